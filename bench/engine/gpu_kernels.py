"""Our Triton kernels on the device: whether they are right, and how much of the memory's speed they reach."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from gpu_device import Device

from argosy_engine.attention.params import AttentionParams
from argosy_engine.attention.selector import AttentionNeeds
from argosy_engine.layers.self_test import attention_self_test as attention_fault
from argosy_engine.sample.sampler import SamplerOptions
from argosy_engine.sample.sampler import self_test as sampler_fault
from argosy_engine.triton_kernels.activations import silu_and_mul
from argosy_engine.triton_kernels.paged_attention import paged_attention
from argosy_engine.triton_kernels.process_logits import RowMasks, process_logits
from argosy_engine.triton_kernels.rms_norm import add_rms_norm, rms_norm
from argosy_engine.triton_kernels.sampling import DeviceSamplingBatch, sample_tokens

LAYERS = {
    "Qwen3-0.6B": AttentionParams(num_heads=16, num_kv_heads=8, head_dim=128, scale=128**-0.5),
    "Llama-3-8B": AttentionParams(num_heads=32, num_kv_heads=8, head_dim=128, scale=128**-0.5),
    "Gemma-3-12B": AttentionParams(
        num_heads=16, num_kv_heads=8, head_dim=256, scale=1 / 16, sliding_window=1024
    ),
    "Gemma-2-9B": AttentionParams(
        num_heads=16, num_kv_heads=8, head_dim=256, scale=1 / 16, logit_softcap=50.0
    ),
}
VOCAB_SIZE = 151936


def check(device: Device) -> Iterator[tuple[str, str | None]]:
    """Compare with torch; yields each case and what is wrong with it, or None."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32) if device.is_cuda else (torch.float32,)
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        for model, layer in LAYERS.items() if device.is_cuda else ():
            if dtype is not torch.bfloat16 and model != "Qwen3-0.6B":
                continue  # each compiles kernels for seconds
            needs = AttentionNeeds("cuda", name, 16, [layer])
            yield f"attention, {model}, {name}", attention_fault("triton", needs, dtype, device.torch)
        for mode in ("raw_logprobs", "processed_logprobs"):
            options = SamplerOptions(vocab_size=VOCAB_SIZE if device.is_cuda else 300, logprobs_mode=mode)
            yield f"sampling, {mode}, {name}", sampler_fault(options, dtype, device.torch)
        yield f"norm and activation, {name}", _elementwise_fault(device, dtype)


def _elementwise_fault(device: Device, dtype: torch.dtype) -> str | None:
    generator = torch.Generator().manual_seed(0)
    x, residual = torch.randn(2, 37, 1000, generator=generator).to(device.torch, dtype).unbind(0)
    weight = torch.randn(1000, generator=generator).to(device.torch, dtype)
    gate, up = x.float().chunk(2, 1)
    total = x.float() + residual.float()
    cases = (
        (rms_norm(x, weight, 1e-6), _norm(x.float(), weight)),
        (add_rms_norm(x, residual.clone(), weight, 1e-6), _norm(total.to(dtype).float(), weight)),
        (silu_and_mul(x), torch.nn.functional.silu(gate) * up),
    )
    for ours, expected in cases:
        error = float((ours.float() - expected).abs().max())
        allowed = 2 * float((expected.to(dtype).float() - expected).abs().max()) + 1e-4
        if not error <= allowed:
            return f"it is wrong by {error:.2g} where {allowed:.2g} is allowed"
    return None


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, (x.shape[1],), weight.float(), 1e-6)


class Case(NamedTuple):
    name: str
    num_bytes: int
    """Read and written at least."""
    run: Callable[[], Any]


def bandwidths(device: Device) -> Iterator[tuple[str, float, float]]:
    """Yield cases, the seconds of a launch, and the bytes per second that it reaches."""
    for case in _cases(device):
        seconds = device.seconds(case.run)
        yield case.name, seconds, case.num_bytes / seconds


def _cases(device: Device) -> Iterator[Case]:
    rows, vocab_size, requests, context = (8192, VOCAB_SIZE, 64, 1024) if device.is_cuda else (8, 300, 2, 32)
    dtype = torch.bfloat16 if device.is_cuda else torch.float32
    size, on = dtype.itemsize, {"device": device.torch}
    x = torch.randn(rows, 4096, dtype=dtype, **on)
    residual, weight = torch.randn_like(x), torch.ones(4096, dtype=dtype, **on)
    yield Case("rms_norm, 8192 x 4096", 2 * x.nbytes, lambda: rms_norm(x, weight, 1e-6))
    yield Case("add_rms_norm, 8192 x 4096", 4 * x.nbytes, lambda: add_rms_norm(x, residual, weight, 1e-6))
    gated = torch.randn(rows, 2 * 12288 if device.is_cuda else 64, dtype=dtype, **on)
    yield Case("silu_and_mul, 8192 x 12288", gated.nbytes * 3 // 2, lambda: silu_and_mul(gated))
    for count in (1, requests):
        # So far apart that top-p keeps some hundred tokens, as it mostly does with models.
        logits = 5 * torch.randn(count, vocab_size, dtype=dtype, **on)
        entries = torch.zeros(count, dtype=torch.int32, **on)
        positions = torch.full((count,), 5, **on)
        batch = DeviceSamplingBatch(
            temperature=torch.ones(count, **on),
            top_k=torch.zeros(count, dtype=torch.int32, **on),
            top_p=torch.full((count,), 0.9, **on),
            min_p=torch.zeros(count, **on),
            seeds=torch.zeros(count, dtype=torch.int64, **on),
            positions=positions,
        )
        masks = RowMasks(entries, torch.full((1, -(-vocab_size // 32)), -1, dtype=torch.int32, **on))
        yield Case(
            f"sampling, {count} rows, plain",
            logits.nbytes,
            lambda logits=logits, batch=batch: sample_tokens(logits, batch, has_limits=False),
        )
        yield Case(
            f"sampling, {count} rows, top_p 0.9",
            logits.nbytes,
            lambda logits=logits, batch=batch: sample_tokens(logits, batch),
        )
        flat = logits / 5
        yield Case(
            f"sampling, {count} rows, top_p 0.9 of most tokens",
            logits.nbytes,
            lambda flat=flat, batch=batch: sample_tokens(flat, batch),
        )
        yield Case(
            f"grammar mask, {count} rows",
            logits.numel() * (size + 4) + masks.bitmask.nbytes,
            lambda logits=logits, positions=positions, masks=masks: process_logits(
                logits, positions, grammar=masks
            ),
        )
    yield _attention(device, requests, context, dtype)


def _attention(device: Device, requests: int, context: int, dtype: torch.dtype) -> Case:
    on = {"device": device.torch}
    layer, blocks = LAYERS["Qwen3-0.6B"], context // 16
    cache = torch.randn(2, requests * blocks, 16, layer.num_kv_heads, layer.head_dim, **on).to(dtype)
    table = torch.randperm(requests * blocks).int().view(requests, blocks).to(device.torch)
    q = torch.randn(requests, layer.num_heads, layer.head_dim, **on).to(dtype)
    starts = torch.arange(requests + 1, dtype=torch.int32, **on)
    lens = torch.full((requests,), context, dtype=torch.int32, **on)
    return Case(
        f"attention of Qwen3-0.6B, {requests} decodes at {context} tokens",
        cache.nbytes + 2 * q.nbytes,
        lambda: paged_attention(
            q,
            cache,
            query_start_loc=starts,
            seq_lens=lens,
            block_table=table,
            max_query_len=1,
            scale=layer.scale,
        ),
    )
