# Everything needs only python3 (3.11 or newer) with pip; `make help` lists the targets.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
LOCK := requirements/lock.txt
MARKS := $(VENV)/.npuserve
MODELS := examples/.models

EXAMPLE ?= model_repository
REPOSITORY_model_repository := examples/model_repository
REPOSITORY_vad := examples/vad/model_repository
REPOSITORY_embedding := examples/embedding/model_repository
REPOSITORY_yolo := examples/yolo/model_repository
FETCH_model_repository := ocr
FETCH_vad := vad
FETCH_embedding := embedding
FETCH_yolo := yolo
ARGS ?=
TESTS ?= tests

.DEFAULT_GOAL := help
.PHONY: help serve test torch check lint types format docs models lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

serve: $(MARKS)/serve $(MODELS)/.$(FETCH_$(EXAMPLE)) ## serve the examples (EXAMPLE=vad|embedding|yolo for others, ARGS=… for flags)
	$(BIN)/npuserve --model-repository $(REPOSITORY_$(EXAMPLE)) $(ARGS)

test: $(MARKS)/test models ## run the tests (TESTS=… for some of them)
	$(BIN)/python -m pytest -q $(TESTS)

torch: $(MARKS)/torch ## install torch, which the tests of the pytorch backend need (large)

check: lint types test ## everything CI runs, and the linters

lint: $(MARKS)/dev ## ruff, format and spelling
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/codespell

types: $(MARKS)/dev ## mypy --strict
	$(BIN)/mypy

format: $(MARKS)/dev ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(MARKS)/serve ## write docs/reference/options.md from the declarations
	$(BIN)/python docs/generate_options.py

models: $(MODELS)/.ocr $(MODELS)/.vad $(MODELS)/.embedding $(MODELS)/.yolo ## fetch the model files of all examples

$(MODELS)/.%: examples/fetch_models.py | $(MARKS)/serve
	@$(BIN)/python examples/fetch_models.py $*
	@mkdir -p $(MODELS) && touch $@

# An environment without pip gets one from the python3 that makes it (Debian splits ensurepip off).
$(MARKS)/venv:
	@$(PYTHON) -m venv $(VENV) || { \
	  rm -rf $(VENV) && $(PYTHON) -m venv --without-pip $(VENV) && \
	  $(PYTHON) -m pip --python $(BIN)/python install -q pip; }
	@mkdir -p $(MARKS) && touch $@

define install
	$(PIP) install -q -c $(LOCK) -e '.[$(1)]'
	@touch $@
endef

$(MARKS)/serve: pyproject.toml $(LOCK) | $(MARKS)/venv
	$(call install,examples$(comma)grpc-native$(comma)onnxruntime)

$(MARKS)/test: pyproject.toml $(LOCK) | $(MARKS)/venv $(MARKS)/serve
	$(call install,test)

$(MARKS)/torch: pyproject.toml $(LOCK) | $(MARKS)/venv
	$(call install,torch)

$(MARKS)/dev: pyproject.toml $(LOCK) | $(MARKS)/test
	$(call install,dev)

comma := ,

lock: $(MARKS)/venv ## write requirements/lock.txt anew from the newest versions that fit together
	rm -rf $(VENV)-lock && $(PYTHON) -m venv $(VENV)-lock
	$(VENV)-lock/bin/pip install -q -e '.[dev]'
	@sed -n '/^#/p' $(LOCK) > $(LOCK).new
	$(VENV)-lock/bin/pip freeze --exclude npuserve --exclude-editable >> $(LOCK).new
	@mv $(LOCK).new $(LOCK) && rm -rf $(VENV)-lock

clean: ## remove the environment, fetched models and caches
	rm -rf $(VENV) $(MODELS) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	$(PYTHON) examples/fetch_models.py --clean
