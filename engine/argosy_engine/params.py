"""SamplingParams and PoolingParams: what a request asks for, with vLLM's field names. No torch.

They are validated structs: parameters written in Python are checked as strictly as those that arrive as JSON.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar, Literal

import msgspec
from msgspec import Struct, StructMeta, structs

from argosy_engine.errors import InvalidRequest
from argosy_engine.structured.structured_outputs_params import StructuredOutputsParams


class ValidatedStructMeta(StructMeta):
    """Metaclass of structs with a `verify` method: calling the class converts values, checks types and verifies.

    Decoding and `structs.replace` bypass it: parameters were checked before they are sent to the core.
    """

    ONE_OR_MORE: ClassVar[tuple[str, ...]] = ()
    """Fields holding strings that also accept a single string."""

    def __call__(cls, **fields: Any) -> Any:  # noqa: N805 (of a metaclass)
        """Build an instance from keyword arguments.

        Raises:
            InvalidRequest: unknown name (with a suggestion), wrong type or value out of bounds.
        """
        if not fields.keys() <= _names(cls):
            name = next(name for name in fields if name not in cls.__struct_fields__)
            close = difflib.get_close_matches(name, cls.__struct_fields__, n=1)
            hint = f", did you mean {close[0]!r}?" if close else ""
            raise InvalidRequest(f"{cls.__name__} has no {name!r}{hint}", param=name)
        for name in cls.ONE_OR_MORE:
            if isinstance(fields.get(name), str):
                fields[name] = (fields[name],)
        try:
            made: Any = msgspec.convert(fields, cls)
        except msgspec.ValidationError as error:
            message, _, path = str(error).partition(" - at ")
            name = path.partition("$.")[2].rstrip("`").partition("[")[0]
            raise InvalidRequest(f"{name}: {message}" if name else message, param=name or None) from None
        made.verify()
        return made


@cache
def _names(struct: StructMeta) -> frozenset[str]:
    return frozenset(struct.__struct_fields__)


GREEDY_EPSILON = 1e-5
"""Temperatures below this mean greedy sampling, as in vLLM."""

MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORDS_TOKENS = 1024
"""Tokens of all bad words of a request together."""
MAX_BAD_WORD_CHARS = 1024
MAX_LOGPROB_TOKEN_IDS = 128
MAX_EXTRA_ARGS = 64
MAX_EXTRA_ARGS_BYTES = 64 * 1024
"""Size of a request's `extra_args` as msgpack."""
MAX_REPETITION_PATTERN = 1024
"""Bound on pattern size and count, and thereby on the state kept for each such request."""


