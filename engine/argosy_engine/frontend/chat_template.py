"""ChatTemplate: renders messages to prompt text with the model's own Jinja template, in a sandbox.

The template comes from the model directory or a flag, never from a request (CVE-2025-61620) unless the engine was
started with `--trust-request-chat-template`: a request may set variables that the template declares, and no others
reach it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.meta

from argosy_engine.errors import ConfigError, InvalidRequest
from argosy_engine.frontend.bounded_template import (
    MODEL_LIMITS,
    REQUEST_LIMITS,
    BoundedEnvironment,
    LimitExceeded,
    TemplateLimits,
    limited,
)
from argosy_engine.frontend.generation_tag import GenerationTag
from argosy_engine.frontend.guarded_template import GuardedEnvironment
from argosy_engine.frontend.render_pool import Abandoned
from argosy_engine.frontend.template_roles import FUNCTION_CALL_ID, TemplateRoles
from argosy_engine.model_configs.model_config import read_json
from argosy_engine.parsers.parser_registry import has_reasoning
from argosy_engine.request_defaults import RequestDefaults
from argosy_protocol.chat_history import is_replayed, newest_message, replayed_text
from argosy_protocol.errors import ApiError
from argosy_protocol.json_limits import parse_text
from argosy_protocol.openai import ChatCompletionRequest, ChatMessage
from argosy_protocol.response_tools import CUSTOM_ARGUMENT

_RESERVED = {
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "bos_token",
    "eos_token",
}


_END_OF_MESSAGE = "\U0010efff "
"""Appended to a final message that is to be continued, to find its end in the rendered text. A template that trims
messages removes the space."""


_PROBE = "argosyprobe"
_PROBE_PARTS = [{"type": "text", "text": _PROBE}]
"""Content that tells whether a template renders texts or parts."""
_NO_DEFAULTS = RequestDefaults()


class _TemplateRaised(Exception):
    """Raised by `raise_exception` in a template that rejects the messages."""


class _Arguments(dict[str, Any]):
    """Arguments of a tool call: an object for templates that want one, and its JSON text for those that put it between
    other texts, as DeepSeek's do."""

    def __str__(self) -> str:
        return _tojson(self)

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


