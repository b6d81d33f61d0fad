"""OpenAI wire types, with vLLM's extra request fields, as msgspec structs.

Router and engine decode the same bytes with the same decoder, so they cannot disagree about a request. Decoding is
strict but for numbers and booleans written as texts (`n: "1"`) and booleans as 0 and 1, as in vLLM; every field has a
bound, unknown fields are ignored as OpenAI's servers do.
A field appears here once the engine honours it, or to be refused where ignoring it would change the answer
(`unsupported`).

Also here are two of vLLM's APIs that take a chat: /v1/chat/completions/batch, several chats with the same parameters,
answered by one chat completion whose choices are the answers in their order; and /tokenize and /detokenize.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from argosy_protocol.errors import BadRequest
from argosy_protocol.headers import REQUEST_ID_FORM
from argosy_protocol.json_limits import MAX_MODEL_NAME, Nullable, NullDefaults, decode_body

ALLOWED_TOOLS = "allowed_tools"
"""The type of such a choice."""


def function_name(tool: object) -> object:
    """The name of a tool as chats describe it; None if it has none."""
    function = tool.get("function") if isinstance(tool, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def allowed(
    tools: Sequence[dict[str, Any]], mode: object, names: Sequence[object], where: str
) -> tuple[str, list[dict[str, Any]]]:
    """Return the remaining choice, and the tools that it allows.

    Args:
        tools: the request's, as chats describe them.
        mode: as the client sent it.
        names: the values that the client sent as names.
        where: the field with `mode` and `tools`, for errors.

    Raises:
        BadRequest: the mode is neither `auto` nor `required`, or a name is none of the tools'.
    """
    if mode not in ("auto", "required"):
        raise BadRequest(f"{where}.mode must be auto or required", param=f"{where}.mode")
    named_by = [function_name(tool) for tool in tools]
    allowed_names = {name for name in names if isinstance(name, str)}
    known = {name for name in named_by if isinstance(name, str)}
    if not names or not all(isinstance(name, str) for name in names) or not allowed_names <= known:
        raise BadRequest(f"{where}.tools must name some of tools", param=f"{where}.tools")
    return str(mode), [
        tool
        for tool, name in zip(tools, named_by, strict=True)
        if isinstance(name, str) and name in allowed_names
    ]


MAX_MESSAGES = 4096
MAX_PROMPTS = 1024
MAX_STOP_STRINGS = 4
"""OpenAI's bound, and vLLM's."""
MAX_TOKENS = 1 << 24
MAX_LOGPROBS = 1 << 20
"""Upper bound for any engine; each has its own `--max-logprobs`."""
MAX_LOGPROB_TOKEN_IDS = 128
"""vLLM's bound."""
MAX_CHOICES = 1024
"""Choices of one call: prompts times n."""
MAX_REQUEST_ID = 128
_REQUEST_ID = re.compile(REQUEST_ID_FORM)
MAX_CHAT_TEMPLATE = 1 << 16
"""In characters; the longest templates of models have half as many. As many take seconds to compile."""

ModelField = Nullable[Annotated[str, Meta(max_length=MAX_MODEL_NAME)]]
Probability = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_TOKENS)]
LogprobCount = Annotated[int, Meta(ge=-1, le=MAX_LOGPROBS)]
"""-1 stands for the whole vocabulary, as in vLLM."""
ExtraArg = str | int | float | bool | list[str | int | float | bool]
DataParallelRank = Annotated[int, Meta(ge=0, le=1 << 20)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
StopStrings = Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)]


_ROLES_WITH_CONTENT = frozenset(("user", "system", "developer"))


class StreamOptions(NullDefaults, kw_only=True, omit_defaults=True):
    include_usage: Nullable[bool] = False
    continuous_usage_stats: Nullable[bool] = False
    include_obfuscation: Nullable[bool] = False
    """See `unsupported`."""


