#!/usr/bin/env bash
# Installs the wheel of dist/ into an empty environment away from this checkout, runs a fleet on it, then pytest with the
# arguments. The environment borrows third-party packages from .venv: a line in a .pth file adds their folder to the
# path, but not the checkout, which .venv reaches by a .pth file of its own.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
venv=$root/build/installed
unset PYTHONPATH

wheels=(dist/argosy-*.whl)
((${#wheels[@]} == 1)) || { echo "dist has ${#wheels[@]} wheels; run \`make wheel\`" >&2; exit 1; }
rm -rf "$venv"
.venv/bin/python -m venv --without-pip "$venv"
.venv/bin/python -m pip --disable-pip-version-check --python "$venv" install --quiet --no-deps --no-index "${wheels[0]}"
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/third_party.pth"
"$venv/bin/python" -P -c '
import sys, argosy, argosy_engine, argosy_fetcher, argosy_operator, argosy_protocol, argosy_resource, argosy_router
from argosy_router.native.build import BUILD_KIND
for package in argosy, argosy_engine, argosy_fetcher, argosy_operator, argosy_protocol, argosy_resource, argosy_router:
    assert package.__file__.startswith(sys.prefix), package.__file__
assert BUILD_KIND == "compiled", BUILD_KIND
'

# The port is reserved, as tests reserve theirs, until this script ends and with it the coprocess's input.
coproc reservation {
  PYTHONPATH=tests/support .venv/bin/python -c '
import sys, processes
print(processes.free_port(), flush=True)
sys.stdin.read()'
}
read -r port <&"${reservation[0]}"
folder=$(mktemp -d)
trap 'cd "$folder" && "$venv/bin/argosy" down >/dev/null 2>&1 || true; rm -rf "$folder"' EXIT
cp examples/quickstart.yaml "$folder"
cd "$folder"
"$venv/bin/argosy" up --file quickstart.yaml --detach --port "$port"
"$venv/bin/argosy" chat tiny 'Hello! What can you do?' --max-tokens 50
"$venv/bin/argosy" logs router | grep 'compiled build'
"$venv/bin/argosy" down

cd "$root"
"$venv/bin/python" -P -m pytest "$@"
