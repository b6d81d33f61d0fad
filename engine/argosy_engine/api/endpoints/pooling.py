"""Endpoints of models for pooling: /v1/embeddings, /classify, /score, /rerank, and /pooling for vectors of either kind.

Prompts pass the same queue and cache as generations. Each endpoint gets the size of a request's body in bytes, which
bounds its prompts, and raises ApiError or EngineError (`exchange.to_api_error`).
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Final, TypeVar, cast

import msgspec
import numpy as np
from fastapi import FastAPI, Request
from starlette.responses import Response

from argosy_engine.api.endpoints.exchange import Endpoint, context_of, json_answer
from argosy_engine.api.http.http_responses import WatchedResponse, read_body
from argosy_engine.api.served_engine import Engine, OpenAIServing
from argosy_engine.errors import InvalidRequest
from argosy_engine.frontend.output_processor import GenerationOutput
from argosy_engine.frontend.pooling import (
    check_scores,
    check_token_numbers,
    cosines,
    pooling_request,
    render_inputs,
    render_pairs,
    render_texts,
    token_rows,
)
from argosy_engine.frontend.renderer import Renderer, TokenizedPrompt
from argosy_engine.messages import EngineCoreRequest
from argosy_engine.params import PoolingParams
from argosy_protocol.pooling import (
    ClassificationData,
    ClassificationRequest,
    ClassificationResponse,
    Embedding,
    EmbeddingRequest,
    EmbeddingResponse,
    EncodingFields,
    PoolingData,
    PoolingFields,
    PoolingRequest,
    PoolingResponse,
    PoolingUsage,
    PromptFields,
    RerankDocument,
    RerankRequest,
    RerankResponse,
    RerankResult,
    Score,
    ScoreRequest,
    ScoreResponse,
    ScoringFields,
    decode_classification_request,
    decode_embedding_request,
    decode_pooling_request,
    decode_rerank_request,
    decode_score_request,
    encode_vector,
)

_Item = TypeVar("_Item", bound=msgspec.Struct)
_Body = TypeVar("_Body", bound=PoolingFields)

_BYTES_PER_TURN: Final = 1 << 20
"""JSON that is written before other requests have their turn: some milliseconds."""


async def pooled_outputs(
    serving: OpenAIServing,
    render: Callable[[Renderer], Sequence[TokenizedPrompt]],
    request: PoolingFields,
    params: PoolingParams,
    size: int,
    place_of: Callable[[int], str] | None = None,
) -> list[GenerationOutput]:
    """Render the prompts of a request, and return their outputs, each with a vector, in the order of the prompts.

    Args:
        size: of the request's body, in bytes.
        place_of: tells for the index of a prompt the field that has it, if not `request.place_of`.

    Raises:
        ApiError, EngineError: see `exchange.to_api_error`.
    """
    llm = serving.llm

    def core_request(index: int, prompt: TokenizedPrompt) -> EngineCoreRequest:
        try:
            return pooling_request(
                llm.input_processor,
                prompt,
                params,
                cache_salt=request.cache_salt,
                priority=request.priority,
                tenant=serving.tenant,
                data_parallel_rank=request.data_parallel_rank,
            )
        except InvalidRequest as error:
            if error.param == "prompt":
                error.param = (place_of or request.place_of)(index)
                error.args = (f"{error.param}: {error}",)
            raise

    def work(request: PoolingFields) -> list[EngineCoreRequest]:
        prompts = render(llm.renderer)
        if params.is_token_wise:
            check_token_numbers(llm.config, params, sum(len(prompt.token_ids) for prompt in prompts))
        return [core_request(index, prompt) for index, prompt in enumerate(prompts)]

    llm.queue_limits.check(1)
    requests = await serving.render_pool.run(size, work, request, serving.tenant)
    outputs: list[GenerationOutput | None] = [None] * len(requests)
    async with aclosing(llm.generate(requests)) as results:
        async for batch in results:
            for output in batch:
                outputs[output.index] = output
    done = [output for output in outputs if output is not None and output.embedding is not None]
    assert len(done) == len(requests)
    return done


async def _pooled_inputs(
    serving: OpenAIServing, request: PromptFields, params: PoolingParams, size: int
) -> list[GenerationOutput]:
    """As `pooled_outputs`, of a request with inputs, or a chat that may have images."""
    images = None
    if request.messages is not None:
        serving.llm.queue_limits.check(1)
        images, size = await serving.images_of(request.as_chat(), size)
    render = partial(render_inputs, request=request, images=images)
    return await pooled_outputs(serving, render, request, params, size)


async def written(items: Iterable[_Item]) -> list[_Item]:
    """Return the items of an answer as JSON that stands for them, made in turns of the event loop: a thousand vectors
    of thousands of numbers are a hundred megabytes."""
    encoded, num_bytes = [], 0
    for item in items:
        text = msgspec.json.encode(item)
        encoded.append(msgspec.Raw(text))
        num_bytes += len(text)
        if num_bytes >= _BYTES_PER_TURN:
            num_bytes = 0
            await asyncio.sleep(0)
    return cast("list[_Item]", encoded)


def vector_of(output: GenerationOutput) -> list[float]:
    assert output.embedding is not None
    return output.embedding


def usage_of(outputs: Sequence[GenerationOutput]) -> PoolingUsage:
    tokens = sum(output.num_prompt_tokens for output in outputs)
    return PoolingUsage(prompt_tokens=tokens, total_tokens=tokens)


def check_encoding(request: EncodingFields) -> None:
    """
    Raises:
        InvalidRequest: vectors are not written in this format.
    """
    if request.encoding_format not in ("float", "base64"):
        raise InvalidRequest(
            f"encoding_format {request.encoding_format} is not supported; there is: float, base64",
            param="encoding_format",
        )
    if request.embed_dtype not in ("float32", "float16", "bfloat16"):
        raise InvalidRequest(
            f"embed_dtype {request.embed_dtype} is not supported; there is: float32, float16, bfloat16",
            param="embed_dtype",
        )


def encoded_vector(vector: list[float], request: EncodingFields) -> list[float] | str:
    """Return a vector as the request wants it: as numbers, or as their bytes in base64."""
    if request.encoding_format == "float":
        return vector
    byte_order = ">" if request.endianness == "big" else "<"
    if request.embed_dtype == "float32" and byte_order == "<":
        return encode_vector(vector, "base64")
    numbers: Any = np.asarray(vector, np.float32)
    if request.embed_dtype == "float16":
        numbers = numbers.astype(f"{byte_order}f2")
    elif request.embed_dtype == "bfloat16":
        numbers = _bfloat16(numbers).astype(f"{byte_order}u2")
    else:
        numbers = numbers.astype(f"{byte_order}f4")
    return base64.b64encode(numbers.tobytes()).decode()


def _bfloat16(numbers: np.ndarray) -> np.ndarray:
    """Return the upper halves of float32 numbers, rounded to even, uint16."""
    bits = numbers.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


async def embed(
    serving: OpenAIServing, request: EmbeddingRequest, request_id: str, size: int
) -> EmbeddingResponse:
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
    outputs = await _pooled_inputs(serving, request, params, size)
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


async def classify(
    serving: OpenAIServing, request: ClassificationRequest, request_id: str, size: int
) -> ClassificationResponse:
    name, pooling = serving.check_model(request.model), serving.llm.config.pooling
    if pooling is None or pooling.task != "classify":
        raise InvalidRequest(
            f"{name} does not classify: that needs a checkpoint with a head for labels (ForSequenceClassification), "
            "served with --convert classify or auto"
        )
    params = PoolingParams(task="classify", use_activation=request.use_activation)
    outputs = await _pooled_inputs(serving, request, params, size)
    return ClassificationResponse(
        id=f"classify-{request_id}",
        created=int(time.time()),
        model=name,
        data=[_data(index, vector_of(output), pooling.labels) for index, output in enumerate(outputs)],
        usage=usage_of(outputs),
    )


def _data(index: int, probs: list[float], labels: Sequence[str]) -> ClassificationData:
    best = max(range(len(probs)), key=probs.__getitem__)
    return ClassificationData(index=index, label=labels[best], probs=probs, num_classes=len(probs))


async def pool(
    serving: OpenAIServing, request: PoolingRequest, request_id: str, size: int
) -> PoolingResponse:
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
    outputs = await _pooled_inputs(serving, request, params, size)
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


async def score(serving: OpenAIServing, request: ScoreRequest, request_id: str, size: int) -> ScoreResponse:
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


def add_pooling_routes(app: FastAPI, engine: Engine) -> dict[str, Endpoint]:
    """Add the routes to `app`; return endpoints by the field that only their requests have."""

    def add(
        paths: Sequence[str],
        decode: Callable[[bytes], _Body],
        compute: Callable[[OpenAIServing, _Body, str, int], Awaitable[msgspec.Struct]],
    ) -> Endpoint:
        async def endpoint(request: Request) -> WatchedResponse:
            raw = await read_body(request)
            body = decode(raw)
            context = context_of(engine, request, body)
            answer = compute(context.serving, body, context.response_id, len(raw))
            return json_answer(engine, answer, context.request_id, body)

        for path in paths:
            app.post(path)(endpoint)
        return endpoint

    embeddings = add(["/v1/embeddings"], decode_embedding_request, embed)
    classifications = add(["/v1/classify", "/classify"], decode_classification_request, classify)
    add(["/pooling"], decode_pooling_request, pool)
    scores = add(["/v1/score", "/score"], decode_score_request, score)
    reranked = add(["/v2/rerank", "/v1/rerank", "/rerank"], decode_rerank_request, rerank)

    async def pooled_inputs(request: Request) -> Response:
        pooling = None if engine.llm is None else engine.llm.config.pooling
        is_classifier = pooling is not None and pooling.task == "classify"
        return await (classifications(request) if is_classifier else embeddings(request))

    return {
        "input": pooled_inputs,
        "query": reranked,
        **dict.fromkeys(("queries", "text_1", "data_1"), scores),
    }
