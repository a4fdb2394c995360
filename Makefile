# Two commands from a fresh clone: `make demo` and `make test`. Each makes .venv if there is none.
#   make TORCH=torch demo    takes the registry's newest PyTorch in place of the CPU build named here

PYTHON ?= python3
TORCH ?= torch==2.13.0
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
# a file for each kind of install: what one needs to run it, and what one needs to work on it
FOR_USE := $(VENV)/installed-with-$(subst =,-,$(TORCH))
FOR_DEV := $(VENV)/installed-dev-with-$(subst =,-,$(TORCH))

.PHONY: demo notebooks test test-thorough test-real test-gpu soak lint types format bench eval eval-real leaderboard clean

demo: $(FOR_USE)
	$(BIN)/python examples/demo.py $(ARGS)

# runs every notebook of examples/notebooks, and writes its outputs into it
notebooks: $(FOR_DEV)
	$(BIN)/python examples/notebooks/make.py $(ARGS)

test: $(FOR_DEV)
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal $(ARGS)

# more examples of every property, for a quiet machine
test-thorough: $(FOR_DEV)
	HYPOTHESIS_PROFILE=thorough $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal --timeout 1800 $(ARGS)

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

bench: $(FOR_DEV)
	$(BIN)/python bench/prefix.py $(ARGS)

# what eval/results/ holds, measured anew; DATA is a folder of data sets (see docs/evaluation.md)
METHODS := exact,contiguous_kv,contiguous_kv:ahead=1,contiguous_kv:rechoose=false,contiguous_kv.paper,contiguous_kv.paper:solo_layers=1,impress:probe_heads=2,h2o
# what was looked at to choose ContiguousKV's settings, on the other half of another draw
SETTINGS := contiguous_kv,contiguous_kv:chunk_tokens=4,contiguous_kv:chunk_tokens=16,contiguous_kv:period=1,contiguous_kv:period=4,contiguous_kv:queries=0,contiguous_kv:ahead=2
# a budget by mass: what was looked at, on that other half, and what was reported
MASSES := contiguous_kv,contiguous_kv:mass=0.5,contiguous_kv:mass=0.8,contiguous_kv:mass=0.9,contiguous_kv:mass=0.95
MASS := contiguous_kv,contiguous_kv:mass=0.8,contiguous_kv:mass=0.9
# how much a decoded token's choice must gain: looked at on that other half, with running text where there is DATA
GAINS := contiguous_kv:gain=0,contiguous_kv:gain=0.02,contiguous_kv:gain=0.05,contiguous_kv:gain=0.1,contiguous_kv:gain=0.2,contiguous_kv:gain=0.4
# passages, each method behind the lead, and as in its paper
PASSAGES := cache_tune,cache_tune:lead=1,cache_tune.paper,cache_blend,cache_blend.paper,epic,epic.paper
# on long prefixes, and on real text
LONG := contiguous_kv,contiguous_kv:chunk_tokens=16,contiguous_kv:ahead=1,contiguous_kv.paper,impress:probe_heads=2,h2o
TEXT := exact,contiguous_kv,contiguous_kv:ahead=1,contiguous_kv.paper,impress:probe_heads=2,h2o
EVAL := $(BIN)/python -m eval.run --seed 45 --half 1 --dtype float32
CHOOSE := $(BIN)/python -m eval.run --seed 43 --half 0 --dtype float32 --model eval/reference/xs
# settings were chosen on the other half of the examples
EVAL_PASSAGES := $(EVAL) --ratios 0.15 --model eval/reference/xs
RESULTS := eval/results

