# make demo    set up what the demo needs, then compare the standard residual, its control, Block and Full on the text
#              Python ships with
# make study   a study of the laboratory, e.g. ARGS="noise --preset micro"; without ARGS the studies there are
# make test    set up the rest, then the tests, with lint and types beside them
# make test-all    the tests that make test leaves out because they take long: those with the marker long, the other cases of
#              those with the marker quick, and of make integrations what takes seconds; SECONDS=2400 begins no long test
#              after so many, in an order of files that each commit shuffles anew
# make bench   the speed of a training step, beside the plain model, the standard residual and the naive read
# make docs    the documentation site, into build/site
# make peers   other people's kernels, into build/peers, for the benchmarks and tests that compare with them
# make integrations    depth reads inside other people's code: what a registry has into build/integrations, the rest from the
#              checkouts in PEERS_PATH; writes the table of docs/how-to/integrations.md
# make gpu     BUDGET=540 seconds of a CUDA device: tests, steps, kernels, peers and training runs in order of worth, rows
#              into benchmarks/results/gpu.jsonl, figures into the documentation and README; again goes on. Needs PyTorch and
#              Transformers alone beside build/gpu-pack.tar.xz. COPY=FOLDER: from a machine that is thrown away afterwards, rows
#              and what was compiled go there as well: gpu.jsonl, and caches.tar.gz for another machine's build/gpu-pack
# make gpu-pack    what a machine without a network lacks for that, as build/gpu-pack.tar.xz; TEXT=SOURCE packs a text to
#              train on, EVALUATION=FOLDER the files of WikiText-2, LAMBADA and HellaSwag
# make test-gpu    the tests that need a CUDA device
# make test-scale  the tests that need four processes
# make soak        KILLS=200 of processes of runs in two, of which each must go on bit for bit (an hour)
# make test-oldest the tests of kernels, residuals, models, training and make gpu on the oldest PyTorch that is allowed and
#                  Transformers 5.17 (needs a network)
# make fuzz    MINUTES=10 of kills, full disks, damaged files, hostile flags and requests; again goes on
# make audit   known vulnerabilities of the locked versions (needs a network), and their licences into docs/project/licences.md
# make lock    the hashes of the locked versions anew (needs a network)
# make clean   remove the environment (runs/ stays)
#
# PYTHON picks another interpreter; PIP_ARGS is given to pip, e.g. an index with smaller builds of torch.

PYTHON ?= python3
PIP_ARGS ?=
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
HASHED := --require-hashes --no-deps -r
# Many images set it. pip compiles nothing here, so each process of the tests and the demo would compile what it imports of
# torch and Transformers: 15 seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo study test test-all lint types bench docs peers integrations gpu gpu-pack test-gpu test-scale test-oldest soak fuzz audit lock clean
.DELETE_ON_ERROR:

setup: .venv/ready

# One environment, in steps: what the demo needs, what development adds, what the documentation adds. Every file that is
# fetched has one of the hashes in locks/, but for torch, which comes in builds for CPUs and GPUs: it has its version.
# Nothing is fetched to build the package: the locked setuptools does it.
.venv/demo: pyproject.toml constraints.txt locks/demo.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "attnres needs Python 3.11 or later: $(PYTHON) is $$($(PYTHON) --version 2>&1); try make PYTHON=python3.12"; exit 2; }
	@echo "setting up .venv (once)"
	$(PYTHON) -m venv --clear .venv
	$(PIP) $(PIP_ARGS) $(HASHED) locks/demo.txt
	$(PIP) $(PIP_ARGS) -c constraints.txt torch
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

.venv/ready: .venv/demo locks/dev.txt
	@echo "adding what lint, types and tests need (once)"
	$(PIP) $(PIP_ARGS) $(HASHED) locks/dev.txt
	@$(BIN)/python -W ignore -m compileall -q .venv/lib/python*/site-packages/torchao  # whose source warns when compiled
	@touch $@

