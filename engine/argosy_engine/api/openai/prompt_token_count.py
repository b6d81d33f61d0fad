"""Counts the tokens of a chat's prompt: /v1/messages/count_tokens and /v1/responses/input_tokens."""

from __future__ import annotations

from argosy_engine.api.openai.openai_serving import OpenAIServing
from argosy_engine.frontend.render_pool import stop_if_abandoned
from argosy_protocol.openai import ChatCompletionRequest


async def prompt_token_count(serving: OpenAIServing, chat: ChatCompletionRequest, size: int) -> int:
    """Count the tokens of a chat's prompt, even of one that is too long for the model.

    Args:
        size: of the request's body, in bytes.

    Raises:
        ApiError, EngineError: see `openai_serving.to_api_error`.
    """
    serving.check_model(chat.model)

    def count(chat: ChatCompletionRequest) -> int:
        tokens = serving.llm.renderer.chat_tokens(chat)
        stop_if_abandoned()
        return len(tokens)

    return await serving.render_pool.run(size, count, chat, serving.tenant)
