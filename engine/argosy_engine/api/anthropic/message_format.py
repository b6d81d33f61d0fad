"""MessageFormat: formats outputs of the engine as a message of Anthropic's API.

Text is parsed as a chat's, by the chat's own format; this module owns what a message says otherwise: its blocks, the
reason why it ended, and its usage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from argosy_engine.api.openai.chat_format import ChatFormat
from argosy_engine.frontend.outputs import GenerationOutput
from argosy_engine.frontend.renderer import Renderer, TokenizedPrompt
from argosy_protocol.anthropic import (
    Message,
    MessageUsage,
    OutputTokensDetails,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)
from argosy_protocol.json_limits import is_too_deep
from argosy_protocol.openai import ChatCompletionRequest, Delta

SIGNATURE = "unsigned"
"""Signature of thinking blocks. Anthropic's server verifies its own; ours reads every block, and clients refuse to send
one back that has none."""

_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_NO_ARGUMENTS: Final = msgspec.Raw(b"{}")
_NO_DELTA = Delta()


class MessageFormat:
    """
    Args:
        model: the name to answer with.
        max_tokens: as the client asked; `chat` has no more than the prompt leaves room for.
        report_tools: as a `ChatFormat`'s.
    """

    def __init__(
        self,
        renderer: Renderer,
        chat: ChatCompletionRequest,
        request_id: str,
        model: str,
        prompt: TokenizedPrompt,
        max_tokens: int | None,
        report_tools: Callable[[bool], None] | None = None,
    ) -> None:
        self._chat_format = ChatFormat(
            renderer, chat, request_id, model, prompt, 1, report_tools=report_tools
        )
        self._id = f"msg_{request_id}"
        self._model = model
        self._max_tokens = max_tokens or 0

    def delta(self, output: GenerationOutput) -> Delta:
        """Return what an output adds to the message: reasoning, content and calls."""
        choice = self._chat_format.delta(output)
        return _NO_DELTA if choice is None else choice.delta

    def beginning(self, output: GenerationOutput) -> Message:
        """Return the message without content, as a stream begins with it; `output` is the first one."""
        return Message(
            id=self._id, model=self._model, content=[], usage=self.usage(output, num_output_tokens=0)
        )

    def message(self, output: GenerationOutput) -> Message:
        """Format a complete output."""
        answer = self._chat_format.response([output]).choices[0].message
        content: list[TextBlock | ThinkingBlock | ToolUseBlock] = []
        if answer.reasoning:
            content.append(ThinkingBlock(answer.reasoning, SIGNATURE))
        if answer.content:
            content.append(TextBlock(answer.content))
        for call in answer.tool_calls:
            function = call.function
            content.append(ToolUseBlock(call.id or "", function.name or "", _object(function.arguments)))
        stop_reason, stop_sequence = self.stop(output)
        return Message(
            id=self._id,
            model=self._model,
            content=content,
            stop_reason=stop_reason,
            stop_sequence=stop_sequence,
            usage=self.usage(output, output.num_output_tokens),
        )

    def stop(self, output: GenerationOutput) -> tuple[str, str | None]:
        """Return why the message ended with `output`, and the stop sequence that ended it."""
        if output.finish_reason == "length":
            is_asked = output.num_output_tokens >= self._max_tokens
            return ("max_tokens" if is_asked else "model_context_window_exceeded"), None
        if isinstance(output.stop_reason, str):
            return "stop_sequence", output.stop_reason
        return ("tool_use" if self._chat_format.num_calls else "end_turn"), None

    def usage(self, output: GenerationOutput, num_output_tokens: int) -> MessageUsage:
        """Return the usage up to `output`."""
        num_cached = output.num_cached_tokens
        return MessageUsage(
            input_tokens=output.num_prompt_tokens - num_cached,
            cache_read_input_tokens=num_cached,
            output_tokens=num_output_tokens,
            output_tokens_details=OutputTokensDetails(self._chat_format.num_reasoning_tokens),
        )


def _object(arguments: str) -> msgspec.Raw:
    """Return a call's arguments as a JSON object, as the model wrote it; empty if it is none, or nested deeper than a
    request may be."""
    try:
        text = arguments.encode()
        if is_too_deep(text):
            return _NO_ARGUMENTS
        _decode_object(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return _NO_ARGUMENTS
    return msgspec.Raw(text)
