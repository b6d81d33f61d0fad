"""InputProcessor: makes the core's requests from a prompt and parameters (vLLM: `v1/engine/input_processor.py`).

Requests that the core could not run are rejected here, in the API process. It may be called in any thread.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_intdigest

from argosy_engine.errors import InvalidRequest, PromptTooLong, RequestFailed
from argosy_engine.frontend.renderer import Renderer, TokenizedPrompt
from argosy_engine.frontend.request_params import num_logprobs, params_key, to_sampling_params
from argosy_engine.messages.core_messages import EngineCoreRequest
from argosy_engine.params.sampling_params import MAX_BAD_WORDS_TOKENS, SamplingParams
from argosy_engine.request_defaults import sampling_defaults
from argosy_engine.resolved_config import ResolvedConfig
from argosy_engine.sample.logits_processor.interface import LogitsProcessor, load_logits_processors
from argosy_engine.structured.manager import GrammarRequest
from argosy_protocol.openai import ChatCompletionRequest, GenerationRequest

logger = logging.getLogger("argosy.frontend")

_SEED_MASK = (1 << 63) - 1
_KEPT_PARAMS = 256
"""Sampling parameters that are kept. Clients send the same ones with most requests."""


class InputProcessor:
    """
    Raises (from the constructor):
        ConfigError: the model directory lacks a file, or a logits processor cannot be loaded.
    """

    def __init__(self, config: ResolvedConfig) -> None:
        self.config = config
        self.renderer = Renderer(
            config, config.parsers, config.tokenizer, least_output=int(config.pooling is None)
        )
        self._sampling_defaults = sampling_defaults(Path(config.model_path), config.request_defaults)
        self._logits_processors = load_logits_processors(config.logits_processors)
        self._unseeded = itertools.count(1)
        """Numbers of the choices that get a seed from the engine's own sequence."""
        self._numbers = itertools.count()
        """Numbers of the requests of a core with copies, which all have to give a request the same id."""
        self._last_bad_words: tuple[Sequence[str], tuple[tuple[int, ...], ...]] = ((), ())
        """Words tokenised last, which the prompts of a call have in common, and their tokens."""
        self._kept_params: dict[tuple[Any, ...], SamplingParams] = {}
        """Valid parameters by the fields that they were made of (`params_key`), and the number of prompts."""

    def sampling_params(self, request: GenerationRequest, num_prompts: int = 1) -> SamplingParams:
        """Return the request's parameters over the model's generation config (`to_sampling_params`).

        They may be those of other requests, too: copy them to change them.
        """
        key = num_prompts, params_key(request)
        try:
            kept = self._kept_params.get(key)
        except TypeError:  # a list or a mapping is among the fields
            return self._sampling_params(request, num_prompts)
        if kept is None:
            kept = self._sampling_params(request, num_prompts)
            if kept.structured_outputs is not None:
                return kept  # its fields take any JSON value, of which True and 1 are equal
            if len(self._kept_params) >= _KEPT_PARAMS:
                self._kept_params.clear()
            self._kept_params[key] = kept
        return kept

    def _sampling_params(self, request: GenerationRequest, num_prompts: int) -> SamplingParams:
        if (
            isinstance(request, ChatCompletionRequest)
            and request.tools
            and request.tool_choice in (None, "auto")
            and not self.config.parsers.enable_auto_tool_choice
        ):
            raise InvalidRequest(
                '"auto" tool choice requires --enable-auto-tool-choice, which this engine was started without',
                param="tool_choice",
            )
        calls = self.renderer.parsers.tool_parser.call_form
        params = to_sampling_params(request, self._sampling_defaults, self.config, num_prompts, calls)
        kept = self.renderer.parsed_token_ids(request)
        return params.replace(kept_special_token_ids=kept) if kept else params

    def process_inputs(
        self,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
        resume: Sequence[Sequence[int]] = (),
        tenant: str = "",
        data_parallel_rank: int | None = None,
        asks_max_tokens: bool = True,
        is_pooling: bool = False,
    ) -> list[EngineCoreRequest]:
        """Make the core's requests, one per choice, each with an internal id, a bounded `max_tokens` and a seed.

        Args:
            resume: for each choice, the output of an earlier run that it continues.
            tenant: the request's tenant (`headers.TENANT`).
            data_parallel_rank: core that computes them; None: the one with the least work.
            asks_max_tokens: whether `max_tokens` is refused if it exceeds the room that the prompt leaves, rather than
                lowered, as a default is.
            is_pooling: whether nothing is generated.

        Raises:
            PromptTooLong: prompt plus output would exceed the model's context.
            InvalidRequest: the model does not generate, the prompt is empty, a token id is beyond the vocabulary, the
                structured output cannot be enforced, a priority is given to an engine that does not schedule by it, or
                there is no such rank.
        """
        if not is_pooling:
            check_generates(self.config)
        if data_parallel_rank is not None:
            self._check_rank(data_parallel_rank)
        if priority and self.config.scheduling_policy != "priority":
            raise InvalidRequest(
                "priority needs an engine started with --scheduling-policy priority", param="priority"
            )
        params, grammar = self._resolve(prompt, params, asks_max_tokens=asks_max_tokens), None
        if params.structured_outputs is not None:
            grammar = GrammarRequest(params.structured_outputs.spec(), prompt.reasoning)
            params = params.replace(structured_outputs=None)
        requests = []
        for choice in range(params.n):
            seed = self._next_seed() if params.seed is None else (params.seed + choice) & _SEED_MASK
            output = list(resume[choice]) if resume else []
            self.renderer.check_token_ids(output, "resume")
            if len(output) > (params.max_tokens or 0):
                raise InvalidRequest("resume has more tokens than max_tokens", param="resume")
            requests.append(
                EngineCoreRequest(
                    request_id=self._new_id(),
                    prompt_token_ids=prompt.token_ids,
                    # The prompt is the same for all choices, and so are its log probabilities.
                    sampling_params=params.replace(
                        n=1, seed=seed, prompt_logprobs=None if choice else params.prompt_logprobs
                    ),
                    arrival_time=time.time(),
                    cache_salt=cache_salt,
                    priority=priority,
                    chunk_ends=prompt.chunk_ends,
                    resume_token_ids=output,
                    grammar=grammar,
                    tenant=tenant,
                    data_parallel_rank=data_parallel_rank,
                )
            )
        return requests

    def _new_id(self) -> str:
        return f"{next(self._numbers):024x}" if self.config.has_copies else secrets.token_hex(12)

    def _check_rank(self, rank: int) -> None:
        num_ranks = self.config.data_parallel_size
        if not 0 <= rank < num_ranks:
            raise InvalidRequest(
                f"data_parallel_rank {rank} is out of range: this engine has {num_ranks} (--data-parallel-size), "
                "numbered from 0",
                param="data_parallel_rank",
            )

    def _next_seed(self) -> int:
        """Return the seed of a choice without one: the next of the engine's own sequence, if `--seed` is set."""
        if self.config.seed is None:
            return secrets.randbits(63)
        number = next(self._unseeded)
        return xxh3_64_intdigest(number.to_bytes(8, "little"), self.config.seed) & _SEED_MASK

    def _resolve(
        self, prompt: TokenizedPrompt, params: SamplingParams, *, asks_max_tokens: bool
    ) -> SamplingParams:
        """Return the parameters with checked token ids, bad words as tokens and `max_tokens` within the context."""
        count, limit = len(prompt.token_ids), self.config.max_model_len
        if not count:
            raise InvalidRequest("the prompt is empty", param="prompt")
        self.renderer.check_length(count)
        room = limit - count
        max_tokens = room if params.max_tokens is None else params.max_tokens
        if not asks_max_tokens:
            max_tokens = min(max_tokens, room)
        if max_tokens > room:
            raise PromptTooLong(
                f"this model's maximum context length is {limit} tokens: {count} in the prompt and "
                f"{max_tokens} for the output exceed it; ask for at most {room} here",
                param="max_tokens",
            )
        for name, token_ids in params.token_ids().items():
            self.renderer.check_token_ids(token_ids, name)
        check_extra_args(params, self._logits_processors)
        chosen = tuple(dict.fromkeys(params.logprob_token_ids or ())) or None
        return params.replace(
            max_tokens=max_tokens,
            bad_words=(),
            bad_words_token_ids=self._bad_words(params.bad_words),
            thinking_marks=prompt.thinking_marks,
            logprobs=len(chosen) if chosen else num_logprobs("logprobs", params.logprobs, self.config),
            logprob_token_ids=chosen,
            prompt_logprobs=num_logprobs("prompt_logprobs", params.prompt_logprobs, self.config),
        )

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Tokenise each word as at the start of a text, and as after a space if the tokens differ."""
        last_words, last_token_ids = self._last_bad_words
        if words == last_words:
            return last_token_ids
        encode = self.renderer.tokenizer.encode
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            bare, spaced = (
                tuple(encode(prefix + word.lstrip(), add_special_tokens=False).ids) for prefix in ("", " ")
            )
            found[bare] = None
            if spaced[:1] != bare[:1] and len(spaced) == len(bare):
                found[spaced] = None
        token_ids = tuple(ids for ids in found if ids)
        if sum(map(len, token_ids)) > MAX_BAD_WORDS_TOKENS:
            raise InvalidRequest(
                f"bad_words have more than {MAX_BAD_WORDS_TOKENS} tokens together", param="bad_words"
            )
        self._last_bad_words = words, token_ids
        return token_ids


def check_generates(config: ResolvedConfig) -> None:
    """
    Raises:
        InvalidRequest: the model is served for pooling.
    """
    if config.pooling is not None:
        served = "embeddings" if config.pooling.task == "embed" else "classification"
        raise InvalidRequest(
            f"{config.model_name} is served for pooling ({served}) and does not generate; ask a model that generates. "
            "Of a decoder with an output head, --runner generate makes one"
        )


def check_extra_args(params: SamplingParams, logits_processors: Sequence[type[LogitsProcessor]]) -> None:
    """Let the logits processors that a request uses validate it.

    Raises:
        InvalidRequest: one of them rejects it, or it has arguments that none of them uses.
        RequestFailed: one of them failed.
    """
    is_used = False
    for processor in logits_processors:
        try:
            if processor.is_used_by(params):
                is_used = True
                processor.validate_params(params)
        except ValueError as error:
            raise InvalidRequest(str(error), param="vllm_xargs") from None
        except Exception as error:
            logger.exception("logits processor %s cannot validate a request", processor.__qualname__)
            raise RequestFailed(
                f"logits processor {processor.__qualname__} failed on this request"
            ) from error
    if params.extra_args and not is_used:
        raise InvalidRequest(
            f"no logits processor of this engine uses {', '.join(sorted(params.extra_args))[:200]}",
            param="vllm_xargs",
        )
