"""Wire types of /classify and /pooling, and the fields that all endpoints of pooling models have. Names are vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from argosy_protocol.errors import BadRequest
from argosy_protocol.invalid_value import ADVISED
from argosy_protocol.json_limits import decode_body
from argosy_protocol.null_defaults import Nullable
from argosy_protocol.openai import (
    MAX_CHAT_TEMPLATE,
    MAX_MESSAGES,
    MAX_REQUEST_ID,
    MAX_TOKENS,
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    DataParallelRank,
    InternalFields,
    ModelField,
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


class PoolingFields(InternalFields, kw_only=True, omit_defaults=True):
    """Fields of every request to a pooling model."""

    model: ModelField = ""
    user: Annotated[str, Meta(max_length=512)] | None = None
    use_activation: bool | None = None
    """Whether embeddings are scaled to length 1, and scores become probabilities; null: as the model says."""
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] | None = None
    """Tokens that stay of a longer prompt; -1: as many as the model takes."""
    truncation_side: Literal["left", "right"] | None = None
    """Where tokens are cut off; by default right, so that the first ones stay. Special tokens stay on both sides."""
    priority: Nullable[Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)]] = 0
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    request_id: Annotated[str, Meta(max_length=MAX_REQUEST_ID)] | None = None
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


_CLASSIFY = msgspec.json.Decoder(ClassificationRequest)
_POOLING = msgspec.json.Decoder(PoolingRequest)


def decode_classification_request(body: bytes) -> ClassificationRequest:
    """Decode a body of /classify.

    Raises:
        BadRequest: not JSON, wrong types or out of bounds; `param` names the field.
        PayloadTooLarge: it has too many values.
    """
    return decode_body(_CLASSIFY, body)


def decode_pooling_request(body: bytes) -> PoolingRequest:
    """Decode a body of /pooling. Raises as `decode_classification_request`."""
    return decode_body(_POOLING, body)
