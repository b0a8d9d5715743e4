# The two main commands are `make demo` and `make test`. Both create .venv first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Tests run two processes at a time, each with one thread; the demo uses what the machine has.
test test-all fuzz: export OMP_NUM_THREADS := 1
test test-all fuzz: export MKL_NUM_THREADS := 1

.PHONY: help install demo test test-all fuzz lint clean

help:
	@echo "make install   create .venv with Paceline in it, and nothing else"
	@echo "make demo      train a small model with GRPO until it solves more than before: five minutes on an idle core,"
	@echo "               up to ten on a busy machine"
	@echo "make test      run ruff, mypy and the tests (under 8 minutes on 2 cores, including installation)"
	@echo "make test-all  the same, with the slow tests"
	@echo "make fuzz      give 20,000 damaged and hostile files to everything that reads files (some minutes; SEED=1 for others)"
	@echo "make lint      run only ruff and mypy"
	@echo "make clean     remove .venv and all caches"

install: $(STAMP)

demo: $(STAMP)
	@echo "A model of 3.5 million parameters comes with the package; it solves half of the countdown puzzles. GRPO improves"
	@echo "it in five minutes on an idle core, up to ten on a busy machine. The first run also compiles kernels, which takes"
	@echo "another minute."
	$(BIN)/paceline train
	@echo "The command is $(BIN)/paceline (just paceline after \`source $(BIN)/activate\`); \`paceline report FOLDER\`"
	@echo "writes an HTML page about the run."

# mypy takes one core for most of a minute: it runs beside the tests.
test: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(BIN)/mypy & types=$$!; $(BIN)/pytest -n 2 --dist worksteal -q; tests=$$?; wait $$types && exit $$tests

test-all: lint
	$(BIN)/pytest -n 2 --dist worksteal -q -m "not gpu"

SEED ?= 0
fuzz: $(STAMP)
	$(BIN)/python bench/fuzz.py --cases 20000 --seed $(SEED)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# uv installs in seconds where pip takes minutes, but reads no pip configuration: a machine that needs one falls back to
# pip. The constraints keep pip from installing the newest torch, in isolated builds too.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Paceline needs Python 3.11 or newer: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	{ $(BIN)/pip install -q uv \
		&& VIRTUAL_ENV="$(CURDIR)/$(VENV)" UV_FIND_LINKS="$${PIP_FIND_LINKS:-}" \
			$(BIN)/uv pip install -q -c constraints.txt -e '.[dev]'; } \
	|| PIP_CONSTRAINT="$(CURDIR)/constraints.txt" $(BIN)/pip install -q --no-compile -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find paceline tests bench -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
