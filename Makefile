# One command sets up and runs the main job (make run); one sets up and passes the tests (make test).
# The environment is .venv unless PYTHON names another interpreter: `make gpu-check PYTHON=python3` installs nothing.

VENV    := .venv
STAMP   := $(VENV)/.installed
CPP := $(wildcard src/tilewise/kernels/*/*.cuh src/tilewise/kernels/*/*/*.cuh src/tilewise/native/*.cpp src/tilewise/native/*.h \
                  tests/emulator/*.h tests/emulator/*.cpp tests/emulator/*/*.cuh tests/emulator/*/*/*.cuh)
INSTALL := python -m pip install --quiet --disable-pip-version-check
CLANG_FORMAT = $(PYTHON) -c "from clang_format import clang_format; clang_format()"
export PYTHONPATH := src$(if $(PYTHONPATH),:$(PYTHONPATH))

ifeq ($(origin PYTHON), undefined)
PYTHON  := $(VENV)/bin/python
SETUP   := $(STAMP)
endif

# With REPORTS=folder every job leaves a JUnit report there.
REPORT = $(if $(REPORTS),--junitxml=$(REPORTS)/$@.xml)

.PHONY: run native wheel-native test kernel-gates thunder libraries nightly compilers newest instrument-check mutants check format golden docs site evidence evidence-check machine-code screenshots gpu-check gpu-nightly release environments clean

run: $(SETUP)
	$(PYTHON) -m tilewise inspect --shape 1,8,2048,64 --dtype float32 --mask window:256,0 --html report.html

test: $(SETUP)
	$(PYTHON) -m pytest tests -m "not gpu and not kernel_gate and not nightly" -n 2 --dist loadfile $(REPORT)

kernel-gates: $(SETUP)
	$(PYTHON) -m pytest tests -m kernel_gate -n 2 --dist loadfile $(REPORT)

# Thunder needs an older torch than ours, and timm a torchvision: each has an environment of its own.
thunder: .venv-thunder/.installed
	.venv-thunder/bin/python -m pytest $(REPORT) tests/integrations/test_integrations_thunder.py \
	  "tests/integrations/test_integrations_examples.py::test_example[thunder_executor.py]"

libraries: .venv-libraries/.installed
	.venv-libraries/bin/python -m pytest $(REPORT) -m "not kernel_gate and not nightly" \
	  tests/integrations/test_integrations_libraries.py tests/test_kernels.py
	.venv-libraries/bin/python -m pytest $(if $(REPORTS),--junitxml=$(REPORTS)/architectures.xml) -n 2 \
	  tests/integrations/test_integrations_architectures.py

# What takes too long for every change. The outcome is kept in tests/hostile/nightly.json.
nightly: $(SETUP)
	$(PYTHON) tests/hostile/nightly.py
	$(if $(SETUP),$(MAKE) --keep-going compilers)

# Every kernel by the oldest NVRTC that is served, which current CUDA builds of torch pin, and by the newest.
compilers: gates-by-13.0.88 gates-by-newest

gates-by-%: .venv-nvrtc-%/.installed
	.venv-nvrtc-$*/bin/python -m pytest $(REPORT) tests/test_kernels.py

# Prints which packages are other releases than the pins name, then tests with them. torch alone stays as it is: the
# newest that pip finds is gigabytes of CUDA, and another release asks for code of its own (torch_kernels/gates.py).
newest:
	test -x .venv-newest/bin/python || python3 -m venv .venv-newest
	.venv-newest/bin/$(INSTALL) --upgrade --upgrade-strategy eager --requirement .ci/torch.txt --editable ".[dev]"
	@.venv-newest/bin/python -m pip list --format=freeze --exclude-editable --exclude torch --exclude pip | \
	  grep -vxF -f constraints.txt -f constraints-cpu.txt -f .ci/torch.txt || echo "Every pin is of the newest release."
	$(MAKE) --keep-going check test kernel-gates PYTHON=.venv-newest/bin/python

# Thousands of generated problems on a GPU against float64, in ten minutes. The outcome is kept in
# tests/hostile/gpu_nightly.json.
gpu-nightly: $(SETUP)
	$(PYTHON) tests/hostile/gpu_nightly.py

# Two identical candidates, 200 times, on a machine that is kept busy: at most 4 may be told apart. Takes some minutes.
# The record goes to benchmarks/results/, or to RESULTS=folder.
instrument-check: $(SETUP)
	$(PYTHON) tools/instrument.py --save $(if $(RESULTS),--results $(RESULTS)) $(if $(RUNS),--runs $(RUNS))

# Which changed lines of the parts that decide correctness the tests let pass: COUNT of them (150), drawn by SEED (0).
mutants: $(SETUP)
	$(PYTHON) tools/mutants.py $(if $(SEED),--seed $(SEED)) $(if $(COUNT),--count $(COUNT)) $(if $(ONLY),--only $(ONLY))

# The extension that answers repeated calls without Python (docs/native.md), built now rather than in the background.
native: $(SETUP)
	$(PYTHON) -m tilewise native build

# A wheel for this platform, this Python and this PyTorch that holds it, for machines without a compiler.
wheel-native: $(SETUP)
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir build .
	$(PYTHON) -m tilewise native wheel build/tilewise-*-py3-none-any.whl --folder dist