class RepetitionDetection(Struct, kw_only=True, omit_defaults=True):
    """End the generation once it ends in one pattern of tokens, `min_count` times in a row (vLLM's field)."""

    max_pattern_size: Annotated[int, Meta(ge=0, le=1024)] = 0
    min_pattern_size: Annotated[int, Meta(ge=0, le=1024)] = 0
    min_count: Annotated[int, Meta(ge=0, le=1024)] = 0


class ChatMessage(Struct, kw_only=True, omit_defaults=True):
    """One message. Content parts and tool calls stay plain JSON values, as new kinds appear faster than schemas."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | Annotated[list[dict[str, Any]], Meta(max_length=1024)] | None = None
    name: Annotated[str, Meta(max_length=256)] | None = None
    tool_calls: Annotated[list[dict[str, Any]], Meta(max_length=256)] | None = None
    tool_call_id: Annotated[str, Meta(max_length=256)] | None = None
    function_call: dict[str, Any] | None = None
    """The call of an assistant of OpenAI's older models, in a history."""
    refusal: str | None = None
    """What an assistant has said instead of `content`."""
    reasoning: str | None = None
    reasoning_content: str | None = None


class ResumedChoice(Struct, kw_only=True, omit_defaults=True):
    """The part of one choice that was delivered before."""

    token_ids: TokenIds = []
    finished: bool = False
    """Whether its last chunk was delivered, so that it only counts in the usage."""


class Resume(Struct, kw_only=True, omit_defaults=True):
    """The part of a stream that an earlier attempt has delivered; the answer continues after it."""

    created: Annotated[int, Meta(ge=0, le=1 << 40)]
    """Unix time in the chunks of the earlier attempt."""
    choices: Annotated[list[ResumedChoice], Meta(min_length=1, max_length=MAX_CHOICES)]


class InternalFields(NullDefaults, kw_only=True, omit_defaults=True):
    """Fields by which other engines and routers direct each other: transfers of KV caches, ranks, adapters by path,
    sessions, code. Any value but null is refused, so that no client can use them. `DataParallelRank` is one more, which
    our engine honours and the router refuses."""

    kv_transfer_params: None = None
    ec_transfer_params: None = None
    bootstrap_host: None = None
    bootstrap_port: None = None
    bootstrap_room: None = None
    routed_dp_rank: None = None
    disagg_prefill_dp_rank: None = None
    lora_path: None = None
    session_params: None = None
    custom_logit_processor: None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        asked = getattr(self, "request_id", None)
        if asked and _REQUEST_ID.fullmatch(asked) is None:  # an empty one asks for none
            raise BadRequest(
                f"request_id must be at most {MAX_REQUEST_ID} letters (a-z, A-Z), digits, '.', '_' or '-'; it is "
                f"{asked!r}",
                param="request_id",
            )


class CallFields(InternalFields, kw_only=True, omit_defaults=True):
    """Fields of every request to a model, for whose sake it is made and in which order."""

    model: ModelField = ""
    user: Annotated[str, Meta(max_length=512)] | None = None
    request_id: Annotated[str, Meta(max_length=MAX_REQUEST_ID)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    priority: Nullable[Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)]] = 0
    """vLLM's field: lower values go first, if the engine schedules by priority."""


class SamplingFields(CallFields, kw_only=True, omit_defaults=True):
    """Fields of every request for generation but Anthropic's. `None` stands for the model's generation config."""

    stream: Nullable[bool] = False
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 20)] | None = None
    min_p: Probability | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: StopString | StopStrings | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    include_stop_str_in_output: Nullable[bool] = False
    ignore_eos: Nullable[bool] = False
    skip_special_tokens: Nullable[bool] = True
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] | None = None
    logit_bias: (
        Annotated[dict[TokenId, Annotated[float, Meta(ge=-100.0, le=100.0)]], Meta(max_length=1024)] | None
    ) = None
    prompt_cache_key: Annotated[str, Meta(max_length=512)] | None = None
    """OpenAI's field: requests with the same key should meet the same cache. The router's session policy uses it."""
    session_id: Annotated[str, Meta(max_length=512)] | None = None
    """The same, by the name that agent frameworks use."""
    structured_outputs: Any = None
    """vLLM's field; the engine checks its content."""
    vllm_xargs: Annotated[dict[str, ExtraArg], Meta(max_length=64)] | None = None
    """vLLM's field: arguments for custom logits processors."""