class RepetitionDetectionParams(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Ends a generation once its last tokens repeat one pattern `min_count` times in a row."""

    max_pattern_size: int = 0
    """In tokens; 0 turns detection off."""
    min_pattern_size: int = 0
    """In tokens; 0 means 1."""
    min_count: int = 0

    def problem(self) -> str | None:
        """Return what is wrong with these values, or None."""
        if not 0 <= self.min_pattern_size <= self.max_pattern_size <= MAX_REPETITION_PATTERN:
            return f"needs 0 <= min_pattern_size <= max_pattern_size <= {MAX_REPETITION_PATTERN}"
        if self.max_pattern_size and not 2 <= self.min_count <= MAX_REPETITION_PATTERN:
            return f"needs min_count between 2 and {MAX_REPETITION_PATTERN}"
        return None


class ThinkingMarks(Struct, frozen=True, array_like=True):
    """Tokens around the reasoning of one request."""

    start_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    num_open_tokens: int = -1
    """Tokens at the prompt's end that belong to an open think block; -1: none is open."""


class SamplingParams(
    Struct,
    kw_only=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    weakref=True,
    metaclass=ValidatedStructMeta,
):
    """Sampling and stopping parameters of one request. `stop` and `bad_words` also accept a single string.

    Raises (from the constructor):
        InvalidRequest: unknown name, wrong type or value out of bounds.
    """

    ONE_OR_MORE: ClassVar[tuple[str, ...]] = ("stop", "bad_words")

    n: int = 1
    """Choices per prompt. The core sees one request per choice, each with n = 1."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1 turns it off."""
    min_p: float = 0.0
    """Drop tokens whose probability is below this share of the most probable token's; 0 turns it off."""
    seed: int | None = None
    """Sampling noise is a pure function of (seed, position). None: the input processor draws one for each choice."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """Applies to prompt and output tokens; the other two penalties count output tokens only."""
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    """Set by the input processor from `bad_words`, because the core never sees text."""
    max_tokens: int | None = 16
    """None: up to the model's context length."""
    min_tokens: int = 0
    """Before this many output tokens, no EOS token, stop id or stop string ends the request. A grammar that allows only
    the end takes precedence."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    repetition_detection: RepetitionDetectionParams | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    """False: special tokens that follow each other are shown without the spaces that a decoder puts between them."""
    kept_special_token_ids: tuple[int, ...] = ()
    """Special tokens in the text nevertheless, for a parser that reads it. Set by the input processor."""
    logprobs: int | None = None
    """Return log probabilities of each output token and of this many best alternatives; -1: of the whole vocabulary.
    The engine's `--max-logprobs` is the upper bound."""
    logprob_token_ids: tuple[int, ...] | None = None
    """Return log probabilities of these tokens, in this order, instead of the best ones."""
    prompt_logprobs: int | None = None
    """The same for each prompt token except the first."""
    structured_outputs: StructuredOutputsParams | None = None
    """Format that the output must have. The core gets it as a grammar, separately from these parameters."""
    thinking_token_budget: int | None = None
    """Tokens of a think block after which its end is forced."""
    thinking_marks: ThinkingMarks | None = None
    """Set by the input processor for a request with a budget."""
    stream_interval: int = 1
    """Tokens in each output of a stream, but the first and the last."""
    extra_args: dict[str, Any] | None = None
    """Arguments of custom logits processors (`--logits-processors`); API requests pass them as `vllm_xargs`."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_EPSILON

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    def verify(self) -> None:
        """Check all values.

        Raises:
            InvalidRequest: a value is out of bounds.
        """
        repetition = self.repetition_detection.problem() if self.repetition_detection else None
        checks = (
            ("n", 1 <= self.n <= MAX_N, f"must be between 1 and {MAX_N}"),
            ("temperature", 0.0 <= self.temperature <= 100.0, "must be between 0 and 100"),
            ("top_p", 0.0 < self.top_p <= 1.0, "must be in (0, 1]"),
            ("top_k", self.top_k >= -1, "must be -1 or 0 (off) or positive"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "must be between 0 and 1"),
            ("seed", self.seed is None or -(1 << 63) <= self.seed < 1 << 63, "must fit into 64 bits"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "must be between -2 and 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "must be between -2 and 2"),
            ("repetition_penalty", 0.0 < self.repetition_penalty <= 10.0, "must be in (0, 10]"),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "must be at least 1"),
            ("min_tokens", self.min_tokens >= 0, "must not be negative"),
            (
                "min_tokens",
                self.max_tokens is None or self.min_tokens <= self.max_tokens,
                f"must not exceed max_tokens ({self.max_tokens})",
            ),
            ("stop", len(self.stop) <= MAX_STOP_STRINGS, f"takes at most {MAX_STOP_STRINGS} stop strings"),
            ("stop", all(self.stop), "must not contain an empty string"),
            (
                "stop_token_ids",
                len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
                f"takes at most {MAX_STOP_TOKEN_IDS} ids",
            ),
            *self._token_checks(),
            ("logprobs", self.logprobs is None or self.logprobs >= -1, "must be -1 (all) or not negative"),
            (
                "logprob_token_ids",
                len(self.logprob_token_ids or ()) <= MAX_LOGPROB_TOKEN_IDS,
                f"takes at most {MAX_LOGPROB_TOKEN_IDS} ids",
            ),
            (
                "prompt_logprobs",
                self.prompt_logprobs is None or self.prompt_logprobs >= -1,
                "must be -1 (all) or not negative",
            ),
            (
                "extra_args",
                _is_small(self.extra_args),
                f"takes {MAX_EXTRA_ARGS} JSON values, {MAX_EXTRA_ARGS_BYTES} bytes in all",
            ),
            ("repetition_detection", repetition is None, repetition or ""),
            ("stream_interval", self.stream_interval >= 1, "at least 1"),
            (
                "thinking_token_budget",
                self.thinking_token_budget is None or self.thinking_token_budget >= 0,
                "must not be negative",
            ),
        )
        for name, is_good, message in checks:
            if not is_good:
                raise InvalidRequest(f"{name} {message}", param=name)

    def _token_checks(self) -> tuple[tuple[str, bool, str], ...]:
        bias, allowed = self.logit_bias or {}, self.allowed_token_ids
        return (
            ("logit_bias", len(bias) <= MAX_LOGIT_BIAS, f"takes at most {MAX_LOGIT_BIAS} tokens"),
            (
                "logit_bias",
                all(math.isfinite(value) and -100.0 <= value <= 100.0 for value in bias.values()),
                "values must be between -100 and 100",
            ),
            ("allowed_token_ids", allowed is None or len(allowed) > 0, "must not be empty"),
            ("bad_words", len(self.bad_words) <= MAX_BAD_WORDS, f"takes at most {MAX_BAD_WORDS} words"),
            (
                "bad_words",
                all(0 < len(word) <= MAX_BAD_WORD_CHARS for word in self.bad_words),
                f"must have 1 to {MAX_BAD_WORD_CHARS} characters each",
            ),
        )

    def token_ids(self) -> dict[str, tuple[int, ...]]:
        """Return every field that holds token ids, to be checked against the vocabulary."""
        return {
            "stop_token_ids": self.stop_token_ids,
            "allowed_token_ids": self.allowed_token_ids or (),
            "logit_bias": tuple(self.logit_bias or ()),
            "logprob_token_ids": self.logprob_token_ids or (),
        }

    def replace(self, **changes: Any) -> SamplingParams:
        return structs.replace(self, **changes)


def _is_small(extra_args: dict[str, Any] | None) -> bool:
    if not extra_args:
        return True
    try:
        size = len(msgspec.msgpack.encode(extra_args))  # the encoding in which they are sent to the core
    except (TypeError, ValueError, OverflowError, RecursionError):
        return False
    return len(extra_args) <= MAX_EXTRA_ARGS and size <= MAX_EXTRA_ARGS_BYTES


class PoolingParams(
    Struct,
    kw_only=True,
    frozen=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    metaclass=ValidatedStructMeta,
):
    """Pooling parameters of one request.

    Raises (from the constructor):
        InvalidRequest: unknown name, wrong type or value out of bounds.
    """

    task: Literal["embed", "classify", "token_embed", "token_classify"] | None = None
    """What to compute; None: what the model is served for. The last two: of each token, instead of the whole prompt."""
    pooling_type: Literal["last", "mean", "cls"] | None = None
    """Which hidden states become the vector; None: those that the model was trained for."""
    use_activation: bool | None = None
    """Whether embeddings are scaled to length 1, and scores become probabilities; None: as the model says."""
    normalize: bool | None = None
    """Older name of `use_activation`, which wins."""
    dimensions: int | None = None
    """Keep this many leading elements, before normalising; for models trained for it (Matryoshka, arXiv 2205.13147)."""
    second_text: int | None = None
    """Index of the first token of a pair's second text, for encoders that tell the two apart. The engine sets it."""

    @property
    def needs_every_token(self) -> bool:
        """Whether a cached prefix cannot be used, because the KV cache does not hold its hidden states."""
        return self.is_token_wise or self.pooling_type in ("mean", "cls")

    @property
    def is_token_wise(self) -> bool:
        """Whether each token has a vector of its own; which ones become the vector does not matter then."""
        return self.task in ("token_embed", "token_classify")

    def replace(self, **changes: Any) -> PoolingParams:
        return msgspec.structs.replace(self, **changes)

    def verify(self) -> None:
        """Check all values.

        Raises:
            InvalidRequest: a value is out of bounds.
        """
        if self.dimensions is not None and self.dimensions < 1:
            raise InvalidRequest("dimensions must be at least 1", param="dimensions")
        if self.second_text is not None and self.second_text < 0:
            raise InvalidRequest("second_text must be at least 0", param="second_text")

    def check_dimensions(self, size: int, is_matryoshka: bool, trained: Sequence[int] = ()) -> None:
        """Check `dimensions` against the model.

        Args:
            size: number of elements of the model's vectors.
            is_matryoshka: whether the model supports shorter vectors.
            trained: lengths that the model was trained for; empty for any length.

        Raises:
            InvalidRequest: the model's vectors cannot be shortened to `dimensions`.
        """
        if self.dimensions is None:
            return
        if not is_matryoshka:
            raise InvalidRequest(
                f"dimensions cannot be set: this model is not trained for shorter vectors (Matryoshka), its own have "
                f"{size} elements",
                param="dimensions",
            )
        if trained and self.dimensions not in trained:
            known = ", ".join(map(str, trained))
            raise InvalidRequest(
                f"dimensions must be one of {known}, not {self.dimensions}", param="dimensions"
            )
        if self.dimensions > size:
            raise InvalidRequest(
                f"dimensions must be between 1 and {size}, not {self.dimensions}", param="dimensions"
            )
