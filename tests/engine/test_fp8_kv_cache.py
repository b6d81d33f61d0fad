"""An FP8 KV cache: what is stored, how much memory it takes, and that requests get what an exact cache gives them."""

from __future__ import annotations

import json
import random

import pytest
import torch

from argosy_engine import LLM, SamplingParams
from argosy_engine.api.doctor import main as doctor
from argosy_engine.attention.backend import Attention, AttentionWeights
from argosy_engine.attention.torch_attn import TorchBackend
from argosy_engine.errors import ConfigError
from attention_cases import random_case

FP8 = torch.float8_e4m3fn


def rounded(values: list[torch.Tensor], scale: float) -> list[torch.Tensor]:
    return [(each / scale).clamp(-448, 448).to(FP8).float() * scale for each in values]


@pytest.mark.parametrize("seed", range(8))
def test_attention_reads_keys_and_values_as_they_were_rounded(seed: int) -> None:
    case = random_case(random.Random(seed), torch.float32)
    k_scale, v_scale = torch.tensor([[0.03], [2.0]])
    attention = Attention(
        case.shape.params,
        TorchBackend(torch.float32, has_fp8_kv_cache=True),
        AttentionWeights(k_scale=k_scale, v_scale=v_scale, sinks=case.sinks, alibi_slopes=case.slopes),
    )
    attention.bind(case.empty_cache().to(attention.kv_cache_dtype))
    context = [(row, (0, start)) for row, (start, _) in enumerate(case.spans) if start > 1]
    if context:
        rows, spans = (list(each) for each in zip(*context, strict=True))
        attention(case.qkv(rows, spans), case.metadata(rows, spans))
    ones = [(row, (0, 1)) for row, (start, _) in enumerate(case.spans) if start == 1]
    for row, span in ones:
        attention(case.qkv([row], [span]), case.metadata([row], [span]))
    every = list(range(len(case.spans)))
    out = attention(case.qkv(every, case.spans), case.metadata(every, case.spans))
    case.k[:], case.v[:] = rounded(case.k, 0.03), rounded(case.v, 2.0)
    torch.testing.assert_close(out.double(), case.expected(), atol=1e-4, rtol=1e-4)


def test_a_block_takes_a_quarter_of_float32(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["builtin://tiny", "--device", "cpu", "--dtype", "float32", "-o", "json"]
    sizes = []
    for dtype in ("auto", "fp8"):
        assert doctor([*flags, "--kv-cache-dtype", dtype]) == 0
        sizes.append(json.loads(capsys.readouterr().out)["budget"]["block_bytes"])
    assert sizes[0] == 4 * sizes[1]


def generated(kv_cache_dtype: str) -> tuple[list[int], int]:
    """Return the tokens of a greedy output, and the number of KV blocks of 4 MiB."""
    with LLM("builtin://tiny", device="cpu", dtype="float32", attention_backend="torch", threads=1,
             kv_cache_memory_bytes=4 << 20, max_model_len=64, kv_cache_dtype=kv_cache_dtype) as llm:  # fmt: skip
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        (output,) = llm.generate(["Once upon a time"], params)
        return list(output.outputs[0].token_ids), llm.client.config.num_gpu_blocks


def test_an_engine_generates_with_it() -> None:
    exact, exact_blocks = generated("auto")
    ours, blocks = generated("fp8_e4m3")
    assert len(ours) == 8
    assert ours[:2] == exact[:2]
    assert blocks == 4 * exact_blocks


def test_the_cpu_backend_refuses_it() -> None:
    with pytest.raises(ConfigError, match="keeps keys and values in the model's dtype only"):
        LLM("builtin://tiny", device="cpu", attention_backend="cpu", kv_cache_dtype="fp8", block_size=16)
