"""ChatTemplate: renders messages to prompt text with the model's own Jinja template, in a sandbox.

The template comes from the model directory or a flag, never from a request (CVE-2025-61620) unless the engine was
started with `--trust-request-chat-template`: a request may set variables that the template declares, and no others
reach it.

Many templates skip a message whose role they do not know, and the model answers without having read it. Which roles a
template renders, and whether tools and documents, `TemplateRoles` finds by rendering probes; a request with something
that would be left out is refused. `developer`, by which OpenAI's newer models call what others call `system`, becomes
`system` where a template does not know it, and `function`, the older name of what a tool returns, becomes `tool`.
Invariant: a role counts as dropped only if the template rendered probes of it, and what it made of them did not depend
on their text. A template that fails on a probe may fail on the request, too, and says why.

Images are parts of a message's content, and the template writes what stands for them (`image_form`). For a template
that takes texts only, it is put into the text here, before the message's own, as in vLLM.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

import jinja2
import jinja2.meta

from argosy_engine.errors import ConfigError, InvalidRequest
from argosy_engine.frontend.admission import Abandoned
from argosy_engine.frontend.template_sandbox import (
    MODEL_LIMITS,
    REQUEST_LIMITS,
    BoundedEnvironment,
    GenerationTag,
    GuardedEnvironment,
    LimitExceeded,
    TemplateLimits,
    limited,
)
from argosy_engine.model_configs.model_config import read_json
from argosy_engine.parsers.parser_registry import has_reasoning
from argosy_engine.resolved_config import RequestDefaults
from argosy_protocol.errors import ApiError
from argosy_protocol.json_limits import parse_text
from argosy_protocol.openai import ChatCompletionRequest, ChatMessage
from argosy_protocol.responses_chat import CUSTOM_ARGUMENT
from argosy_protocol.skipped_content import OR_NOTE, is_replayed, newest_message, replayed_text

if TYPE_CHECKING:
    from argosy_engine.frontend.media.processor import ChatImages

Message = dict[str, Any]

FUNCTION_CALL_ID = "function0"
"""Id of a call by OpenAI's older `function_call`, which has none. Mistral's templates want nine letters and digits."""
_MARKS = ("argosyprobe", "Text of Another")
"""Two texts of a probe: they differ in every part, since templates may trim, cut or change what they render."""


def _tools(name: str, text: str) -> Sequence[Mapping[str, Any]]:
    parameters = {"type": "object", "properties": {name: {"type": "string", "description": text}}}
    return ({"type": "function", "function": {"name": name, "description": text, "parameters": parameters}},)


def _documents(name: str, text: str) -> Sequence[Mapping[str, Any]]:
    return ({"title": name, "text": text},)


_TOOLS: Sequence[Mapping[str, Any]] = (
    {
        "type": "function",
        "function": {"name": "f", "description": "c", "parameters": {"type": "object", "properties": {}}},
    },
)
_DOCUMENTS = _documents("d", "e")
_NAMES = (("f", "c"), ("argosy_probe", "Text of Another"))
"""Name and text of what two probes of tools or documents have."""
_SYSTEM: Message = {"role": "system", "content": "s"}
_USER: Message = {"role": "user", "content": "a"}
_ANSWER: Message = {"role": "assistant", "content": "b"}
_CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": {}}},
    ],
}
_FIRST: Sequence[tuple[list[Message], list[Message]]] = (([], [_USER]), ([], []))
_LATER: Sequence[tuple[list[Message], list[Message]]] = (
    ([_USER], []),
    ([_USER, _ANSWER], [_USER]),
    ([_USER, _ANSWER], []),
    ([_USER], [_USER]),
    ([_USER, _CALL], []),
)
"""Messages before and after the probe."""
_KNOWN_ROLES = 256
"""Number of answers kept; clients choose the names of roles."""
MAX_ROLES = 16
"""Roles of one request: each may take as many renderings as there are probes."""
_MAX_VALUE_CHARS = 1024
"""A template argument that is longer as JSON is not given to the probes."""


class _Given(NamedTuple):
    """What a request gives its template besides messages, on which it may depend what becomes of a message."""

    tools: bool
    documents: bool
    arguments: str
    """Template arguments as JSON text."""


class TemplateRoles:
    """Which roles a template renders, and whether tools and documents.

    Args:
        render: renders `messages`, `tools`, `documents` and template arguments, given by name; fails in any way.
    """

    def __init__(self, render: Callable[..., str]) -> None:
        self._render = render
        self._is_dropped = lru_cache(_KNOWN_ROLES)(self._probe)
        self._is_left_out = lru_cache(_KNOWN_ROLES)(self._probe_given)

    def check(self, has_tools: bool, has_documents: bool, arguments: Mapping[str, Any]) -> None:
        """
        Raises:
            InvalidRequest: the template would leave out the tools or the documents.
        """
        given = _given(has_tools, has_documents, arguments)
        for name, is_given, remedy in (
            (
                "tools",
                has_tools,
                "leave them out, or give the engine a template that does, by --chat-template",
            ),
            ("documents", has_documents, "put them into a message"),
        ):
            if is_given and self._is_left_out(name, given):
                raise InvalidRequest(
                    f"{name}: this model's chat template does not render {name}; {remedy}", name
                )

    def known(
        self,
        messages: list[Message],
        *,
        has_tools: bool = False,
        has_documents: bool = False,
        arguments: Mapping[str, Any] | None = None,
    ) -> list[Message]:
        """Return the messages in roles that the template renders.

        Args:
            has_tools: whether the template gets tools with them.
            has_documents: whether it gets documents.
            arguments: values of variables that it declares.

        Raises:
            InvalidRequest: the template would drop a message, or there are too many roles.
        """
        num_roles = len({message["role"] for message in messages})
        if num_roles > MAX_ROLES:
            raise InvalidRequest(f"the messages have {num_roles} roles; at most {MAX_ROLES}", "messages")
        given = _given(has_tools, has_documents, arguments or {})
        return [self._known(message, index, given) for index, message in enumerate(messages)]

    def _known(self, message: Message, index: int, given: _Given) -> Message:
        role: str = message["role"]
        is_first = index == 0
        if role in ("user", "assistant") or not self._is_dropped(role, is_first, given):
            return message
        if role == "developer" and not self._is_dropped("system", is_first, given):
            return {**message, "role": "system"}
        if role == "function" and not self._is_dropped("tool", is_first, given):
            return {**message, "role": "tool", "tool_call_id": FUNCTION_CALL_ID}
        where = f"messages[{index}].role"
        place = "in the first message" if is_first else "after the first message"
        remedy = "use system, user, assistant or tool"
        if not given.tools and not self._is_dropped(role, is_first, given._replace(tools=True)):
            place, remedy = "without tools", "send the tools, and no tool_choice of 'none'"
        raise InvalidRequest(
            f"{where}: this model's chat template does not render the role {role!r} {place}; {remedy}",
            param=where,
        )

    def _probe_given(self, name: str, given: _Given) -> bool:
        """Return whether the template leaves out tools, or documents."""
        values, sample = _values(given), _tools if name == "tools" else _documents
        return self._makes_no_difference(
            [{**values, "messages": messages, name: sample(*names)} for names in _NAMES]
            for messages in ([_USER], [_SYSTEM, _USER], [_USER, _ANSWER, _USER])
        )

    def _probe(self, role: str, is_first: bool, given: _Given) -> bool:
        """Return whether the template leaves out a message of that role."""
        values = _values(given)
        probes = [
            {"role": role, "content": mark, "name": "f", "tool_call_id": "123456789"} for mark in _MARKS
        ]
        return self._makes_no_difference(
            [{**values, "messages": [*before, probe, *after]} for probe in probes]
            for before, after in (_FIRST if is_first else _LATER)
        )

    def _makes_no_difference(self, probes: Iterable[Sequence[Mapping[str, Any]]]) -> bool:
        """Return whether the template renders some of these pairs of values, and the two of each pair alike."""
        is_rendered = False
        for pair in probes:
            with contextlib.suppress(Exception):  # a template may fail in any way
                one, other = (self._render(**values) for values in pair)
                if one != other:
                    return False
                is_rendered = True
        return is_rendered


def _values(given: _Given) -> dict[str, Any]:
    """What a probe renders besides its messages."""
    arguments: dict[str, Any] = json.loads(given.arguments)
    return {
        **arguments,
        "tools": _TOOLS if given.tools else None,
        "documents": _DOCUMENTS if given.documents else None,
    }


def _given(has_tools: bool, has_documents: bool, arguments: Mapping[str, Any]) -> _Given:
    texts = {name: json.dumps(value) for name, value in arguments.items()}
    short = (f"{json.dumps(name)}: {text}" for name, text in texts.items() if len(text) <= _MAX_VALUE_CHARS)
    return _Given(has_tools, has_documents, f"{{{', '.join(sorted(short))}}}")


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


_IMAGE_PART = {"type": "image"}
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
        self.image_form = lru_cache(_KNOWN_ROLES)(self._image_form)
        """Tells of a role and the token that stands for an image whether the template takes images as `parts`, or has
        to get them in the `text`; None if it renders none."""

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

    def render(
        self,
        request: ChatCompletionRequest,
        through: Callable[[Any], Any] | None = None,
        images: ChatImages | None = None,
    ) -> str:
        """Render the prompt's text.

        Args:
            through: applied to each value before the template gets it.
            images: of the messages; each has one placeholder in the text.

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
                plain_messages(request.messages, images),
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
        mark = ""
        if images is not None:
            mark = f"argosyimage{secrets.token_hex(8)}"  # which no client can have written
            self._put_images(values["messages"], images.info.image_token, mark)
        if is_continued:
            last = values["messages"][-1]
            if isinstance(last["content"], str):
                last["content"] += _END_OF_MESSAGE
            else:
                last["content"].append({"type": "text", "text": _END_OF_MESSAGE})
        try:
            text = self._rendered(**values, add_generation_prompt=request.add_generation_prompt)
            if images is not None:
                info = images.info
                text = text.replace(mark, info.image_text)
                if (
                    info.before or info.after
                ):  # every placeholder here is of an image: those of clients are hidden
                    text = text.replace(info.image_token, f"{info.before}{info.image_token}{info.after}")
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

    def _put_images(self, messages: list[Message], token: str, mark: str) -> None:
        """Write a mark into the texts of messages whose images the template does not take as parts."""
        for message in messages:
            content = message["content"]
            if isinstance(content, list) and self.image_form(message["role"], token) == "text":
                texts = [part["text"] for part in content if part["type"] == "text"]
                message["content"] = "\n".join([mark] * (len(content) - len(texts)) + texts)

    def _image_form(self, role: str, token: str) -> Literal["parts", "text"] | None:
        if self._renders_image(role, [_IMAGE_PART, *_PROBE_PARTS], token):
            return "parts"
        if self._renders_image("user", [_IMAGE_PART, *_PROBE_PARTS], token):
            return None  # of other roles only
        return "text" if self._renders_image(role, f"{token}\n{_PROBE}", token) else None

    def _renders_image(self, role: str, content: Any, token: str) -> bool:
        """Whether the template writes a message's image once, and its text."""
        probe = {"role": role, "content": content, "name": "f", "tool_call_id": "123456789"}
        for before, after in (*_FIRST, *_LATER):
            values = {"messages": [*before, probe, *after], "tools": None, "documents": None}
            with contextlib.suppress(Exception):  # a template may fail in any way
                text = self._rendered(**values, add_generation_prompt=not after)
                if text.count(token) == 1 and _PROBE in text:
                    return True
        return False

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
                {**message, "content": _as_parts(message["content"])} for message in values["messages"]
            ]
        with limited(self._limits):
            text: str = self._template.render(**self._special_tokens, **values)
        return text


