"""/v1/chat/completions/batch: answers several chats with one chat completion, which has a choice for each."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from argosy_engine.api.openai.chat_format import ChatFormat
from argosy_engine.api.openai.openai_serving import OpenAIServing
from argosy_engine.api.openai.usage import usage_of
from argosy_engine.frontend.outputs import GenerationOutput
from argosy_engine.frontend.render_pool import stop_if_abandoned
from argosy_engine.frontend.renderer import TokenizedPrompt
from argosy_protocol.chat_batch import BatchChatCompletionRequest
from argosy_protocol.openai import ChatChoice, ChatCompletion


async def chat_batch(
    serving: OpenAIServing, request: BatchChatCompletionRequest, request_id: str, size: int
) -> ChatCompletion:
    """Answer a batch of chats.

    Args:
        size: of the request's body, in bytes.

    Raises:
        ApiError, EngineError: see `openai_serving.to_api_error`.
    """
    model = serving.check_model(request.model)
    renderer, chats = serving.llm.renderer, request.chats()

    def render(_: BatchChatCompletionRequest) -> list[TokenizedPrompt]:
        prompts = []
        for chat in chats:
            stop_if_abandoned()
            prompts.append(renderer.render_chat(chat))
        return prompts

    def formatted(prompts: Sequence[TokenizedPrompt], outputs: Sequence[GenerationOutput]) -> ChatCompletion:
        choices: list[ChatChoice] = []
        num_reasoning_tokens = 0
        for index, (chat, prompt, output) in enumerate(zip(chats, prompts, outputs, strict=True)):
            output.index = 0
            chat_format = ChatFormat(renderer, chat, request_id, model, prompt, 1)
            answer = chat_format.response([output])
            choices.append(msgspec.structs.replace(answer.choices[0], index=index))
            num_reasoning_tokens += chat_format.num_reasoning_tokens
        return msgspec.structs.replace(
            answer,
            choices=choices,
            usage=usage_of(outputs, 1, num_reasoning_tokens),
            prompt_token_ids=None,
            prompt_text=msgspec.UNSET,
        )

    prompts, requests = await serving.prepare(render, request, size)
    outputs = await serving.generate(prompts, requests, request)
    return await asyncio.to_thread(formatted, prompts, outputs)
