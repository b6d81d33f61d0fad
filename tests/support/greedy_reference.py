"""The reference that greedy output is held against: transformers, teacher-forced.

If at every position the reference's best next token, given the prompt and our tokens so far, is our token, then our
output is the reference's greedy output. One forward pass per prompt shows it.
"""

from __future__ import annotations

import torch

TIE = 1e-4
"""A differing token is excused only where the reference's two best logits are this close."""


@torch.inference_mode()
def differing_tokens(model: torch.nn.Module, prompt: list[int], output: list[int]) -> list[str]:
    """One line per token that is neither the reference's choice nor excused by a tie."""
    logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1].float()
    best = logits.topk(2)
    lines = []
    for position, token in enumerate(output):
        expected = best.indices[position, 0].item()
        if token == expected:
            continue
        gap = (best.values[position, 0] - logits[position, token]).item()
        if gap > TIE:
            lines.append(f"position {position}: {token} instead of {expected}, {gap:.2e} below it")
    return lines