eval: $(FOR_DEV)
	$(EVAL) --methods $(METHODS) --budgets 0.05,0.1,0.25 --model eval/reference/xs --tasks reference --prefix-tokens 512 --limit 100 \
		--out $(RESULTS)/reference-xs
	$(BIN)/python -m eval.report $(RESULTS)/reference-xs
	$(CHOOSE) --methods $(SETTINGS) --budgets 0.05,0.1 \
		--tasks reference --prefix-tokens 512 --limit 40 --out $(RESULTS)/settings-xs
	$(BIN)/python -m eval.report $(RESULTS)/settings-xs
	$(CHOOSE) --methods $(MASSES) --budgets 0.05,0.1,0.25 \
		--tasks reference --prefix-tokens 512 --limit 40 --out $(RESULTS)/choosing-mass-xs
	$(BIN)/python -m eval.report $(RESULTS)/choosing-mass-xs
	$(EVAL) --methods $(MASS) --budgets 0.05,0.1,0.25 --model eval/reference/xs \
		--tasks reference --prefix-tokens 512 --limit 100 --out $(RESULTS)/mass-xs
	$(BIN)/python -m eval.report $(RESULTS)/mass-xs
	$(EVAL) --methods $(LONG) --budgets 0.05,0.1 --model eval/reference/long --tasks reference --prefix-tokens 4080 --limit 14 \
		--out $(RESULTS)/reference-long
	$(BIN)/python -m eval.report $(RESULTS)/reference-long
	$(EVAL_PASSAGES) --methods $(PASSAGES) --tasks reference --prefix-tokens 512 --limit 60 --out $(RESULTS)/corpus-xs
	$(BIN)/python -m eval.report $(RESULTS)/corpus-xs
ifdef DATA
	$(CHOOSE) --methods $(GAINS) --budgets 0.05,0.1 \
		--data $(DATA) --tasks reference,text --prefix-tokens 512 --limit 60 --out $(RESULTS)/choosing-gain-xs
	$(BIN)/python -m eval.report $(RESULTS)/choosing-gain-xs
	$(EVAL) --methods $(TEXT) --budgets 0.05,0.1 --model eval/reference/xs --data $(DATA) --tasks sst2,rte,trec,text --prefix-tokens 640 --limit 60 \
		--out $(RESULTS)/text-xs
	$(BIN)/python -m eval.report $(RESULTS)/text-xs
endif

# methods within a budget on pretrained models (see docs/evaluation.md); DATA is a folder of data sets, without it the hub
REAL_MODELS := smollm2-135m qwen2.5-coder-0.5b
REAL_METHODS := exact,contiguous_kv,contiguous_kv:reorder=false,contiguous_kv:codec=int8,contiguous_kv.paper,impress:probe_heads=2,h2o
# those that may choose once for an answer, or at each of its tokens
REAL_DECODING := exact,contiguous_kv,contiguous_kv:rechoose=false,contiguous_kv.paper,h2o,h2o:rechoose=true,kv_drive
EVAL_REAL := $(EVAL) $(if $(DATA),--data $(DATA)) --prefix-tokens 1000

eval-real: $(FOR_DEV)
	for model in $(REAL_MODELS); do \
		$(EVAL_REAL) --model $$model --methods $(REAL_METHODS) --budgets 0.05,0.1,0.25 --tasks sst2,rte,squad --limit 48 \
			--out $(RESULTS)/real-$$model && \
		$(BIN)/python -m eval.report $(RESULTS)/real-$$model && \
		$(EVAL_REAL) --model $$model --methods $(REAL_DECODING) --budgets 0.05,0.1,0.25 --tasks text --limit 16 \
			--out $(RESULTS)/real-text-$$model && \
		$(BIN)/python -m eval.report $(RESULTS)/real-text-$$model && \
		$(EVAL_REAL) --model $$model --methods $(PASSAGES) --ratios 0.15 --tasks hotpotqa --limit 24 --max-length 2048 \
			--out $(RESULTS)/real-passages-$$model && \
		$(BIN)/python -m eval.report $(RESULTS)/real-passages-$$model || exit; \
	done

leaderboard: $(FOR_DEV)
	$(BIN)/python -m eval.leaderboard $(wildcard $(RESULTS)/real-*) --out docs/leaderboard.md

$(FOR_USE): KIND := .[demo]
$(FOR_DEV): KIND := .[dev]
$(FOR_USE) $(FOR_DEV): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --upgrade "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable "$(KIND)"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis .ruff_cache .mypy_cache
