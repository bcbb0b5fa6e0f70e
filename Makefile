# The two commands: `make demo` and `make test`. Both set up what they need in .venv.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test lint format figures bench clean
.DELETE_ON_ERROR:

demo: $(INSTALLED)  ## audit and train three methods on real data; leaves a report in out/demo
	$(BIN)/fedshuffle demo --out out/demo

test: $(INSTALLED) lint  ## lint, types, and all tests
	$(BIN)/python -m pytest -n 2

lint: $(INSTALLED)  ## format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(INSTALLED)  ## put the code in its standard form
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

figures: $(INSTALLED)  ## the paper's toy figures in out/quadratic
	$(BIN)/fedshuffle reproduce quadratic --out out/quadratic

bench: $(INSTALLED)  ## engines against a bare loop, as ratios
	$(BIN)/python benchmarks/engines.py

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv out build dist
