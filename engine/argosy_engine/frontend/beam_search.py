"""Beam search over log probabilities, outside the core: each round requests one more token of every beam.

vLLM's algorithm (`entrypoints/llm.py: beam_search`): every beam proposes its 2 * beam_width most probable tokens; a
proposal that ends the sequence is complete, and the best beam_width of the others continue. Beams of a prompt share its
blocks through the prefix cache, which makes a round cheap. The search knows no engine: the caller, sync or async,
generates the next tokens of `BeamSearchBatch.beams` and passes them to `advance`, until there are no more beams.

`beam_choices` searches for API requests with `use_beam_search`. `n` is the beam width, or a larger `best_of` of
/v1/completions. As in vLLM a stream has each choice in one piece, since until its end a search knows none, and each
round is a request per beam, in metrics as well. Fields that have no effect on a beam search are refused, where vLLM
ignores them: the search ranks whole continuations by the model's own probabilities, and ends them at the model's end of
sequence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from argosy_engine.errors import InvalidRequest
from argosy_engine.frontend.detokenizer import IncrementalDetokenizer
from argosy_engine.frontend.input_processor import InputProcessor, bound_beams, check_images, num_logprobs
from argosy_engine.frontend.output_processor import GenerationOutput
from argosy_engine.frontend.renderer import TokenizedPrompt
from argosy_engine.frontend.tokenizer import Tokenizer
from argosy_engine.params import MAX_N, SamplingParams, ValidatedStructMeta
from argosy_engine.resolved_config import ResolvedConfig
from argosy_engine.sample.token_logprobs import TokenLogprobs
from argosy_protocol.openai import MAX_CHOICES, CompletionRequest, GenerationRequest

if TYPE_CHECKING:  # LLM needs no asynchronous client of a core
    from argosy_engine.frontend.async_llm import AsyncLLM

MAX_BEAM_WIDTH = MAX_N


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stop": (None, []),
    "stop_token_ids": (None, []),
    "top_p": (None, 1.0),
    "top_k": (None, 0, -1),
    "min_p": (None, 0.0),
    "presence_penalty": (None, 0.0),
    "frequency_penalty": (None, 0.0),
    "repetition_penalty": (None, 1.0),
    "logit_bias": (None, {}),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "min_tokens": (None, 0),
    "repetition_detection": (None,),
    "thinking_token_budget": (None, -1),
    "logprob_token_ids": (None, []),
    "resume": (None,),
    "prompt_logprobs": (None,),
    "vllm_xargs": (None, {}),
    "structured_outputs": (None,),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto", "none"),
    "echo": (None, False),
}
"""Fields that have no effect on a beam search, and the values with which they are accepted."""


class BeamSearchParams(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, metaclass=ValidatedStructMeta
):
    """Parameters of a beam search. Field names and defaults are vLLM's.

    Raises (from the constructor):
        InvalidRequest: unknown name, wrong type or value out of bounds.
    """

    beam_width: int
    """A round requests twice as many log probabilities, so the engine's `--max-logprobs` limits it as well."""
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    """Temperature of the sampled tokens, which the search ignores; it follows the log probabilities."""
    length_penalty: float = 1.0
    """Exponent of the sequence's length, prompt included, by which scores are divided."""
    include_stop_str_in_output: bool = False
    """Whether the text includes the token that ended the sequence."""

    def verify(self) -> None:
        """Check the bounds. Raises InvalidRequest if a value is out of bounds."""
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
        """Return the sampling parameters of a beam's request in one round.

        Args:
            config: the engine's.
            num_logprobs: alternatives per token to return to the client.

        Raises:
            InvalidRequest: the engine does not return so many log probabilities.
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
    """Token ids of prompt and output."""
    cum_logprob: float
    finish_reason: str | None = None
    text: str | None = None
    """Text of the output."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log probabilities of the output's tokens, with the requested alternatives; none if they are not kept."""


@dataclass(slots=True)
class BeamSearchOutput:
    sequences: list[BeamSearchSequence]
    """The beam_width best, best first."""


