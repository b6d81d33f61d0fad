"""Reference for greedy output: transformers with teacher forcing.

If our token is the reference's best next token at every position, given the prompt and our tokens before it, then our
output is the reference's greedy output. Checking this takes one forward pass per prompt.
"""

from __future__ import annotations

import torch

TIE = 1e-4
"""A differing token is accepted only if its logit is this close to the reference's best one."""


@torch.inference_mode()
def differing_tokens(model: torch.nn.Module, prompt: list[int], output: list[int]) -> list[str]:
    """Return one line per token that is neither the reference's choice nor within `TIE` of it."""
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
