#!/usr/bin/env bash
# Runs the router's benchmarks, compared with sglang-router if SGLANG_ROUTER_PYTHON names an interpreter that has it: shared
# prefixes at rising rates, then conversations while an engine dies. Takes about 28 minutes on two idle cores. Prints
# tables and keeps the figures of all rounds as JSON in RESULTS. QUICK=1 only checks that everything runs.
set -euo pipefail
cd "$(dirname "$0")/.."
results=${RESULTS:-${TMPDIR:-/tmp}/argosy-bench/router}
mkdir -p "$results"
sglang=${SGLANG_ROUTER_PYTHON:+--sglang "$SGLANG_ROUTER_PYTHON"}
prefixes=(--rounds 3 --seconds 12 --rates 5 20 40 55)
conversations=(--rounds 3 --seconds 45 --rates 8)
if [[ -n ${QUICK:-} ]]; then
  prefixes=(--rounds 1 --seconds 3 --rates 20)
  conversations=(--rounds 1 --seconds 12 --rates 4)
fi
# shellcheck disable=SC2086 # two words or none
python bench/router/shared_prefixes.py "${prefixes[@]}" $sglang --contenders round-robin sglang-router 'sglang-router, balancing' \
  --json "$results/prefixes.json" | tee "$results/prefixes.md"
echo
# shellcheck disable=SC2086
python bench/router/conversations.py "${conversations[@]}" $sglang --contenders sglang-router 'sglang-router, balancing' \
  --json "$results/conversations.json" | tee "$results/conversations.md"
printf '\n%s\n' "kept in $results"
