# The front door: thin targets over the CMake presets. `make demo` and `make test` are all the set-up of a fresh Debian machine.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := build
.PHONY: build demo test bench format lint install clean configure

PREFIX ?= /usr/local
DEMO := run --model llama-3.1-8b --layers 4 --trace data/sample_trace.jsonl --verify 1% --report build/demo-report.html
SOURCES = $(shell find include src tests examples python/src $(wildcard bench) -regex ".*\.\(c\|cpp\|h\|hpp\|inl\|cu\|cuh\)")

configure:
	@scripts/setup.sh
	@cmake --preset release -Wno-dev --log-level=WARNING >/dev/null

build: configure  ## the program, at build/imbrex
	@cmake --build --preset release --target imbrex_cli

demo: build  ## replays the sample trace through four layers of Llama 3.1 8B
	build/imbrex $(DEMO)

test: configure  ## builds everything and passes every test
	@cmake --build --preset release
	@ctest --preset release

bench: build  ## times the standard cases on this machine
	build/imbrex bench

format:  ## rewrites the sources in the house format (.clang-format, clang-format 14)
	@clang-format -i $(SOURCES)
	@black --quiet python

lint:  ## format, structure and clang-tidy, without changing anything
	@scripts/setup.sh ci
	@scripts/lint.sh

install: build
	@cmake --build --preset release --target imbrex
	@cmake --install build --prefix $(PREFIX)

clean:
	rm -rf build
