"""/tokenize and /detokenize: what a text or a chat is to the model. Nothing is queued or cached."""

from __future__ import annotations

from argosy_engine.api.serving import Serving
from argosy_engine.protocol.tokenization import (
    ChatTokenizeRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    TextTokenizeRequest,
    TokenizeResponse,
)


async def tokenize(
    serving: Serving, request: TextTokenizeRequest | ChatTokenizeRequest, size: int
) -> TokenizeResponse:
    """`size` of the body in bytes.

    Raises:
        ApiError, EngineError: see `serving.to_api_error`.
    """
    serving.check_model(request.model)
    processor = serving.llm.processor

    def tokens_of(request: TextTokenizeRequest | ChatTokenizeRequest) -> list[int]:
        if isinstance(request, ChatTokenizeRequest):
            return processor.chat_tokens(request)
        return processor.encode(request.prompt, add_special_tokens=request.add_special_tokens).ids

    tokens = await serving.off_loop(size, tokens_of, request)
    return TokenizeResponse(
        count=len(tokens),
        max_model_len=processor.config.max_model_len,
        tokens=tokens,
        token_strs=processor.tokenizer.token_strs(tokens) if request.return_token_strs else None,
    )


async def detokenize(serving: Serving, request: DetokenizeRequest, size: int) -> DetokenizeResponse:
    """`size` of the body in bytes.

    Raises:
        ApiError, EngineError: see `serving.to_api_error`.
    """
    serving.check_model(request.model)
    processor = serving.llm.processor

    def text_of(request: DetokenizeRequest) -> str:
        processor.check_token_ids(request.tokens, param="tokens")
        return processor.tokenizer.decode(request.tokens, skip_special_tokens=False)

    return DetokenizeResponse(prompt=await serving.off_loop(size, text_of, request))
