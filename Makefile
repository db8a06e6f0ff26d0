# Two commands do all the set-up on a machine with Python 3.11 or newer: `make demo` and `make test`.

comma := ,
# The first interpreter that runs and is new enough; a shim on the path may do neither.
first_python = $(shell for p in $(2); do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < $(1))' >/dev/null 2>&1 && { echo "$$p"; break; }; done)
PYTHON := $(call first_python,(3$(comma) 11),python3.11 python3.12 python3.13 python3)
BIN := .venv/bin
INSTALLED := .venv/installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
CHECKED := benchmarks configs docs examples jaxserve pallas_kernels scheduler scripts tests README.md CONTRIBUTING.md

# jax beyond 0.10 needs Python 3.12; where there is one, the kernels are lowered by these versions too.
NEWER_JAX := 0.11.2 0.12.0.1
NEWER_PYTHON := $(call first_python,(3$(comma) 12),python3.12 python3.13 $(wildcard $(HOME)/.pyenv/versions/3.1[23]*/bin/python))

DEVICELESS_PYTHON := $(or $(NEWER_PYTHON),$(PYTHON))
DEVICELESS_JAX := $(if $(NEWER_PYTHON),$(lastword $(NEWER_JAX)),0.10.2)

.PHONY: demo test test-newer-jax test-long test-deviceless bench-peers install clean
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
	$(MAKE) --no-print-directory test-newer-jax

# Kernels only, in environments that hold little more than jax: Mosaic GPU's need a newer one than 0.10.
ifdef NEWER_PYTHON
test-newer-jax: $(NEWER_JAX:%=.venv-jax-%/installed)
	@for jax in $(NEWER_JAX); do \
		echo "jax $$jax"; \
		.venv-jax-$$jax/bin/python -m pytest tests/kernels/test_lowering.py tests/kernels/test_tpu_lowering.py \
			tests/kernels/mosaic || exit; \
	done
else
test-newer-jax:
	@echo "no Python 3.12 or newer here: the kernels are not tried on jax $(NEWER_JAX)"
endif

.venv-jax-%/installed:
	$(NEWER_PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install --quiet jax==$* absl-py pytest
	@touch $@

# Compilers for chips that are not here, two gigabytes of them: XLA:GPU and ptxas, and libtpu.
test-deviceless: .venv-deviceless/installed
	.venv-deviceless/bin/python -m pytest -m deviceless tests/deviceless

.venv-deviceless/installed:
	@test -n "$(DEVICELESS_PYTHON)" || { echo "Python 3.11 or newer is needed; none is on the path" >&2; exit 1; }
	$(DEVICELESS_PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install --quiet 'jax[tpu]==$(DEVICELESS_JAX)' \
		jax-cuda13-plugin==$(DEVICELESS_JAX) nvidia-cuda-nvcc absl-py flax pytest
	@touch $@

test-long: $(INSTALLED)
	$(BIN)/jaxserve fetch
	$(BIN)/python -m pytest -m slow

# Beside other engines: an hour or so on a machine that does nothing else.  Options go into PEERS.
bench-peers: $(INSTALLED)
	$(PIP) install --quiet --editable '.[plot]'
	$(BIN)/python -m benchmarks.peers $(PEERS)

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
	rm -rf .venv .venv-* .peers build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
