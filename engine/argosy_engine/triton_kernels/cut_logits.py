"""The logits that tokens are drawn from, for `--logprobs-mode processed_logprobs` and `processed_logits`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from argosy_engine.triton_kernels.launch import launch
from argosy_engine.triton_kernels.nucleus import inverse_of
from argosy_engine.triton_kernels.sampling import Cuts, DeviceSamplingBatch

_BLOCK = 4096


def cut_logits(
    logits: torch.Tensor, batch: DeviceSamplingBatch, cuts: Cuts, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return float32 logits [R, vocab_size] over the temperature, minus infinity where a limit drops the token.

    Rows of temperature 0 are not scaled; padding is not written. Takes one launch.

    Args:
        logits: [R, vocab_size], as given to `sample_tokens`.
        cuts: what `sample_tokens` kept.
        out: receives the result; may be the logits themselves.
    """
    num_rows, vocab_size = logits.shape
    if out is None:
        out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    launch(
        _cut_logits,
        (num_rows, triton.cdiv(vocab_size, _BLOCK)),
        logits_ptr=logits,
        out_ptr=out,
        temperature_ptr=batch.temperature,
        positions_ptr=batch.positions,
        cut_logits_ptr=cuts.logits,
        cut_ids_ptr=cuts.token_ids,
        vocab_size=vocab_size,
        row_stride=logits.stride(0),
        out_stride=out.stride(0),
        BLOCK=_BLOCK,
    )
    return out


@triton.jit
def _cut_logits(
    logits_ptr,
    out_ptr,
    temperature_ptr,
    positions_ptr,
    cut_logits_ptr,
    cut_ids_ptr,
    vocab_size,
    row_stride,
    out_stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(positions_ptr + row) < 0:
        return
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * row_stride + ids, mask=ids < vocab_size, other=0.0).to(tl.float32)
    cut = tl.load(cut_logits_ptr + row)
    is_kept = (x > cut) | ((x == cut) & (ids <= tl.load(cut_ids_ptr + row)))
    x = tl.where(is_kept, x * inverse_of(tl.load(temperature_ptr + row)), float("-inf"))
    tl.store(out_ptr + row * out_stride + ids, x, mask=ids < vocab_size)
