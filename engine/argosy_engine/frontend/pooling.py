"""Pooling: prompts and requests of models for vectors and labels, and offline pooling, on which `LLM.encode` is built.

Inputs, or pairs of texts, differ from prompts of generations in two ways: what is cut off of a long text leaves the
tokenizer's special tokens, because models pool one of them, and a classifier reads two texts as one prompt (vLLM:
`CrossEncoderIOProcessor`). To the core each is a prompt with one output token, which is discarded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from argosy_engine.core.proc.core_client import SyncClient
from argosy_engine.errors import InvalidRequest
from argosy_engine.frontend.admission import stop_if_abandoned
from argosy_engine.frontend.input_processor import InputProcessor
from argosy_engine.frontend.media.processor import ChatImages
from argosy_engine.frontend.output_processor import log_failures
from argosy_engine.frontend.prompts import Truncation
from argosy_engine.frontend.renderer import Renderer, TokenizedPrompt
from argosy_engine.messages import EngineCoreRequest, FinishReason
from argosy_engine.model_configs.model_use import PoolingSpec
from argosy_engine.params import PoolingParams, SamplingParams
from argosy_engine.resolved_config import ResolvedConfig
from argosy_protocol.openai import ChatCompletionRequest, ChatMessage, CompletionRequest
from argosy_protocol.pooling import PromptFields, ScoringFields

MAX_TOKEN_NUMBERS = 1 << 21
"""Limit on the numbers of a request, or offline of a prompt, whose tokens all have a vector: some 40 MB of JSON."""

_TINY = 1e-12
"""Smallest length of a vector that a cosine is divided by."""


_KEPT_QUERIES = 2
"""Tokenised queries that are kept: pairs of one query come one after the other."""


@dataclass(slots=True)
class PoolingOutput:
    data: list[Any] = field(default_factory=list)
    """The vector, in float32; of tasks for tokens a list of vectors, one for each token of the prompt."""

    @property
    def embedding(self) -> list[float]:
        return self.data

    @property
    def probs(self) -> list[float]:
        """What a model that classifies has made of the prompt: one number per label."""
        return self.data

    @property
    def score(self) -> float:
        """The number of a pair of texts, or of a prompt for a model with one label.

        Raises:
            ValueError: there are several.
        """
        if len(self.data) != 1:
            raise ValueError(f"{len(self.data)} values are no score")
        return self.data[0]


@dataclass(slots=True)
class PoolingRequestOutput:
    """Result of one prompt. The names are vLLM's."""

    prompt_token_ids: list[int]
    outputs: PoolingOutput
    num_cached_tokens: int = 0
    error: str | None = None
    """Why there is no vector."""


def pooling_request(
    input_processor: InputProcessor,
    prompt: TokenizedPrompt,
    params: PoolingParams,
    *,
    cache_salt: str | None = None,
    priority: int = 0,
    tenant: str = "",
    data_parallel_rank: int | None = None,
) -> EngineCoreRequest:
    """Make the core's request.

    The scheduler treats it as a prompt with one output token, which is discarded.

    Args:
        params: those that are not given are the model's own.

    Raises:
        InvalidRequest: the prompt is empty or too long, the model does something else, or it has no vectors of so many
            dimensions.
    """
    config = input_processor.config
    params = resolved_params(params, config.pooling or PoolingSpec())
    params.check_dimensions(config.embedding_size, config.is_matryoshka, config.matryoshka_dimensions)
    check_token_numbers(config, params, len(prompt.token_ids))
    one_token = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    (request,) = input_processor.process_inputs(
        prompt,
        one_token,
        cache_salt=cache_salt,
        priority=priority,
        tenant=tenant,
        data_parallel_rank=data_parallel_rank,
        asks_max_tokens=False,  # a prompt of full length leaves no room
        is_pooling=True,
    )
    request.pooling_params = params.replace(second_text=prompt.second_text)
    return request