class GenerationRequest(SamplingFields, kw_only=True, omit_defaults=True):
    """Fields shared by chat completions and completions. `None` stands for the model's generation config."""

    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    spaces_between_special_tokens: Nullable[bool] = True
    return_token_ids: Nullable[bool] = False
    """vLLM's field: every chunk carries `token_ids` for its choice, and the first response `prompt_token_ids`."""
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None
    bad_words: (
        Annotated[list[Annotated[str, Meta(min_length=1, max_length=1024)]], Meta(max_length=128)] | None
    ) = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=1 << 20)] | None = None
    repetition_detection: RepetitionDetection | None = None
    prompt_logprobs: LogprobCount | None = None
    logprob_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_LOGPROB_TOKEN_IDS)] | None = None
    """vLLM's field: log probabilities are those of these tokens, besides the sampled one, instead of the best ones."""
    return_tokens_as_token_ids: bool | None = None
    """vLLM's field: `logprobs` show tokens as `token_id:ID`, so that tokens without text can be distinguished."""
    data_parallel_rank: DataParallelRank | None = None
    """vLLM's: engine core that computes the request, by default the one with the least work. The router refuses it."""
    resume: Resume | None = None
    """Sent by the router only; refused without its internal header."""
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] | None = None
    """vLLM's field: tokens of the prompt that stay if it is longer; -1: as many as the model's context has room for."""
    truncation_side: Literal["left", "right"] | None = None
    """vLLM's field: where tokens are cut off; by default left, so that the last ones stay."""
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] | None = None
    """vLLM's field: tokens of reasoning after which its end is forced; -1: no limit."""
    add_special_tokens: bool | None = None
    """vLLM's field: whether the tokenizer's own tokens, such as BOS, are put around the prompt; by default around
    texts of completions, and not around chats, whose templates write them."""
    watermarking: bool | None = None
    """vLLM's field, without effect: there are no watermarks to turn off."""
    stream_interval: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None = None
    """vLLM's field: tokens of a choice in each event of a stream, but the first and the last. The engine's
    `--stream-interval` is the least."""
    response_format: dict[str, Any] | None = None
    # Decoded only to be refused if their value would change the answer (see `unsupported`).
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_whitespace_pattern: Any = None
    structural_tag: Any = None
    logits_processors: Any = None
    prompt_embeds: Any = None
    use_beam_search: Nullable[bool] = False
    """vLLM's field: return the `n` most probable answers instead of sampled ones."""
    length_penalty: Nullable[Annotated[float, Meta(ge=-10.0, le=10.0)]] = 1.0
    """vLLM's field: beams are ranked by their log probability divided by their length to this power."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options needs stream to be true", param="stream_options")


class ChatCompletionRequest(GenerationRequest, kw_only=True, omit_defaults=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=512)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    documents: Annotated[list[dict[str, Any]], Meta(max_length=1024)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: Nullable[bool] = True
    """vLLM's field: false keeps the reasoning out of the answer. The model reasons all the same."""
    add_generation_prompt: Nullable[bool] = True
    continue_final_message: Nullable[bool] = False
    echo: Nullable[bool] = False
    """vLLM's field: the answer begins with the last message, if it is the assistant's."""
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None
    chat_template: Annotated[str, Meta(max_length=MAX_CHAT_TEMPLATE)] | None = None
    """vLLM's field: the template of this request, for engines that trust their clients."""
    mm_processor_kwargs: Annotated[dict[str, Any], Meta(max_length=64)] | None = None
    """vLLM's field: arguments for the model's image processor, for engines that trust their clients."""
    media_io_kwargs: Annotated[dict[str, Any], Meta(max_length=16)] | None = None
    """vLLM's field: the colour behind the transparent pixels of images."""
    return_prompt_text: bool | None = None
    """vLLM's field: the answer, or the first chunk of a stream, has the rendered prompt as `prompt_text`."""
    # See `unsupported`.
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    web_search_options: Any = None
    audio: Any = None
    moderation: Any = None
    verbosity: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_messages()
        if self.tools:
            if isinstance(self.tool_choice, dict) and self.tool_choice.get("type") == ALLOWED_TOOLS:
                self.tool_choice, self.tools = _allowed(self.tool_choice, self.tools)
            return
        if self.tools is not None:
            raise BadRequest("tools must not be an empty list; leave it out", param="tools")
        if self.tool_choice not in (None, "none"):
            raise BadRequest("tool_choice needs tools", param="tool_choice")

    def check_messages(self) -> None:
        """
        Raises:
            BadRequest: a message lacks its content.
        """
        for index, message in enumerate(self.messages):
            if message.content is None and message.role in _ROLES_WITH_CONTENT:
                where = f"messages[{index}].content"
                raise BadRequest(f"{where} is required of the role {message.role}", param=where)


