"""/server_info, for the admin key, and /tokenizer_info, if a flag allows it. Names and forms are vLLM's."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from argosy_engine.frontend.async_llm import AsyncLLM
from argosy_engine.frontend.chat_template import tokenizer_config
from argosy_protocol import __version__
from argosy_protocol.errors import BadRequest, NotFound

_SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")
_PREFIXES = ("VLLM", "ARGOSY")
_FORMATS = ("text", "json")


def add_info_routes(app: FastAPI, llm: Callable[[], AsyncLLM], has_tokenizer_info: bool) -> None:
    """Add the routes to `app`.

    Args:
        llm: returns the loaded engine, or raises Unavailable.
        has_tokenizer_info: whether clients may read the chat template and the tokenizer's settings.
    """

    @app.get("/server_info")
    async def server_info(request: Request) -> Response:
        form = request.query_params.get("config_format", "text")
        if form not in _FORMATS:
            raise BadRequest("config_format must be text or json", param="config_format")
        config = llm().config
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
        if not has_tokenizer_info:
            raise NotFound("start the engine with --enable-tokenizer-info-endpoint to get /tokenizer_info")
        return _json(tokenizer_settings(llm()))


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


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