def check_token_numbers(config: ResolvedConfig, params: PoolingParams, num_tokens: int) -> None:
    """Check that prompts with so many tokens do not make too many numbers.

    Args:
        params: resolved.

    Raises:
        InvalidRequest: each token has a vector, and they have more than `MAX_TOKEN_NUMBERS` numbers.
    """
    if not params.is_token_wise:
        return
    spec = config.pooling or PoolingSpec()
    size = spec.num_labels if spec.task == "classify" else params.dimensions or config.embedding_size
    if num_tokens * size > MAX_TOKEN_NUMBERS:
        raise InvalidRequest(
            f"{num_tokens} tokens with {size} numbers each are more than {MAX_TOKEN_NUMBERS} numbers; send at most "
            f"{MAX_TOKEN_NUMBERS // size} tokens at once",
            param="input",
        )


def token_rows(numbers: list[float], num_tokens: int) -> list[list[float]]:
    """Return the vectors of a prompt's tokens, which the core sends one after the other."""
    size = len(numbers) // num_tokens
    return [numbers[start : start + size] for start in range(0, len(numbers), size)]


def resolved_params(params: PoolingParams, spec: PoolingSpec) -> PoolingParams:
    """Return the parameters with the model's own where none are given, as the core wants them.

    Raises:
        InvalidRequest: the model does something else.
    """
    task = params.task or spec.task
    kind = task.removeprefix("token_")
    if kind != spec.task:
        raise InvalidRequest(
            f"task {task} needs a model that is served for it (--convert {kind}); this one is for {spec.task}",
            param="task",
        )
    if kind != "embed" and params.dimensions is not None:
        raise InvalidRequest("dimensions are of embeddings; this model classifies", param="dimensions")
    asked = params.use_activation if params.use_activation is not None else params.normalize
    return params.replace(
        task=task,
        pooling_type=params.pooling_type or spec.pooling_type,
        use_activation=spec.use_activation if asked is None else asked,
        normalize=None,
        dimensions=params.dimensions or spec.dimensions,
    )


def encode(
    client: SyncClient,
    input_processor: InputProcessor,
    prompts: Sequence[TokenizedPrompt],
    params: PoolingParams,
    on_done: Callable[[int], None],
) -> list[PoolingRequestOutput]:
    """Compute vectors of the prompts, batched, in the order given.

    Args:
        on_done: called with a prompt's token count when its vector is computed.

    Raises:
        InvalidRequest: as `pooling_request`; no prompt has run then.
        EngineError: the core could not run a prompt.
    """
    requests = [pooling_request(input_processor, prompt, params) for prompt in prompts]
    results = [PoolingRequestOutput(prompt.token_ids, PoolingOutput()) for prompt in prompts]
    live = {request.request_id: result for request, result in zip(requests, results, strict=True)}
    try:
        for request in requests:
            client.add_request(request)
        while live:
            for out in client.step().outputs:
                result = live.pop(out.request_id, None)
                if result is None:
                    continue  # of another call
                if out.finish_reason is FinishReason.ERROR or out.pooling_output is None:
                    result.error = out.error or "the engine could not run this prompt"
                else:
                    result.outputs.data = out.pooling_output
                    if params.is_token_wise:
                        result.outputs.data = token_rows(out.pooling_output, len(result.prompt_token_ids))
                if out.prefill_stats is not None:
                    result.num_cached_tokens = out.prefill_stats.num_cached_tokens
                on_done(len(result.prompt_token_ids))
    finally:
        # After an error or Ctrl-C no request of this call may remain in the core.
        client.abort_requests(list(live))
    log_failures([result.error for result in results])
    return results


def cosines(queries: Sequence[list[float]], documents: Sequence[list[float]]) -> list[float]:
    """Return the cosine of each document's vector with its query's.

    Args:
        queries: one for all documents, or one for each.
    """
    first, second = np.asarray(queries, np.float32), np.asarray(documents, np.float32)
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    found: list[float] = ((first * second).sum(axis=1) / np.maximum(lengths, _TINY)).tolist()
    return found


def check_scores(config: ResolvedConfig) -> None:
    """
    Raises:
        InvalidRequest: the model does not score pairs of texts.
    """
    if config.pooling is None:
        raise InvalidRequest(
            f"{config.model_name} generates; scores need a model that embeds or classifies, or this one started with "
            "--runner pooling"
        )
    if config.pooling.task == "classify" and config.pooling.num_labels != 1:
        raise InvalidRequest(
            f"scores need a model with one label, and {config.model_name} has {config.pooling.num_labels}; use "
            "/classify"
        )


