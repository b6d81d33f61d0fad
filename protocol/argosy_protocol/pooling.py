"""Wire types of the endpoints of pooling models: /v1/embeddings, OpenAI's with the extra fields of vLLM; /classify,
/pooling, /score and /rerank, whose names are vLLM's; and the fields that all of them have."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from argosy_protocol.errors import BadRequest
from argosy_protocol.json_limits import ADVISED, Nullable, decode_body
from argosy_protocol.openai import (
    MAX_CHAT_TEMPLATE,
    MAX_MESSAGES,
    MAX_PROMPTS,
    MAX_TOKENS,
    CallFields,
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    DataParallelRank,
    TokenId,
)

MAX_DIMENSIONS = 1 << 20
Texts = (
    str
    | Annotated[
        list[str | TokenId | Annotated[list[TokenId], Meta(max_length=MAX_TOKENS)]], Meta(min_length=1)
    ]
)
Dimensions = Annotated[int, Meta(ge=1, le=MAX_DIMENSIONS)]
EncodingFormat = Annotated[
    Literal["float", "base64", "bytes", "bytes_only"], Meta(extra={ADVISED: ("float", "base64")})
]
"""The last two are vLLM's, and refused by our engine."""
EmbedDType = Annotated[
    Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"],
    Meta(extra={ADVISED: ("float32", "float16", "bfloat16")}),
]
"""The last two are vLLM's, and refused by our engine."""
Endianness = Literal["native", "little", "big"]


_OLDER_NAMES = ("softmax", "activation")
"""vLLM's former names of `use_activation`, where numbers of classes are computed."""