def _as_parts(content: str | list[Any]) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return content


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


def plain_messages(messages: Sequence[ChatMessage], images: ChatImages | None = None) -> list[dict[str, Any]]:
    """Make the dicts that templates expect: text content as a string, that with images as a list of parts, tool-call
    arguments as values.

    Raises:
        InvalidRequest: content is no text, or a call malformed.
    """
    newest = newest_message(messages)
    return [
        _plain_message(message, f"messages[{index}]", is_replayed(message, index, newest), images)
        for index, message in enumerate(messages)
    ]


def _plain_message(
    message: ChatMessage, where: str, is_replay: bool, images: ChatImages | None
) -> dict[str, Any]:
    """Make the dict that templates expect: text content as a string, tool-call arguments as values.

    Arguments that are no JSON object remain text: an engine's own answer has such if it was cut off.
    """
    plain: dict[str, Any] = {"role": message.role, "content": _content(message, where, is_replay, images)}
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


def _content(
    message: ChatMessage, where: str, is_replay: bool, images: ChatImages | None
) -> str | list[dict[str, Any]]:
    """Return a message's text, its parts joined by newlines, or its parts if there are images among them."""
    if not message.content:
        return message.refusal or ""
    if isinstance(message.content, str):
        return message.content
    texts: list[str] = []
    parts: list[dict[str, Any]] = []
    for index, part in enumerate(message.content):
        at = f"{where}.content[{index}]"
        if part.get("type") != "text":
            if images is not None and images.of(part) is not None:
                parts += [{"type": "text", "text": text} for text in texts]
                parts.append(dict(_IMAGE_PART))
                texts = []
                continue
            if is_replay or part.get(OR_NOTE) is True:
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
    if parts:
        return parts + [{"type": "text", "text": text} for text in texts]
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
