"""Wire type of /v1/chat/completions/batch, vLLM's: several chats with the same parameters in one request.

The answer is one chat completion, whose choices are the answers to the chats, in their order.

Owns: which fields a batch takes.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from argosy_protocol.errors import BadRequest
from argosy_protocol.json_limits import decode_body
from argosy_protocol.openai import MAX_CHOICES, MAX_MESSAGES, ChatCompletionRequest, ChatMessage

_Conversation = Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]

_SINGLE = {
    "n": (None, 1),
    "stream": (False,),
    "tools": (None,),
    "use_beam_search": (False,),
    "prompt_logprobs": (None,),
    "resume": (None,),
}
"""Fields of a single chat only -> the values with which a batch takes them."""


class BatchChatCompletionRequest(ChatCompletionRequest, kw_only=True, omit_defaults=True):
    """Body of /v1/chat/completions/batch."""

    messages: Annotated[list[_Conversation], Meta(min_length=1, max_length=MAX_CHOICES)]  # type: ignore[assignment]

    def check_messages(self) -> None:
        for field, neutral in _SINGLE.items():
            if getattr(self, field) not in neutral:
                raise BadRequest(
                    f"{field} is not supported in a batch; use /v1/chat/completions", param=field
                )
        self.chats()

    def chats(self) -> list[ChatCompletionRequest]:
        """Return the chats.

        Raises:
            BadRequest: a message lacks its content.
        """
        shared = {name: getattr(self, name) for name in ChatCompletionRequest.__struct_fields__}
        chats = []
        for index, conversation in enumerate(self.messages):
            try:
                chats.append(ChatCompletionRequest(**{**shared, "messages": conversation}))
            except BadRequest as error:
                given = error.param or ""
                if given.startswith("messages["):
                    error.param = f"messages[{index}]{given.removeprefix('messages')}"
                    error.message = error.message.replace(given, error.param, 1)
                raise
        return chats


_BATCH = msgspec.json.Decoder(BatchChatCompletionRequest)


def decode_batch_request(body: bytes) -> BatchChatCompletionRequest:
    """Decode a body of /v1/chat/completions/batch.

    Raises:
        BadRequest: not JSON, nested too deeply, wrong types or out of bounds; `param` names the field.
        PayloadTooLarge: it has too many values.
    """
    return decode_body(_BATCH, body)
