# Every target sets up what it needs in .venv first; a second run asks no package index.
# ARGS are handed on:  make demo ARGS="--help"   make test ARGS="-k gguf"
SETUP := python=$$(sh scripts/find-python) && "$$python" scripts/setup.py
BIN := .venv/bin
ARGS ?=
export PYTHON

.PHONY: help demo test dev lint format bench clean

help:
	@echo "make demo     complete code with the model in the package (offline; no compiler needed)"
	@echo "make test     build the wheel, check style and types, run the tests against the wheel"
	@echo "make dev      an editable installation with every tool, in .venv"
	@echo "make lint     style and types alone          make format   put files in style"
	@echo "make bench    measure, in build/bench        make clean    remove .venv and all that was built"

demo:
	@$(SETUP) demo
	@$(BIN)/starscope demo $(ARGS)

test:
	@$(SETUP) test
	@$(MAKE) --no-print-directory lint
	@$(BIN)/python scripts/offline.py $(BIN)/python -m pytest -n 2 $(ARGS)

dev:
	@$(SETUP) dev

lint:
	@test -x $(BIN)/ruff || { $(SETUP) dev; }
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@$(BIN)/clang-format --dry-run --Werror src/starscope/native/*.cpp src/starscope/native/*.h

format:
	@test -x $(BIN)/ruff || { $(SETUP) dev; }
	@$(BIN)/ruff format --quiet .
	@$(BIN)/ruff check --quiet --fix .
	@$(BIN)/clang-format -i src/starscope/native/*.cpp src/starscope/native/*.h

bench:
	@$(SETUP) test
	@mkdir -p build/bench
	@$(BIN)/python benches/convert.py build/bench $(ARGS)
	@$(BIN)/python benches/infill.py demo tests/data/held_out/*.py

clean:
	rm -rf .venv build .mypy_cache .pytest_cache .ruff_cache .hypothesis
