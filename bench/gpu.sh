#!/usr/bin/env bash
# Checks and measures the engine on one NVIDIA GPU, in under ten minutes: tokens, kernels, decode and prefill as shares
# of the roofline, hidden waits, a breakdown of the time, larger shapes, a server, transformers beside it.
# bench/engine/gpu.py lists the sections.
#
#   bash bench/gpu.sh [--wheels FOLDER] [flags of bench/engine/gpu.py]
#
# PYTHON (default python3) is an interpreter with torch (CUDA), transformers and their dependencies. No network is used:
# the engine's other dependencies (msgspec, pyzmq, fastapi, uvicorn, ...), if missing, are installed from the wheels into
# a temporary folder. Without a GPU it prints one line and exits with status 3.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
wheels=
if [ "${1:-}" = --wheels ]; then
  wheels=${2:?--wheels takes a folder}
  shift 2
fi
case " $* " in *' --device cpu '*) ;; *)
  "$python" -c 'import torch; raise SystemExit(not torch.cuda.is_available())' 2>/dev/null || {
    echo "gpu.sh: $python has no torch that sees an NVIDIA GPU; nothing was measured" >&2
    exit 3
  } ;;
esac
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
if [ -n "$wheels" ]; then
  missing=$("$python" bench/engine/gpu.py --missing)
  if [ -n "$missing" ]; then
    # shellcheck disable=SC2086 # names, one a word
    "$python" -m pip install --quiet --no-index --find-links "$wheels" --target "$site" $missing
  fi
fi
PYTHONPATH="protocol:fetcher:engine:router:operator:cli:$site${PYTHONPATH:+:$PYTHONPATH}" timeout --signal=INT --kill-after=10 590 "$python" bench/engine/gpu.py "$@"
