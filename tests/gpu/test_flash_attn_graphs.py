"""Decode steps of backend `flash_attn` as CUDA graphs, with stand-ins for the library and for graphs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fake_flash_attn
from argosy_engine.messages import NewRequest, SchedulerOutput
from argosy_engine.models.config_file import load_model_config
from argosy_engine.models.loader import load_model
from argosy_engine.params import SamplingParams
from argosy_engine.sample.sampler import SamplerOptions
from argosy_engine.worker.model_runner import ModelRunner
from checked_copies import CheckedRuntime
from random_checkpoints import KINDS, make_checkpoint
from rerun_graphs import RerunGraphs

CPU = torch.device("cpu")
PROMPTS = {"a": [5, 6, 7], "b": [11, 12], "c": [20]}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)

pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value):RuntimeWarning"
)  # attention leaves padding undefined


def generate(path: Path, block_size: int, graphs: RerunGraphs | None) -> dict[str, list[int]]:
    config = load_model_config(path)
    model = load_model(
        path, config, dtype=torch.float32, device=CPU, attention_backend="flash_attn", max_positions=64,
        load_format="auto", seed=0,
    ).model  # fmt: skip
    runner = ModelRunner(
        model, config, num_blocks=4, block_size=block_size, max_num_seqs=4, max_num_batched_tokens=16,
        max_model_len=16, device=CPU, sampling=SamplerOptions(vocab_size=config.vocab_size), runtime=CheckedRuntime(),
    )  # fmt: skip
    if graphs is not None:
        assert runner.capture_graphs([1, 4], graphs)
    tokens: dict[str, list[int]] = {name: [] for name in PROMPTS}
    new = [NewRequest(name, ids, [[1 + row]], 0, GREEDY) for row, (name, ids) in enumerate(PROMPTS.items())]
    scheduled = {name: len(ids) for name, ids in PROMPTS.items()}
    finished: list[str] = []
    for _ in range(4):
        output = SchedulerOutput(new, {}, scheduled, sum(scheduled.values()), finished, {})
        result = runner.execute(output).get()
        for name, sampled in zip(result.request_ids, result.sampled_token_ids, strict=True):
            tokens[name] += sampled
        finished = [name for name, found in tokens.items() if len(found) == 2 and name != "a"]
        new, scheduled = [], {name: 1 for name in scheduled if name not in finished}
    return tokens


@pytest.mark.parametrize(
    ("version", "capability", "block_size"), [(2, (8, 0), 256), (3, (9, 0), 16), (4, (10, 0), 16)]
)
def test_replayed_decodes_are_those_that_run_eagerly(
    version: int,
    capability: tuple[int, int],
    block_size: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    published = KINDS["llama"]
    fields = {**published.fields, "num_hidden_layers": 1}
    make_checkpoint(replace(published, fields=fields), tmp_path / "model")
    # transformers, which writes the model, would take the stand-ins for the library
    fake_flash_attn.install(monkeypatch, tmp_path, version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    graphs = RerunGraphs()
    assert generate(tmp_path / "model", block_size, graphs) == generate(tmp_path / "model", block_size, None)
    assert graphs.captured == [4, 1]
    assert graphs.replays == [4, 1, 1]
