# The commands: `make demo`, `make test`, `make test-slow`, `make docs` and `make dist`. Each installs
# what it needs in .venv, and no more.
PYTHON ?= python3
VENV := $(or $(FEDSHUFFLE_VENV),.venv)
BIN := $(VENV)/bin
# What .venv holds: the package with its demo, the tools of `make test`, those of the docs, and all.
INSTALLED := $(VENV)/.installed
TOOLS := $(VENV)/.tools
DOCS := $(VENV)/.docs
ALL := $(VENV)/.all
# Without bytecode, each of the hundreds of processes that tests start would compile everything again.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(BIN)/python -m pytest --dist loadgroup

.PHONY: demo test test-slow docs dist lint format figures docs-pictures notebooks audit-flower bench bench-peers clean
.DELETE_ON_ERROR:

demo: $(INSTALLED)  ## audit and train three methods on real data; leaves a report in out/demo
	$(BIN)/fedshuffle demo --out out/demo

docs: $(DOCS)  ## the documentation site in out/site; a warning is an error
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going docs out/site

test: lint  ## format, lint, types and the fast tests
	$(PYTEST) -n 2 -m "not slow"

test-slow: $(ALL)  ## the tests that take long: Ray, Flower, the browser, the site, new environments
	$(PYTEST) -n 3 -m slow  # one of them usually waits for Flower's processes

dist: $(TOOLS)  ## the wheel and the source distribution, in dist
	rm -rf dist
	$(BIN)/python -m build

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

audit-flower: $(ALL)  ## what the auditor finds for Flower's strategies
	$(BIN)/python benchmarks/flower_strategies.py --write

bench: $(ALL)  ## engines against a bare loop, and what grows with what; on an idle machine
	$(BIN)/python benchmarks/engines.py
	$(BIN)/python benchmarks/engines.py --works "lstm 2x256" "resnet-18 gn" --engines sequential sequential:2 --rounds 5
	$(BIN)/python benchmarks/scaling.py
	$(BIN)/python benchmarks/population.py
	$(BIN)/python benchmarks/cluster.py
	$(BIN)/python benchmarks/flower_memory.py
	$(BIN)/python benchmarks/flower_rounds.py
	$(BIN)/python benchmarks/finetuning.py

bench-peers: $(INSTALLED)  ## other libraries on the same work, each in an environment of its own
	$(BIN)/python benchmarks/peers/run.py $(ARGS)

# One command installs it all at once, from whatever is there already: nothing is downloaded twice.
install = $(BIN)/pip install --quiet --constraint constraints.txt --editable

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/pip
	$(install) '.[demo]'
	touch $@

$(TOOLS): pyproject.toml constraints.txt | $(BIN)/pip
	$(install) '.[dev]'
	touch $(INSTALLED) $@

$(DOCS): pyproject.toml constraints.txt | $(BIN)/pip
	$(install) '.[docs]'
	touch $(INSTALLED) $@

$(ALL): pyproject.toml constraints.txt | $(BIN)/pip
	$(install) '.[all,dev,docs]'
	touch $(INSTALLED) $(TOOLS) $(DOCS) $@

clean:
	rm -rf .venv .bench out build dist
