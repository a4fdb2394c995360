# Two commands from a fresh clone: `make demo` and `make test`. Each makes .venv if there is none.
#   make TORCH=torch demo    takes the registry's newest PyTorch in place of the CPU build named here

PYTHON ?= python3
TORCH ?= torch==2.13.0
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed-with-$(subst =,-,$(TORCH))

.PHONY: demo test test-thorough test-gpu lint format bench clean

demo: $(INSTALLED)
	$(BIN)/python examples/demo.py $(ARGS)

test: $(INSTALLED)
	$(BIN)/python -m pytest -q -n $(JOBS) $(ARGS)

# more examples of every property, for a quiet machine
test-thorough: $(INSTALLED)
	HYPOTHESIS_PROFILE=thorough $(BIN)/python -m pytest -q -n $(JOBS) --timeout 1800 $(ARGS)

# on a machine with a GPU, and PyTorch already there
test-gpu:
	$(PYTHON) -m pytest -q tests/gpu $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)
	$(BIN)/python bench/prefix.py $(ARGS)

$(INSTALLED): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --upgrade "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis .ruff_cache