class BeamSearch:
    """Beam search of one prompt: call `advance` while there are `beams`, then `best`.

    Args:
        num_logprobs: alternatives to keep per token; None keeps no log probabilities of single tokens.

    A search keeps `beam_width` beams and as many completed sequences: those that cannot be among the best any more are
    dropped, however many tokens it generates.
    """

    def __init__(
        self,
        prompt: list[int],
        params: BeamSearchParams,
        eos_token_ids: Collection[int],
        num_logprobs: int | None = 0,
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
        """Sequences whose next tokens `advance` needs; empty when the search has ended."""
        return [beam.tokens for beam in self._beams] if self._num_rounds < self.params.max_tokens else []

    def advance(self, proposals: Iterator[TokenLogprobs]) -> None:
        """Process one round. Has no effect when the search has ended.

        Args:
            proposals: begins with the most probable next tokens of each of the beams, which are taken from it.
        """
        if not self.beams:
            return
        self._num_rounds += 1
        width = self.params.beam_width
        # An entry begins with the sampled token; the others are the most probable ones.
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
        self._completed = nlargest(width, self._completed, key=self._score)

    def best(self) -> list[BeamSearchSequence]:
        """The beam_width best, best first."""
        for beam in self._beams:
            beam.finish_reason = "length"
        return nlargest(self.params.beam_width, self._completed + self._beams, key=self._score)

    def text(
        self, sequence: BeamSearchSequence, tokenizer: Tokenizer, *, skip_special_tokens: bool = True
    ) -> str:
        """Return the output's text. The token that ended it counts as special."""
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
        token_id = entry.token_ids[rank]
        grown = BeamSearchSequence([*beam.tokens, token_id], cum_logprob)
        if self._num_logprobs is not None:
            kept = self._num_logprobs + 1
            logprobs = TokenLogprobs(
                [token_id, *entry.token_ids[1:kept]], [entry.logprobs[rank], *entry.logprobs[1:kept]], rank
            )
            grown.logprobs = [*beam.logprobs, logprobs]
        return grown

    def _score(self, sequence: BeamSearchSequence) -> float:
        """Compute the score. An end token counts in the probability, but not in the length."""
        length = len(sequence.tokens) - (sequence.finish_reason == "stop")
        return sequence.cum_logprob / length**self.params.length_penalty


class BeamSearchBatch:
    """Beam searches of one call's prompts, which advance together."""

    def __init__(self, prompts: Sequence[TokenizedPrompt], searches: Sequence[BeamSearch]) -> None:
        self._prompts = prompts
        self._searches = searches

    @property
    def beams(self) -> list[TokenizedPrompt]:
        """Sequences whose next tokens `advance` needs; empty when all searches have ended."""
        return [
            TokenizedPrompt(tokens, prompt.chunk_ends, mm_features=prompt.mm_features)
            for prompt, search in zip(self._prompts, self._searches, strict=True)
            for tokens in search.beams
        ]

    def advance(self, proposals: Iterable[TokenLogprobs]) -> None:
        """Process one round.

        Args:
            proposals: the most probable next tokens of each of the beams, in their order.
        """
        remaining = iter(proposals)
        for search in self._searches:
            search.advance(remaining)

    def best(
        self, tokenizer: Tokenizer, count: int | None = None, *, skip_special_tokens: bool = True
    ) -> list[list[BeamSearchSequence]]:
        """Return the `count` best sequences of each prompt, best first, with their texts; all beams without `count`."""
        found = []
        for search in self._searches:
            sequences = search.best()[:count]
            for sequence in sequences:
                sequence.text = search.text(sequence, tokenizer, skip_special_tokens=skip_special_tokens)
            found.append(sequences)
        return found


def max_output_tokens(
    input_processor: InputProcessor, prompt: TokenizedPrompt, max_tokens: int | None
) -> int:
    """Return how many tokens a search may append to a prompt: `max_tokens`, or what the model's context leaves.

    Raises:
        PromptTooLong: they exceed the model's context.
        InvalidRequest: the prompt is empty.
    """
    (longest,) = input_processor.process_inputs(prompt, SamplingParams(max_tokens=max_tokens))
    limit = longest.sampling_params.max_tokens
    assert limit is not None
    return limit


async def beam_choices(
    llm: AsyncLLM, prompts: Sequence[TokenizedPrompt], request: GenerationRequest, *, tenant: str = ""
) -> list[GenerationOutput]:
    """Search the `n` best continuations of each prompt; return them best first, as the choices of one call.

    Args:
        tenant: the tenant that the tokens are computed for.

    Raises:
        InvalidRequest: out of bounds, too long, or has a field that a beam search does not support.
        BadRequest: the answer may become too large (`bound_beams`).
        EngineError: see `AsyncLLM.generate`.
    """
    n, width = request.n or 1, _width(request)
    _check(request, len(prompts) * width)
    check_images(prompts, width)
    sampling = llm.input_processor.sampling_params(request)
    logprobs = num_logprobs("logprobs", sampling.logprobs, llm.config)
    rooms = [max_output_tokens(llm.input_processor, prompt, sampling.max_tokens) for prompt in prompts]
    room = bound_beams([len(prompt.token_ids) for prompt in prompts], width, max(rooms), logprobs, request)
    params = [_params(request, sampling, width, min(room, own)) for own in rooms]
    batch = BeamSearchBatch(
        prompts,
        [
            BeamSearch(prompt.token_ids, own, llm.config.eos_token_ids, logprobs)
            for prompt, own in zip(prompts, params, strict=True)
        ],
    )
    round_params = params[0].round_params(llm.config, logprobs or 0)
    num_cached: list[int] = []
    while beams := batch.beams:
        results = await _next_tokens(llm, beams, round_params, request, tenant)
        num_cached = num_cached or [result.num_cached_tokens for result in results]
        batch.advance(result.logprobs[0] for result in results)
    found = batch.best(llm.renderer.tokenizer, n, skip_special_tokens=request.skip_special_tokens)
    outputs = []
    for index, (prompt, sequences) in enumerate(zip(prompts, found, strict=True)):
        for choice, sequence in enumerate(sequences):
            token_ids = sequence.tokens[len(prompt.token_ids) :]
            output = GenerationOutput(
                index * n + choice, sequence.text or "", token_ids, sequence.finish_reason
            )
            output.num_prompt_tokens, output.num_cached_tokens = len(prompt.token_ids), num_cached[index]
            output.num_output_tokens, output.logprobs = len(token_ids), sequence.logprobs
            outputs.append(output)
    return outputs


def _params(
    request: GenerationRequest, sampling: SamplingParams, width: int, max_tokens: int
) -> BeamSearchParams:
    return BeamSearchParams(
        beam_width=width,
        max_tokens=max_tokens,
        ignore_eos=request.ignore_eos,
        temperature=sampling.temperature,
        length_penalty=request.length_penalty,
        include_stop_str_in_output=request.include_stop_str_in_output,
    )


async def _next_tokens(
    llm: AsyncLLM,
    beams: Sequence[TokenizedPrompt],
    params: SamplingParams,
    request: GenerationRequest,
    tenant: str,
) -> list[GenerationOutput]:
    """Generate one token of each beam, with its alternatives."""
    requests = [
        core_request
        for beam in beams
        for core_request in llm.input_processor.process_inputs(
            beam,
            params,
            cache_salt=request.cache_salt,
            priority=request.priority,
            tenant=tenant,
            data_parallel_rank=request.data_parallel_rank,
        )
    ]
    return await llm.collect(requests)


def _width(request: GenerationRequest) -> int:
    """Return the beam width."""
    n = request.n or 1
    best_of = request.best_of if isinstance(request, CompletionRequest) else None
    if best_of is not None and best_of < n:
        raise InvalidRequest(f"best_of must be at least n ({n})", param="best_of")
    return n if best_of is None else best_of


def _check(request: GenerationRequest, num_beams: int) -> None:
    if num_beams > MAX_CHOICES:
        raise InvalidRequest(f"prompts times beams exceed {MAX_CHOICES}", param="beam_width")
    for name, neutral in _NEUTRAL.items():
        if getattr(request, name, None) not in neutral:
            raise InvalidRequest(f"{name} cannot be combined with use_beam_search", param=name)
