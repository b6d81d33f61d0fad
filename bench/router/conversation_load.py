"""Load of conversations: popular and rare system prompts, several turns with pauses, growing histories.

Owns the conversations' texts and times. Must not know servers. Invariant: equal arguments make equal conversations, so
that all contenders get the same ones at the same times. Only the time of a turn after the first depends on the
contender, because it follows the previous answer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from prompts import BYTES_PER_TOKEN
from shared_prefix_load import text

SYSTEM_PROMPTS = 24
SYSTEM_TOKENS = 1536
TURNS = (2, 7)
"""Minimum and maximum per conversation, uniformly distributed."""
TURN_TOKENS = (64, 384)
ANSWER_TOKENS = (32, 128)
THINK_S = 5.0
"""Mean of the exponentially distributed pause before the next turn."""
MAX_THINK_S = 20.0


@dataclass(frozen=True, slots=True)
class Turn:
    """The user's message, the length of the answer, and the pause after it."""

    text: str
    answer_tokens: int
    think_s: float


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation, which begins `at_s` seconds after the load."""

    at_s: float
    system: str
    turns: tuple[Turn, ...]


def conversations(
    seed: str,
    per_s: float,
    seconds: float,
    *,
    system_prompts: int = SYSTEM_PROMPTS,
    system_tokens: int = SYSTEM_TOKENS,
) -> list[Conversation]:
    """Return conversations that begin within `seconds`, as a Poisson process of rate `per_s`.

    The popularity of the k-th system prompt is proportional to 1/k (Zipf's law, as in traces of assistants).
    """
    rng = random.Random(seed)
    systems = [text(rng, system_tokens * BYTES_PER_TOKEN) for _ in range(system_prompts)]
    popularity = [1.0 / (rank + 1) for rank in range(system_prompts)]
    made = []
    at = rng.expovariate(per_s)
    while at < seconds:
        (system,) = rng.choices(systems, popularity)
        turns = tuple(_turn(rng) for _ in range(rng.randint(*TURNS)))
        made.append(Conversation(at, system, turns))
        at += rng.expovariate(per_s)
    return made


def _turn(rng: random.Random) -> Turn:
    return Turn(
        text(rng, rng.randint(*TURN_TOKENS) * BYTES_PER_TOKEN),
        rng.randint(*ANSWER_TOKENS),
        min(MAX_THINK_S, rng.expovariate(1.0 / THINK_S)),
    )


def mean_turns() -> float:
    """Return the mean number of turns per conversation."""
    return sum(TURNS) / 2
