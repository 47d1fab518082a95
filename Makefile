# Two commands matter: `make demo` and `make test`. Each sets up what it needs in .venv first.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
FRAMEWORKS := $(VENV)/.frameworks
# Workers of the tests: one more than the two cores of a small machine. A third of their time they wait for processes.
JOBS   ?= 3

# pip compiles with one process. These are 250 MB of Python, and some files in them are of other versions of it.
PIP     = $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt
COMPILE = $(BIN)/python -W ignore -m compileall -qq -j 0 $(VENV)/lib || true

.PHONY: setup frameworks demo docs check test dist image lint typecheck bench soak extras clean
.DELETE_ON_ERROR:

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "headrace needs Python 3.11 or newer; run: make PYTHON=/path/to/python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[dev]'
	$(COMPILE)
	@touch $@

# The trainers that `headrace.checkpoint.frameworks` is tested with. torchtitan without what it requires: its datasets wants an older fsspec.
frameworks: $(FRAMEWORKS)

$(FRAMEWORKS): $(READY)
	$(PIP) --editable '.[frameworks]'
	$(PIP) --no-deps torchtitan spmd_types
	$(COMPILE)
	@touch $@

demo: $(READY)
	$(BIN)/headrace demo

# The documentation site, below build/docs. A warning of Sphinx is an error.
docs: $(READY)
	$(BIN)/python -m docs.site.build

test: $(FRAMEWORKS)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m 'not soak and not gpu' --durations 15 --durations-min 5

# What a change should pass before it is shown to others: under two minutes.
check: lint typecheck
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -q -m 'unit and not slow and not soak and not gpu'

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

typecheck: $(READY)
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/headrace bench all --output bench-out

soak: $(FRAMEWORKS)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m 'not gpu and not alone' --hypothesis-profile explore -o faulthandler_timeout=3700
	$(BIN)/python -m pytest -m alone --hypothesis-profile explore

# What each extra weighs, in MB of site-packages: the table of docs/howto/install.md.
extras: $(READY)
	@for extra in core s3 data sql torch dali ray otel sidecar; do \
	  rm -rf build/extra && $(PYTHON) -m venv --without-pip build/extra && \
	  $(BIN)/python -m pip --python build/extra/bin/python install --quiet --constraint constraints.txt ".$$([ $$extra = core ] || echo [$$extra])" && \
	  echo "$$extra $$(du -sm build/extra/lib/python3*/site-packages | cut -f1) MB" || exit 1; \
	done

# The files of a release, checked.
dist: $(READY)
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*

# The image of deploy/: BASE is a Python image with its digest, IMAGE the name of the result. A push prints its digest.
IMAGE ?= headrace
image:
	@case "$(BASE)" in *@sha256:*) ;; *) echo "give the base image with its digest: make image BASE=python:3.11-slim-bookworm@sha256:..."; exit 2;; esac
	docker build -f deploy/docker/Dockerfile -t $(IMAGE) --build-arg BASE=$(BASE) .

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis demo-out test-out bench-out
