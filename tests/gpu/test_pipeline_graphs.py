"""CUDA graphs of pipeline stages: each captures its own layers; what stages exchange is no part of a graph."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from argosy_engine.distributed.lockstep import Round
from argosy_engine.distributed.parallel_state import LocalCommunicator
from argosy_engine.layers.experts import TokenExchange
from argosy_engine.messages import NewRequest, SchedulerOutput
from argosy_engine.model_configs.sharding import WHOLE_MODEL, Stage
from argosy_engine.models.config_file import load_model_config
from argosy_engine.models.loader import load_model
from argosy_engine.params import SamplingParams
from argosy_engine.sample.sampler import SamplerOptions
from argosy_engine.worker.model_runner import ModelRunner, Pipeline
from checked_copies import CheckedRuntime
from random_checkpoints import KINDS, make_checkpoint
from rerun_graphs import RerunGraphs

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value):RuntimeWarning"
)  # attention leaves padding undefined
MAX_NUM_TOKENS, MAX_NUM_SEQS, BLOCK_SIZE, BLOCKS = 32, 4, 16, 3
PROMPTS = {"a": [5, 6, 7, 8, 9], "b": [11, 12], "c": [20, 21, 22]}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


class Connection(LocalCommunicator):
    """One stage's end of connections in this thread: what is sent lies ready."""

    def __init__(self, rank: int, size: int, sent: dict[int, deque[torch.Tensor]]) -> None:
        self.rank, self.size = rank, size
        self._sent = sent

    def send(self, x: torch.Tensor, destination: int) -> None:
        self._sent.setdefault(destination, deque()).append(x.clone())

    def receive(self, x: torch.Tensor, source: int) -> torch.Tensor:
        return x.copy_(self._sent[self.rank].popleft())


def write_model(kind: str, path: Path) -> None:
    published = KINDS[kind]
    make_checkpoint(replace(published, fields={**published.fields, "num_hidden_layers": 2}), path)


def make_stages(path: Path, count: int, exchange: TokenExchange | None = None) -> list[ModelRunner]:
    config = load_model_config(path)
    sent: dict[int, deque[torch.Tensor]] = {}
    runners = []
    for index in range(count):
        stage = Stage(index, count) if count > 1 else WHOLE_MODEL
        model = load_model(
            path, config, dtype=torch.float32, device=CPU, attention_backend="triton", max_positions=64,
            load_format="auto", seed=0, stage=stage,
        ).model  # fmt: skip
        pipeline = None
        if count > 1:
            group = Connection(index, count, sent)
            pipeline = Pipeline(
                model, group, config.hidden_size, torch.float32, CPU, max_num_tokens=MAX_NUM_TOKENS
            )
        runners.append(
            ModelRunner(
                model, config, num_blocks=1 + BLOCKS * len(PROMPTS), block_size=BLOCK_SIZE, max_num_seqs=MAX_NUM_SEQS,
                max_num_batched_tokens=MAX_NUM_TOKENS, max_model_len=BLOCKS * BLOCK_SIZE, device=CPU,
                sampling=SamplerOptions(vocab_size=config.vocab_size), runtime=CheckedRuntime(), pipeline=pipeline,
                exchange=exchange,
            )
        )  # fmt: skip
    return runners


def generate(runners: list[ModelRunner], *, others: int | None = None) -> dict[str, list[int]]:
    """Prompts together, then decodes of three requests, of two and of one.

    Args:
        others: tokens that another engine core computes in each step, with which this one shares experts.
    """
    tokens: dict[str, list[int]] = {name: [] for name in PROMPTS}
    blocks = [[[*range(first, first + BLOCKS)]] for first in range(1, 1 + BLOCKS * len(PROMPTS), BLOCKS)]
    new = [
        NewRequest(name, ids, held, 0, GREEDY)
        for (name, ids), held in zip(PROMPTS.items(), blocks, strict=True)
    ]
    scheduled = {name: len(ids) for name, ids in PROMPTS.items()}
    finished: list[str] = []
    for step in range(6):
        last = {name: tokens[name][-1] for name in scheduled if tokens[name]}
        output = SchedulerOutput(
            new, {}, scheduled, sum(scheduled.values()), finished, {}, new_token_ids=last
        )
        if others is not None:
            output.round = Round([sum(scheduled.values()), others], is_decode=step > 0)
        for runner in runners:
            result = runner.execute(output).get()
        for name, sampled in zip(result.request_ids, result.sampled_token_ids, strict=True):
            tokens[name] += sampled
        new, finished = [], [name for name in scheduled if step == {"b": 2, "c": 3}.get(name)]
        scheduled = {name: 1 for name in scheduled if name not in finished}
    return tokens


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[int]]]:
    """A model, and what it generates as a whole."""
    path = tmp_path_factory.mktemp("llama")
    write_model("llama", path)
    return path, generate(make_stages(path, 1))


# The tests below have graphs of llama in both stages.
@pytest.mark.parametrize("kind", ["qwen3-moe", pytest.param("llama", marks=pytest.mark.full)])
def test_stages_with_graphs_generate_what_the_whole_model_does(kind: str, tmp_path: Path) -> None:
    write_model(kind, tmp_path)
    expected = generate(make_stages(tmp_path, 1))
    stages = make_stages(tmp_path, 2)
    graphs = [RerunGraphs() for _ in stages]
    for runner, api in zip(stages, graphs, strict=True):
        assert runner.capture_graphs([1, 2, 4], api)
    assert generate(stages) == expected
    assert [each.replays for each in graphs] == [[4, 4, 2, 1, 1]] * 2
    assert [len(each) for each in expected.values()] == [6, 3, 4]


def test_a_stage_without_graphs_works_with_one_that_has_them(
    llama: tuple[Path, dict[str, list[int]]],
) -> None:
    path, expected = llama
    stages = make_stages(path, 2)
    api = RerunGraphs()
    assert stages[1].capture_graphs([1, 4], api)
    assert generate(stages) == expected
    assert api.replays == [4, 4, 4, 1, 1]


def test_stages_of_cores_that_share_experts_replay_graphs_of_the_agreed_size(
    llama: tuple[Path, dict[str, list[int]]],
) -> None:
    path, expected = llama
    stages = make_stages(path, 2, TokenExchange(LocalCommunicator()))
    graphs = [RerunGraphs() for _ in stages]
    for runner, api in zip(stages, graphs, strict=True):
        assert runner.capture_graphs([2, 4], api)
    assert generate(stages, others=4) == expected
    for runner in stages:
        runner.lend_experts(Round([0, 2], is_decode=True))  # receives nothing from the stage before
    assert [each.replays for each in graphs] == [[4, 4, 4, 4, 4, 2]] * 2
