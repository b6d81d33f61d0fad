"""A training run starts from given weights, and goes on after it was killed."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file

from forked_scripts import forked_script

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "models" / "argosy-tiny"
MODULES = ["torch._dynamo", "tokenizers", "safetensors.torch"]
"""What a run imports and takes seconds: of torch, what its optimizers need."""

pytestmark = pytest.mark.timeout(600)


def test_a_run_starts_from_weights_and_is_resumed_where_it_ended(tmp_path: Path) -> None:
    with forked_script(ROOT / "training" / "train.py", MODULES) as script:
        check_runs(tmp_path, script)


def check_runs(runs: Path, script: Callable[[Sequence[str]], int]) -> None:
    def train(*options: str) -> dict[str, float]:
        command = ["--runs", str(runs), "--name", "small", "--workers", "1", "--tokens", "256"]
        assert script([*command, "--minutes", "30", "--chunk", "100", "--eager", *options]) == 0
        return json.loads((runs / "small" / "status.json").read_text())

    first = train("--start", str(SHIPPED), "--rate", "0.001", "--steps", "2")
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

    second = train("--start", str(SHIPPED), "--steps", "3", "--resume")
    assert second["steps"] == 3
    assert second["tokens"] > first["tokens"]
    assert second["seconds"] > first["seconds"]
