"""Reference for sampling kernels: which tokens top-k, top-p and min-p keep, by a sort in float64."""

from __future__ import annotations

import torch

from argosy_engine.triton_kernels.sampling import DeviceSamplingBatch


def device_batch(
    rows: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    position: int = 0,
) -> DeviceSamplingBatch:
    """Return a batch of rows with the same parameters; row i is at position `position` + i."""
    return DeviceSamplingBatch(
        temperature=torch.full((rows,), temperature),
        top_k=torch.full((rows,), top_k, dtype=torch.int32),
        top_p=torch.full((rows,), top_p),
        min_p=torch.full((rows,), min_p),
        seeds=torch.full((rows,), seed, dtype=torch.int64),
        positions=torch.arange(position, position + rows),
    )


def probabilities(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return float64 probabilities [vocab_size] of one row's logits, NaN counting as minus infinity."""
    x = torch.where(logits.isnan(), float("-inf"), logits.double())
    return ((x - x.max()) / temperature).softmax(0)


def kept_tokens(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float, slack: float
) -> set[int]:
    """Return the kept tokens of one row.

    Args:
        logits: [vocab_size].
        slack: share by which the limits of top-p and min-p are loosened, or tightened if negative.
    """
    probs = probabilities(logits, temperature)
    x = torch.where(logits.isnan(), float("-inf"), logits.double())
    order = torch.sort(x, descending=True, stable=True).indices
    order = order[(probs >= min(min_p * (1 - slack), 1.0) * probs.max())[order] & (x > float("-inf"))[order]]
    if 0 < top_k < len(order):
        order = order[:top_k]
    if top_p < 1.0:
        mass = probs[order].cumsum(0)
        limit = top_p * (1 - 1e-6) * (1 + slack) * mass[-1]
        order = order[: max(int((mass - probs[order] < limit).sum()), 1)]
    return set(order.tolist())
