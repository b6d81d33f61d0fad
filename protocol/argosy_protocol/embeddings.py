"""Wire types of /v1/embeddings: OpenAI's, with the extra request fields of vLLM."""

from __future__ import annotations

import base64
import struct
from typing import Literal

import msgspec
from msgspec import Struct

from argosy_protocol.json_limits import decode_body
from argosy_protocol.pooling import EncodingFields, PoolingUsage


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


_decoder = msgspec.json.Decoder(EmbeddingRequest)


def decode_embedding_request(body: bytes) -> EmbeddingRequest:
    """Decode a request body.

    Raises:
        BadRequest: not JSON, wrong types or out of bounds; `param` names the field.
        PayloadTooLarge: it has too many values.
    """
    return decode_body(_decoder, body)


def encode_vector(vector: list[float], encoding_format: Literal["float", "base64"]) -> list[float] | str:
    """Return a vector as OpenAI's API writes it: base64 is of float32, little-endian."""
    if encoding_format == "float":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
