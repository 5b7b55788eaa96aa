# The same commands here and in CI. PYTHON=/path/to/python3 chooses the interpreter of a new environment, ARGS="…" is handed on.
.DEFAULT_GOAL := help
.PHONY: help run test install check test-py311

COMPILERS = $(if $(filter Linux-x86_64,$(shell uname -sm | tr ' ' -)),$(comma)aot-gpu$(comma)aot-tpu)
comma := ,

help:
	@echo 'make run      install what serving needs and serve the default model: HTTP on 127.0.0.1:8000, gRPC on 8001'
	@echo 'make test     install what the tests need and run the default tier'
	@echo 'make install  .venv with everything for development: tests, linters, and on x86-64 Linux the TPU and GPU compilers'
	@echo 'make check    style, import layers and types'
	@echo 'Options: PYTHON=/path/to/python3, ARGS="…" for run and test'

run:
	@scripts/install .venv ''
	@exec .venv/bin/jaxserve run $(ARGS)

test:
	@scripts/install .venv test
	@scripts/test $(ARGS)

install:
	@scripts/install .venv dev$(COMPILERS)

check:
	@scripts/install .venv dev
	@scripts/check

# The oldest supported Python, with the oldest jax, and torch (whose CPU build is at hand there) for the comparisons with transformers: the tests that hang on
# them most. ARGS=tests runs all.
PY311_TESTS = $(addprefix tests/,models loading/test_sharded.py kernels/test_api.py kernels/test_engine.py engine_host/test_host_time.py \
	$(addprefix engine/test_,batch.py groups.py memory.py overlap.py page_mover.py runner.py slot_state.py))

test-py311:
	@PYTHON=$$(scripts/find_python 3.11) scripts/install .venv-py311 test,parity
	@VENV=.venv-py311 scripts/test $(or $(ARGS),$(PY311_TESTS))
