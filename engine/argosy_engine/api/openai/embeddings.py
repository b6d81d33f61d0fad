"""/v1/embeddings: turns prompts into vectors, through the same queue and cache as generations."""

from __future__ import annotations

import time
from contextlib import aclosing

from argosy_engine.api.openai.openai_serving import OpenAIServing
from argosy_engine.frontend.outputs import GenerationOutput
from argosy_engine.frontend.pooling import pooling_request
from argosy_engine.params.pooling_params import PoolingParams
from argosy_protocol.embeddings import (
    Embedding,
    EmbeddingRequest,
    EmbeddingResponse,
    EmbeddingUsage,
    encode_vector,
)


async def embed(
    serving: OpenAIServing, request: EmbeddingRequest, request_id: str, size: int
) -> EmbeddingResponse:
    """
    Args:
        size: of the request's body, in bytes.

    Raises:
        ApiError, EngineError: see `openai_serving.to_api_error`.
    """
    name = serving.check_model(request.model)
    llm = serving.llm
    params = PoolingParams(
        pooling_type=request.pooling_type, normalize=request.normalize, dimensions=request.dimensions
    )
    # The inputs as the prompts of a completion: the same forms, tokens and cache keys.
    prompts = await serving.render_pool.run(
        size, llm.renderer.render_completion, request.as_completion(), serving.tenant
    )
    requests = [
        pooling_request(
            llm.input_processor,
            prompt,
            params,
            cache_salt=request.cache_salt,
            tenant=serving.tenant,
            data_parallel_rank=request.data_parallel_rank,
        )
        for prompt in prompts
    ]
    outputs: list[GenerationOutput | None] = [None] * len(requests)
    async with aclosing(llm.generate(requests)) as results:
        async for batch in results:
            for output in batch:
                outputs[output.index] = output
    done = [output for output in outputs if output is not None and output.embedding is not None]
    assert len(done) == len(requests)
    tokens = sum(output.num_prompt_tokens for output in done)
    return EmbeddingResponse(
        id=f"embd-{request_id}",
        created=int(time.time()),
        model=name,
        data=[
            Embedding(
                index=output.index, embedding=encode_vector(output.embedding or [], request.encoding_format)
            )
            for output in done
        ],
        usage=EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens),
    )
