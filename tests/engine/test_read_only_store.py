"""An engine whose store is mounted read-only and that may make no request, as in a pod."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from argosy_fetcher.progress import Progress
from argosy_fetcher.pull import PulledModel, pull_model
from argosy_fetcher.source_uri import parse
from named_sources import publish_tiny, serve_names

SERVE = """
import os, sys
from argosy_engine import LLM, SamplingParams
from argosy_fetcher.errors import ModelInUse
from argosy_fetcher.pull import open_store

try:
    open(os.path.join(sys.argv[1], "written"), "w")
except OSError as error:
    print("store:", error.strerror)
llm = LLM(model="hf://acme/tiny", download_dir=sys.argv[1], max_model_len=64, num_gpu_blocks_override=16)
(output,) = llm.generate(["hello"], SamplingParams(max_tokens=4, ignore_eos=True))
print("tokens:", len(output.outputs[0].token_ids))
store = open_store(sys.argv[2])  # the same, writable
try:
    store.remove(store.list()[0])
except ModelInUse:
    print("held")
"""
MOUNT = 'mount --bind "$1" "$2" && mount -o remount,ro,bind "$2" && shift 2 && exec "$@"'


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> PulledModel:
    serve_names(monkeypatch, tmp_path / "store")
    publish_tiny("acme/tiny")
    model = pull_model(parse("hf://acme/tiny"), progress=Progress())
    model.close()
    return model


def run_read_only(tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Run an engine on a bind mount of the store; without root on the store itself, whose owner may not write."""
    store, mount = tmp_path / "store", tmp_path / "mount"
    mount.mkdir()
    program = [sys.executable, "-P", "-c", SERVE, str(mount), str(store)]
    command = ["unshare", "--mount", "sh", "-c", MOUNT, "sh", str(store), str(mount), *program]
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root, for a mount")
    environment = os.environ | {"ARGOSY_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)
    if "mount:" in done.stderr or "unshare:" in done.stderr:
        pytest.skip(f"cannot mount here: {done.stderr.strip()[-200:]}")
    return done


def test_it_serves_and_holds_the_model_and_writes_nothing(model: PulledModel, tmp_path: Path) -> None:
    before = sorted(path.stat().st_mtime_ns for path in model.path.rglob("*"))
    done = run_read_only(tmp_path)
    assert done.stdout.splitlines() == ["store: Read-only file system", "tokens: 4", "held"], done.stderr
    assert sorted(path.stat().st_mtime_ns for path in model.path.rglob("*")) == before


def test_a_damaged_model_is_an_error_that_says_what_to_do(model: PulledModel, tmp_path: Path) -> None:
    (model.path / "model.safetensors").unlink()
    done = run_read_only(tmp_path)
    assert done.returncode == 1
    assert "hf://acme/tiny is damaged in the model store" in done.stderr
    assert "delete the pod" in done.stderr.splitlines()[-1]