def joined_scores(query: PoolingRequestOutput, document: PoolingRequestOutput) -> PoolingRequestOutput:
    """Return the result of a pair of texts that were embedded."""
    error = query.error or document.error
    score = [] if error else cosines([query.outputs.data], [document.outputs.data])
    return PoolingRequestOutput(
        query.prompt_token_ids + document.prompt_token_ids,
        PoolingOutput(score),
        query.num_cached_tokens + document.num_cached_tokens,
        error,
    )


def render_inputs(
    renderer: Renderer, request: PromptFields, images: ChatImages | None = None
) -> list[TokenizedPrompt]:
    """Tokenise the inputs of a request.

    Args:
        images: of its messages.

    Raises:
        InvalidRequest: an input is too long, has a token id beyond the vocabulary, or is not text, or the chat template
            rejects the messages.
    """
    if request.messages is not None:
        return [renderer.render_chat(request.as_chat(), images)]
    return _completion(
        renderer, request.as_completion(), adds_special=request.add_special_tokens is not False
    )


def render_texts(renderer: Renderer, request: ScoringFields) -> tuple[list[TokenizedPrompt], int]:
    """Tokenise queries and documents one by one, for a model that embeds; return them and the number of queries.

    Raises:
        InvalidRequest: a text is too long.
    """
    queries, documents = _limited_texts(renderer, request)
    completion = request.completion_of([*queries, *documents])
    return _completion(renderer, completion, adds_special=True), len(queries)


def render_pairs(renderer: Renderer, request: ScoringFields) -> list[TokenizedPrompt]:
    """Tokenise each query with its document, for a model that classifies.

    Raises:
        InvalidRequest: a pair is too long, or the chat template rejects it.
    """
    queries, documents = _limited_texts(renderer, request)
    if len(queries) == 1:
        queries *= len(documents)
    spec = renderer.config.pooling or PoolingSpec()
    make: Callable[[str, str], TokenizedPrompt]
    if renderer.config.request_defaults.chat_template is not None:
        make = _TemplatedPairs(renderer, request)
    elif spec.has_separate_texts:
        make = _SeparatePairs(renderer, request)
    else:

        def make(query: str, document: str) -> TokenizedPrompt:
            completion = request.completion_of(query + document)
            return _completion(renderer, completion, adds_special=True)[0]

    prompts = []
    for query, document in zip(queries, documents, strict=True):
        stop_if_abandoned()
        prompts.append(make(query, document))
    return prompts


def _completion(
    renderer: Renderer, request: CompletionRequest, *, adds_special: bool
) -> list[TokenizedPrompt]:
    prompts = request.prompts()
    truncation = renderer.truncation_of(request)
    special = renderer.tokenizer.special_tokens_of_text
    is_plain = not any(special) if adds_special else False
    if not isinstance(prompts[0], str) or is_plain or (adds_special and truncation is None):
        return renderer.render_completion(request)
    around = special if adds_special else [[], []]
    return [
        _joined(renderer, [_encoded(renderer, text, truncation)], around, truncation)
        for text in prompts
        if isinstance(text, str)
    ]


class _TemplatedPairs:
    """Pairs that a chat template joins, as messages of the roles `query` and `document`."""

    def __init__(self, renderer: Renderer, request: ScoringFields) -> None:
        self._renderer = renderer
        self._request = request
        self._arguments = request.template_arguments()
        self._special = renderer.tokenizer.special_tokens_of_text

    def __call__(self, query: str, document: str) -> TokenizedPrompt:
        limit = self._request.truncate_prompt_tokens
        before, after = self._special
        if limit is not None and limit > 0:
            limit = max(limit - len(before) - len(after), 1)
        chat = ChatCompletionRequest(
            messages=[
                ChatMessage(role="query", content=query),
                ChatMessage(role="document", content=document),
            ],
            model=self._request.model,
            max_tokens=0,
            cache_salt=self._request.cache_salt,
            truncate_prompt_tokens=limit,
            truncation_side=self._request.cut_side,
            add_generation_prompt=False,
            chat_template_kwargs=self._arguments,
        )
        prompt = self._renderer.render_chat(chat)
        if not before and not after:
            return prompt
        token_ids = [*before, *prompt.token_ids, *after]
        self._renderer.check_length(len(token_ids))
        return TokenizedPrompt(token_ids, [], is_truncated=prompt.is_truncated)


