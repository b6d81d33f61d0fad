"""Greedy output equals transformers' token for token in fp32, however the steps are cut."""

from __future__ import annotations

import functools
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from argosy_engine import LLM
from argosy_engine.checkpoint.model_folder import resolve_model
from argosy_engine.config import EngineArgs
from argosy_engine.core.proc.core_client import InprocClient
from argosy_engine.errors import ConfigError
from argosy_engine.messages import EngineCoreRequest
from argosy_engine.params import SamplingParams
from greedy_reference import differing_tokens
from preemptions import PreemptionCounter

ARCHITECTURES = ("qwen3-tied", "qwen2-bias", "llama")
EXACT = {"dtype": "float32", "device": "cpu", "threads": 1}
GREEDY = SamplingParams(temperature=0.0, max_tokens=16)


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.full)])
def prompts(request: pytest.FixtureRequest) -> list[list[int]]:
    """110 or 220 prompts of 1 to ~700 tokens: chats, shared prefixes, copies, noise."""
    times = request.param
    llm = LLM("builtin://tiny", **EXACT, num_gpu_blocks_override=512)
    rng = random.Random(11)
    words = [
        "red",
        "lantern",
        "harbor",
        "seven",
        "copper",
        "quiet",
        "river",
        "stone",
        "maple",
        "engine",
        "cloud",
        "north",
    ]
    template = llm.renderer.template
    assert template is not None
    texts = []
    for _ in range(30 * times):
        question = " ".join(rng.choices(words, k=rng.randrange(1, 40)))
        texts.append(f"<|im_start|>user\nRepeat: {question}<|im_end|>\n<|im_start|>assistant\n")
    system = "You answer from these facts. " + " ".join(rng.choices(words, k=120))
    texts += [
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nWhat is {rng.choice(words)} {i}?<|im_end|>\n"
        "<|im_start|>assistant\n"
        for i in range(30 * times)
    ]
    token_lists = [llm.renderer.render_text(text, add_special_tokens=False).token_ids for text in texts]
    size = llm.config.vocab_size
    token_lists += [
        [rng.randrange(size) for _ in range(rng.choice((1, 2, 15, 16, 17, 40, 97)))]
        for _ in range(42 * times)
    ]
    token_lists += [[rng.randrange(size) for _ in range(rng.randrange(300, 700))] for _ in range(4 * times)]
    token_lists += [list(token_lists[i]) for i in range(4 * times)]  # exact repeats: full prefix hits
    llm.close()
    assert len(token_lists) == 110 * times
    return token_lists


Differing = Callable[[tuple[int, ...], tuple[int, ...]], list[str]]
"""Lines for a prompt's tokens that are not the reference's."""


@pytest.fixture(scope="module")
def differing() -> Iterator[Differing]:
    """Asks the reference once for equal tokens, because the modes agree except where logits tie."""
    before = torch.get_num_threads()
    model = AutoModelForCausalLM.from_pretrained(resolve_model("builtin://tiny"), dtype=torch.float32).eval()

    @functools.cache
    def ask(prompt: tuple[int, ...], output: tuple[int, ...]) -> list[str]:
        return differing_tokens(model, list(prompt), list(output))

    yield ask
    torch.set_num_threads(before)


MODES: dict[str, dict[str, Any]] = {
    "batched": {},
    "no-prefix-caching": {"enable_prefix_caching": False},
    "chunked": {"max_num_batched_tokens": 48, "max_num_seqs": 24},
    "preempted": {"num_gpu_blocks_override": 60, "max_num_seqs": 64, "max_model_len": 900},
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", MODES)
def test_tiny_model_equals_transformers(mode: str, prompts: list[list[int]], differing: Differing) -> None:
    llm = LLM("builtin://tiny", **EXACT, **MODES[mode])
    preemptions = PreemptionCounter(llm.client)
    results = llm.generate(prompts, GREEDY, use_tqdm=False)
    llm.client.core.scheduler.check()
    wrong = {}
    for index, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        assert result.finish_reason in ("stop", "length")
        if lines := differing(tuple(prompt), tuple(result.token_ids)):
            wrong[index] = lines
    assert not wrong, json.dumps(wrong, indent=1)
    cached = sum(result.num_cached_tokens for result in results)
    assert (cached > 1000) == (mode != "no-prefix-caching"), f"{cached} cached tokens"
    assert bool(preemptions.total) == (mode == "preempted")


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("budget", [2048, 24])
def test_random_checkpoints_equal_transformers(name: str, budget: int, random_checkpoint: Any) -> None:
    path, model = random_checkpoint(name)
    client = InprocClient(EngineArgs.of(model=str(path), max_num_batched_tokens=budget, **EXACT))
    rng = random.Random(3)
    prompts = [[rng.randrange(2, 512) for _ in range(rng.randrange(1, 80))] for _ in range(12)]
    prompts.append(prompts[3] + [5, 6, 7])
    outputs: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        client.add_request(EngineCoreRequest(str(index), prompt, GREEDY, time.time()))
    while client.has_work:
        for out in client.step().outputs:
            outputs.setdefault(out.request_id, []).extend(out.new_token_ids)
    for index, prompt in enumerate(prompts):
        assert differing_tokens(model, prompt, outputs[str(index)]) == [], f"{name}, prompt {index}"


def test_unsupported_checkpoints_are_refused(random_checkpoint: Any, tmp_path: Path) -> None:
    path, _ = random_checkpoint("llama")
    config = json.loads((path / "config.json").read_text())
    for change, message in (
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM is not an architecture of argosy's own"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quant_method 'aqlm' is not supported"),
        ({"hidden_act": "gelu"}, "only silu"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, "RoPE scaling 'dynamic'"),
        ({"hidden_size": "big"}, "hidden_size"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, "head_dim": 16, **change}))
        with pytest.raises(ConfigError, match=message):
            InprocClient(EngineArgs.of(model=str(tmp_path), model_impl="argosy", **EXACT))


@pytest.mark.parametrize(("flags", "dtype"), [("fpu avx512f", "float32"), ("fpu avx512_bf16", "bfloat16")])
def test_auto_dtype_takes_bf16_only_where_the_cpu_has_it(
    flags: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "read_text", _cpuinfo(flags))
    client = InprocClient(EngineArgs.of(model="builtin://tiny", device="cpu", threads=1))
    assert client.config.dtype == dtype


def _cpuinfo(flags: str) -> Any:
    read_text = Path.read_text

    def fake(path: Path, *args: Any, **kwargs: Any) -> str:
        return f"flags\t\t: {flags}\n" if str(path) == "/proc/cpuinfo" else read_text(path, *args, **kwargs)

    return fake


def test_a_context_that_cannot_fit_says_what_would(random_checkpoint: Any) -> None:
    path, _ = random_checkpoint("llama")
    with pytest.raises(ConfigError, match=r"use --max-model-len \d+ or less"):
        InprocClient(EngineArgs.of(model=str(path), kv_cache_memory_bytes=1 << 18, **EXACT))
