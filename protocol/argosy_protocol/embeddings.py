"""Wire types of /v1/embeddings: OpenAI's, with the extra request fields of `PoolingParams`."""

from __future__ import annotations

import base64
import struct
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from argosy_protocol.errors import BadRequest
from argosy_protocol.json_limits import decode_body
from argosy_protocol.null_defaults import Nullable
from argosy_protocol.openai import (
    MAX_REQUEST_ID,
    MAX_TOKENS,
    CompletionRequest,
    DataParallelRank,
    InternalFields,
    ModelField,
    TokenId,
)


class EmbeddingRequest(InternalFields, kw_only=True, omit_defaults=True):
    input: (
        str
        | Annotated[
            list[str | TokenId | Annotated[list[TokenId], Meta(max_length=MAX_TOKENS)]], Meta(min_length=1)
        ]
    )
    """A text, a list of texts, one list of token ids, or a list of such lists."""
    model: ModelField = ""
    encoding_format: Nullable[Literal["float", "base64"]] = "float"
    """`base64` encodes the float32 values, little-endian."""
    dimensions: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    user: Annotated[str, Meta(max_length=512)] | None = None
    pooling_type: Nullable[Literal["last", "mean"]] = "last"
    normalize: Nullable[bool] = True
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    request_id: Annotated[str, Meta(max_length=MAX_REQUEST_ID)] | None = None
    data_parallel_rank: DataParallelRank | None = None
    """As `openai.GenerationRequest` has it."""

    def as_completion(self) -> CompletionRequest:
        """Express the inputs as the prompts of a completion without output, with the same tokens and cache keys.

        Raises:
            BadRequest: texts and token ids are mixed, or there are too many inputs.
        """
        request = CompletionRequest(
            prompt=self.input,
            model=self.model,
            cache_salt=self.cache_salt,
            max_tokens=0,
            data_parallel_rank=self.data_parallel_rank,
        )
        try:
            request.prompts()
        except BadRequest as error:
            error.param = "input"
            raise
        return request


class Embedding(Struct, frozen=True, kw_only=True):
    object: str = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


_decoder = msgspec.json.Decoder(EmbeddingRequest)


def decode_embedding_request(body: bytes) -> EmbeddingRequest:
    """Decode a request body.

    Raises:
        BadRequest: not JSON, wrong types or out of bounds; `param` names the field.
        PayloadTooLarge: it has too many values.
    """
    return decode_body(_decoder, body)


def encode_vector(vector: list[float], encoding_format: Literal["float", "base64"]) -> list[float] | str:
    if encoding_format == "float":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
