"""/tokenize and /detokenize: convert between text or chats and token ids. Nothing is queued or cached."""

from __future__ import annotations

from argosy_engine.api.openai.openai_serving import OpenAIServing
from argosy_engine.frontend.render_pool import stop_if_abandoned
from argosy_protocol.tokenization import (
    ChatTokenizeRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    TextTokenizeRequest,
    TokenizeResponse,
)


async def tokenize(
    serving: OpenAIServing, request: TextTokenizeRequest | ChatTokenizeRequest, size: int
) -> TokenizeResponse:
    """`size` of the body in bytes.

    Raises:
        ApiError, EngineError: see `openai_serving.to_api_error`.
    """
    serving.check_model(request.model)
    renderer = serving.llm.renderer

    def response(request: TextTokenizeRequest | ChatTokenizeRequest) -> TokenizeResponse:
        if isinstance(request, ChatTokenizeRequest):
            tokens = renderer.chat_tokens(request)
        else:
            tokens = renderer.encode(request.prompt, add_special_tokens=request.add_special_tokens).ids
        stop_if_abandoned()
        return TokenizeResponse(
            count=len(tokens),
            max_model_len=renderer.config.max_model_len,
            tokens=tokens,
            token_strs=renderer.tokenizer.token_strs(tokens) if request.return_token_strs else None,
        )

    return await serving.render_pool.run(size, response, request, serving.tenant)


async def detokenize(serving: OpenAIServing, request: DetokenizeRequest, size: int) -> DetokenizeResponse:
    """`size` of the body in bytes.

    Raises:
        ApiError, EngineError: see `openai_serving.to_api_error`.
    """
    serving.check_model(request.model)
    renderer = serving.llm.renderer

    def text_of(request: DetokenizeRequest) -> str:
        renderer.check_token_ids(request.tokens, param="tokens")
        return renderer.tokenizer.decode(request.tokens, skip_special_tokens=False)

    return DetokenizeResponse(prompt=await serving.render_pool.run(size, text_of, request, serving.tenant))
