# Sets up its own environment: needs Linux, bash, make and Python >= 3.11. `make help` lists what there is.
DEFAULT_TORCH := 2.13.0
TORCH ?= $(DEFAULT_TORCH)
PYTHON ?= python3
PROFILE ?= pr
VENV ?=
ARGS ?=
export PYTHON
# Sessions start hundreds of Python processes: compile the suite once, not in each process.
unexport PYTHONDONTWRITEBYTECODE

ifeq ($(VENV),none)
  ifneq ($(origin TORCH),file)
    $(error VENV=none uses the torch that is installed: leave out TORCH or VENV)
  endif
  SETUP := none
  RUN := $(PYTHON)
else ifneq ($(VENV),)
  $(error VENV is $(VENV): leave it out, or write VENV=none to use the active environment)
else
  ifeq ($(TORCH),$(DEFAULT_TORCH))
    SETUP := .venv $(TORCH) ci/constraints-torch.txt
  else
    SETUP := .venv-torch-$(TORCH) $(TORCH)
  endif
  RUN := $(firstword $(SETUP))/bin/python
endif

.DEFAULT_GOAL := help
.PHONY: help conformance test check environment clean

help:
	@echo 'make conformance  judge this torch on this machine    PROFILE=smoke|pr|nightly|certify (default: pr)'
	@echo 'make test         the tests of the suite itself'
	@echo 'make check        ruff and mypy'
	@echo 'make environment  only the set-up that the others begin with'
	@echo 'make clean        remove reports and caches; environments (.venv*) stay'
	@echo
	@echo 'TORCH=2.15.0      another torch, in an environment of its own (default: $(DEFAULT_TORCH), in .venv)'
	@echo 'VENV=none         the active environment with the torch that it has'
	@echo 'PYTHON=python3.12 what a new environment is made with, 3.11 or newer (default: python3)'
	@echo 'ARGS="..."        more arguments for pytest'

environment:
	@bash ci/setup_env.sh $(SETUP)

conformance: environment
	$(RUN) -m pytest -n auto conformance/ --profile $(PROFILE) $(ARGS)

# Two workers: these tests start processes of their own and mostly wait for them. By file: the tests of a file share
# fixtures, such as a session or warm ranks. The order is that of tests/conftest.py.
test: environment
	$(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(addprefix tests/,fast ranks sessions) $(ARGS)

check: environment
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

clean:
	rm -rf conformance-report .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name '.venv*' -prune -o -type d -name __pycache__ -exec rm -rf {} +
