# Two commands do all the set-up on a machine with Python 3.11 or newer: `make demo` and `make test`.

# The first interpreter that runs and is new enough; a shim on the path may do neither.
PYTHON := $(shell for p in python3.11 python3.12 python3.13 python3; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo "$$p"; break; }; done)
BIN := .venv/bin
INSTALLED := .venv/installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
CHECKED := benchmarks configs docs examples jaxserve pallas_kernels scheduler tests README.md CONTRIBUTING.md

.PHONY: demo test test-long install clean
.DELETE_ON_ERROR:

demo: $(INSTALLED)
	$(BIN)/jaxserve fetch
	$(BIN)/jaxserve generate --prompt-file examples/prompts.txt --max-tokens 48 --temperature 0 --stats

test: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell $(wildcard $(CHECKED))
	$(BIN)/mypy
	$(BIN)/jaxserve fetch
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

test-long: $(INSTALLED)
	$(BIN)/jaxserve fetch
	$(BIN)/python -m pytest -m slow

install: $(INSTALLED)

# Written last, so that an interrupted install is repeated and a finished one is not.
$(INSTALLED): pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; none is on the path" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || \
		{ echo "this Python lacks the venv module; on Debian: apt-get install python3-venv" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) install --quiet --editable '.[test]'
	@touch $@

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