def _allowed(choice: dict[str, Any], tools: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    given, where = choice.get(ALLOWED_TOOLS), f"tool_choice.{ALLOWED_TOOLS}"
    if not isinstance(given, dict):
        raise BadRequest(f"{where} must be an object with mode and tools", param=where)
    named = given.get("tools")
    names = [function_name(tool) for tool in named] if isinstance(named, list) else []
    return allowed(tools, given.get("mode"), names, where)


class CompletionRequest(GenerationRequest, kw_only=True, omit_defaults=True):
    prompt: (
        str
        | Annotated[
            list[str | TokenId | Annotated[list[TokenId], Meta(max_length=MAX_TOKENS)]], Meta(min_length=1)
        ]
    )
    """A text, a list of texts, one list of token ids, or a list of such lists."""
    echo: Nullable[bool] = False
    suffix: str | None = None
    """What follows the text to generate, for models that fill in the middle."""
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None
    """The beam width, if it should exceed `n`."""
    logprobs: LogprobCount | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None
    """Zero only with `echo`: the prompt is scored, and nothing is generated."""

    @property
    def is_scoring(self) -> bool:
        """Whether the prompt is returned without a continuation."""
        return self.echo and self.max_tokens == 0

    def prompts(self) -> list[str | list[int]]:
        """The prompts of the batch, each a text or token ids.

        Raises:
            BadRequest: kinds are mixed, a prompt is empty, or there are more than `MAX_PROMPTS`.
        """
        if isinstance(self.prompt, str):
            return [self.prompt]
        kinds = {type(item) for item in self.prompt}
        if kinds == {int}:
            return [self.prompt]  # type: ignore[list-item]
        if len(kinds) != 1:
            raise BadRequest("prompt mixes texts and token ids", param="prompt")
        if len(self.prompt) > MAX_PROMPTS:
            raise BadRequest(f"prompt has more than {MAX_PROMPTS} entries", param="prompt")
        return list(self.prompt)  # type: ignore[arg-type]


NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "length_penalty": (1.0,),
    "prompt_embeds": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "web_search_options": (),
    "audio": (),
    "moderation": (),
    "verbosity": ("medium",),
    "logits_processors": ([],),
    "guided_whitespace_pattern": (),
}
"""Fields that our engine does not implement -> the values that have no effect."""
BEAM_SEARCH_FIELDS = ("best_of", "length_penalty")
"""Fields of them that it implements in a beam search only."""


def unsupported(request: GenerationRequest) -> str | None:
    """Name of the first field that asks for something that our engine cannot do, or None."""
    for field, neutral in NEUTRAL_VALUES.items():
        value = getattr(request, field, None)
        is_done = request.use_beam_search and field in BEAM_SEARCH_FIELDS
        if value is not None and value not in neutral and not is_done:
            return field
    options = request.stream_options
    return (
        "stream_options.include_obfuscation" if options is not None and options.include_obfuscation else None
    )