class PoolingFields(CallFields, kw_only=True, omit_defaults=True):
    """Fields of every request to a pooling model."""

    use_activation: bool | None = None
    """Whether embeddings are scaled to length 1, and scores become probabilities; null: as the model says."""
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] | None = None
    """Tokens that stay of a longer prompt; -1: as many as the model takes."""
    truncation_side: Literal["left", "right"] | None = None
    """Where tokens are cut off; by default right, so that the first ones stay. Special tokens stay on both sides."""
    data_parallel_rank: DataParallelRank | None = None
    """As `openai.GenerationRequest` has it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in _OLDER_NAMES:
            if self.use_activation is None:
                self.use_activation = getattr(self, name, None)

    def place_of(self, prompt: int) -> str:
        """Return the field, or the entry of it, that has the prompt with this index."""
        raise NotImplementedError

    @property
    def cut_side(self) -> Literal["left", "right"] | None:
        """The side to cut, of a request that may be cut."""
        return None if self.truncate_prompt_tokens is None else self.truncation_side or "right"

    def completion_of(self, prompt: Any) -> CompletionRequest:
        """Express prompts as those of a completion without output, with the same tokens and cache keys."""
        return CompletionRequest(
            prompt=prompt,
            model=self.model,
            cache_salt=self.cache_salt,
            priority=self.priority,
            max_tokens=0,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            truncation_side=self.cut_side,
            data_parallel_rank=self.data_parallel_rank,
        )


class PromptFields(PoolingFields, kw_only=True, omit_defaults=True):
    """Fields of requests with prompts: `input`, or one chat."""

    input: Texts | None = None
    """A text, a list of texts, one list of token ids, or a list of such lists."""
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    """vLLM's: a chat, whose prompt the model's chat template makes."""
    add_special_tokens: bool | None = None
    """Whether texts get the tokenizer's special tokens: by default those of `input` do, and chats do not."""
    add_generation_prompt: Nullable[bool] = False
    continue_final_message: Nullable[bool] = False
    chat_template: Annotated[str, Meta(max_length=MAX_CHAT_TEMPLATE)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.input is None and self.messages is None:
            raise BadRequest("the request needs `input`, or a chat in `messages`", param="input")
        if self.input is not None and self.messages is not None:
            raise BadRequest("give `input` or `messages`, not both", param="messages")
        if self.messages is not None and self.add_special_tokens:
            raise BadRequest(
                "add_special_tokens goes with input; a chat gets those that its template writes",
                param="add_special_tokens",
            )

    def place_of(self, prompt: int) -> str:
        if self.messages is not None:
            return "messages"
        is_list = isinstance(self.input, list) and not isinstance(self.input[0], int)
        return f"input[{prompt}]" if is_list else "input"

    def as_completion(self) -> CompletionRequest:
        """Express `input` as the prompts of a completion.

        Raises:
            BadRequest: texts and token ids are mixed, or there are too many inputs.
        """
        request = self.completion_of(self.input)
        try:
            request.prompts()
        except BadRequest as error:
            error.param = "input"
            raise
        return request

    def as_chat(self) -> ChatCompletionRequest:
        """Express `messages` as a chat without output."""
        return ChatCompletionRequest(
            messages=self.messages or [],
            model=self.model,
            cache_salt=self.cache_salt,
            priority=self.priority,
            max_tokens=0,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            truncation_side=self.cut_side,
            data_parallel_rank=self.data_parallel_rank,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template=self.chat_template,
            chat_template_kwargs=self.chat_template_kwargs,
        )

    def as_generation(self) -> CompletionRequest | ChatCompletionRequest:
        """Express the prompts as those of a request without output.

        Raises:
            BadRequest: as `as_completion`.
        """
        return self.as_completion() if self.messages is None else self.as_chat()


class EncodingFields(PromptFields, kw_only=True, omit_defaults=True):
    """Fields that say how numbers are written."""

    encoding_format: Nullable[EncodingFormat] = "float"
    """`base64` encodes the bytes of the numbers."""
    embed_dtype: Nullable[EmbedDType] = "float32"
    """Of `base64`."""
    endianness: Nullable[Endianness] = "native"
    """Of `base64`; `native` is little-endian."""
    dimensions: Dimensions | None = None


class ClassificationRequest(PromptFields, kw_only=True, omit_defaults=True):
    """A request to /classify."""

    activation: bool | None = None
    """Older name of `use_activation`."""
    softmax: bool | None = None
    """The same, older still."""


class PoolingRequest(EncodingFields, kw_only=True, omit_defaults=True):
    """A request to /pooling."""

    task: Literal["embed", "classify", "token_embed", "token_classify", "plugin"] | None = None
    """What to compute; null: what the model is served for. Engines refuse the last one."""
    activation: bool | None = None
    """Older name of `use_activation`."""
    softmax: bool | None = None
    """The same, older still."""


class PoolingUsage(Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class ClassificationData(Struct, frozen=True, kw_only=True):
    index: int
    label: str | None
    """Of the highest of `probs`."""
    probs: list[float]
    num_classes: int


class ClassificationResponse(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[ClassificationData]
    usage: PoolingUsage


class PoolingData(Struct, frozen=True, kw_only=True):
    index: int
    object: str = "pooling"
    data: Sequence[float | list[float]] | str
    """Of tasks for tokens a list of vectors, one for each token."""


class PoolingResponse(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[PoolingData]
    usage: PoolingUsage


decode_classification_request = partial(decode_body, msgspec.json.Decoder(ClassificationRequest))
decode_pooling_request = partial(decode_body, msgspec.json.Decoder(PoolingRequest))


class EmbeddingRequest(EncodingFields, kw_only=True, omit_defaults=True):
    pooling_type: Literal["last", "mean", "cls"] | None = None
    """Which hidden states become the vector; null: those that the model was trained for."""
    normalize: bool | None = None
    """Older name of `use_activation`."""


class Embedding(Struct, frozen=True, kw_only=True):
    object: str = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingResponse(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: PoolingUsage


decode_embedding_request = partial(decode_body, msgspec.json.Decoder(EmbeddingRequest))


def encode_vector(vector: list[float], encoding_format: Literal["float", "base64"]) -> list[float] | str:
    """Return a vector as OpenAI's API writes it: base64 is of float32, little-endian."""
    if encoding_format == "float":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


MAX_PAIR_CHARACTERS = 1 << 25
"""Characters of all pairs of a request."""


class DocumentObject(Struct, kw_only=True, omit_defaults=True):
    """A text as an object: `text` as in Jina's and Cohere's older APIs, or vLLM's `content` of parts."""

    text: str | None = None
    content: Annotated[list[dict[str, Any]], Meta(max_length=1024)] | None = None

    def as_text(self) -> str:
        """Return the text of all parts that are text."""
        if self.text is not None:
            return self.text
        return "".join(part["text"] for part in self.content or () if _is_text(part))

    @property
    def is_text(self) -> bool:
        """Whether nothing but text was given. Our engine reads no other parts."""
        return self.text is not None or (self.content is not None and all(map(_is_text, self.content)))


def _is_text(part: dict[str, Any]) -> bool:
    return part.get("type") == "text" and isinstance(part.get("text"), str)


Document = str | DocumentObject
Documents = Annotated[list[Document], Meta(min_length=1, max_length=MAX_PROMPTS)]
OneOrMore = Document | Documents
TokenLimit = Nullable[Annotated[int, Meta(ge=0, le=MAX_TOKENS)]]


class ScoringFields(PoolingFields, kw_only=True, omit_defaults=True):
    """Fields of both endpoints."""

    max_tokens_per_query: TokenLimit = 0
    """Tokens that stay of a query; 0: all."""
    max_tokens_per_doc: TokenLimit = 0
    """Tokens that stay of a document; 0: all."""
    instruction: str | None = None
    """What counts as relevant, for chat templates that read it; short for `chat_template_kwargs`."""
    chat_template_kwargs: dict[str, Any] | None = None
    activation: bool | None = None
    """Older name of `use_activation`."""
    softmax: bool | None = None
    """The same, older still."""

    def names(self) -> tuple[str, str]:
        """Return the names of the fields that have the texts."""
        raise NotImplementedError

    def given(self) -> tuple[OneOrMore, OneOrMore]:
        """Return queries and documents as they were given."""
        raise NotImplementedError

    def queries_and_documents(self) -> tuple[list[str], list[str]]:
        """Return the texts: one query for all documents, or as many as there are documents."""
        queries, documents = self.given()
        return _texts(queries), _texts(documents)

    def place_of(self, prompt: int) -> str:
        """As of other requests; the prompts are the queries, then the documents."""
        for name, texts in zip(self.names(), self.given(), strict=True):
            number = len(texts) if isinstance(texts, list) else 1
            if prompt < number:
                return f"{name}[{prompt}]" if isinstance(texts, list) else name
            prompt -= number
        raise IndexError(prompt)

    @property
    def is_text(self) -> bool:
        """Whether all queries and documents are texts."""
        return all(
            isinstance(each, str) or each.is_text
            for some in self.given()
            for each in (some if isinstance(some, list) else [some])
        )

    def template_arguments(self) -> dict[str, Any]:
        """Return the arguments of the chat template."""
        given = self.chat_template_kwargs or {}
        return given if self.instruction is None else {"instruction": self.instruction, **given}

    def as_completion(self) -> CompletionRequest:
        """Express the texts as the prompts of a completion, as far as a router needs to know them: a classifier's
        prompts begin with the query, and a model that embeds reads each text alone."""
        queries, documents = self.queries_and_documents()
        return self.completion_of([*queries, *documents])


class ScoreRequest(ScoringFields, kw_only=True, omit_defaults=True):
    """A request to /score. The two texts of the pairs have four pairs of names."""

    queries: OneOrMore | None = None
    documents: OneOrMore | None = None
    items: OneOrMore | None = None
    text_1: OneOrMore | None = None
    text_2: OneOrMore | None = None
    data_1: OneOrMore | None = None
    data_2: OneOrMore | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        first, second = self.names()
        queries, documents = self.queries_and_documents()
        if len(queries) > 1 and len(queries) != len(documents):
            raise BadRequest(
                f"{first} has {len(queries)} texts and {second} {len(documents)}; give one of {first}, or as many as "
                f"of {second}",
                param=first,
            )
        _check_size(queries, documents, second)

    def names(self) -> tuple[str, str]:
        """Return the names of the fields that have the texts.

        Raises:
            BadRequest: none or not one pair of fields has them.
        """
        given = {name for name in _TEXT_FIELDS if getattr(self, name) is not None}
        for first, second in _PAIRS_OF_FIELDS:
            if given == {first, second}:
                return first, second
        forms = ", ".join(f"{first} and {second}" for first, second in _PAIRS_OF_FIELDS)
        missing = next((second for first, second in _PAIRS_OF_FIELDS if given == {first}), "queries")
        raise BadRequest(f"the request needs one of these pairs of fields: {forms}", param=missing)

    def given(self) -> tuple[OneOrMore, OneOrMore]:
        first, second = self.names()
        return getattr(self, first), getattr(self, second)


class RerankRequest(ScoringFields, kw_only=True, omit_defaults=True):
    """A request to /rerank."""

    query: Document
    documents: OneOrMore
    top_n: Nullable[Annotated[int, Meta(ge=0, le=MAX_TOKENS)]] = 0
    """Number of results; 0: all."""
    return_documents: Nullable[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_size(*self.queries_and_documents(), "documents")

    def names(self) -> tuple[str, str]:
        return "query", "documents"

    def given(self) -> tuple[OneOrMore, OneOrMore]:
        return self.query, self.documents


_PAIRS_OF_FIELDS = (
    ("queries", "documents"),
    ("queries", "items"),
    ("text_1", "text_2"),
    ("data_1", "data_2"),
)
_TEXT_FIELDS = tuple(dict.fromkeys(name for pair in _PAIRS_OF_FIELDS for name in pair))


class Score(Struct, frozen=True, kw_only=True):
    index: int
    object: str = "score"
    score: float


class ScoreResponse(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage


class RerankDocument(Struct, frozen=True, kw_only=True):
    text: str


class RerankResult(Struct, frozen=True, kw_only=True, omit_defaults=True):
    index: int
    """Of the document in the request."""
    relevance_score: float
    document: RerankDocument | None = None


class RerankResponse(Struct, frozen=True, kw_only=True):
    id: str
    model: str
    results: list[RerankResult]
    """Best first."""
    usage: PoolingUsage


decode_score_request = partial(decode_body, msgspec.json.Decoder(ScoreRequest))
decode_rerank_request = partial(decode_body, msgspec.json.Decoder(RerankRequest))


def _texts(given: OneOrMore) -> list[str]:
    documents = given if isinstance(given, list) else [given]
    return [each if isinstance(each, str) else each.as_text() for each in documents]


def _check_size(queries: list[str], documents: list[str], param: str) -> None:
    """
    Raises:
        BadRequest: there are too many texts, or pairs are too long together.
    """
    if len(queries) + len(documents) > MAX_PROMPTS:
        raise BadRequest(f"the request has more than {MAX_PROMPTS} texts", param=param)
    repeated = len(documents) // len(queries) * sum(map(len, queries))
    if repeated + sum(map(len, documents)) > MAX_PAIR_CHARACTERS:
        raise BadRequest(
            f"the pairs have more than {MAX_PAIR_CHARACTERS} characters together; split the request",
            param=param,
        )