# What PyPI would get, in build/release, judged as it would be there; uploads nothing. Pyroma gives
# 8 of 10 while the project and its authors have no public address.
release: .venv-release/.installed
	rm -rf build/release
	.venv-release/bin/python -m build --no-isolation --outdir build/release
	.venv-release/bin/python -m twine check --strict build/release/*
	.venv-release/bin/pyroma --min 8 build/release/*.tar.gz
	.venv-release/bin/check-wheel-contents build/release/*.whl

check: $(SETUP)
	$(PYTHON) -m ruff check src tests examples benchmarks tools .ci
	$(PYTHON) -m ruff format --check src tests examples benchmarks tools .ci
	$(PYTHON) -m mypy
	$(CLANG_FORMAT) --dry-run -Werror $(CPP)

format: $(SETUP)
	$(PYTHON) -m ruff check --fix src tests examples benchmarks tools .ci
	$(PYTHON) -m ruff format src tests examples benchmarks tools .ci
	$(CLANG_FORMAT) -i $(CPP)

golden: $(SETUP)
	$(PYTHON) tests/test_plan.py --update

docs: $(SETUP)
	$(PYTHON) tools/docs.py

# README.md and docs/ with an API reference from the docstrings (mkdocs.yml), into build/site. A warning is an error
# (--quiet would hide warnings from --strict); the variable silences a notice about the theme's successor.
site: .venv-site/.installed
	NO_MKDOCS_2_WARNING=1 .venv-site/bin/python -m mkdocs build --strict

# What README.md and docs/ cite, measured where it is missing or older than the kernels. Ends after MINUTES (8.5 by
# default), and goes on from there the next time.
evidence: $(SETUP)
	$(PYTHON) tools/evidence.py $(if $(MINUTES),--minutes $(MINUTES)) $(foreach name,$(ONLY),--only $(name))

# Fails where a figure of README.md or docs/ is not backed by a record of the kernels as they are.
evidence-check: $(SETUP)
	$(PYTHON) tools/evidence.py --check

# Enters the machine code of the kernels that records name, so that a change of sources that leaves it as it is leaves
# their figures evidence. Run it before such a change and after it; AGAINST=main compares the kernels that CI compiles
# with those of another revision instead, every Nth of them with EVERY=N.
machine-code: $(SETUP)
	$(PYTHON) tools/machine_code.py $(if $(AGAINST),--against $(AGAINST)) $(if $(EVERY),--every $(EVERY))

# The reports as a browser shows them, for docs/microscope.md. Needs a Chromium (.ci/chromium installs one).
screenshots: $(SETUP)
	$(PYTHON) tests/lab/screenshots.py

# With LANES=5 so many of the files run side by side, each in a process of its own.
gpu-check: $(SETUP)
	$(if $(LANES),printf '%s\n' tests/gpu/test_*.py | xargs -P $(LANES) -n 1 $(PYTHON) -m pytest,$(PYTHON) -m pytest tests/gpu)

# A CUDA build of torch pins NVRTC and Triton itself, and two pins of one package would be a conflict. Variables rather
# than options, which do not reach the environment that our package is built in; pip has the second since 25.3.
CPU_PINS = "from importlib.metadata import requires as of; \
  print('' if any(line.startswith('triton') for line in of('torch')) else 'constraints-cpu.txt')"

$(STAMP): pyproject.toml constraints.txt constraints-cpu.txt .ci/torch.txt
	test -x $(VENV)/bin/python || python3 -m venv $(VENV)
	$(VENV)/bin/$(INSTALL) --constraint constraints.txt --requirement .ci/torch.txt
	pins=$$($(VENV)/bin/python -c $(CPU_PINS)) && \
	export PIP_CONSTRAINT="constraints.txt $$pins" && export PIP_BUILD_CONSTRAINT="$$PIP_CONSTRAINT" && \
	$(VENV)/bin/$(INSTALL) --editable ".[dev]"
	touch $@

.venv-%/.installed: .ci/%.txt constraints.txt
	test -x .venv-$*/bin/python || python3 -m venv .venv-$*
	.venv-$*/bin/$(INSTALL) --requirement $<
	touch $@

# The development environment with another NVRTC in front.
.venv-nvrtc-%/.installed: $(STAMP)
	test -x .venv-nvrtc-$*/bin/python || python3 -m venv .venv-nvrtc-$*
	.venv-nvrtc-$*/bin/$(INSTALL) --upgrade --no-deps "nvidia-cuda-nvrtc$(if $(filter newest,$*),,==$*)"
	$(VENV)/bin/python -c "import site; print(*site.getsitepackages())" \
	  > "$$(.venv-nvrtc-$*/bin/python -c "import site; print(*site.getsitepackages())")/development.pth"
	$(if $(filter newest,$*),,touch $@)

environments: $(STAMP) .venv-thunder/.installed .venv-libraries/.installed .venv-site/.installed \
  .venv-release/.installed

clean:
	rm -rf $(VENV) .venv-thunder .venv-libraries .venv-site .venv-release .venv-newest .venv-nvrtc-* .pytest_cache .mypy_cache .ruff_cache .hypothesis