Endpoint = Literal["chat/completions", "completions"]

_CHAT = msgspec.json.Decoder(ChatCompletionRequest)
_COMPLETION = msgspec.json.Decoder(CompletionRequest)


class _Prompt(Struct):
    prompt: Any = None


_PROMPT = msgspec.json.Decoder(_Prompt)
NO_PROMPT = "Either prompt or prompt_embeds must be provided and non-empty; only prompt is supported here"
"""vLLM's text, and what it means here."""


def decode_request(endpoint: Endpoint, body: bytes) -> ChatCompletionRequest | CompletionRequest:
    """Decode a request body, as `decode_body` does."""
    if endpoint == "chat/completions":
        return decode_body(_CHAT, body)
    try:
        return decode_body(_COMPLETION, body)
    except BadRequest as error:
        if error.param == "prompt" and _lacks_prompt(body):
            raise BadRequest(NO_PROMPT, param="prompt") from None
        raise


def _lacks_prompt(body: bytes) -> bool:
    try:
        return _PROMPT.decode(body).prompt in (None, [])
    except (msgspec.MsgspecError, RecursionError):  # the prompt is nested too deeply
        return False


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int = 0


class CompletionTokensDetails(Struct, frozen=True):
    reasoning_tokens: int = 0


class Usage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None
    """Of chats only."""


class ResponseMessage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Assistant message of a response. `omit_defaults` drops absent fields; those without a default are always sent."""

    role: str
    content: str | None
    refusal: str | None
    annotations: tuple[()]
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()


class FunctionCall(Struct, frozen=True, kw_only=True, omit_defaults=True):
    arguments: str
    name: str | None = None


class ToolCall(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tool call, complete or (with `index`) a delta of one."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] | None = None
    index: int | None = None


class Delta(Struct, frozen=True, kw_only=True, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()


class TopLogprob(Struct, frozen=True, kw_only=True):
    """A candidate token for a position. `bytes` are the token's own, even if it is only part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(TopLogprob, frozen=True, kw_only=True):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True, kw_only=True):
    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(Struct, frozen=True, kw_only=True):
    """Parallel lists, one entry per token; `None` for the first token of an echoed prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(Struct, frozen=True, kw_only=True):
    """vLLM's entry of `prompt_logprobs`, by token id."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class ChatChoice(Struct, frozen=True, kw_only=True):
    index: int
    message: ResponseMessage
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | None = None


class ChatChunkChoice(Struct, frozen=True, kw_only=True):
    index: int
    delta: Delta
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | None = None


class CompletionChoice(Struct, frozen=True, kw_only=True):
    index: int
    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: CompletionLogprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ChatCompletion(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | None = None


class ChatCompletionChunk(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | UnsetType = UNSET


class Completion(Struct, frozen=True, kw_only=True):
    """`text_completion`; the same struct serves whole responses and chunks, as in OpenAI's API."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    system_fingerprint: str | None = None


class ModelCard(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "argosy"
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class ModelList(Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[ModelCard]


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


decode_batch_request = partial(decode_body, msgspec.json.Decoder(BatchChatCompletionRequest))


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
_TOKENIZE_CHAT = msgspec.json.Decoder(ChatTokenizeRequest)
decode_detokenize_request = partial(decode_body, msgspec.json.Decoder(DetokenizeRequest))


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
    return decode_body(_TOKENIZE_CHAT, body) if has_chat else decode_body(_TEXT, body)


def only_model(body: bytes) -> ChatCompletionRequest:
    """Reduce either request to what routing needs: an empty chat with its model, as nothing is computed or cached.

    Raises:
        BadRequest, PayloadTooLarge: as `decode_tokenize_request`.
    """
    return ChatCompletionRequest(messages=[], model=decode_body(_FORM, body).model, max_tokens=0)
