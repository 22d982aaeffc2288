# One command sets up and runs the main job (make run); one sets up and passes the tests (make test).
# The environment is .venv unless PYTHON names another interpreter: `make gpu-check PYTHON=python3` installs nothing.

VENV    := .venv
STAMP   := $(VENV)/.installed
CPP := $(wildcard src/tilewise/kernels/*/*.cuh src/tilewise/kernels/*/*/*.cuh src/tilewise/native/*.cpp src/tilewise/native/*.h \
                  tests/emulator/*.h tests/emulator/*.cpp tests/emulator/*/*.cuh tests/emulator/*/*/*.cuh)
CLANG_FORMAT = $(PYTHON) -c "from clang_format import clang_format; clang_format()"
export PYTHONPATH := src

ifeq ($(origin PYTHON), undefined)
PYTHON  := $(VENV)/bin/python
SETUP   := $(STAMP)
endif

# With REPORTS=folder every job leaves a JUnit report there.
REPORT = $(if $(REPORTS),--junitxml=$(REPORTS)/$@.xml)

.PHONY: run native wheel-native test kernel-gates thunder libraries nightly instrument-check check format golden docs screenshots gpu-check gpu-nightly environments clean

run: $(SETUP)
	$(PYTHON) -m tilewise inspect --shape 2,8,512,64 --dtype float32 --html report.html

test: $(SETUP)
	$(PYTHON) -m pytest tests -m "not gpu and not kernel_gate and not nightly" -n 2 --dist loadfile $(REPORT)

kernel-gates: $(SETUP)
	$(PYTHON) -m pytest tests -m kernel_gate -n 2 --dist loadfile $(REPORT)

# Thunder needs an older torch than ours, and timm a torchvision: each has an environment of its own.
thunder: .venv-thunder/.installed
	.venv-thunder/bin/python -m pytest $(REPORT) tests/integrations/test_integrations_thunder.py \
	  "tests/integrations/test_integrations_examples.py::test_example[thunder_executor.py]"

libraries: .venv-libraries/.installed
	.venv-libraries/bin/python -m pytest $(REPORT) tests/integrations/test_integrations_libraries.py tests/jit/test_jit_compilers.py

# What takes too long for every change. The outcome is kept in tests/hostile/nightly.json.
nightly: $(SETUP)
	$(PYTHON) tests/hostile/nightly.py

# Thousands of generated problems on a GPU against float64, in ten minutes. The outcome is kept in
# tests/hostile/gpu_nightly.json.
gpu-nightly: $(SETUP)
	$(PYTHON) tests/hostile/gpu_nightly.py

# Two identical candidates, 200 times, on a machine that is kept busy: at most 4 may be told apart. Takes some minutes.
# The record goes to benchmarks/results/, or to RESULTS=folder.
instrument-check: $(SETUP)
	$(PYTHON) -m tilewise.lab.commands.instrument --save $(if $(RESULTS),--results $(RESULTS)) $(if $(RUNS),--runs $(RUNS))

# The extension that answers repeated calls without Python (docs/native.md), built now rather than in the background.
native: $(SETUP)
	$(PYTHON) -m tilewise native build

# A wheel for this platform, this Python and this PyTorch that holds it, for machines without a compiler.
wheel-native: $(SETUP)
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir build .
	$(PYTHON) -m tilewise native wheel build/tilewise-*-py3-none-any.whl --folder dist

check: $(SETUP)
	$(PYTHON) -m ruff check src tests examples benchmarks .ci
	$(PYTHON) -m ruff format --check src tests examples benchmarks .ci
	$(PYTHON) -m mypy
	$(CLANG_FORMAT) --dry-run -Werror $(CPP)

format: $(SETUP)
	$(PYTHON) -m ruff check --fix src tests examples benchmarks .ci
	$(PYTHON) -m ruff format src tests examples benchmarks .ci
	$(CLANG_FORMAT) -i $(CPP)

golden: $(SETUP)
	$(PYTHON) tests/test_plan.py --update

docs: $(SETUP)
	$(PYTHON) -m tilewise docs

# The reports as a browser shows them, for docs/microscope.md. Needs a Chromium (.ci/chromium installs one).
screenshots: $(SETUP)
	$(PYTHON) tests/lab/screenshots.py

# With LANES=5 so many of the files run side by side, each in a process of its own.
gpu-check: $(SETUP)
	$(if $(LANES),printf '%s\n' tests/gpu/test_*.py | xargs -P $(LANES) -n 1 $(PYTHON) -m pytest,$(PYTHON) -m pytest tests/gpu)

$(STAMP): pyproject.toml constraints.txt
	test -x $(VENV)/bin/python || python3 -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $@

.venv-%/.installed: .ci/%.txt
	test -x .venv-$*/bin/python || python3 -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	touch $@

environments: $(STAMP) .venv-thunder/.installed .venv-libraries/.installed

clean:
	rm -rf $(VENV) .venv-thunder .venv-libraries .pytest_cache .mypy_cache .ruff_cache .hypothesis
