"""Beam search over log probabilities, outside the core: each round asks for one more token of every beam.

vLLM's algorithm (`entrypoints/llm.py: beam_search`): every beam proposes its 2 * beam_width most probable tokens; a
proposal that ends the sequence is complete, the best beam_width others go on. Beams of a prompt share its blocks by the
prefix cache, which makes a round cheap. Nothing here knows an engine: whoever has one, sync or async, asks it for the
next tokens of `BeamSearchBatch.beams`, and passes them to `advance`, until there are no more beams.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import nlargest

from msgspec import Struct

from argosy_engine.config import ResolvedConfig
from argosy_engine.errors import InvalidRequest
from argosy_engine.frontend.detokenizer import IncrementalDetokenizer
from argosy_engine.frontend.input_processor import InputProcessor
from argosy_engine.frontend.renderer import Prompt
from argosy_engine.frontend.tokenizer import Tokenizer
from argosy_engine.params.sampling_params import MAX_N, SamplingParams
from argosy_engine.params.validated_struct import ValidatedStructMeta
from argosy_engine.sample.token_logprobs import TokenLogprobs

MAX_BEAM_WIDTH = MAX_N


class BeamSearchParams(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, metaclass=ValidatedStructMeta
):
    """Field names and defaults are vLLM's.

    Raises (from the constructor):
        InvalidRequest: unknown name, wrong type or value out of bounds.
    """

    beam_width: int
    """A round asks for twice as many log probabilities, so the engine's `--max-logprobs` is a bound as well."""
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    """Of the tokens drawn on the way, which the search does not look at; it follows the log probabilities."""
    length_penalty: float = 1.0
    """Scores are divided by the sequence's length, prompt included, to this power."""
    include_stop_str_in_output: bool = False
    """Whether the text shows the token that ended the sequence."""

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

    def round_params(self, config: ResolvedConfig, num_logprobs: int = 0) -> SamplingParams:
        """What one round asks of each beam.

        Args:
            config: of the engine that is asked.
            num_logprobs: alternatives that the reader wants to see.

        Raises:
            InvalidRequest: the engine does not give these log probabilities.
        """
        if config.logprobs_mode.endswith("logits"):
            raise InvalidRequest(
                f"beam search needs log probabilities, and this engine's --logprobs-mode is {config.logprobs_mode}",
                param="use_beam_search",
            )
        if 0 <= config.max_logprobs < 2 * self.beam_width:
            raise InvalidRequest(
                f"{self.beam_width} beams need {2 * self.beam_width} log probabilities per token, the engine's "
                f"--max-logprobs is {config.max_logprobs}",
                param="beam_width",
            )
        return SamplingParams(
            max_tokens=1,
            logprobs=max(2 * self.beam_width, num_logprobs),
            temperature=self.temperature,
            ignore_eos=True,
            seed=0,
        )


@dataclass(slots=True)
class BeamSearchSequence:
    tokens: list[int]
    """Prompt and output."""
    cum_logprob: float
    finish_reason: str | None = None
    text: str | None = None
    """Of the output."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the output's tokens, with the alternatives that were asked for."""


@dataclass(slots=True)
class BeamSearchOutput:
    sequences: list[BeamSearchSequence]
    """The beam_width best, best first."""


