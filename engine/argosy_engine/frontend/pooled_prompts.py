"""Pooled prompts: turns the inputs of a pooling request, or its pairs of texts, into tokens.

They differ from prompts of generations in two ways: what is cut off of a long text leaves the tokenizer's special
tokens, because models pool one of them, and a classifier reads two texts as one prompt. Design: vLLM's
`CrossEncoderIOProcessor`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from argosy_engine.errors import InvalidRequest
from argosy_engine.frontend.prompt_truncation import Truncation
from argosy_engine.frontend.render_pool import stop_if_abandoned
from argosy_engine.frontend.renderer import Renderer, TokenizedPrompt
from argosy_engine.model_configs.pooling_spec import PoolingSpec
from argosy_protocol.openai import ChatCompletionRequest, ChatMessage, CompletionRequest
from argosy_protocol.pooling import PromptFields
from argosy_protocol.scoring import ScoringFields

_KEPT_QUERIES = 2
"""Tokenised queries that are kept: pairs of one query come one after the other."""


def render_inputs(renderer: Renderer, request: PromptFields) -> list[TokenizedPrompt]:
    """Tokenise the inputs of a request.

    Raises:
        InvalidRequest: an input is too long, has a token id beyond the vocabulary, or is not text, or the chat template
            rejects the messages.
    """
    if request.messages is not None:
        return [renderer.render_chat(request.as_chat())]
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
