"""What an earlier owner left in a block must not reach the next one, not even NaN or infinity: zero times NaN is NaN.

Attention masks positions by giving them a probability of zero; that is no protection for values that are not finite.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from argosy_engine.attention.backend import Attention
from argosy_engine.attention.cpu_attn import CpuBackend
from argosy_engine.attention.torch_attn import TorchBackend
from argosy_engine.config import EngineArgs
from argosy_engine.core.proc.core_client import InprocClient
from argosy_engine.messages import EngineCoreOutput, EngineCoreRequest
from argosy_engine.native import build, library
from argosy_engine.native.library import Kernels
from argosy_engine.params import SamplingParams
from attention_cases import Case, Shape, Span, make_case, random_case
from random_checkpoints import KINDS, make_checkpoint

POISONS = (math.nan, math.inf, -math.inf)
VARIANTS = {
    each.name: each for each in (*build.VARIANTS, build.AMX_MODEL) if each.cpu_flags <= build.cpu_flags()
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BACKENDS = [
    (name, dtype) for name in ["torch", *VARIANTS] for dtype in DTYPES if name == "torch" or dtype != "fp16"
]


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
def test_no_kernel_reads_what_is_not_the_requests_own(backend: str, dtype: str) -> None:
    """Prompts, chunks of prompts and decodes, with and without sliding window and soft cap, bit for bit."""
    rng = random.Random(11)
    for _ in range(3 if (backend == "torch" and dtype != "fp32") else 8):  # torch's code is one for all types
        case = random_case(rng, DTYPES[dtype])
        clean = attend(backend, case, 0.0)
        assert clean.isfinite().all()
        for poison in POISONS:
            poisoned = attend(backend, case, poison)
            assert torch.equal(clean, poisoned), f"{poison} in {case.shape} {case.spans}"


@pytest.mark.parametrize("backend", ["torch", *VARIANTS])
@pytest.mark.parametrize("chunk_size", [16, 70])
def test_no_kernel_reads_blocks_of_earlier_chunks(backend: str, chunk_size: int) -> None:
    shape = Shape(4, 2, 32, 16, None, None, chunk_size, has_sinks=False)
    case = make_case(random.Random(3), torch.float32, shape, [(100, 101), (17, 40), (75, 230), (300, 330)])
    assert torch.equal(attend(backend, case, 0.0), attend(backend, case, math.nan))


def attend(backend: str, case: Case, poison: float) -> torch.Tensor:
    """The case's step over a cache that is full of `poison` wherever a later owner may have written: beyond the tokens
    of a request, in blocks behind its window or chunk, in blocks of others and in the null block."""
    shape, rows = case.shape, list(range(len(case.spans)))
    cache = torch.full_like(case.empty_cache(), poison)
    dtype = cache.dtype
    if backend == "torch":
        attention = Attention(shape.params, TorchBackend(dtype), case.weights)
    else:
        loaded = Kernels(build.library_path(VARIANTS[backend]))
        attention = Attention(shape.params, CpuBackend(dtype, loaded), case.weights)
    attention.bind(cache)

    def run(rows: list[int], spans: list[Span]) -> torch.Tensor:
        return attention(case.qkv(rows, spans), case.metadata(rows, spans))

    for row, (start, _) in enumerate(case.spans):
        if start:
            run([row], [(0, start)])
    for row, (start, _) in enumerate(case.spans):
        # Blocks that are given back, and another request's by now.
        num_behind = shape.params.kv_cache_spec(shape.block_size, 4).num_skipped(start, shape.block_size)
        cache[:, case.tables[row, :num_behind]] = poison
    return run(rows, case.spans)


POISON = 77
"""A token whose embedding is NaN."""
ARCHITECTURES = ("llama", "mistral-window", "qwen2-window", "gemma2", "gpt2-by-layer")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def poisoned_checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    make_checkpoint(KINDS[request.param], path)
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if name.endswith(("embed_tokens.weight", "wte.weight")):
                tensor[POISON] = math.nan
        save_file(tensors, file, {"format": "pt"})
    return path


@pytest.mark.parametrize(
    ("is_native", "dtype"), [(True, "bfloat16"), (False, "float32")], ids=["kernels", "torch"]
)
def test_a_request_full_of_nan_leaves_no_trace(
    poisoned_checkpoint: Path,
    is_native: bool,
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
    fresh_kernels: None,
) -> None:
    """Others get the same tokens and log probabilities, bit for bit, beside a request whose every state is NaN and in
    the blocks that it leaves, as beside and after a sane one."""
    if not is_native:
        monkeypatch.setenv("ARGOSY_NATIVE", "0")
    clean, poisoned = (neighbours_of(poisoned_checkpoint, dtype, guest) for guest in (POISON + 1, POISON))
    assert clean == poisoned


@pytest.fixture
def fresh_kernels() -> Iterator[None]:
    """Whether to use the kernels is decided anew; afterwards the rest of the suite gets what it had."""
    library.kernels.cache_clear()
    yield
    library.kernels.cache_clear()


def neighbours_of(path: Path, dtype: str, guest_token: int) -> dict[str, list[Any]]:
    """What everybody but the guests gets, in an engine so small that all blocks change hands."""
    client = InprocClient(
        EngineArgs.of(
            model=str(path), dtype=dtype, device="cpu", threads=1, block_size=16, max_model_len=128,
            max_num_batched_tokens=40, num_gpu_blocks_override=48, logprobs_mode="processed_logprobs",
        )
    )  # fmt: skip
    # Where the embedding is the head, too, the logit of its token is NaN for everybody.
    allowed = [token for token in range(2, 512) if token not in (POISON, POISON + 1)]
    owner = SamplingParams(
        temperature=0.9, top_p=0.9, seed=5, max_tokens=6, logprobs=3, allowed_token_ids=allowed
    )
    visits = (
        SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=1.0, max_tokens=20, seed=1, ignore_eos=True),
        SamplingParams(temperature=1.0, top_p=0.5, max_tokens=20, seed=2, ignore_eos=True),
        SamplingParams(temperature=1.0, top_k=7, min_p=0.1, max_tokens=20, seed=3, ignore_eos=True),
    )
    found: dict[str, list[Any]] = {}
    for visit, params in enumerate(visits):
        names = [f"{visit}-{length}" for length in (1, 14, 33, 70)]
        requests = {name: ([3 + visit] + [9] * (int(name.split("-")[1]) - 1), owner) for name in names}
        requests[f"guest {visit}"] = [guest_token] * 75, params
        for name, (tokens, chosen) in requests.items():
            client.add_request(EngineCoreRequest(name, tokens, chosen, 0.0))
        while client.has_work:
            for output in client.step().outputs:
                take(found, output)
    client.close()
    assert all(found[name] for name in found)
    return {name: answers for name, answers in found.items() if not name.startswith("guest")}


def take(found: dict[str, list[Any]], output: EngineCoreOutput) -> None:
    assert output.error is None
    assert all(0 <= token < 512 for token in output.new_token_ids)
    found.setdefault(output.request_id, []).append(
        (output.new_token_ids, [each.logprobs for each in output.logprobs or []])
    )
