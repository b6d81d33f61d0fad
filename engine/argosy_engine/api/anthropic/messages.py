"""/v1/messages and /v1/messages/count_tokens: answers Messages requests as the chats that they stand for.

The chat (`argosy_protocol.anthropic_chat`) is rendered and generated as any other; only the answer's form is this
package's. Errors about the chat are named by `name_field`, where they become responses.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from argosy_engine.api.anthropic.message_format import MessageFormat
from argosy_engine.api.anthropic.message_stream import MessageEvents, with_id_comments
from argosy_engine.api.openai.choice_stream import MAX_INLINE_TOKENS
from argosy_engine.api.openai.openai_serving import OpenAIServing
from argosy_engine.api.openai.prompt_token_count import prompt_token_count
from argosy_protocol.anthropic import Message, MessagesRequest, TokenCount
from argosy_protocol.openai import ChatCompletionRequest


async def create_message(
    serving: OpenAIServing, chat: ChatCompletionRequest, request_id: str, size: int
) -> Message:
    """Answer with one message.

    Args:
        chat: what the request stands for.
        size: of the request's body, in bytes.

    Raises:
        ApiError, EngineError: see `openai_serving.to_api_error`.
    """
    model, max_tokens = serving.check_model(chat.model), chat.max_tokens
    prompt, requests = await serving.prepare_bounded_chat(chat, size)
    (output,) = await serving.generate([prompt], requests, chat)
    report = serving.tool_report(chat, "other", is_stream=False)
    answer = MessageFormat(serving.llm.renderer, chat, request_id, model, prompt, max_tokens, report)
    if len(output.token_ids) <= MAX_INLINE_TOKENS:
        return answer.message(output)
    return await asyncio.to_thread(answer.message, output)


async def stream_message(
    serving: OpenAIServing,
    chat: ChatCompletionRequest,
    request: MessagesRequest,
    request_id: str,
    size: int,
    *,
    has_id_comments: bool = False,
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a message, those of one output together, without the last line end.

    Args:
        chat: what `request` stands for.
        size: of the request's body, in bytes.
        has_id_comments: the events carry the token ids by which another engine can continue the stream in comments.

    Raises:
        ApiError, EngineError: see `openai_serving.to_api_error`.
    """
    model, max_tokens = serving.check_model(chat.model), chat.max_tokens
    prompt, requests = await serving.prepare_bounded_chat(chat, size)
    report = serving.tool_report(chat, "other", is_stream=True)
    answer = MessageFormat(serving.llm.renderer, chat, request_id, model, prompt, max_tokens, report)
    events = MessageEvents(answer, request.resume)
    async with aclosing(serving.llm.generate(requests, 1, frozenset())) as stream:
        async for outputs in stream:
            for output in outputs:
                if len(output.token_ids) <= MAX_INLINE_TOKENS:
                    added = events.of(output)
                else:
                    added = await asyncio.to_thread(events.of, output)
                if has_id_comments:
                    yield with_id_comments(added, output.token_ids)
                elif added:
                    yield b"\n\n".join(added)


async def count_tokens(serving: OpenAIServing, chat: ChatCompletionRequest, size: int) -> TokenCount:
    """Count the tokens of a chat's prompt, even of one that is too long for the model.

    Args:
        size: of the request's body, in bytes.

    Raises:
        ApiError, EngineError: see `openai_serving.to_api_error`.
    """
    return TokenCount(await prompt_token_count(serving, chat, size))