class _TextArguments(_Arguments):
    """Arguments that are no JSON object, such as those of a call that `max_tokens` cut off: an empty object for
    templates that want one, and the text as the model wrote it for those that put it between other texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def __str__(self) -> str:
        return self._text


class ChatTemplate:
    """
    Args:
        special_tokens: variables such as `bos_token`, with their texts.
        default_arguments: template arguments over which those of a request win.
        is_of_request: whether it came with a request, so that it may be hostile.
        limits: of one rendering; by default those of its kind.

    Raises (from the constructor):
        ConfigError: the template does not compile.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        default_arguments: Mapping[str, Any] | None = None,
        *,
        is_of_request: bool = False,
        limits: TemplateLimits | None = None,
    ) -> None:
        environment = GuardedEnvironment() if is_of_request else BoundedEnvironment()
        self._limits = limits or (REQUEST_LIMITS if is_of_request else MODEL_LIMITS)
        self._is_of_request = is_of_request
        environment.add_filter("tojson", _tojson)
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        environment.add_extension(GenerationTag)
        try:
            tree = environment.parse(source)
            self.variables = jinja2.meta.find_undeclared_variables(tree) - _RESERVED
            self._template = environment.compiled(tree)
        except (
            jinja2.TemplateError,
            SyntaxError,
            ValueError,
            RecursionError,
            MemoryError,  # of Python's compiler, on an expression of thousands of parentheses
        ) as error:  # of jinja, and of the code that it makes
            raise ConfigError(f"the model's chat template does not compile: {error}") from None
        self.source = source
        self.has_thinking = "enable_thinking" in self.variables or has_reasoning(source)
        """Whether the model may think before it answers."""
        self._special_tokens = dict(special_tokens)
        self._default_arguments = dict(default_arguments or {})
        self._takes_parts: bool | None = None
        """Whether messages have their content as a list of parts, because the template leaves out texts. None: it has
        rendered nothing yet."""
        self._roles = TemplateRoles(self._rendered)

    @classmethod
    def load(
        cls, path: Path, defaults: RequestDefaults = _NO_DEFAULTS, of_request: str | None = None
    ) -> ChatTemplate | None:
        """Read the model's template from chat_template.jinja, tokenizer_config.json or chat_template.json, where older
        checkpoints of models for images have it; None if it has none.

        Args:
            defaults: the flags' template, which replaces it, and template arguments.
            of_request: a request's template, which replaces both.
        """
        config = tokenizer_config(path)
        template_file = path / "chat_template.jinja"
        source = defaults.chat_template if of_request is None else of_request
        if source is None:
            named = _of_named(config.get("chat_template"))
            processor_file = path / "chat_template.json"
            if named is None and processor_file.is_file() and not template_file.is_file():
                named = read_json(processor_file).get("chat_template")
            source = template_file.read_text() if template_file.is_file() else named
        if not isinstance(source, str):
            return None
        return cls(
            source,
            special_tokens(config),
            defaults.chat_template_kwargs,
            is_of_request=of_request is not None,
        )

    def render(self, request: ChatCompletionRequest, through: Callable[[Any], Any] | None = None) -> str:
        """Render the prompt's text.

        Args:
            through: applied to each value before the template gets it.

        With `continue_final_message` it ends with the last message's content, as in transformers.

        Raises:
            InvalidRequest: the template rejects or drops a message, tools or documents, rejects template arguments, or
                does not render a final message that is to be continued.
        """
        if self._takes_parts is None:
            try:
                self._takes_parts = not self._renders_content(_PROBE) and self._renders_content(_PROBE_PARTS)
            except LimitExceeded as error:
                raise self._beyond_limits(error) from None
        is_continued = request.continue_final_message
        if is_continued and request.add_generation_prompt:
            raise InvalidRequest(
                "Cannot set both `continue_final_message` and `add_generation_prompt` to True; set "
                "`add_generation_prompt` to False",
                param="continue_final_message",
            )
        arguments = self._arguments(request)
        tools = request.tools if request.tools and request.tool_choice != "none" else None
        self._roles.check(bool(tools), bool(request.documents), arguments)
        values = {
            **arguments,
            "messages": self._roles.known(
                plain_messages(request.messages),
                has_tools=bool(tools),
                has_documents=bool(request.documents),
                arguments=arguments,
            ),
            "tools": tools,
            "documents": request.documents,
        }
        if through is not None:
            values = {name: through(value) for name, value in values.items()}
        for message in values["messages"]:
            for call in message.get("tool_calls", ()):
                function = call["function"]
                if isinstance(function["arguments"], dict):
                    function["arguments"] = _Arguments(function["arguments"])
                elif isinstance(function["arguments"], str):
                    function["arguments"] = _TextArguments(function["arguments"])
        if is_continued:
            values["messages"][-1]["content"] += _END_OF_MESSAGE
        try:
            text = self._rendered(**values, add_generation_prompt=request.add_generation_prompt)
        except _TemplateRaised as error:
            raise InvalidRequest(str(error), param="messages") from None
        except Abandoned:
            raise
        except LimitExceeded as error:
            raise self._beyond_limits(error) from None
        except Exception as error:  # a template may fail in any way on unexpected values
            raise InvalidRequest(
                f"the chat template cannot render these messages: {error}", "messages"
            ) from None
        return _through_final_message(text) if is_continued else text

    def _arguments(self, request: ChatCompletionRequest) -> dict[str, Any]:
        """Return the values of the variables that the template declares; it has no use for others."""
        asked = dict(request.chat_template_kwargs or {})
        if request.reasoning_effort is not None:
            asked.setdefault("reasoning_effort", request.reasoning_effort)
            asked.setdefault("enable_thinking", request.reasoning_effort != "none")
        defaults = self._default_arguments
        arguments = defaults | {
            name: value for name, value in asked.items() if value is not None or name not in defaults
        }
        return {name: value for name, value in arguments.items() if name in self.variables}

    def _renders_content(self, content: Any) -> bool:
        """Whether the template renders what a user says."""
        values = {"messages": [{"role": "user", "content": content}], "tools": None, "documents": None}
        try:
            return _PROBE in self._rendered(**values, add_generation_prompt=True)
        except (Abandoned, LimitExceeded):
            raise
        except Exception:  # a template may fail in any way
            return False

    def _beyond_limits(self, error: LimitExceeded) -> InvalidRequest:
        param = "chat_template" if self._is_of_request else "messages"
        return InvalidRequest(f"the chat template {error}", param=param)

    def _rendered(self, **values: Any) -> str:
        if self._takes_parts:
            values["messages"] = [
                {**message, "content": [{"type": "text", "text": text}] if text else []}
                for message in values["messages"]
                for text in [message["content"]]
            ]
        with limited(self._limits):
            text: str = self._template.render(**self._special_tokens, **values)
        return text


