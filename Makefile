# Thin: every step is a script or a CMake preset that can be run by itself.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test bench arm64 format lint clean deps debug release asan tsan both

# Your own llama.cpp: make demo KVTAMP_LLAMA_DIR=/path/to/llama.cpp
llama = llama=$${KVTAMP_LLAMA_DIR:-$$(scripts/fetch llama.cpp)}

help: ## this list
	@sed -nE 's/^([a-z0-9]+):[^#]*## (.*)/make \1\t\2/p' Makefile | expand -t 16

demo: deps ## a long document and a question, through llama.cpp's own cache and through kvtamp
	@$(llama); scripts/fetch smollm2 >/dev/null; cmake --preset release -DKVTAMP_LLAMA_DIR="$$llama"; \
	cmake --build --preset release --target ggml-kvtamp kvtamp; \
	KVTAMP_LLAMA_DIR="$$llama" python3 scripts/demo.py

test: both ## all tests, then the unit tests again under AddressSanitizer and UBSan
	@scripts/fetch smollm2 >/dev/null; scripts/fetch llama-cpp-python >/dev/null
	@ctest --preset release
	@$(MAKE) --no-print-directory asan
	@ctest --preset asan

bench: release ## the benchmarks of build/release/bin
	@shopt -s nullglob; benches=(build/release/bin/*_bench); \
	(($${#benches[@]})) || { echo "no benchmarks were built" >&2; exit 1; }; \
	for bench in "$${benches[@]}"; do echo "== $${bench##*/}"; "$$bench"; done

arm64: deps ## the unit tests for 64-bit Arm, cross-compiled, under qemu
	@scripts/deps --arm64; scripts/fetch arm64 >/dev/null
	@cmake --preset arm64
	@cmake --build --preset arm64
	@ctest --preset arm64

format: ## clang-format on every C++ file
	@scripts/deps --lint
	@git ls-files -zco --exclude-standard '*.cc' '*.h' | xargs -0r clang-format -i

lint: deps ## clang-format and clang-tidy, changing nothing
	@scripts/deps --lint
	@git ls-files -zco --exclude-standard '*.cc' '*.h' | xargs -0r clang-format --dry-run -Werror
	@$(llama); cmake --preset lint -DKVTAMP_LLAMA_DIR="$$llama"; run-clang-tidy -quiet -p build/lint

clean: ## removes build/ (what was fetched stays in the cache)
	@rm -rf build

deps:
	@scripts/deps

# The plug-in for the second version of ggml as well.
both: deps
	@$(llama); other=$$(scripts/fetch llama.cpp-0.26); \
	cmake --preset release -DKVTAMP_LLAMA_DIR="$$llama" -DKVTAMP_OTHER_LLAMA_DIR="$$other"
	@cmake --build --preset release

debug release asan tsan: deps
	@$(llama); cmake --preset $@ -DKVTAMP_LLAMA_DIR="$$llama"
	@cmake --build --preset $@
