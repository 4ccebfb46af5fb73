# `make help` lists the targets. Two commands are enough to start: `make demo` and `make test`.

VENV    ?= .venv
ORACLE  ?= .oracle
PYTHON  ?= python3
TORCH   ?= torch==2.13.0
# One more than the cores, because tests wait for processes that they start.
WORKERS ?= 3
# The frameworks that `make test-frameworks` installs and tests, each in .frameworks/NAME.
FRAMEWORKS ?= lightning sentence_transformers llamafactory swift axolotl openrlhf ray diffusers
ARGS    ?=
SETS    ?=
FOLDER  ?= /tmp

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export TOKENIZERS_PARALLELISM := false
# Empty counts as unset. Otherwise every process of a launch recompiles all of hf_zero, a quarter of its startup time.
export PYTHONDONTWRITEBYTECODE :=

# Absolute, so that programs that change directory still find their interpreter.
BIN        := $(abspath $(VENV))/bin
ORACLE_PY  := $(abspath $(ORACLE))/bin/python
# One stamp per torch requirement: `make demo TORCH=torch` reinstalls, the same command twice does not.
TORCH_KEY  := $(shell printf '%s' '$(TORCH)' | cksum | cut -d' ' -f1)
READY      := $(VENV)/.ready-$(TORCH_KEY)
ORACLE_OK  := $(ORACLE)/.ready-$(TORCH_KEY)
SOURCES    := $(wildcard hf_zero tests examples bench packaging)
# The ranks of a test share the machine: with more threads per rank they only wait for each other.
TEST_ENV   := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 CUDA_DEVICE_MAX_CONNECTIONS=1
FRAMEWORKS_OK := $(FRAMEWORKS:%=.frameworks/%/.ready-$(TORCH_KEY))
NODE_PACKAGES := pdsh openssh-server openssh-client openmpi-bin mpich slurmctld slurmd slurm-client munge iproute2
PYTEST     := $(TEST_ENV) HF_ZERO_DURATIONS=out/durations.txt $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal
DEFAULT    := not slow and not oracle and not multinode and not frameworks

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-quick test-all test-late test-gpu test-multinode test-versions test-frameworks oracle test-oracle bench bench-offload check format docs wheel clean

help: ## list the targets
	@echo "Usage: make <target> [VENV=.venv] [PYTHON=python3] [TORCH=torch==2.13.0]"
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  %-15s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo "On a GPU machine: make demo TORCH=torch (or any pip requirement, with its options)."

venv: $(READY) ## set up .venv with torch, hf_zero (editable) and the tools; fast the second time
	@:

$(READY): setup.cfg packaging/backend.py packaging/hf_zero.pth
	@echo "Setting up $(VENV) with $(TORCH): two to five minutes the first time, mostly for downloading torch."
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(sys.version_info < (3, 10) and f"hf_zero needs Python 3.10 or newer, {sys.executable} is {v}: make PYTHON=python3.11 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "  1/2 torch"
	@printf '%s\n' '$(TORCH)' | xargs $(BIN)/python -m pip install -qq
	@echo "  2/2 hf_zero and its dependencies"
	@$(BIN)/python -m pip install -qq -e '.[examples,dev]'
	@rm -f $(VENV)/.ready-* && touch $@
	@echo "  $(VENV) is ready."

demo: venv ## train a small Llama-style model on 2 processes, plot its loss, generate code with it (about five minutes on 2 cores)
	@$(BIN)/python examples/demo.py $(ARGS)

test: venv ## set up and run the tests (about ten minutes on 2 cores; writes each test's time to out/durations.txt)
	@echo "Running the tests on $(WORKERS) workers (without slow tests and DeepSpeed comparisons: make test-all, make test-oracle)."
	@$(PYTEST) -m "$(DEFAULT)" $(ARGS)

test-quick: venv ## run the short tests that start no process (about 4,000, two minutes on 2 cores)
	@$(PYTEST) -m "not processes and not lengthy and $(DEFAULT)" $(ARGS)

test-all: venv ## run the tests including slow ones (installs Ray and Kubeflow's schemas for the tests of their examples)
	@$(BIN)/python -m pip install -qq -e '.[examples,dev,clusters]'
	@echo "Running all tests except the DeepSpeed comparisons on $(WORKERS) workers."
	@$(PYTEST) -m "not oracle and not multinode and not frameworks" $(ARGS)
	@$(MAKE) test-late

test-late: venv ## test the engine, offload and checkpoints on a simulated GPU whose copies arrive as late as possible
	@echo "Running tests on the simulated late device, where a missing wait makes a test fail."
	@HF_ZERO_LATE_DEVICE=1 $(PYTEST) tests/api tests/checkpoint tests/offload tests/params tests/step -m "not slow and not oracle" $(ARGS)

test-gpu: venv ## test GPU-specific code: kernels, streams, whole steps, NCCL (needs a GPU)
	@$(BIN)/python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "make test-gpu: torch finds no GPU here")'
	@echo "Testing kernels and devices, then whole steps against plain PyTorch, then NCCL with ranks that share the GPU (minutes)."
	@HF_ZERO_TEST_GPU=1 $(TEST_ENV) $(BIN)/python -m pytest -q tests/kernels tests/device -m "not slow and not oracle" $(ARGS)
	@$(BIN)/python -m bench.gpu_parity
	@$(BIN)/python -m bench.gpu_programme --block 1