class _SeparatePairs:
    """Pairs whose texts are tokenised one by one, and joined by the tokenizer's special tokens."""

    def __init__(self, renderer: Renderer, request: ScoringFields) -> None:
        self._renderer = renderer
        self._truncation = renderer.truncation_of(request.completion_of(""))
        self._special = renderer.tokenizer.special_tokens_of_pair
        self._query = lru_cache(_KEPT_QUERIES)(self._encoded)

    def _encoded(self, text: str) -> list[int]:
        return _encoded(self._renderer, text, self._truncation)

    def __call__(self, query: str, document: str) -> TokenizedPrompt:
        texts = [self._query(query), self._encoded(document)]
        prompt = _joined(self._renderer, texts, self._special, self._truncation)
        return prompt if self._renderer.tokenizer.types_second_text else prompt._replace(second_text=None)


def _encoded(renderer: Renderer, text: str, truncation: Truncation | None) -> list[int]:
    """Tokenise a text without special tokens, as much of it as can stay."""
    if truncation is not None:
        text = truncation.trimmed(text, renderer.config.max_model_len * renderer.tokenizer.max_token_chars)
    return renderer.encode(text, add_special_tokens=False, is_truncated=truncation is not None).ids


def _joined(
    renderer: Renderer,
    texts: Sequence[list[int]],
    special: Sequence[list[int]],
    truncation: Truncation | None,
) -> TokenizedPrompt:
    """Join texts with the special tokens before, between and after them; what is cut off is of the texts.

    Of two texts the result says where the second begins.
    """
    whole = list(special[0])
    for token_ids, after in zip(texts, special[1:], strict=True):
        whole += token_ids
        whole += after
    second = len(special[0]) + len(texts[0]) + len(special[1]) if len(texts) == 2 else None
    if truncation is None or len(whole) <= truncation.num_tokens:
        renderer.check_length(len(whole))
        return TokenizedPrompt(whole, [], second_text=second)
    room = truncation.num_tokens - sum(map(len, special))
    if room < 1:
        if second is not None and not truncation.keeps_start:
            second = max(second - (len(whole) - truncation.num_tokens), 0)
        return TokenizedPrompt(truncation.kept(whole), [], is_truncated=True, second_text=second)
    left = room
    kept = []
    for token_ids in texts if truncation.keeps_start else reversed(texts):
        some = truncation._replace(num_tokens=left).kept(token_ids)
        left -= len(some)
        kept.append(some)
    return _joined(renderer, kept if truncation.keeps_start else kept[::-1], special, None)._replace(
        is_truncated=True
    )


def _limited_texts(renderer: Renderer, request: ScoringFields) -> tuple[list[str], list[str]]:
    queries, documents = request.queries_and_documents()
    return (
        _limited(renderer, queries, request.max_tokens_per_query, "max_tokens_per_query"),
        _limited(renderer, documents, request.max_tokens_per_doc, "max_tokens_per_doc"),
    )


def _limited(renderer: Renderer, texts: list[str], num_tokens: int, param: str) -> list[str]:
    """Return the beginnings of texts that have at most so many tokens; 0: the whole texts."""
    if not num_tokens:
        return texts
    if num_tokens >= renderer.config.max_model_len:
        raise InvalidRequest(
            f"{param} must be below this model's context length {renderer.config.max_model_len}; it is {num_tokens}",
            param=param,
        )
    limited = []
    for text in texts:
        text = text[: num_tokens * renderer.tokenizer.max_token_chars]
        encoded = renderer.encode(text, add_special_tokens=False, is_truncated=True)
        limited.append(text if len(encoded) <= num_tokens else text[: encoded.ends[num_tokens - 1]])
    return limited
