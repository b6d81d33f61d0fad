"""MistralTokenizer: tekken.json and tokenizer.model.vN, as mistral-common reads them (`--tokenizer-mode mistral`).

Mistral-common encodes texts, chats and fill-in-the-middle prompts: it writes control tokens by itself, so that no text
of a client can become one. Decoding, grammars and stop strings work on the vocabulary as a tokenizer.json
(`checkpoint.tokenizer_files`), as those of all other models do.

Must not be imported where a model has a tokenizer.json: mistral-common takes a second to import.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from typing import Any

import numpy as np
from mistral_common.protocol.fim.request import FIMRequest
from mistral_common.protocol.instruct.request import ChatCompletionRequest as MistralRequest
from mistral_common.tokens.tokenizers.base import TokenizerVersion
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer as _MistralTokenizer

from argosy_engine.checkpoint.tokenizer_files import PreparedTokenizer
from argosy_engine.errors import ConfigError, InvalidRequest
from argosy_engine.frontend.chat_template import plain_messages
from argosy_engine.frontend.tokenizer import Encoded, Tokenizer
from argosy_protocol.openai import ChatCompletionRequest

_ID = re.compile(r"[a-zA-Z0-9]{9}")
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_ROLES = {"developer": "system", "function": "tool"}
_FILL_IN = ("[PREFIX]", "[SUFFIX]")
_MAX_TOLD = 1000
"""Characters of the library's messages that a client gets."""


class _EncodedBytes:
    """Tokens whose bytes, together, are a text.

    Args:
        pieces: bytes of the tokens.
        num_chars: of the text; what the tokens spell before it, such as SentencePiece's first space, does not count.
    """

    def __init__(self, ids: list[int], pieces: Sequence[bytes], num_chars: int) -> None:
        self.ids = ids
        self._pieces = pieces
        self._num_chars = num_chars

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def ends(self) -> list[int]:
        data = np.frombuffer(b"".join(self._pieces), np.uint8)
        # A token that ends within a character ends with it.
        chars = np.concatenate(([0], np.cumsum((data & 0xC0) != 0x80)))
        ends = chars[np.cumsum([len(piece) for piece in self._pieces])] if self._pieces else chars[:0]
        more = max(int(chars[-1]) - self._num_chars, 0)
        return [int(end) for end in np.clip(ends - more, 0, self._num_chars)]


