#!/usr/bin/env bash
# Runs the tests of everything written in C and C++ on builds with the address and undefined-behaviour sanitizers. A
# report ends the run, and is shown.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$PWD/build/sanitized
flags=(-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g1)
rm -rf "$folder"
mkdir -p "$folder"

# The engine's kernels: the compiler that builds them is wrapped, and has a cache of its own. Optimised, because vector
# code that is not takes minutes.
printf '#!/bin/sh\nexec %q "$@" %s\n' "$(command -v g++)" "${flags[*]} -O1" >"$folder/g++"
chmod +x "$folder/g++"
export CXX=$folder/g++ XDG_CACHE_HOME=$folder
.venv/bin/python -P -c 'from argosy_engine.native.build import library_path; print(library_path())'

# The router's modules: their tests build them with the flags of the environment.
export CFLAGS="${flags[*]} -O1" LDFLAGS="${flags[*]}"
# Python itself has no sanitizer, so the library has to come first; its own leaks are not ours, and its allocator would hide
# what is read beyond an object.
export ASAN_OPTIONS="detect_leaks=0:log_path=$folder/report"
export UBSAN_OPTIONS="print_stacktrace=1:log_path=$folder/report"
export PYTHONMALLOC=malloc
LD_PRELOAD=$(gcc -print-file-name=libasan.so) .venv/bin/python -P -m pytest -p no:cacheprovider \
  tests/router/test_native_modules.py tests/engine/test_sampling_kernel.py tests/engine/test_delta_net.py \
  tests/engine/test_mamba.py tests/engine/test_short_conv.py \
  tests/engine/test_cpu_kernels.py::test_quantized_linear_equals_float64_for_every_number_of_rows \
  tests/engine/test_cpu_kernels.py::test_quantized_gated_linear_equals_float64 \
  tests/engine/test_cpu_kernels.py::test_every_integer_is_widened_exactly "$@" || { status=$?; cat "$folder"/report.* 2>/dev/null || true; exit "$status"; }