class BeamSearch:
    """The search of one prompt: `advance` while there are `beams`, then `best`.

    Args:
        num_logprobs: alternatives to keep per token.
    """

    def __init__(
        self,
        prompt: list[int],
        params: BeamSearchParams,
        eos_token_ids: Collection[int],
        num_logprobs: int = 0,
    ) -> None:
        self.params = params
        self._num_prompt = len(prompt)
        self._eos_token_ids = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._num_logprobs = num_logprobs
        self._num_rounds = 0
        self._beams = [BeamSearchSequence(prompt, 0.0)]
        self._completed: list[BeamSearchSequence] = []

    @property
    def beams(self) -> list[list[int]]:
        """The sequences whose next tokens `advance` wants to know; none when the search is over."""
        return [beam.tokens for beam in self._beams] if self._num_rounds < self.params.max_tokens else []

    def advance(self, proposals: Iterator[TokenLogprobs]) -> None:
        """One round; none when the search is over.

        Args:
            proposals: begins with the most probable next tokens of each of the beams, which are taken from it.
        """
        if not self.beams:
            return
        self._num_rounds += 1
        width = self.params.beam_width
        # The first of an entry is the token that was drawn; the others are the best.
        candidates = [
            (beam.cum_logprob + logprob, beam, entry, rank)
            for beam, entry in zip(self._beams, proposals, strict=False)
            for rank, logprob in enumerate(entry.logprobs[1 : 2 * width + 1], 1)
        ]
        self._beams = []
        candidates.sort(key=lambda candidate: candidate[0], reverse=True)
        for cum_logprob, beam, entry, rank in candidates:
            if entry.token_ids[rank] in self._eos_token_ids:
                ended = self._grow(beam, entry, rank, cum_logprob)
                ended.finish_reason = "stop"
                self._completed.append(ended)
            elif len(self._beams) < width:
                self._beams.append(self._grow(beam, entry, rank, cum_logprob))

    def best(self) -> list[BeamSearchSequence]:
        """The beam_width best, best first."""
        for beam in self._beams:
            beam.finish_reason = "length"
        return nlargest(self.params.beam_width, self._completed + self._beams, key=self._score)

    def text(
        self, sequence: BeamSearchSequence, tokenizer: Tokenizer, *, skip_special_tokens: bool = True
    ) -> str:
        """Of the output. The token that ended it counts as special."""
        prompt, output = sequence.tokens[: self._num_prompt], sequence.tokens[self._num_prompt :]
        end = output.pop() if sequence.finish_reason == "stop" else None
        detokenizer = IncrementalDetokenizer(
            tokenizer, SamplingParams(skip_special_tokens=skip_special_tokens), prompt
        )
        text = detokenizer.update(output, is_last=True)
        if end is None or not self.params.include_stop_str_in_output:
            return text
        return text + tokenizer.token_text(end)

    def _grow(
        self, beam: BeamSearchSequence, entry: TokenLogprobs, rank: int, cum_logprob: float
    ) -> BeamSearchSequence:
        token_id, kept = entry.token_ids[rank], self._num_logprobs + 1
        logprobs = TokenLogprobs(
            [token_id, *entry.token_ids[1:kept]], [entry.logprobs[rank], *entry.logprobs[1:kept]], rank
        )
        return BeamSearchSequence([*beam.tokens, token_id], cum_logprob, logprobs=[*beam.logprobs, logprobs])

    def _score(self, sequence: BeamSearchSequence) -> float:
        """An end token counts in the probability, not in the length."""
        length = len(sequence.tokens) - (sequence.finish_reason == "stop")
        return sequence.cum_logprob / length**self.params.length_penalty


class BeamSearchBatch:
    """The searches of one call's prompts, which advance together."""

    def __init__(self, prompts: Sequence[Prompt], searches: Sequence[BeamSearch]) -> None:
        self._prompts = prompts
        self._searches = searches

    @property
    def beams(self) -> list[Prompt]:
        """The sequences whose next tokens `advance` wants to know; none when all searches are over."""
        return [
            Prompt(tokens, prompt.chunk_ends)
            for prompt, search in zip(self._prompts, self._searches, strict=True)
            for tokens in search.beams
        ]

    def advance(self, proposals: Iterable[TokenLogprobs]) -> None:
        """One round.

        Args:
            proposals: the most probable next tokens of each of the beams, in their order.
        """
        remaining = iter(proposals)
        for search in self._searches:
            search.advance(remaining)

    def best(
        self, tokenizer: Tokenizer, count: int | None = None, *, skip_special_tokens: bool = True
    ) -> list[list[BeamSearchSequence]]:
        """For each prompt its `count` best sequences, best first, with their texts; all beams without `count`."""
        found = []
        for search in self._searches:
            sequences = search.best()[:count]
            for sequence in sequences:
                sequence.text = search.text(sequence, tokenizer, skip_special_tokens=skip_special_tokens)
            found.append(sequences)
        return found


def max_output_tokens(input_processor: InputProcessor, prompt: Prompt, max_tokens: int | None) -> int:
    """How many tokens a search may append to a prompt: `max_tokens`, or what the model's context leaves.

    Raises:
        PromptTooLong: the context does not take so many.
        InvalidRequest: the prompt is empty.
    """
    (longest,) = input_processor.process_inputs(prompt, SamplingParams(max_tokens=max_tokens))
    limit = longest.sampling_params.max_tokens
    assert limit is not None
    return limit
