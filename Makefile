# The two commands: `make demo` and `make test`. Both set up what they need in .venv.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test lint format figures docs-pictures audit-flower bench bench-peers clean
.DELETE_ON_ERROR:

demo: $(INSTALLED)  ## audit and train three methods on real data; leaves a report in out/demo
	$(BIN)/fedshuffle demo --out out/demo

test: $(INSTALLED) lint  ## lint, types, and all tests
	$(BIN)/python -m pytest -n 2 --dist loadgroup

lint: $(INSTALLED)  ## format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(INSTALLED)  ## put the code in its standard form
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

figures: $(INSTALLED)  ## the paper's toy figures in out/quadratic
	$(BIN)/fedshuffle reproduce quadratic --out out/quadratic

docs-pictures: $(INSTALLED)  ## the pictures and tables of docs/methods
	$(BIN)/python -m fedshuffle.experiments.method_pictures docs

audit-flower: $(INSTALLED)  ## what the auditor finds for Flower's strategies; installs Flower
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[flower]'
	$(BIN)/python benchmarks/flower_strategies.py --write

bench: $(INSTALLED)  ## engines against a bare loop, and what grows with what; on an idle machine
	$(BIN)/python benchmarks/engines.py
	$(BIN)/python benchmarks/engines.py --works "lstm 2x256" "resnet-18 gn" --engines lean lean:2 --rounds 5
	$(BIN)/python benchmarks/scaling.py
	$(BIN)/python benchmarks/population.py
	$(BIN)/python benchmarks/cluster.py
	$(BIN)/python benchmarks/flower_memory.py
	$(BIN)/python benchmarks/flower_rounds.py

bench-peers: $(INSTALLED)  ## other libraries on the same work, each in an environment of its own
	$(BIN)/python benchmarks/peers/run.py $(ARGS)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv .bench out build dist
