# Everything runs in .venv, which `make install` fills; each target sets up what it needs.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: install demo test lint format serve bench soak clean

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -m venv --help >/dev/null 2>&1 && $(PYTHON) -c 'import ensurepip' 2>/dev/null \
		|| { echo "python3-venv is missing: sudo apt-get install -y python3-venv"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: install
	$(BIN)/python -m tools.demo

test: install
	$(BIN)/python -m pytest

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

serve: install
	$(BIN)/mindie-mm serve

bench: install
	$(BIN)/python -m bench

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache build dist *.egg-info
