# Two commands from a fresh clone: `make demo` and `make test`. Each makes .venv if there is none.
#   make TORCH=torch demo    takes the newest PyTorch in place of the version named here

PYTHON ?= python3
TORCH ?= torch==2.13.0
# twice the two cores of a small machine: tests also wait for disks, processes and threads
JOBS ?= 4
VENV := .venv
BIN := $(VENV)/bin
# a file for each kind of install: what one needs to run it, and what one needs to work on it
FOR_USE := $(VENV)/installed-with-$(subst =,-,$(TORCH))
FOR_DEV := $(VENV)/installed-dev-with-$(subst =,-,$(TORCH))
FOR_DOCS := $(VENV)/installed-docs-with-$(subst =,-,$(TORCH))

.PHONY: demo notebooks test test-thorough test-real test-gpu soak lint types format docs bench eval eval-real leaderboard clean

demo: $(FOR_USE)
	$(BIN)/python examples/demo.py $(ARGS)

# runs every notebook of examples/notebooks, and writes its outputs into it
notebooks: $(FOR_DEV)
	$(BIN)/python examples/notebooks/make.py $(ARGS)

# bytecode is written whatever the user's settings: without it, each worker and process compiles every module
test: $(FOR_DEV)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal $(ARGS)

# all combinations, and more examples of every property, for a quiet machine: hours
test-thorough: $(FOR_DEV)
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal --timeout 1800 --thorough $(ARGS)

# with pretrained models, which are downloaded the first time (see docs/evaluation.md)
test-real: $(FOR_DEV)
	$(BIN)/python -m pytest -q --real tests/real $(ARGS)

# ten minutes of everything at once; ARGS="--seed 1 2 --minutes 30 --out bench/results"
soak: $(FOR_DEV)
	$(BIN)/python tests/soak/soak.py $(ARGS)

# on a machine with a GPU, and PyTorch already there
test-gpu:
	$(PYTHON) -m pytest -q tests/gpu $(ARGS)

lint: $(FOR_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(FOR_DEV)
	$(BIN)/python -m mypy

format: $(FOR_DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# the documentation as a site, in site/; ARGS="serve" shows it and follows changes
docs: $(FOR_DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs $(or $(ARGS),build --strict)

# five minutes of all subjects; ARGS="compare A B", ARGS="run --suite full --out B" (see docs/performance.md)
bench: $(FOR_DEV)
	$(BIN)/python -m bench $(or $(ARGS),run --suite quick --out bench-results)

# what eval/results/ holds (see eval/suites.toml); DATA is a folder of data sets, without it the hub
eval: $(FOR_DEV)
	$(BIN)/python -m eval.suite reference $(if $(DATA),--data $(DATA))

eval-real: $(FOR_DEV)
	$(BIN)/python -m eval.suite real $(if $(DATA),--data $(DATA))

leaderboard: $(FOR_DEV)
	$(BIN)/python -m eval.leaderboard $(wildcard eval/results/real-*) --out docs/leaderboard.md
	$(BIN)/python -m eval.choosing

$(FOR_USE): KIND := .[demo]
$(FOR_DEV): KIND := .[dev]
$(FOR_DOCS): KIND := .[docs]
$(FOR_USE) $(FOR_DEV) $(FOR_DOCS): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --upgrade "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable "$(KIND)"
	touch $@

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .hypothesis .ruff_cache .mypy_cache
