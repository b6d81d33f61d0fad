"""Wire types of /tokenize and /detokenize, the same as vLLM's."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from argosy_protocol.errors import BadRequest
from argosy_protocol.json_limits import decode_body
from argosy_protocol.null_defaults import Nullable
from argosy_protocol.openai import (
    MAX_TOKENS,
    ChatCompletionRequest,
    InternalFields,
    ModelField,
    TokenId,
)


class _InternalFields(InternalFields, kw_only=True):
    data_parallel_rank: None = None
    """Nothing is computed that a rank could be chosen for."""


class TextTokenizeRequest(_InternalFields, kw_only=True):
    prompt: str
    model: ModelField = ""
    add_special_tokens: Nullable[bool] = True
    return_token_strs: Nullable[bool] = False


class ChatTokenizeRequest(ChatCompletionRequest, kw_only=True, omit_defaults=True):
    """A chat, of which only the fields that determine the prompt are used."""

    return_token_strs: Nullable[bool] = False


class DetokenizeRequest(_InternalFields, kw_only=True):
    tokens: Annotated[list[TokenId], Meta(max_length=MAX_TOKENS)]
    model: ModelField = ""


class TokenizeResponse(Struct, frozen=True, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None
    """The tokens as they are spelled in the vocabulary."""


class DetokenizeResponse(Struct, frozen=True, kw_only=True):
    prompt: str


class _Form(_InternalFields):
    """Fields that tell which of the two requests it is, and its model."""

    model: ModelField = ""
    prompt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()


_FORM = msgspec.json.Decoder(_Form)
_TEXT = msgspec.json.Decoder(TextTokenizeRequest)
_CHAT = msgspec.json.Decoder(ChatTokenizeRequest)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeRequest)


def decode_tokenize_request(body: bytes) -> TextTokenizeRequest | ChatTokenizeRequest:
    """Decode a body of /tokenize.

    Raises:
        BadRequest: not JSON, wrong types or out of bounds, or not one of a prompt and a chat; `param` names the field.
        PayloadTooLarge: it has too many values.
    """
    form = decode_body(_FORM, body)
    has_prompt, has_chat = (bytes(field) not in (b"", b"null") for field in (form.prompt, form.messages))
    if has_prompt and has_chat:
        raise BadRequest("give `prompt` or `messages`, not both", param="messages")
    if not has_prompt and not has_chat:
        raise BadRequest("the request needs `prompt`, or a chat in `messages`", param="prompt")
    return decode_body(_CHAT, body) if has_chat else decode_body(_TEXT, body)


def decode_detokenize_request(body: bytes) -> DetokenizeRequest:
    """Decode a body of /detokenize.

    Raises:
        BadRequest, PayloadTooLarge: as `decode_tokenize_request`.
    """
    return decode_body(_DETOKENIZE, body)


def only_model(body: bytes) -> ChatCompletionRequest:
    """Reduce either request to what routing needs: an empty chat with its model, as nothing is computed or cached.

    Raises:
        BadRequest, PayloadTooLarge: as `decode_tokenize_request`.
    """
    return ChatCompletionRequest(messages=[], model=decode_body(_FORM, body).model, max_tokens=0)
