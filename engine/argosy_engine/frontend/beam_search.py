"""Beam search over log probabilities, outside the core: each round asks for one more token of every beam.

vLLM's algorithm (`entrypoints/llm.py: beam_search`): every beam proposes its 2 * beam_width most probable tokens; a
proposal that ends the sequence is complete, the best beam_width others go on. Beams of a prompt share its blocks by the
prefix cache, which makes a round cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

from msgspec import Struct

from argosy_engine.errors import InvalidRequest
from argosy_engine.sample.params import MAX_N, SamplingParams
from argosy_engine.sample.token_logprobs import TokenLogprobs

MAX_BEAM_WIDTH = MAX_N
"""The engine's `--max-logprobs` is another bound: a round asks for twice as many."""


class BeamSearchParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Field names and defaults are vLLM's."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    """Of the tokens drawn on the way, which the search does not look at; it follows the raw log probabilities."""
    length_penalty: float = 1.0
    """Scores are divided by the sequence's length, prompt included, to this power."""

    def verify(self) -> None:
        """Raises InvalidRequest when a value is out of bounds."""
        checks = (
            ("beam_width", 1 <= self.beam_width <= MAX_BEAM_WIDTH, f"must be between 1 and {MAX_BEAM_WIDTH}"),
            ("max_tokens", self.max_tokens >= 1, "must be at least 1"),
            ("temperature", 0.0 <= self.temperature <= 100.0, "must be between 0 and 100"),
            ("length_penalty", -10.0 <= self.length_penalty <= 10.0, "must be between -10 and 10"),
        )
        for name, is_good, message in checks:
            if not is_good:
                raise InvalidRequest(f"{name} {message}", param=name)

    def round_params(self) -> SamplingParams:
        """What one round asks of each beam."""
        return SamplingParams.of(
            max_tokens=1, logprobs=2 * self.beam_width, temperature=self.temperature, ignore_eos=True, seed=0
        )


@dataclass(slots=True)
class BeamSearchSequence:
    tokens: list[int]
    """Prompt and output."""
    cum_logprob: float
    finish_reason: str | None = None
    text: str | None = None
    """Of the output."""


@dataclass(slots=True)
class BeamSearchOutput:
    sequences: list[BeamSearchSequence]
    """The beam_width best, best first."""


class _Search(NamedTuple):
    """One prompt's beams that go on, and those that are complete."""

    beams: list[BeamSearchSequence]
    completed: list[BeamSearchSequence]


def beam_search(
    prompts: list[list[int]],
    params: BeamSearchParams,
    eos_token_ids: Collection[int],
    next_logprobs: Callable[[list[list[int]]], list[TokenLogprobs]],
) -> list[list[BeamSearchSequence]]:
    """The best sequences of each prompt.

    Args:
        next_logprobs: of many token sequences at once, the most probable next tokens of each.
    """
    searches = [_Search([BeamSearchSequence(prompt, 0.0)], []) for prompt in prompts]
    for _ in range(params.max_tokens):
        beams = [beam for search in searches for beam in search.beams]
        if not beams:
            break
        proposals = iter(next_logprobs([beam.tokens for beam in beams]))
        for search in searches:
            candidates = [
                BeamSearchSequence([*beam.tokens, token_id], beam.cum_logprob + logprob)
                for beam in search.beams
                for token_id, logprob in _best(next(proposals), 2 * params.beam_width)
            ]
            candidates.sort(key=lambda candidate: -candidate.cum_logprob)
            search.beams.clear()
            for candidate in candidates:
                if candidate.tokens[-1] in eos_token_ids and not params.ignore_eos:
                    candidate.finish_reason = "stop"
                    search.completed.append(candidate)
                elif len(search.beams) < params.beam_width:
                    search.beams.append(candidate)
    results = []
    for search in searches:
        for beam in search.beams:
            beam.finish_reason = "length"
        sequences = search.completed + search.beams
        sequences.sort(key=lambda sequence: -_score(sequence, params.length_penalty))
        results.append(sequences[: params.beam_width])
    return results


def _best(entry: TokenLogprobs, count: int) -> list[tuple[int, float]]:
    """The most probable tokens; the first of the entry is the one that was drawn."""
    return list(zip(entry.token_ids[1 : count + 1], entry.logprobs[1 : count + 1], strict=True))


def _score(sequence: BeamSearchSequence, length_penalty: float) -> float:
    """An end token counts in the probability, not in the length."""
    length = len(sequence.tokens) - (sequence.finish_reason == "stop")
    return sequence.cum_logprob / length**length_penalty
