# One command sets up and runs the main job (make run); one sets up and passes the tests (make test).
# The environment is .venv unless PYTHON names another interpreter: `make gpu-check PYTHON=python3` installs nothing.

VENV    := .venv
STAMP   := $(VENV)/.installed
CPP := $(wildcard src/tilewise/kernels/*/*.cuh) src/tilewise/integrations/detour.cpp
CLANG_FORMAT = $(PYTHON) -c "from clang_format import clang_format; clang_format()"
export PYTHONPATH := src

ifeq ($(origin PYTHON), undefined)
PYTHON  := $(VENV)/bin/python
SETUP   := $(STAMP)
endif

.PHONY: run test check format golden docs gpu-check clean

run: $(SETUP)
	$(PYTHON) -m tilewise inspect --shape 2,8,512,64 --dtype float32 --html report.html

test: $(SETUP)
	$(PYTHON) -m pytest tests -m "not gpu" -n 2 --dist loadfile

check: $(SETUP)
	$(PYTHON) -m ruff check src tests examples
	$(PYTHON) -m ruff format --check src tests examples
	$(PYTHON) -m mypy
	$(CLANG_FORMAT) --dry-run -Werror $(CPP)

format: $(SETUP)
	$(PYTHON) -m ruff check --fix src tests examples
	$(PYTHON) -m ruff format src tests examples
	$(CLANG_FORMAT) -i $(CPP)

golden: $(SETUP)
	$(PYTHON) tests/test_plan.py --update

docs: $(SETUP)
	$(PYTHON) -m tilewise docs

gpu-check: $(SETUP)
	$(PYTHON) -m pytest tests/gpu

$(STAMP): pyproject.toml constraints.txt
	test -x $(VENV)/bin/python || python3 -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