class MistralTokenizer(Tokenizer):
    """
    Args:
        prepared: the decoding tokenizer.json, and the file that mistral-common reads.

    Raises (from the constructor):
        ConfigError: mistral-common cannot read the file.
    """

    def __init__(self, prepared: PreparedTokenizer) -> None:
        super().__init__(prepared.folder)
        file = prepared.mistral_file
        assert file is not None
        try:
            self._mistral = _MistralTokenizer.from_file(file)
        except Exception as error:  # the library raises anything on malformed files
            raise ConfigError(f"mistral-common cannot read {file}: {error}") from None
        self._encoder = self._mistral.instruct_tokenizer.tokenizer
        self._pieces_of_ids: dict[int, bytes] = {}

    @property
    def version(self) -> str:
        """Version of the tokenizer, which tells how it writes chats: v1 to v15."""
        return str(self._mistral.version.value)

    @cached_property
    def adds_special_tokens(self) -> bool:
        return True

    @cached_property
    def special_tokens_of_text(self) -> list[list[int]]:
        return [[self._encoder.bos_id], []]

    @cached_property
    def special_tokens_of_pair(self) -> list[list[int]]:
        return [[self._encoder.bos_id], [], []]

    @property
    def fills_in(self) -> bool:
        """Whether it has tokens for a text between a prompt and a suffix."""
        return all(token in self.control_tokens for token in _FILL_IN)

    def encode(self, text: str, *, add_special_tokens: bool, cuts: Sequence[int] = ()) -> Encoded:
        text.encode()  # the library would replace lone surrogates
        parts = [text[start:end] for start, end in zip((0, *cuts), (*cuts, len(text)), strict=True)]
        try:
            ids = [id_ for part in parts for id_ in self._encoder.encode(part, bos=False, eos=False)]
        except ValueError as error:  # of a regular expression, on a million spaces
            raise InvalidRequest(
                f"the text cannot be tokenised: {str(error)[:_MAX_TOLD]}", "prompt"
            ) from None
        pieces = self._pieces_of(ids)
        if add_special_tokens:
            ids, pieces = [self._encoder.bos_id, *ids], [b"", *pieces]
        return _EncodedBytes(ids, pieces, len(text))

    def encode_chat(self, request: ChatCompletionRequest, defaults: Mapping[str, Any]) -> tuple[str, Encoded]:
        """Render a chat, and return its text, with control tokens, and its tokens.

        Args:
            defaults: `--default-chat-template-kwargs`, of which `reasoning_effort` counts.

        Raises:
            InvalidRequest: mistral-common rejects it, or it has a field that only a chat template can render.
        """
        if request.chat_template is not None:
            raise InvalidRequest(
                "chat_template is refused: mistral-common writes the chats of this model", "chat_template"
            )
        if request.documents:
            raise InvalidRequest(
                "documents are refused: chats of this model have no place for them", "documents"
            )
        if request.continue_final_message and request.messages[-1].role != "assistant":
            raise InvalidRequest(
                "continue_final_message needs a final message of the assistant", "continue_final_message"
            )
        tools = request.tools if request.tools and request.tool_choice != "none" else None
        messages = self._messages(request)
        try:
            asked = MistralRequest.from_openai(
                messages,
                [_tool(tool) for tool in tools] if tools else None,
                bool(request.continue_final_message),
                **self._settings(request, defaults),
            )
            ids = [int(id_) for id_ in self._mistral.encode_chat_completion(asked).tokens]
        except InvalidRequest:
            raise
        except Exception as error:  # the library raises ValueErrors, AssertionErrors and its own
            raise InvalidRequest(
                f"mistral-common cannot render these messages: {' '.join(str(error).split())[:_MAX_TOLD]}",
                "messages",
            ) from None
        pieces = self._pieces_of(ids)
        text = b"".join(pieces).decode("utf-8", "replace")
        return text, _EncodedBytes(ids, pieces, len(text))

    def encode_fill_in(self, prefix: str, suffix: str) -> list[int]:
        """Return the tokens of a prompt after which the model writes what stands between two texts.

        Raises:
            UnicodeEncodeError: a text has lone surrogates.
            InvalidRequest: the library rejects it.
        """
        for text in (prefix, suffix):
            text.encode()
        try:
            request = FIMRequest(prompt=prefix, suffix=suffix)
            return [int(id_) for id_ in self._mistral.encode_fim(request).tokens]
        except Exception as error:
            raise InvalidRequest(f"mistral-common rejects it: {str(error)[:_MAX_TOLD]}", "suffix") from None

    def _pieces_of(self, ids: Sequence[int]) -> list[bytes]:
        known = self._pieces_of_ids
        for id_ in set(ids).difference(known):
            known[id_] = self.token_bytes(id_)
        return [known[id_] for id_ in ids]

    def _settings(self, request: ChatCompletionRequest, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the library writes into the prompt besides messages and tools, as far as this version has it."""
        if not self._mistral.version.supports_model_settings:
            return {}
        asked = dict(defaults) | dict(request.chat_template_kwargs or {})
        effort = request.reasoning_effort or asked.get("reasoning_effort")
        if effort is None and asked.get("enable_thinking") is False:
            effort = "none"
        settings: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
        builder = self._encoder.model_settings_builder
        if builder is not None and builder.json_schema is not None and request.response_format is not None:
            settings["response_format"] = request.response_format
        return settings

    def _messages(self, request: ChatCompletionRequest) -> list[dict[str, Any]]:
        """Return the messages in OpenAI's form, with ids of calls that this version accepts."""
        has_thoughts = "[THINK]" in self.control_tokens
        unanswered: list[str] = []
        made: list[dict[str, Any]] = []
        for number, plain in enumerate(plain_messages(request.messages)):
            role = _ROLES.get(plain["role"], plain["role"])
            message: dict[str, Any] = {"role": role, "content": plain["content"]}
            try:
                for text in (plain["content"], plain.get("reasoning_content") or ""):
                    text.encode()
            except UnicodeEncodeError:
                raise InvalidRequest(
                    f"messages[{number}] contains lone surrogates, which are not text", "messages"
                ) from None
            if role == "assistant":
                if has_thoughts and plain.get("reasoning_content"):
                    message["reasoning_content"] = plain["reasoning_content"]
                calls = [
                    self._call(call, f"{number}.{index}")
                    for index, call in enumerate(plain.get("tool_calls", ()))
                ]
                unanswered = [call["id"] for call in calls]
                if calls:
                    message |= {"tool_calls": calls, "content": plain["content"] or None}
            elif role == "tool":
                given = plain.get("tool_call_id")
                id_ = self._id(given) if given else next(iter(unanswered), None)
                unanswered = [each for each in unanswered if each != id_]
                message["tool_call_id"] = id_
                name = plain.get("name")
                if name is not None and _NAME.fullmatch(name):
                    message["name"] = name
            made.append(message)
        return made

    def _call(self, call: Mapping[str, Any], number: str) -> dict[str, Any]:
        function, given = call["function"], call.get("id")
        arguments = function["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {
            "id": self._id(given if isinstance(given, str) and given else number),
            "type": "function",
            "function": {"name": function["name"], "arguments": arguments},
        }

    def _id(self, given: str) -> str:
        """Return an id of a call as this version accepts it: until v13 nine letters and digits."""
        if _ID.fullmatch(given) or self._mistral.version >= TokenizerVersion.v13:
            return given
        return sha256(given.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest("a tool needs a function", "tools")
    made = {"name": function.get("name"), "parameters": function.get("parameters") or {}}
    if function.get("description") is not None:
        made["description"] = function["description"]
    if function.get("strict") is not None:
        made["strict"] = function["strict"]
    return {"type": "function", "function": made}