.venv/docs: .venv/demo locks/docs.txt
	$(PIP) $(PIP_ARGS) $(HASHED) locks/docs.txt
	@touch $@

demo: .venv/demo
	$(BIN)/attnres compare --steps 40 --val-every 10 --depth-every 20 --val-windows 32 --timing-s 0 --out runs/demo
	@echo "open runs/demo/report.html in a browser"

ARGS ?= --list
study: .venv/demo
	$(BIN)/python -m lab $(ARGS)

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/ready
	$(BIN)/ty check

# One process for each core: a file's tests are shared out too where one has nothing left to do.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n logical --dist worksteal

# Lint and types run beside the tests; where they fail, what they say follows pytest's closing line.
test: .venv/ready
	@mkdir -p build; { $(MAKE) --no-print-directory lint types >build/lint.txt 2>&1; } & beside=$$!; \
	$(PYTEST); tests=$$?; wait $$beside; lint=$$?; \
	[ $$lint = 0 ] || cat build/lint.txt; exit $$((tests ? tests : lint))

SEED ?= $(shell git log -1 --format=%h)
test-all: .venv/ready build/integrations/ready
	$(PYTEST) -m long $(if $(SECONDS),--seconds $(SECONDS) --seed $(SEED))
	$(PYTEST) -m "integrations and not long" integrations

docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open build/site/index.html in a browser; to search it: python3 -m http.server --directory build/site"

bench: .venv/ready
	$(BIN)/python benchmarks/step.py

PEERS := fla-core==0.6.0 einops==0.8.2 liger-kernel==0.8.5 flash-attn-res==0.1.12 fast-attnres==2.1.0 attn_res==0.1.0
peers: .venv/ready
	$(PIP) --no-deps --upgrade --target build/peers $(PEERS)

build/integrations/ready: .venv/ready locks/integrations.txt
	$(PIP) $(PIP_ARGS) --upgrade --target build/integrations $(HASHED) locks/integrations.txt
	@touch $@

integrations: build/integrations/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m integrations --write-table integrations

# With the environment's Python, or on a machine that has none with the one that has PyTorch.
BUDGET ?= 540
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
gpu:
	$(GPU_PYTHON) benchmarks/round.py --budget $(BUDGET) $(if $(COPY),--rows build/round/gpu.jsonl --copy $(COPY)/gpu.jsonl)
	$(if $(COPY),$(GPU_PYTHON) benchmarks/round.py --caches $(COPY)/caches.tar.gz,$(GPU_PYTHON) benchmarks/round.py --page)

# Pure Python, at the versions that are tested, and the peers; a text is tokenised here.
PACKED := tyro docstring-parser typeguard typing-extensions rich pygments markdown-it-py mdurl pytest iniconfig pluggy
gpu-pack: .venv/ready
	rm -rf build/gpu-pack/site build/gpu-pack/peers
	$(PIP) --no-deps --target build/gpu-pack/site $$(sed -n 's/ .*//p' locks/dev.txt | grep -E "^($$(echo $(PACKED) | tr ' ' '|'))==")
	$(PIP) --no-deps --target build/gpu-pack/peers $(PEERS)
	test -z "$(TEXT)" || $(BIN)/attnres prepare --source "$(TEXT)" --tokenizer bpe:8192 --out build/gpu-pack/text
	test -z "$(EVALUATION)" || { rm -rf build/gpu-pack/evaluation; mkdir -p build/gpu-pack/evaluation; \
		cp $(foreach set,wikitext2 lambada hellaswag,"$(EVALUATION)"/$(set)*) build/gpu-pack/evaluation; }
	tar -C build -cJf build/gpu-pack.tar.xz --exclude 'gpu-pack/caches.tar.gz' --exclude 'gpu-pack/triton' \
		--exclude 'gpu-pack/inductor' gpu-pack
	@du -sk build/gpu-pack.tar.xz | awk '{ print "build/gpu-pack.tar.xz: " int($$1 / 1024) " MiB"; exit $$1 > 30 * 1024 }'