test-multinode: venv ## test several nodes, simulated with network namespaces (as root on Debian or Ubuntu; installs ssh, MPI, Slurm)
	@test "$$(id -u)" = 0 || { echo "make test-multinode creates network namespaces and must be run as root."; exit 1; }
	@echo "Installing the nodes' packages (ssh, pdsh, MPI, Slurm), if missing."
	@command -v pdsh sshd mpirun.openmpi mpirun.mpich slurmd munged ip > /dev/null || \
	    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(NODE_PACKAGES); }
	@echo "Starting jobs on two nodes with every launcher, one test after the other."
	@$(TEST_ENV) $(BIN)/python -m pytest -q -m multinode tests/multinode $(ARGS)

test-versions: venv ## test the oldest and newest versions of torch, transformers, ...: SETS="oldest newest", or all of them
	@echo "Running the selected tests with each set of versions, in environments under .versions (docs/versions.md)."
	@TORCH='$(TORCH)' $(TEST_ENV) $(BIN)/python -m tests.versions $(SETS) --pytest="-n $(WORKERS) $(ARGS)"

test-frameworks: venv $(FRAMEWORKS_OK) ## train with Lightning, LLaMA-Factory, ms-swift and others (FRAMEWORKS="lightning ray" selects)
	@echo "Training with each framework, one test after the other: $(FRAMEWORKS)."
	@HF_ZERO_FRAMEWORKS="$(FRAMEWORKS)" $(TEST_ENV) $(BIN)/python -m pytest -q -m frameworks tests/frameworks $(ARGS)

# requirements/NAME.txt is installed as usual. Packages in NAME.alone.txt are installed without their dependencies, because
# some of these (torchaudio, torchvision) have no build for a CPU torch and are not needed to train a language model; the
# other dependencies are then listed in NAME.txt.
.frameworks/%/.ready-$(TORCH_KEY): tests/frameworks/requirements/%.txt setup.cfg packaging/backend.py packaging/hf_zero.pth
	@echo "Setting up .frameworks/$*: two to five minutes."
	@test -x .frameworks/$*/bin/python || $(PYTHON) -m venv .frameworks/$*
	@printf '%s\n' '$(TORCH)' | xargs .frameworks/$*/bin/python -m pip install -qq --no-compile
	@.frameworks/$*/bin/python -m pip freeze | grep -iE '^torch==' > .frameworks/$*/constraints.txt
	@.frameworks/$*/bin/python -m pip install -qq --no-compile -c .frameworks/$*/constraints.txt -r $< -e .
	@test ! -f $(<:.txt=.alone.txt) || .frameworks/$*/bin/python -m pip install -qq --no-compile --no-deps -r $(<:.txt=.alone.txt)
	@rm -f .frameworks/$*/.ready-* && touch $@

oracle: $(ORACLE_OK) ## set up .oracle: a real DeepSpeed, for comparison only

$(ORACLE_OK): $(READY)
	@echo "Setting up $(ORACLE) with DeepSpeed 0.19.8 (nothing compiled): two to five minutes."
	@test -x $(ORACLE_PY) || $(PYTHON) -m venv $(ORACLE)
	@echo "  1/2 torch, transformers, accelerate in the same versions as in $(VENV)"
	@$(BIN)/python -m pip freeze | grep -iE '^(torch|transformers|accelerate|numpy|tokenizers|safetensors)==' > $(ORACLE)/constraints.txt
	@printf '%s\n' '$(TORCH)' | xargs $(ORACLE_PY) -m pip install -qq -c $(ORACLE)/constraints.txt
	@$(ORACLE_PY) -m pip install -qq -c $(ORACLE)/constraints.txt transformers accelerate psutil ninja setuptools wheel
	@echo "  2/2 DeepSpeed"
	@DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(ORACLE_PY) -m pip install -qq --no-build-isolation deepspeed==0.19.8
	@rm -f $(ORACLE)/.ready-* && touch $@
	@echo "  $(ORACLE) is ready."

test-oracle: venv oracle ## compare with a real DeepSpeed (sets up .oracle first)
	@echo "Comparing with DeepSpeed, one test after the other."
	@HF_ZERO_ORACLE_PYTHON=$(ORACLE_PY) $(TEST_ENV) $(BIN)/python -m pytest -q -m oracle $(ARGS)

bench: venv ## benchmark the engine against others; options through ARGS="--engine ..."
	@$(BIN)/python -m bench.engine $(ARGS)

bench-offload: venv ## train a model larger than memory from a drive, and benchmark the drive; FOLDER=/mnt/nvme names it
	@$(BIN)/python -m bench.offload --folder $(FOLDER) $(ARGS)
	@$(BIN)/python -m bench.nvme --folder $(FOLDER)

check: venv ## lint (ruff) and type check (mypy)
	@$(BIN)/python -m ruff check
	@$(BIN)/python -m mypy

format: venv ## sort imports, fix lint errors and format the code (ruff)
	@$(BIN)/python -m ruff check -q --fix || true
	@$(BIN)/python -m ruff format $(SOURCES)

docs: venv ## build the site into site/ (installs mkdocs-material)
	@$(BIN)/python -m pip install -qq -e '.[examples,dev,docs]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build -q --strict
	@echo "Built: $(BIN)/python -m http.server -d site 8000, then open http://localhost:8000 (search needs a server)."

wheel: venv ## build dist/hf_zero-*.whl
	@$(BIN)/python -m build --wheel --outdir dist .

clean: ## remove caches and build output (.venv, .oracle and .versions stay; delete them by hand)
	@rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
