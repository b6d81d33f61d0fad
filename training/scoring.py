"""Exact-match accuracy of whole replies under greedy decoding, without decoding.

A reply is what greedy decoding gives if and only if, with the true reply fed in, the most likely
token is the right one at every place: one forward pass scores a whole batch.
"""

from collections.abc import Callable

import torch
from tokenizers import Tokenizer
from torch import Tensor

from corpus import mix, render
from corpus.conversation import Conversation
from tokenizer import encode

BATCH_TOKENS = 8192


def _target(tokenizer: Tokenizer, conversation: Conversation) -> tuple[list[int], int]:
    """Ids up to the end of the final reply, and where what the model must say begins."""
    spans = render.spans(conversation)[:-1]
    said = 2 if conversation.thinking else 1
    ids, _ = encode(tokenizer, spans)
    prompt, _ = encode(tokenizer, spans[:-said])
    return ids, len(prompt)


@torch.no_grad()
def exact(model: Callable[[Tensor], Tensor], tokenizer: Tokenizer, cases: list[Conversation]) -> list[bool]:
    """For each case whether the whole reply (thought, text, end token) is exact.

    `model` takes ids [batch, length] to logits [batch, length, vocab].
    """
    targets = [_target(tokenizer, case) for case in cases]
    order = sorted(range(len(cases)), key=lambda i: len(targets[i][0]))
    right = [False] * len(cases)
    while order:
        longest = len(targets[order[-1]][0])
        group = [order.pop() for _ in range(min(len(order), max(1, BATCH_TOKENS // longest)))]
        ids = torch.zeros(len(group), longest, dtype=torch.int64)
        for row, index in enumerate(group):
            ids[row, : len(targets[index][0])] = torch.tensor(targets[index][0])
        with torch.compiler.set_stance("force_eager"):
            best = model(ids).argmax(-1)
        for row, index in enumerate(group):
            tokens, start = targets[index]
            right[index] = best[row, start - 1 : len(tokens) - 1].tolist() == tokens[start:]
    return right


def score(
    model: Callable[[Tensor], Tensor], tokenizer: Tokenizer, count: int, seed: int, thinking: bool = False
) -> dict[str, float]:
    """Share of exact replies per family over `count` held-out cases each."""
    made: dict[str, float] = {}
    for family in mix.EVALUATED:
        found = exact(model, tokenizer, mix.held_out(family, count, seed, thinking))
        made[family] = sum(found) / len(found)
    return made
