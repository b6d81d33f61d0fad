"""Wire types of /score and /rerank: vLLM's, which are Jina's and Cohere's for reranking.

Both score pairs of texts. Texts are bounded in number, and pairs in characters, because one query may be paired with
many documents.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from argosy_protocol.errors import BadRequest
from argosy_protocol.json_limits import decode_body
from argosy_protocol.null_defaults import Nullable
from argosy_protocol.openai import MAX_PROMPTS, MAX_TOKENS, CompletionRequest
from argosy_protocol.pooling import PoolingFields, PoolingUsage

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


_SCORE = msgspec.json.Decoder(ScoreRequest)
_RERANK = msgspec.json.Decoder(RerankRequest)


def decode_score_request(body: bytes) -> ScoreRequest:
    """Decode a body of /score.

    Raises:
        BadRequest: not JSON, wrong types or out of bounds; `param` names the field.
        PayloadTooLarge: it has too many values.
    """
    return decode_body(_SCORE, body)


def decode_rerank_request(body: bytes) -> RerankRequest:
    """Decode a body of /rerank. Raises as `decode_score_request`."""
    return decode_body(_RERANK, body)


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
