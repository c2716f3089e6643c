# SPDX-License-Identifier: Apache-2.0
PY := .venv/bin/python
# In the order of their names: left to itself, xdist runs files of few tests last, and those are the
# engines' long ones, which the other process would wait for.
QUICK := -m "not slow" -n 2 --dist loadfile --no-loadscope-reorder --durations 30 --durations-min 5
# The Python of `make test-next`, and what of the tests its quick part runs: one engine, and no
# commands, which take long to start.
NEXT := .venv-next/bin/python
NEXT_QUICK := tests/patches tests/cache tests/engine/test_scheduler.py \
	tests/engine/test_admission.py tests/engine/test_metrics.py::test_every_step \
	--deselect tests/patches/test_flags.py::test_serve_help_lists_the_flags \
	--deselect tests/patches/test_flags.py::test_recall_is_an_argument_and_a_flag

# vLLM reports usage to its makers, and transformers asks the Hub about models, unless told not to.
export VLLM_NO_USAGE_STATS ?= 1
export DO_NOT_TRACK ?= 1
export HF_HUB_OFFLINE ?= 1

SOAK_MINUTES ?= 30

.DEFAULT_GOAL := help
.PHONY: help setup lint format test test-slow test-next test-next-quick soak demo bench results snapshots wheel docs clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-16s %s\n", $$1, $$2}' Makefile

setup: ## make .venv with everything (every target below does this by itself)
	@tools/setup.sh

demo: setup ## a novel and a chat past a real model's positions, beside stock vLLM
	@$(PY) -m benchmarks.demo

bench: setup ## the quick form of every benchmark, on this machine; JSON in results/
	@$(PY) -m benchmarks.quick

results: setup ## write the pages of results and the README's block from benchmarks/results
	@$(PY) -m benchmarks.reporting.results
	@$(PY) -m benchmarks.reporting.readme

test: setup ## the tests, less the slow ones
	@$(PY) -m pytest $(QUICK)

test-slow: setup ## the slow tests
	@$(PY) -m pytest -m slow

test-next: setup ## the tests beside the vLLM of requirements/next.txt, less the slow ones
	@$(PY) tools/next_vllm.py
	@$(NEXT) -m pytest $(QUICK)

test-next-quick: setup ## the part of them that depends most on vLLM, in two minutes
	@$(PY) tools/next_vllm.py
	@$(NEXT) -m pytest $(QUICK) $(NEXT_QUICK)

snapshots: setup ## write what we use of vLLM into tests/patches/snapshots, for both versions
	@$(PY) tools/next_vllm.py
	@$(PY) -m tests.patches.snapshot

wheel: setup ## build dist/*.whl, and serve with every policy from a new environment that has it
	@$(PY) tools/wheel.py dist
	@$(PY) -m pytest -m slow tests/test_wheel.py

docs: setup ## the documentation's site in out/site, and the page of settings; a broken link stops it
	@$(PY) tools/settings_page.py
	@$(PY) -m pip install -q --no-deps -r requirements/docs.txt
	@$(PY) -m mkdocs build --strict --quiet

soak: setup ## mixed load on a live server for SOAK_MINUTES (30): no leak, no slow-down
	@$(PY) -m tests.soak --minutes $(SOAK_MINUTES)

lint: setup ## ruff: rules and formatting; basedpyright: types; hadolint: the Dockerfile
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@.venv/bin/basedpyright
	@if [ -x .venv/bin/hadolint ]; then .venv/bin/hadolint Dockerfile; fi

format: setup ## let ruff put in order what it can
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

clean: ## remove .venv, .venv-next, caches and build leftovers
	rm -rf .venv .venv-next .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
