# Every target installs what it needs into its own virtual environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# Waiting OpenMP threads sleep instead of spinning, because the workers of pytest share the cores.
export GOMP_SPINCOUNT := 0
export OMP_WAIT_POLICY := passive
PYTEST := $(BIN)/python -m pytest --numprocesses auto --dist worksteal

.PHONY: demo test check slow lint format bench clean

demo: $(VENV)/.core
	$(BIN)/classwise demo --out demo

# The whole suite.
test: lint
	$(PYTEST)

# Lint, types and the fast tests: two minutes on two cores.
check: lint
	$(PYTEST) -m "not slow"

# Measure the suite on an idle machine and rewrite the list of slow tests.
slow: $(VENV)/.dev
	mkdir -p build
	$(PYTEST) --durations=0 --durations-min=0.5 | tee build/durations.txt
	(printf '%s\n' browser distributed faults parity; \
	sed -nE 's#^[0-9.]+s (call|setup) +.*/(test_\w+\.py::(Test\w+::)?test_\w+).*#\2#p' build/durations.txt) | \
	LC_ALL=C sort -u > tests/slow.txt

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks evaluate --peers

$(VENV)/.core: pyproject.toml constraints.txt
	@echo "setting up $(VENV) (some minutes the first time)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	@touch $@

# --no-deps: these packages require torchvision and more, which our comparisons do not use.
$(VENV)/.dev: $(VENV)/.core
	$(PIP) --editable ".[dev]"
	$(PIP) --no-deps torchattacks pyautoattack adversarial-robustness-toolbox six
	@touch $@

clean:
	rm -rf $(VENV) demo build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
