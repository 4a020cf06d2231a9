# `make test` and `make demo` each do all the set-up on a fresh clone; a second run re-installs nothing.
# Progress goes to stderr: the last line on stdout is the command's own.

BIN := .venv/bin
STAMP := .venv/.installed
EXTRAS := test$(shell command -v nvidia-smi >/dev/null 2>&1 && echo ,cuda)
# For instance `make demo PROMPT='Once upon a time'`.
PROMPT ?= She walked into the room and
WORKERS ?= 2

.PHONY: setup lint test demo goldens clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	@python=$$(PYTHON='$(PYTHON)' .ci/find_python) || exit 1; \
	echo "setup: .venv with $$python, extras $(EXTRAS)" >&2; \
	[ -x $(BIN)/python ] || "$$python" -m venv .venv >&2 || exit 1; \
	if command -v uv >/dev/null 2>&1; then \
	    uv pip install --quiet --python $(BIN)/python -e '.[$(EXTRAS)]' >&2; \
	else \
	    $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -e '.[$(EXTRAS)]' >&2; \
	fi && touch $@

lint: setup
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

test: lint
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --max-worker-restart 0

demo: setup
	@$(BIN)/python -m infer.generate --model demo --prompt "$$PROMPT" --temperature 0.7 --top-p 0.95 --verify coupled --compare

# The stored references come from transformers and torch, which live in an environment of their own.
goldens:
	@[ -n "$(GOLDENS_PYTHON)" ] || { \
	    echo "make goldens GOLDENS_PYTHON=/path/to/python: an environment made as tests/goldens/README.md says" >&2; \
	    exit 1; }
	@"$(GOLDENS_PYTHON)" tests/goldens/make_goldens.py make

clean:
	@rm -rf .venv .cache build dist

export PROMPT
