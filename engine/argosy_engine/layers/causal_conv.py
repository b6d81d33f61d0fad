"""causal_conv: the short causal convolution of layers with states, over a step's requests, in plain torch; and how
Triton's kernels of these layers divide a step.

A request keeps the last inputs in a block of the state pool (`attention.layer.StateLayer`). Nothing waits for a device.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from argosy_engine.attention.layer import StateRows
from argosy_engine.attention.metadata import AttentionMetadata


def causal_conv(
    x: torch.Tensor,
    factors: torch.Tensor,
    conv_states: torch.Tensor,
    rows: StateRows,
    meta: AttentionMetadata,
) -> torch.Tensor:
    """Convolve each channel over the tokens of its request, float32 [T, channels], and keep the last inputs.

    Args:
        x: [T, channels].
        factors: float32 [kernel_size, channels], the newest token's last.
        conv_states: [num_states, kernel_size - 1, channels] in x's dtype, the newest token last; changed.
        rows: blocks of the states of the step's requests.
        meta: of the step.
    """
    kernel_size, channels = factors.shape
    places = _places(meta, kernel_size)
    earlier = conv_states.index_select(0, rows.sources).masked_fill_(rows.begins[:, None, None], 0.0)
    inputs = x.new_empty(len(x) + earlier.shape[0] * earlier.shape[1], channels)
    inputs.index_copy_(0, places.states, earlier.flatten(0, 1))
    inputs.index_copy_(0, places.tokens, x)
    conv_states.index_copy_(0, rows.targets, inputs[places.kept].view_as(earlier))
    summed = torch.zeros(len(x), channels, device=x.device)
    for tap, of_tap in enumerate(factors):
        summed += inputs[places.tokens + (tap + 1 - kernel_size)] * of_tap
    return summed


def divided_step(
    meta: AttentionMetadata, num_tokens: int, chunk_size: int | None = None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return `state_steps.requests_of_tokens` and `state_steps.chunks_of_prompts` of a step, which layers share.
    Both are None in steps of decodes, which CUDA graphs repeat.

    Args:
        num_tokens: of the step, with padding.
        chunk_size: tokens of a chunk; None: there are no chunks.
    """
    if num_tokens == len(meta.seq_lens):
        return None, None
    found: tuple[torch.Tensor, torch.Tensor | None] | None = meta.shared.get((divided_step, chunk_size))
    if found is None:
        from argosy_engine.triton_kernels.state_steps import chunks_of_prompts, requests_of_tokens

        starts, chunks = meta.query_start_loc, None
        if chunk_size is not None:
            rows = chunks_of_prompts(meta.query_start_loc_cpu, meta.num_decodes, chunk_size)
            chunks = torch.from_numpy(rows).to(starts.device, non_blocking=True)
        found = meta.shared[divided_step, chunk_size] = requests_of_tokens(starts, num_tokens), chunks
    return found


class _Places(NamedTuple):
    """Rows of the inputs of a step's convolutions: of each request those that it has kept, then those of its tokens."""

    tokens: torch.Tensor
    """int64 [T]"""
    states: torch.Tensor
    """int64 [R * (kernel_size - 1)]: of what was kept before the step."""
    kept: torch.Tensor
    """The same: of what is kept after it."""


def _places(meta: AttentionMetadata, kernel_size: int) -> _Places:
    """Return the rows for a step, which layers share."""
    found: _Places | None = meta.shared.get((_Places, kernel_size))
    if found is None:
        starts = meta.query_start_loc_cpu.astype(np.int64)
        count, earlier = len(starts) - 1, kernel_size - 1
        requests = np.arange(count)
        tokens = np.arange(starts[-1]) + np.repeat((requests + 1) * earlier, np.diff(starts))
        firsts = (
            (each + requests * earlier)[:, None] + np.arange(earlier) for each in (starts[:-1], starts[1:])
        )
        device = meta.block_table.device
        found = _Places(*(torch.from_numpy(each.reshape(-1)).to(device) for each in (tokens, *firsts)))
        meta.shared[_Places, kernel_size] = found
    return found