# Eight at once, for most of the time goes into compiling; what wants the whole memory goes after them.
test-gpu: .venv/ready
	$(BIN)/python -m pytest -m gpu -n 8 --dist worksteal -k "not two_to_the_31" tests/gpu
	$(BIN)/python -m pytest -m gpu -k two_to_the_31 tests/gpu

test-scale: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m scale tests/scale

# Another torch and its triton, in front of everything else that .venv has; that triton's interpreter takes an array of one
# value for an integer, of which NumPy 2.3 warns and which 2.4 refuses.
OLDEST := torch==2.11.0 numpy==2.3.5 transformers==5.17.0
build/oldest/ready: .venv/ready
	$(PYTHON) -m venv --clear build/oldest
	build/oldest/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) $(OLDEST)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
		"$$(build/oldest/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/rest.pth"
	@touch $@

test-oldest: build/oldest/ready
	PYTHONPATH=. OMP_NUM_THREADS=1 build/oldest/bin/python -m pytest -n logical --dist worksteal \
		-W "ignore:Conversion of an array with ndim:DeprecationWarning" \
		tests/ops tests/residuals tests/models tests/training tests/benchmarks/test_round.py

KILLS ?= 200
soak: .venv/ready
	PYTHONPATH=.:tests:tests/scale $(BIN)/python tests/scale/soak.py --kills $(KILLS)

MINUTES ?= 10
fuzz: .venv/ready
	$(BIN)/python -m fuzz --minutes $(MINUTES) --out fuzz/results/campaign.json --page docs/explanation/reliability.md

audit: .venv/ready
	$(PIP) $(PIP_ARGS) --target build/audit pip-audit==2.10.1
	$(BIN)/python fuzz/licences.py docs/project/licences.md
	PYTHONPATH=build/audit $(BIN)/python fuzz/audit.py constraints.txt

# Written anew after a change of pyproject.toml or constraints.txt. A CPU build of torch keeps CUDA's libraries out;
# LOCK_ARGS says where one is, if not in PyTorch's index: LOCK_ARGS="--find-links FOLDER".
LOCK_ARGS ?= --torch-backend cpu
# Code bases that depth reads are tried in, and what they import that the environment lacks; TRL is in locks/dev.txt.
INTEGRATIONS := diffusers==0.42.1 einops==0.8.2 einx==0.4.3 frozendict==2.5.1 jsonargparse==4.53.0 lightning==2.6.6 \
	lightning-utilities==0.15.3 litgpt==0.5.13 loguru==0.7.3 megatron-core==0.16.1 pytorch-lightning==2.6.6 \
	spmd-types==0.3.1 timm==1.0.31 torch-einops-utils==0.2.0 torchmetrics==1.9.0 torchtitan==0.3.0 x-transformers==2.31.10
LOCK := build/lock/bin/uv pip compile pyproject.toml --quiet --constraints constraints.txt --generate-hashes \
	--python-version 3.11.7 --python-platform x86_64-manylinux_2_28 --no-annotate --no-header --no-emit-package torch
lock: .venv/demo
	$(PIP) $(PIP_ARGS) --target build/lock --upgrade uv==0.13.9
	$(LOCK) $(LOCK_ARGS) --output-file locks/demo.txt
	$(LOCK) $(LOCK_ARGS) --extra dev --output-file locks/dev.txt
	$(LOCK) $(LOCK_ARGS) --extra docs --output-file locks/docs.txt
	$(LOCK) $(LOCK_ARGS) --all-extras --output-file locks/extras.txt
	echo $(INTEGRATIONS) | tr ' ' '\n' | build/lock/bin/uv pip compile - --quiet --no-deps --generate-hashes \
		--python-version 3.11.7 --no-annotate --no-header --output-file locks/integrations.txt

clean:
	rm -rf .venv build *.egg-info
