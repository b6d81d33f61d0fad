"""/v1/embeddings: turns prompts into vectors."""

from __future__ import annotations

import time
from functools import partial

from argosy_engine.api.openai.openai_serving import OpenAIServing
from argosy_engine.api.openai.pooled_outputs import (
    check_encoding,
    encoded_vector,
    pooled_outputs,
    usage_of,
    vector_of,
    written,
)
from argosy_engine.errors import InvalidRequest
from argosy_engine.frontend.pooled_prompts import render_inputs
from argosy_engine.params.pooling_params import PoolingParams
from argosy_protocol.embeddings import Embedding, EmbeddingRequest, EmbeddingResponse


async def embed(
    serving: OpenAIServing, request: EmbeddingRequest, request_id: str, size: int
) -> EmbeddingResponse:
    """
    Args:
        size: of the request's body, in bytes.

    Raises:
        ApiError, EngineError: see `openai_serving.to_api_error`.
    """
    name, pooling = serving.check_model(request.model), serving.llm.config.pooling
    if pooling is not None and pooling.task != "embed":
        raise InvalidRequest(
            f"{name} is served to classify: use /classify, or start the engine with --convert embed for embeddings"
        )
    check_encoding(request)
    params = PoolingParams(
        pooling_type=request.pooling_type,
        use_activation=request.use_activation,
        normalize=request.normalize,
        dimensions=request.dimensions,
    )
    outputs = await pooled_outputs(serving, partial(render_inputs, request=request), request, params, size)
    return EmbeddingResponse(
        id=f"embd-{request_id}",
        created=int(time.time()),
        model=name,
        data=await written(
            Embedding(index=index, embedding=encoded_vector(vector_of(output), request))
            for index, output in enumerate(outputs)
        ),
        usage=usage_of(outputs),
    )
