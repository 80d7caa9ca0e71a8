# Every target sets up what it needs in its own virtual environment, from a bare checkout.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test lint format bench clean

demo: $(VENV)/.core
	$(BIN)/classwise demo --out demo

test: lint
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal

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

# These ask for torchvision and more, which the comparisons with them do not need.
$(VENV)/.dev: $(VENV)/.core
	$(PIP) --editable ".[dev]"
	$(PIP) --no-deps torchattacks pyautoattack adversarial-robustness-toolbox six
	@touch $@

clean:
	rm -rf $(VENV) demo build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
