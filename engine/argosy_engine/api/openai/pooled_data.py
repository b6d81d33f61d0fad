"""/pooling: the vectors of prompts, whatever the model is served for."""

from __future__ import annotations

import time
from collections.abc import Sequence
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
from argosy_engine.frontend.outputs import GenerationOutput
from argosy_engine.frontend.pooled_prompts import render_inputs
from argosy_engine.frontend.pooling import token_rows
from argosy_engine.params.pooling_params import PoolingParams
from argosy_protocol.pooling import PoolingData, PoolingRequest, PoolingResponse


async def pool(
    serving: OpenAIServing, request: PoolingRequest, request_id: str, size: int
) -> PoolingResponse:
    """
    Args:
        size: of the request's body, in bytes.

    Raises:
        ApiError, EngineError: see `openai_serving.to_api_error`.
    """
    name, pooling = serving.check_model(request.model), serving.llm.config.pooling
    if pooling is None:
        raise InvalidRequest(
            f"{name} generates: /pooling needs an engine started with --runner pooling; /v1/embeddings answers"
        )
    if request.task == "plugin":
        raise InvalidRequest(
            f"task {request.task} is not computed; there is: embed, classify, token_embed, token_classify",
            param="task",
        )
    check_encoding(request)
    params = PoolingParams(
        task=request.task, use_activation=request.use_activation, dimensions=request.dimensions
    )
    outputs = await pooled_outputs(serving, partial(render_inputs, request=request), request, params, size)
    return PoolingResponse(
        id=f"pool-{request_id}",
        created=int(time.time()),
        model=name,
        data=await written(
            PoolingData(index=index, data=_encoded(output, request, params))
            for index, output in enumerate(outputs)
        ),
        usage=usage_of(outputs),
    )


def _encoded(
    output: GenerationOutput, request: PoolingRequest, params: PoolingParams
) -> Sequence[float | list[float]] | str:
    """Return a prompt's vector; of tasks for tokens a list of vectors, or the bytes of all in their order."""
    vector = vector_of(output)
    if params.is_token_wise and request.encoding_format == "float":
        return token_rows(vector, output.num_prompt_tokens)
    return encoded_vector(vector, request)
