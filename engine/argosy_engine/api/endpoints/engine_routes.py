"""Endpoints that generate nothing: tokens and models, the engine's state, what it runs, and its administration."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Annotated, Any, Final, Literal, cast

import msgspec
from fastapi import FastAPI, Query, Request
from starlette.responses import Response, StreamingResponse

from argosy_engine.api.endpoints.exchange import json_answer, request_id_of, serving_of
from argosy_engine.api.http.http_responses import WatchedResponse, read_body
from argosy_engine.api.served_engine import Engine, OpenAIServing
from argosy_engine.errors import InvalidRequest, UtilityFailed
from argosy_engine.frontend.admission import stop_if_abandoned
from argosy_engine.frontend.async_llm import AsyncLLM
from argosy_engine.frontend.chat_template import tokenizer_config
from argosy_engine.frontend.renderer import Renderer
from argosy_protocol import __version__, headers
from argosy_protocol.api_descriptions import ANTHROPIC_HEADER, CODEX_QUERY, encoded_model, encoded_models
from argosy_protocol.errors import BadRequest, InternalError, NotFound, Unavailable
from argosy_protocol.openai import (
    ChatTokenizeRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    TextTokenizeRequest,
    TokenizeResponse,
    decode_detokenize_request,
    decode_tokenize_request,
)
from argosy_protocol.telemetry import (
    HOT_PREFIXES_CONTENT_TYPE,
    HOT_PREFIXES_PATH,
    MAX_TOKENS,
    HotPrefixReport,
)

MAX_WAIT_S: Final = 30.0
MAX_LISTED_TOKENS: Final = 1 << 19
"""Tokens of a request or an answer, unless the model's context is longer. To make and encode a list of so many holds
the interpreter for some 10 ms."""


_LEVELS = {"1": 1, "2": 2}

_MODES = ("abort", "wait")


_SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")

_FORMATS = ("text", "json")


async def tokenize(
    serving: OpenAIServing, request: TextTokenizeRequest | ChatTokenizeRequest, size: int
) -> TokenizeResponse:
    """`size` of the body in bytes.

    Raises:
        ApiError, EngineError: see `exchange.to_api_error`.
    """
    serving.check_model(request.model)
    renderer = serving.llm.renderer
    images = None
    if isinstance(request, ChatTokenizeRequest):
        images, size = await serving.images_of(request, size)

    def response(request: TextTokenizeRequest | ChatTokenizeRequest) -> TokenizeResponse:
        if isinstance(request, ChatTokenizeRequest):
            encoded = renderer.encode_chat(request, images)
        else:
            encoded = renderer.encode(request.prompt, add_special_tokens=request.add_special_tokens)
        stop_if_abandoned()
        _check_num_listed(len(encoded), renderer, "prompt")
        tokens = encoded.ids
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
        ApiError, EngineError: see `exchange.to_api_error`.
    """
    serving.check_model(request.model)
    renderer = serving.llm.renderer

    def text_of(request: DetokenizeRequest) -> str:
        _check_num_listed(len(request.tokens), renderer, "tokens")
        renderer.check_token_ids(request.tokens, param="tokens")
        return renderer.tokenizer.decode_long(request.tokens)

    return DetokenizeResponse(prompt=await serving.render_pool.run(size, text_of, request, serving.tenant))


def _check_num_listed(num_tokens: int, renderer: Renderer, param: str) -> None:
    """
    Raises:
        InvalidRequest: there are more than `MAX_LISTED_TOKENS`.
    """
    most = max(MAX_LISTED_TOKENS, renderer.config.max_model_len)
    if num_tokens > most:
        raise InvalidRequest(
            f"{param} has {num_tokens} tokens, at most {most} are taken; send it in parts", param
        )


def add_token_routes(app: FastAPI, engine: Engine) -> None:
    """Add the routes to `app`: /tokenize and /detokenize, by vLLM's names."""

    @app.post("/tokenize")
    async def tokenized(request: Request) -> WatchedResponse:
        raw = await read_body(request)
        body = decode_tokenize_request(raw)
        answer = tokenize(serving_of(engine, request), body, len(raw))
        return json_answer(engine, answer, request_id_of(request, None), body)

    @app.post("/detokenize")
    async def detokenized(request: Request) -> WatchedResponse:
        raw = await read_body(request)
        body = decode_detokenize_request(raw)
        answer = detokenize(serving_of(engine, request), body, len(raw))
        return json_answer(engine, answer, request_id_of(request, None), body)


def add_model_routes(app: FastAPI, engine: Engine) -> None:
    """Add the routes to `app`, with lists in the forms of OpenAI's, Anthropic's and Codex' clients."""

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        return _json_of(
            encoded_models(
                engine.serving.models().data,
                is_anthropic=ANTHROPIC_HEADER in request.headers,
                is_codex=CODEX_QUERY in request.query_params,
            )
        )

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        card = engine.serving.model(name)
        return _json_of(encoded_model(card, is_anthropic=ANTHROPIC_HEADER in request.headers))


