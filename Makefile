# SPDX-License-Identifier: Apache-2.0
# Two commands are enough on a fresh machine: `make train` and `make test`. The rest is below; `make help` lists it.
# Variables:  PYTHON=python3.12        the Python that .venv is made from
#             PYTHON_ENV=DIR           use this environment instead of .venv
#             TORCH_INDEX=URL          package index for torch alone (for the smaller CPU build, say)
#             LOONGFORGE_DEPS=FILE     offline bundle to use instead of system packages (default: dist/loongforge-deps-*)
#             PRESET=release           CMake preset that `make build` builds and the Python package uses
#             CUTLASS=1                build the experts' CUDA products on a machine without a GPU too (minutes)
#             DEVICE=cuda              or cpu: `make train` there (default: auto);  SIZE=small  a larger preset
#             TRAIN_ARGS="..."         further arguments for `loongforge train`;  SCENES=N  number of sample scenes
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.PHONY: help setup build train test test-long lint format wheel offline-bundle clean distclean
export PYTHON PYTHON_ENV TORCH_INDEX LOONGFORGE_DEPS PRESET TRAIN_ARGS SCENES DEVICE SIZE CUTLASS

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed 's/:.*## /\t/' | expand -t 18
setup: ## install what is missing: system packages, .venv, Python packages
	@scripts/setup.sh
build: setup ## set-up, then build the library, the command and the Python extension
	@scripts/build.sh
train: build ## all of that, then make the sample data, train on it, print the result
	@scripts/train.sh
test: build ## every test that CI runs
	@scripts/test.sh short
test-long: build ## thread sanitizer, fuzzing, long sweeps
	@scripts/test.sh long
lint: setup ## layers, banned functions, sizes, text rules, ruff, clang-format
	@scripts/lint.sh all
format: setup ## lay out C with clang-format 14 and Python with ruff
	@scripts/lint.sh format
wheel: setup ## build a wheel into dist/
	@scripts/build.sh wheel
offline-bundle: setup ## the C libraries and CUTLASS's headers in one tar, for a machine without a network
	@scripts/bundle.sh
clean: ## remove what was built (an offline bundle in dist/ stays)
	rm -rf build dist/*.whl python/loongforge/*.so python/loongforge/*.so.*
distclean: clean ## and the environment, sample data and runs
	rm -rf .venv data runs
