"""A training run starts from given weights, and goes on after it was killed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "models" / "argosy-tiny"

pytestmark = pytest.mark.timeout(600)


def train(runs: Path, *options: str) -> dict[str, float]:
    command = [sys.executable, str(ROOT / "training" / "train.py"), "--runs", str(runs), "--name", "small"]
    command += ["--workers", "1", "--tokens", "256", "--minutes", "30", "--eager", *options]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return json.loads((runs / "small" / "status.json").read_text())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def test_a_run_starts_from_weights_and_is_resumed_where_it_ended(runs: Path) -> None:
    first = train(runs, "--start", str(SHIPPED), "--rate", "0.001", "--steps", "2")
    assert first["steps"] == 2
    exported = runs / "small" / "export"
    shipped = load_file(SHIPPED / "model.safetensors")
    trained = load_file(exported / "model.safetensors")
    assert {n: t.shape for n, t in trained.items()} == {n: t.shape for n, t in shipped.items()}
    name = "model.layers.0.mlp.up_proj.weight"
    assert (trained[name].float() - shipped[name].float()).abs().max() < 0.01
    assert (exported / "tokenizer.json").read_bytes() == (SHIPPED / "tokenizer.json").read_bytes()
    momentum = load_file(runs / "small" / "checkpoint.safetensors")[f"muon.{name}"]
    assert momentum.abs().sum() > 0

    second = train(runs, "--start", str(SHIPPED), "--steps", "3", "--resume")
    assert second["steps"] == 3
    assert second["tokens"] > first["tokens"]
    assert second["seconds"] > first["seconds"]
