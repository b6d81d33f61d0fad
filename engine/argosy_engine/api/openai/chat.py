"""/v1/chat/completions: turns chat requests into generations, and their outputs into responses or streams."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from argosy_engine.api.openai.chat_format import ChatFormat
from argosy_engine.api.openai.choice_stream import DirectWriter, Prepared, stream_choices, whole_response
from argosy_engine.api.openai.openai_serving import OpenAIServing
from argosy_engine.frontend.renderer import TokenizedPrompt
from argosy_engine.messages.core_messages import EngineCoreRequest
from argosy_protocol.openai import ChatChunkChoice, ChatCompletion, ChatCompletionChunk, ChatCompletionRequest


async def chat(
    serving: OpenAIServing, request: ChatCompletionRequest, request_id: str, size: int
) -> ChatCompletion:
    """Answer a chat with one response.

    Args:
        size: of the request's body, in bytes.
    """
    model = serving.check_model(request.model)
    prompt, requests = await _prepare(serving, request, size)
    outputs = await serving.generate([prompt], requests, request)
    chat_format = ChatFormat(
        serving.llm.renderer,
        request,
        request_id,
        model,
        prompt,
        len(outputs),
        report_tools=serving.tool_report(request, "chat_completions", is_stream=False),
    )
    return await whole_response(outputs, chat_format)


def chat_stream(
    serving: OpenAIServing,
    request: ChatCompletionRequest,
    request_id: str,
    size: int,
    *,
    resumable: bool = False,
    has_id_comments: bool = False,
    direct: DirectWriter | None = None,
) -> AsyncGenerator[bytes, None]:
    """Answer a chat with the events of a stream of chunks.

    Args:
        size: of the request's body, in bytes.
        resumable: the stream carries the token ids by which another engine can continue it.
        has_id_comments: it carries them in comments, unless the client asks for them in the chunks.
        direct: where events can be written while the stream is waited for.
    """
    has_id_comments = has_id_comments and not request.return_token_ids

    async def prepare() -> Prepared[ChatChunkChoice, ChatCompletionChunk, ChatCompletion]:
        model = serving.check_model(request.model)
        prompt, requests = await _prepare(serving, request, size)
        choice_format = ChatFormat(
            serving.llm.renderer,
            request,
            request_id,
            model,
            prompt,
            request.n or 1,
            with_ids=resumable and not has_id_comments,
            report_tools=serving.tool_report(request, "chat_completions", is_stream=True),
        )
        return Prepared([prompt], requests, choice_format)

    return stream_choices(serving, request, prepare, has_id_comments=has_id_comments, direct=direct)


async def _prepare(
    serving: OpenAIServing, request: ChatCompletionRequest, size: int
) -> tuple[TokenizedPrompt, list[EngineCoreRequest]]:
    render_chat = serving.llm.renderer.render_chat
    (prompt,), requests = await serving.prepare(lambda request: [render_chat(request)], request, size)
    return prompt, requests
