# The commands: `make demo`, `make docs`, `make test` and `make test-slow`. Each installs what it needs in .venv, and no more.
PYTHON ?= python3
VENV := $(or $(FEDSHUFFLE_VENV),.venv)
BIN := $(VENV)/bin
# What .venv holds: the package alone, with the tools of `make test`, with Ray, Flower and trackers too,
# and with what builds the site, whose reference imports Flower.
INSTALLED := $(VENV)/.installed
TOOLS := $(VENV)/.tools
CLUSTERS := $(VENV)/.clusters
DOCS := $(VENV)/.docs
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadgroup

.PHONY: demo docs test test-slow lint format figures docs-pictures notebooks audit-flower bench bench-peers clean
.DELETE_ON_ERROR:

demo: $(INSTALLED)  ## audit and train three methods on real data; leaves a report in out/demo
	$(BIN)/fedshuffle demo --out out/demo

docs: $(DOCS)  ## the documentation site in out/site; a warning is an error
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going docs out/site

test: lint  ## format, lint, types and the fast tests
	$(PYTEST) -m "not slow"

test-slow: $(CLUSTERS) $(DOCS)  ## the tests that take long: Ray, Flower, the browser, killed processes, experiments
	$(PYTEST) -m slow

lint: $(TOOLS)  ## format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(TOOLS)  ## put the code in its standard form
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

figures: $(INSTALLED)  ## the paper's toy figures in out/quadratic
	$(BIN)/fedshuffle reproduce quadratic --out out/quadratic

docs-pictures: $(INSTALLED)  ## the picture of the README; pictures and tables of docs/explanation/methods
	$(BIN)/python -m fedshuffle.experiments.message_picture docs
	$(BIN)/python -m fedshuffle.experiments.method_pictures docs

notebooks: $(DOCS)  ## run docs/notebooks and store their outputs
	$(BIN)/python -m tests.notebooks

audit-flower: $(CLUSTERS)  ## what the auditor finds for Flower's strategies
	$(BIN)/python benchmarks/flower_strategies.py --write

bench: $(CLUSTERS)  ## engines against a bare loop, and what grows with what; on an idle machine
	$(BIN)/python benchmarks/engines.py
	$(BIN)/python benchmarks/engines.py --works "lstm 2x256" "resnet-18 gn" --engines sequential sequential:2 --rounds 5
	$(BIN)/python benchmarks/scaling.py
	$(BIN)/python benchmarks/population.py
	$(BIN)/python benchmarks/cluster.py
	$(BIN)/python benchmarks/flower_memory.py
	$(BIN)/python benchmarks/flower_rounds.py

bench-peers: $(INSTALLED)  ## other libraries on the same work, each in an environment of its own
	$(BIN)/python benchmarks/peers/run.py $(ARGS)

# One command installs it all at once, from whatever is there already: nothing is downloaded twice.
install = $(BIN)/pip install --quiet --constraint constraints.txt --editable

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/pip
	$(install) .
	touch $@

$(TOOLS): pyproject.toml constraints.txt | $(BIN)/pip
	$(install) '.[dev]'
	touch $(INSTALLED) $@

$(CLUSTERS): pyproject.toml constraints.txt | $(BIN)/pip
	$(install) '.[dev,flower,mlflow,ray,wandb]'
	touch $(INSTALLED) $(TOOLS) $@

$(DOCS): pyproject.toml constraints.txt | $(BIN)/pip
	$(install) '.[docs,flower]'
	touch $(INSTALLED) $@

clean:
	rm -rf .venv .bench out build dist
