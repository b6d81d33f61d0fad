#!/usr/bin/env bash
# The whole product on a real Kubernetes: binaries built once, cluster up, images, chart, tests, cluster down.
# Runs with the project's environment on PATH (`make e2e`). Failures leave logs in e2e/artifacts.
# What is built has deadlines of its own, for each command: the tests' timeout is for tests.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=e2e
python -m cluster build
(($#)) || set -- e2e
exec python -m pytest -c pyproject.toml --rootdir . --maxfail 3 -v --timeout 1500 -o timeout_func_only=true "$@"
