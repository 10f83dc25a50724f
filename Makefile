# Two commands set everything up: `make serve` and `make test`. Both may be run again at any time.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt

.PHONY: serve test lint clean

serve: .venv/serve.done
	$(BIN)/nanoserve serve $(ARGS)

test: .venv/test.done
	$(BIN)/python -m pytest $(ARGS)

lint: .venv/test.done
	$(BIN)/ruff format src tests bench && $(BIN)/ruff check --fix src tests bench && $(BIN)/mypy && $(BIN)/lint-imports importlinter.ini

# torch goes first and by itself: another package that asks for it would take a CUDA build of gigabytes.
.venv/torch.done: constraints.txt
	$(PYTHON) -m venv .venv
	@echo "installing torch (the CPU build is about 200 MB) ..."
	$(PIP) torch
	touch $@

.venv/serve.done: .venv/torch.done pyproject.toml
	$(PIP) --editable .
	touch $@

.venv/test.done: .venv/torch.done pyproject.toml
	$(PIP) --editable '.[test]'
	touch .venv/serve.done $@

clean:
	rm -rf .venv build src/*.egg-info