def tokenizer_config(path: Path) -> dict[str, Any]:
    """Read the model folder's tokenizer_config.json; empty if it has none.

    Raises:
        ConfigError: it cannot be read.
    """
    file = path / "tokenizer_config.json"
    return read_json(file) if file.is_file() else {}


def _of_named(template: Any) -> Any:
    """Return one template for a list of named ones, such as Hermes' and Command R's: as in transformers, `tool_use` for
    requests with tools, and `default` for others."""
    if not isinstance(template, list):
        return template
    named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
    default, with_tools = named.get("default"), named.get("tool_use")
    if not isinstance(default, str) or not isinstance(with_tools, str):
        return default if with_tools is None else with_tools
    # Jinja removes a newline at a template's end, which is no end here.
    with_tools, default = with_tools.removesuffix("\n"), default.removesuffix("\n")
    return f"{{% if tools %}}{with_tools}{{% else %}}{default}{{% endif %}}"


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the special tokens that templates name."""
    special = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            special[name] = text
    return special


def _through_final_message(text: str) -> str:
    """Cut a rendered chat after the content of its final message.

    Raises:
        InvalidRequest: the template did not render that content.
    """
    end = text.rfind(_END_OF_MESSAGE.rstrip())
    if end < 0:
        raise InvalidRequest(
            "the chat template does not render the final message, so that it cannot be continued; leave out "
            "continue_final_message",
            param="continue_final_message",
        )
    return text[:end] if text.startswith(_END_OF_MESSAGE, end) else text[:end].rstrip()


def plain_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Make the dicts that templates expect: text content as a string, tool-call arguments as values.

    Raises:
        InvalidRequest: content is no text, or a call malformed.
    """
    newest = newest_message(messages)
    return [
        _plain_message(message, f"messages[{index}]", is_replayed(message, index, newest))
        for index, message in enumerate(messages)
    ]


def _plain_message(message: ChatMessage, where: str, is_replay: bool) -> dict[str, Any]:
    """Make the dict that templates expect: text content as a string, tool-call arguments as values.

    Arguments that are no JSON object remain text: an engine's own answer has such if it was cut off.
    """
    plain: dict[str, Any] = {"role": message.role, "content": _text_content(message, where, is_replay)}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    reasoning = message.reasoning if message.reasoning is not None else message.reasoning_content
    if reasoning is not None:
        plain["reasoning_content"] = reasoning
    if message.tool_calls:
        plain["tool_calls"] = [
            _plain_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)
        ]
    elif message.function_call:
        call = {"id": FUNCTION_CALL_ID, "type": "function", "function": message.function_call}
        plain["tool_calls"] = [_plain_tool_call(call, f"{where}.function_call", "function_call needs a name")]
    return plain


def _text_content(message: ChatMessage, where: str, is_replay: bool) -> str:
    if not message.content:
        return message.refusal or ""
    if isinstance(message.content, str):
        return message.content
    texts = []
    for index, part in enumerate(message.content):
        at = f"{where}.content[{index}]"
        if part.get("type") != "text":
            if is_replay:
                texts += [note] if (note := replayed_text(part)) is not None else []
                continue
            raise InvalidRequest(
                f"content of type {str(part.get('type'))[:64]!r} is not supported by this model, only text",
                param=at,
            )
        text = part.get("text")
        if not isinstance(text, str):
            raise InvalidRequest(f"{at}.text must be a text", param=f"{at}.text")
        texts.append(text)
    return "\n".join(texts)


def _plain_tool_call(
    call: Mapping[str, Any], where: str, needed: str = "a tool call needs function.name"
) -> dict[str, Any]:
    function, custom = call.get("function"), call.get("custom")
    if function is None and isinstance(custom, dict):  # of a tool whose input is a text
        function = {"name": custom.get("name"), "arguments": {CUSTOM_ARGUMENT: custom.get("input")}}
        call = {name: value for name, value in call.items() if name != "custom"} | {"type": "function"}
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(needed, param=where)
    arguments = function.get("arguments")
    arguments = {} if arguments is None else arguments
    if isinstance(arguments, str):
        with contextlib.suppress(ApiError):
            value = parse_text(arguments or "{}", f"{where}.function.arguments")
            arguments = value if isinstance(value, dict) else arguments
    return {**call, "function": {**function, "arguments": arguments}}


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Format a value as JSON as Hugging Face does: without HTML escaping."""
    if isinstance(value, _TextArguments):
        return str(value)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise _TemplateRaised(message)