def add_state_routes(app: FastAPI, engine: Engine) -> None:
    """Add the routes to `app`. `/ping` is Amazon SageMaker's name of `/health`."""

    @app.get("/health")
    @app.get("/ping")
    @app.post("/ping")
    async def health() -> Response:
        return Response(status_code=200 if engine.is_healthy else 503)

    @app.get("/ready")
    async def ready(wait: Annotated[float, Query(ge=0, le=MAX_WAIT_S)] = 0.0) -> Response:
        """While the engine starts, the answer may be held back for `wait` seconds: Kubernetes asks once a second at
        most, and would notice that much later."""
        if wait:
            await engine.wait_started(wait)
        return _json({"status": engine.status}, 200 if engine.is_ready else 503)

    @app.get("/version")
    async def version() -> Response:
        return _json({"version": __version__})

    @app.get("/load")
    async def load() -> Response:
        return _json({"server_load": engine.server_load})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await engine.render_metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get(HOT_PREFIXES_PATH)
    async def hot_prefixes(max_tokens: Annotated[int, Query(ge=1, le=MAX_TOKENS)] = MAX_TOKENS) -> Response:
        llm = engine.loaded
        report = HotPrefixReport(
            model_fingerprint=llm.config.model_fingerprint, prefixes=engine.prefix_hits.hottest(max_tokens)
        )
        return Response(msgspec.msgpack.encode(report), media_type=HOT_PREFIXES_CONTENT_TYPE)

    @app.get(headers.TELEMETRY_PATH)
    async def telemetry() -> StreamingResponse:
        return StreamingResponse(engine.telemetry.stream(), media_type=headers.TELEMETRY_CONTENT_TYPE)


def add_info_routes(app: FastAPI, engine: Engine) -> None:
    """Add the routes to `app`, with vLLM's names and forms: what the server runs, and, with a flag, the settings
    of the tokenizer."""

    @app.get("/server_info")
    async def server_info(request: Request) -> Response:
        form = request.query_params.get("config_format", "text")
        if form not in _FORMATS:
            raise BadRequest("config_format must be text or json", param="config_format")
        config = engine.loaded.config
        return _json(
            {
                "vllm_config": str(config) if form == "text" else msgspec.to_builtins(config),
                "vllm_env": environment(),
                "system_env": {
                    "argosy_version": __version__,
                    "python_version": sys.version,
                    "python_platform": platform.platform(),
                    "os": platform.system(),
                    "cpu_info": platform.machine(),
                },
            }
        )

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        if not engine.options.enable_tokenizer_info_endpoint:
            raise NotFound("start the engine with --enable-tokenizer-info-endpoint to get /tokenizer_info")
        return _json(tokenizer_settings(engine.loaded))


def tokenizer_settings(llm: AsyncLLM) -> dict[str, Any]:
    """Return the contents of tokenizer_config.json, with the chat template that is used."""
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | tokenizer_config(
        Path(llm.config.tokenizer_path)
    )
    template = llm.renderer.template
    if template is not None:
        settings["chat_template"] = template.source
    return settings


def environment() -> dict[str, str]:
    """Return the variables of vLLM's that are set, without those that may hold secrets."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith("VLLM_") and not any(secret in name for secret in _SECRETS)
    }


def add_admin_routes(app: FastAPI, engine: Engine) -> None:
    """Add the routes to `app`, with vLLM's names and parameters. `http.asgi_layers` checks who may call them.

    `POST /sleep?level=1&mode=abort`: level 1 frees weights and KV cache and leaves the checkpoint in the page cache,
    level 2 drops that too; mode `abort` fails running requests with 503, `wait` lets them finish. Asleep, the engine is
    not ready, and requests get 503.
    """

    @app.post("/sleep")
    async def sleep(request: Request) -> Response:
        level, mode = request.query_params.get("level", "1"), request.query_params.get("mode", "abort")
        if level not in _LEVELS:
            raise BadRequest("level must be 1 or 2", param="level")
        if mode not in _MODES:
            raise BadRequest("mode must be abort or wait", param="mode")
        try:
            with engine.sleep_operation("sleep"):
                await engine.loaded.sleep(_LEVELS[level], cast(Literal["abort", "wait"], mode))
        except UtilityFailed as error:
            raise InternalError(f"the engine cannot sleep: {error}") from None
        return Response(status_code=200)

    @app.post("/wake_up")
    async def wake_up() -> Response:
        try:
            with engine.sleep_operation("wake"):
                await engine.loaded.wake_up()
        except UtilityFailed as error:
            raise InternalError(f"the engine cannot wake up: {error}") from None
        return Response(status_code=200)

    @app.get("/is_sleeping")
    async def is_sleeping() -> Response:
        return _json({"is_sleeping": engine.loaded.is_sleeping})

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        if not await engine.loaded.reset_prefix_cache():
            raise Unavailable("requests are running; the prefix cache was kept", retry_after_s=1.0)
        return Response(status_code=200)


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _json_of(body: bytes) -> Response:
    return Response(body, media_type="application/json")
