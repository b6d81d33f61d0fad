"""Endless batches of one length each, made on the fly from the seeded generator.

Documents start at position 0 and are never packed together; the length of a batch is the bucket
its documents fit, and its height makes all batches cost about the same time.
"""

import random
from collections.abc import Iterator
from itertools import islice

import torch
from tokenizers import Tokenizer
from torch import Tensor

from corpus import mix, render
from tokenizer import encode

BUCKETS = (
    48,
    64,
    80,
    *range(96, 257, 32),
    *range(320, 513, 64),
    *range(640, 1025, 128),
    1536,
    2048,
    3072,
    4096,
)


def _cost(length: int) -> float:
    """Time per token, relative to length 256 (measured, one thread, float32)."""
    return 1.0 + length / 2500


CHUNK = 3000
"""Conversations that are made at a time, unless told otherwise."""


class Batches:
    """The stream of one worker; `phase` 0: short documents only, 1: no long ones, 2: everything."""

    def __init__(self, tokenizer: Tokenizer, seed: str, tokens: int, chunk: int = CHUNK) -> None:
        self.tokenizer, self.tokens, self.chunk = tokenizer, tokens, chunk
        self.rng = random.Random(seed)
        self.phase = 0
        self.documents = 0
        self._waiting: dict[int, list[tuple[list[int], list[float]]]] = {b: [] for b in BUCKETS}

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            phase = self.phase
            limit = 192 if phase == 0 else 4096
            for conversation in islice(mix.training(self.rng, with_long=phase == 2), self.chunk):
                document = encode(self.tokenizer, render.spans(conversation))
                if len(document[0]) <= limit:
                    self.documents += 1
                    self._waiting[next(b for b in BUCKETS if b >= len(document[0]))].append(document)
            ready = list(self._ready())
            self.rng.shuffle(ready)
            for batch in ready:
                yield _tensors(*batch)
                if self.phase != phase:
                    break

    def _ready(self) -> Iterator[tuple[int, list[tuple[list[int], list[float]]]]]:
        for length, waiting in self._waiting.items():
            height = max(2, round(self.tokens / _cost(length) / length))
            while len(waiting) >= height:
                yield length, waiting[:height]
                del waiting[:height]


def _tensors(length: int, documents: list[tuple[list[int], list[float]]]) -> tuple[Tensor, Tensor]:
    ids = torch.zeros(len(documents), length, dtype=torch.int64)
    weights = torch.zeros(len(documents), length)
    for row, (tokens, loss_weights) in enumerate(documents):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        weights[row, : len(tokens)] = torch.tensor(loss_weights)
    return ids, weights
