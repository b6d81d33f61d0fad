"""What every route that computes something needs of a request besides its body."""

from __future__ import annotations

from typing import NamedTuple

from fastapi import Request

from argosy_engine.api.openai.openai_serving import OpenAIServing
from argosy_engine.api.request_headers import (
    choose_rank,
    given_response_id,
    request_id_of,
    serving_of,
)
from argosy_engine.api.served_engine import Engine
from argosy_engine.api.server_defaults import log_request
from argosy_engine.frontend.observer import SkippingApi
from argosy_engine.frontend.request_record import current_record
from argosy_protocol.headers import DROPPED_TOOLS
from argosy_protocol.openai import GenerationRequest
from argosy_protocol.pooling import PoolingFields
from argosy_protocol.skipped_content import Skipped


class RequestContext(NamedTuple):
    serving: OpenAIServing
    request_id: str
    given_response_id: str | None
    """The id that a router has chosen; None without one."""

    @property
    def response_id(self) -> str:
        """The id that response ids derive from: the same for all attempts of a router at one request."""
        return self.given_response_id or self.request_id


def context_of(engine: Engine, request: Request, body: GenerationRequest | PoolingFields) -> RequestContext:
    """Return the context of a decoded request, after setting the rank in `body` that a header names.

    Raises:
        BadRequest: the rank is no number, or not that of the body.
        Unavailable: the model loads, or the engine sleeps or drains.
    """
    choose_rank(request, body)
    context = RequestContext(
        serving_of(engine, request), request_id_of(request, body.request_id), given_response_id(request)
    )
    record = current_record.get()
    if record is not None:
        record.request_id = context.response_id
        record.model = body.model or context.serving.check_model("")
        record.tenant = context.serving.tenant
    log_request(engine.options, body, context.response_id)
    return context


def report_skipped(engine: Engine, api: SkippingApi, skipped: Skipped) -> dict[str, str]:
    """Count what the chat of a request leaves out of it, and return the headers that tell its client."""
    if not (skipped.content or skipped.tools):
        return {}
    for observer in engine.serving.llm.observers:
        observer.on_skipped(api, skipped)
    return {DROPPED_TOOLS: skipped.dropped_tools} if skipped.tools else {}
