"""The warm-up launches every variant of the kernels that steps of requests need afterwards."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForImageTextToText

from argosy_engine.checkpoint.model_folder import resolve_model
from argosy_engine.config import EngineArgs
from argosy_engine.messages import EncoderInput, NewRequest
from argosy_engine.models.config_file import load_model_config
from argosy_engine.models.loader import load_model
from argosy_engine.params import SamplingParams
from argosy_engine.sample.sampler import SamplerOptions
from argosy_engine.triton_kernels.launch import launched_variants
from argosy_engine.worker.model_runner import ModelRunner
from argosy_engine.worker.warm_up import allow_all, dummy_request, dummy_step, warm_up
from image_checkpoints import prompt_of, random_image
from random_checkpoints import KINDS, make_checkpoint
from transformers_checkpoints import write_checkpoint

MAX_LEN, ROWS = 20, 2
SAMPLING = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, top_k=3, seed=1),
    SamplingParams(seed=2, presence_penalty=1.0, logprobs=1),
    SamplingParams(temperature=0.0, allowed_token_ids=(1, 2, 3), logprobs=0),
    SamplingParams(seed=3, min_p=0.1, logit_bias={3: 1.0}, logprobs=1),
]


@pytest.fixture(scope="module")
def args() -> EngineArgs:
    return EngineArgs.of(
        model="builtin://tiny",
        dtype="float32",
        max_num_seqs=ROWS,
        max_num_batched_tokens=24,
        block_size=16,
        max_logprobs=1,
    )


@pytest.fixture(scope="module")
def runner(args: EngineArgs) -> ModelRunner:
    path: Path = resolve_model(args.model)
    config = load_model_config(path)
    config = replace(config, num_hidden_layers=1, sliding_windows=config.sliding_windows[:1])  # to be quick
    model = load_model(
        path,
        config,
        dtype=torch.float32,
        device=torch.device("cpu"),
        attention_backend="triton",
        max_positions=MAX_LEN + 1,
        load_format="dummy",
        seed=0,
    ).model
    return ModelRunner(
        model,
        config,
        num_blocks=3,
        block_size=16,
        max_num_seqs=ROWS,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=MAX_LEN,
        device=torch.device("cpu"),
        sampling=SamplerOptions(vocab_size=config.vocab_size, kind="kernels"),
    )


def test_requests_launch_no_other_variants(runner: ModelRunner, args: EngineArgs) -> None:
    known = warm_up(runner, args, MAX_LEN)
    rng = random.Random(0)
    for turn in range(5):
        requests = []
        for row in range(rng.randint(1, ROWS)):
            length = rng.randint(2, 15)
            computed = length - 1 if rng.random() < 0.6 else 0
            requests.append(dummy_request(runner, args, row, length, computed, rng.choice(SAMPLING)))
        with launched_variants() as variants:
            runner.execute(dummy_step(requests, allow_all(runner, requests) if turn % 3 == 0 else None)).get()
        runner.execute(dummy_step([], None, [request.request_id for request in requests]))
        assert variants
        assert not variants - known


def seeing_runner(path: Path, args: EngineArgs, backend: str, max_model_len: int = MAX_LEN) -> ModelRunner:
    """Return one of a Gemma 3, whose tokens of an image attend to all of it."""
    config = load_model_config(path)
    loaded = load_model(
        path,
        config,
        dtype=torch.float32,
        device=torch.device("cpu"),
        attention_backend=backend,
        max_positions=max_model_len + 1,
        load_format="auto",
        seed=0,
        max_step_tokens=args.max_num_batched_tokens,
    )
    return ModelRunner(
        loaded.model,
        config,
        num_blocks=8,
        block_size=16,
        max_num_seqs=ROWS,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=max_model_len,
        device=torch.device("cpu"),
        sampling=SamplerOptions(vocab_size=config.vocab_size, kind="kernels"),
        images=loaded.images,
    )


def test_images_launch_no_other_variants(args: EngineArgs, tmp_path: Path) -> None:
    write_checkpoint("gemma3", tmp_path)
    runner = seeing_runner(tmp_path, args, "triton")
    known = warm_up(runner, args, MAX_LEN)
    for lengths in ((2,), (7,), (15,), (4, 13)):
        requests = [
            dummy_request(runner, args, row, length, 0, SAMPLING[0]) for row, length in enumerate(lengths)
        ]
        requests[-1] = runner.with_dummy_image(requests[-1])
        with launched_variants() as variants:
            runner.execute(dummy_step(requests, None)).get()
        runner.execute(dummy_step([], None, [request.request_id for request in requests]))
        assert variants
        assert not variants - known


def test_tokens_of_an_image_attend_to_all_of_it(args: EngineArgs, tmp_path: Path) -> None:
    """As they do in torch, whose tokens tests hold against transformers."""
    write_checkpoint("gemma3", tmp_path)
    model: Any = AutoModelForImageTextToText.from_pretrained(tmp_path)
    tokens, (feature,) = prompt_of(model, [list(range(40, 45)), random_image(model, "a", 1), [50, 51]])
    sampling = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20)
    found = {}
    for backend in ("triton", "torch"):
        runner = seeing_runner(tmp_path, args, backend, 64)
        blocks = [[1, 2, 3, 4]] * len(runner.groups)
        request = NewRequest("a", tokens, blocks, 0, sampling, mm_features=[feature])
        step = dummy_step([request], None)
        step.encoder_inputs = [EncoderInput("a", "image", feature.num_embeds, feature.inputs)]
        (entry,) = runner.execute(step).get().logprobs["a"]
        found[backend] = entry
    assert found["triton"].token_ids == found["torch"].token_ids
    torch.testing.assert_close(
        *(torch.tensor(each.logprobs) for each in found.values()), atol=1e-4, rtol=1e-4
    )


@pytest.fixture(scope="module")
def compilations(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Compilations and launches of models, before and after the warm-up ended."""
    kinds = ("qwen2-window", "qwen3-moe", "qwen3.5")
    paths = [tmp_path_factory.mktemp(kind) for kind in kinds]
    for kind, path in zip(kinds, paths, strict=True):
        make_checkpoint(KINDS[kind], path)
    program = Path(__file__).parent.parent / "support" / "steps_without_gpu.py"
    done = subprocess.run(
        [sys.executable, program, *paths],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(kinds, map(json.loads, done.stdout.splitlines()[-len(kinds) :]), strict=True))


@pytest.mark.parametrize("kind", ["qwen2-window", "qwen3-moe", "qwen3.5"])
def test_nothing_is_compiled_after_it(kind: str, compilations: dict[str, Any]) -> None:
    counts = compilations[kind]
    assert counts["warmed"]["compiled"] > 10
    assert counts["after"]["started"] > counts["warmed"]["started"] + 100
    assert counts["after"]["compiled"] == counts["warmed"]["compiled"]
