#!/usr/bin/env bash
# The whole product on a real Kubernetes: cluster up, images, chart, tests, cluster down.
# Runs with the project's environment on PATH (`make e2e`). Failures leave logs in e2e/artifacts.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=e2e
exec python -m pytest -c pyproject.toml --rootdir . e2e -x -v --timeout 1500 "$@"
