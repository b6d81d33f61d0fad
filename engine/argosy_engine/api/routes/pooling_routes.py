"""Routes of models for pooling: embeddings, classification, scores, reranking, and vectors of either kind."""

from __future__ import annotations

from fastapi import FastAPI, Request

from argosy_engine.api.answers import json_answer
from argosy_engine.api.http.http_responses import WatchedResponse
from argosy_engine.api.http.request_body import read_body
from argosy_engine.api.openai.classification import classify
from argosy_engine.api.openai.embeddings import embed
from argosy_engine.api.openai.pooled_data import pool
from argosy_engine.api.openai.scoring import rerank, score
from argosy_engine.api.routes.request_context import context_of
from argosy_engine.api.routes.sagemaker_routes import Endpoint
from argosy_engine.api.served_engine import Engine
from argosy_protocol.embeddings import decode_embedding_request
from argosy_protocol.pooling import decode_classification_request, decode_pooling_request
from argosy_protocol.scoring import decode_rerank_request, decode_score_request


def add_pooling_routes(app: FastAPI, engine: Engine) -> dict[str, Endpoint]:
    """Add the routes to `app`; return endpoints by the field that only their requests have."""

    @app.post("/v1/embeddings")
    async def embeddings(request: Request) -> WatchedResponse:
        raw = await read_body(request)
        body = decode_embedding_request(raw)
        context = context_of(engine, request, body)
        answer = embed(context.serving, body, context.response_id, len(raw))
        return json_answer(engine, answer, context.request_id, body)

    @app.post("/classify")
    @app.post("/v1/classify")
    async def classifications(request: Request) -> WatchedResponse:
        raw = await read_body(request)
        body = decode_classification_request(raw)
        context = context_of(engine, request, body)
        answer = classify(context.serving, body, context.response_id, len(raw))
        return json_answer(engine, answer, context.request_id, body)

    @app.post("/pooling")
    async def poolings(request: Request) -> WatchedResponse:
        raw = await read_body(request)
        body = decode_pooling_request(raw)
        context = context_of(engine, request, body)
        answer = pool(context.serving, body, context.response_id, len(raw))
        return json_answer(engine, answer, context.request_id, body)

    @app.post("/score")
    @app.post("/v1/score")
    async def scores(request: Request) -> WatchedResponse:
        raw = await read_body(request)
        body = decode_score_request(raw)
        context = context_of(engine, request, body)
        answer = score(context.serving, body, context.response_id, len(raw))
        return json_answer(engine, answer, context.request_id, body)

    @app.post("/rerank")
    @app.post("/v1/rerank")
    @app.post("/v2/rerank")
    async def reranked(request: Request) -> WatchedResponse:
        raw = await read_body(request)
        body = decode_rerank_request(raw)
        context = context_of(engine, request, body)
        answer = rerank(context.serving, body, context.response_id, len(raw))
        return json_answer(engine, answer, context.request_id, body)

    async def pooled_inputs(request: Request) -> WatchedResponse:
        pooling = None if engine.llm is None else engine.llm.config.pooling
        is_classifier = pooling is not None and pooling.task == "classify"
        return await (classifications(request) if is_classifier else embeddings(request))

    return {
        "input": pooled_inputs,
        "query": reranked,
        **dict.fromkeys(("queries", "text_1", "data_1"), scores),
    }
