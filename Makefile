# Each target first creates what it needs: a virtual environment in .venv with the pinned dependencies.
PYTHON ?= python3
BIN := .venv/bin
# Each test uses one core.
TEST_PROCESSES ?= auto
export TOKENIZERS_PARALLELISM := false
# Emptied, so that Python stores the bytecode of libraries when they are first imported, even if the environment forbids
# it. Otherwise every process that a test starts compiles them again: importing Sentence Transformers takes 24 seconds
# instead of 9.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test everything nightly clients servers wheel help lint docs bench gpu gpu_checks clean

demo: .venv/.installed  ## Tokenizer, pretraining, fill-mask and search on the documentation inside Python
	$(BIN)/python examples/demo.py --config configs/demo.yaml

test: .venv/.installed  ## The tests, without those marked slow, gpu or hub
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal

everything: .venv/.installed  ## Also the tests marked slow: 11 minutes in all
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal -m "not gpu and not hub and not clients"

nightly: everything clients servers  ## All that needs no GPU and no Hub

clients: .venv-clients/.installed  ## The tests of third-party clients (five minutes)
	.venv-clients/bin/python -m pytest -n $(TEST_PROCESSES) --dist worksteal -m clients tests/clients

servers: .venv-servers/.installed  ## The test of the server vLLM (ten minutes)
	.venv-servers/bin/python -m pytest tests/servers

wheel: .venv/.installed  ## The wheel in empty environments, each with one extra from the package index (downloads)
	NEOBERT_HF_INSTALL=1 $(BIN)/python -m pytest -n 0 -m slow tests/test_wheel.py

help: .venv/.installed  ## The texts that `neobert-hf COMMAND --help` prints
	$(BIN)/python -c "import neobert_hf_cli; neobert_hf_cli.write_help()"

lint: .venv/.installed
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

docs: .venv/.installed  ## The guides and the API reference as a site, in site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: .venv/.installed  ## Speed beside other encoders and bare matrix products; rewrites benchmarks/results/throughput.md
	MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=-1 GLIBC_TUNABLES=glibc.malloc.hugetlb=1 \
		$(BIN)/python benchmarks/throughput.py

gpu: .venv/.installed  ## Speed of the forward pass and of a training step on a GPU; writes benchmarks/results/gpu.md
	$(BIN)/python benchmarks/gpu.py

gpu_checks: .venv/.installed  ## All that needs a GPU, the most important first, in ten minutes; logs in runs/gpu_checks
	$(BIN)/python benchmarks/gpu_checks.py

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --no-compile -c constraints.txt torch
	$(BIN)/pip install -q --no-compile -c constraints.txt -e '.[dev]'
	touch $@

.venv-clients/.installed: pyproject.toml tests/clients/requirements.txt tests/clients/constraints.txt
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/pip install -q --no-compile -c tests/clients/constraints.txt torch
	.venv-clients/bin/pip install -q --no-compile -c tests/clients/constraints.txt -e '.[export]' -r tests/clients/requirements.txt
	touch $@

.venv-servers/.installed: pyproject.toml tests/servers/requirements.txt tests/servers/constraints.txt
	$(PYTHON) -m venv .venv-servers
	.venv-servers/bin/pip install -q --no-compile -c tests/servers/constraints.txt -e . -r tests/servers/requirements.txt
	# vLLM's parts for pictures and sound: their builds are for a GPU, which a torch for the CPU refuses to load.
	.venv-servers/bin/pip uninstall -q -y torchaudio torchcodec torchvision
	touch $@

clean:
	rm -rf .venv .venv-clients .venv-servers
