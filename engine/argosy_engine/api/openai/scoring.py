"""/score and /rerank: how well texts match, by a model that classifies pairs or by the cosines of embeddings."""

from __future__ import annotations

import time
from functools import partial

from argosy_engine.api.openai.openai_serving import OpenAIServing
from argosy_engine.api.openai.pooled_outputs import pooled_outputs, usage_of, vector_of
from argosy_engine.errors import InvalidRequest
from argosy_engine.frontend.pooled_prompts import render_pairs, render_texts
from argosy_engine.frontend.pooling import check_scores, cosines
from argosy_engine.params.pooling_params import PoolingParams
from argosy_protocol.pooling import PoolingUsage
from argosy_protocol.scoring import (
    RerankDocument,
    RerankRequest,
    RerankResponse,
    RerankResult,
    Score,
    ScoreRequest,
    ScoreResponse,
    ScoringFields,
)


async def score(serving: OpenAIServing, request: ScoreRequest, request_id: str, size: int) -> ScoreResponse:
    """
    Args:
        size: of the request's body, in bytes.

    Raises:
        ApiError, EngineError: see `openai_serving.to_api_error`.
    """
    name = serving.check_model(request.model)
    scores, usage = await _scores(serving, request, size)
    return ScoreResponse(
        id=f"score-{request_id}",
        created=int(time.time()),
        model=name,
        data=[Score(index=index, score=value) for index, value in enumerate(scores)],
        usage=usage,
    )


async def rerank(
    serving: OpenAIServing, request: RerankRequest, request_id: str, size: int
) -> RerankResponse:
    """As `score`, with the documents in the order of their scores."""
    name = serving.check_model(request.model)
    scores, usage = await _scores(serving, request, size)
    _, documents = request.queries_and_documents()
    best = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)[: request.top_n or None]
    return RerankResponse(
        id=f"score-{request_id}",
        model=name,
        results=[
            RerankResult(
                index=index,
                relevance_score=scores[index],
                document=RerankDocument(text=documents[index]) if request.return_documents else None,
            )
            for index in best
        ],
        usage=usage,
    )


async def _scores(
    serving: OpenAIServing, request: ScoringFields, size: int
) -> tuple[list[float], PoolingUsage]:
    config = serving.llm.config
    check_scores(config)
    if not request.is_text:
        raise InvalidRequest(
            "this model reads texts; queries and documents have parts of another type", param="documents"
        )
    params = PoolingParams(use_activation=request.use_activation)
    if config.pooling is not None and config.pooling.task == "classify":
        queries, documents = request.queries_and_documents()
        num_characters = len(documents) // len(queries) * sum(map(len, queries)) + sum(map(len, documents))
        size = max(size, num_characters)  # of the pairs, which repeat a query
        outputs = await pooled_outputs(
            serving,
            partial(render_pairs, request=request),
            request,
            params,
            size,
            lambda index: request.place_of(len(queries) + index),
        )
        return [vector_of(output)[0] for output in outputs], usage_of(outputs)
    num_queries = len(request.queries_and_documents()[0])

    outputs = await pooled_outputs(
        serving, lambda renderer: render_texts(renderer, request)[0], request, params, size
    )
    vectors = [vector_of(output) for output in outputs]
    return cosines(vectors[:num_queries], vectors[num_queries:]), usage_of(outputs)
