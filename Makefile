# Two commands: `make demo` and `make test`. Each sets up what it needs on a machine that has only Python >= 3.11.
PYTHON ?= python3
VENV   := .venv
CONSTRAINTS ?= constraints.txt
BIN    := $(VENV)/bin

.PHONY: demo test test-full test-oldest test-vllm lint types pytest docs clean

demo: $(VENV)/.installed
	$(BIN)/vitrim demo $(if $(CIFAR10),--cifar10 $(CIFAR10))

# The types are checked while the first tests run.
test: lint
	$(MAKE) --no-print-directory --jobs 2 types pytest

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/mypy

# One torch thread per worker: as many workers as cores already use every core. Bytecode is kept even where the
# environment forbids it: tests start many interpreters, each of which would compile torch again. A worker that dies ends
# the run: pytest-xdist would wait forever for the rest of its group.
pytest: $(VENV)/.installed
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadgroup --max-worker-restart 0 $(TESTS)

# The whole suite, with every method on every host and what is marked `full`: takes hours on two cores.
test-full: lint types
	VITRIM_FULL_MATRIX=1 $(MAKE) --no-print-directory pytest

# The lower bounds of pyproject.toml, in an environment of their own; `tests/older.py` says what is left out and why.
OLDEST := tests/core tests/methods tests/selectors tests/hosts tests/tasks tests/cli tests/demo tests/test_bounds.py

test-oldest:
	$(MAKE) --no-print-directory pytest VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt TESTS="$(OLDEST)"

# Hosts and selectors beside vLLM's pins.
test-vllm:
	$(MAKE) --no-print-directory pytest VENV=.venv-vllm CONSTRAINTS=constraints-vllm.txt TESTS="tests/hosts tests/selectors"

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
	rm -rf $(VENV) .venv-oldest .venv-vllm .pytest_cache .mypy_cache .ruff_cache site docs/api docs/changelog.md docs/design/measures.md
