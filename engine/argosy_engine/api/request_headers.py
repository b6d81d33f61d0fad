"""What the headers of a request say, a client's or a router's: ids, tenant, model name, resumption, rank."""

from __future__ import annotations

import secrets
import time
from urllib.parse import unquote

from fastapi import Request

from argosy_engine.api.http.request_ids import is_request_id
from argosy_engine.api.observability.load_report import FORMAT_HEADER
from argosy_engine.api.openai.openai_serving import OpenAIServing
from argosy_engine.api.served_engine import Engine
from argosy_protocol import headers
from argosy_protocol.bearer_keys import bearer_token
from argosy_protocol.errors import (
    BadRequest,
)
from argosy_protocol.openai import (
    GenerationRequest,
)
from argosy_protocol.pooling import PoolingFields

MAX_TENANT_LENGTH = 64
"""Routers send 16 characters."""
_MAX_RANK_DIGITS = 6


def request_id_of(request: Request, in_body: str | None) -> str:
    """Return the id of the header, else of the body, else a new one."""
    for candidate in (request.headers.get(headers.REQUEST_ID), in_body):
        if candidate is not None and is_request_id(candidate):
            return candidate
    return f"{int(time.time()):x}{secrets.token_hex(12)}"


def serving_of(engine: Engine, request: Request) -> OpenAIServing:
    """Return what serves a request: under the model name and for the tenant that a router gave, if one did.

    A tenant that is longer than a router's is ignored, because the core keeps tenants.
    """
    name, tenant = request.headers.get(headers.MODEL_NAME), request.headers.get(headers.TENANT, "")
    if len(tenant) > MAX_TENANT_LENGTH:
        tenant = ""
    if name is None and not tenant:
        return engine.serving
    return engine.serving.answering_as(None if name is None else unquote(name), tenant)


def client_key(request: Request) -> str:
    """Return a client's key, whichever of the two headers has it; empty if it sent none."""
    authorization = request.headers.get("authorization")
    if authorization is None:
        return request.headers.get("x-api-key", "").strip()
    token = bearer_token(authorization)
    return authorization if token is None else token


def given_response_id(request: Request) -> str | None:
    """Return the id that a router has chosen for the answer; None without one."""
    given = request.headers.get(headers.RESPONSE_ID)
    return given if given is not None and is_request_id(given) else None


def _is_resumable(request: Request) -> bool:
    """Whether the request comes from a router that can let another engine continue the stream."""
    return headers.RESUME in request.headers


def resumption_of(request: Request) -> dict[str, bool]:
    """Return how a stream carries token ids for a router."""
    given = request.headers.get(headers.RESUME)
    return {"resumable": given is not None, "has_id_comments": given == headers.IN_COMMENTS}


def check_resume(request: Request, body: GenerationRequest) -> None:
    """Reject `resume` from clients: it is for routers, which remove their internal headers from clients' requests."""
    if body.resume is not None and not (body.stream and _is_resumable(request)):
        raise BadRequest("resume is internal to engines and refused from clients", param="resume")


def choose_rank(request: Request, body: GenerationRequest | PoolingFields) -> None:
    """Set the body's `data_parallel_rank` to that of the header, if there is one."""
    given = request.headers.get(headers.DATA_PARALLEL_RANK)
    if given is None:
        return
    if not (given.isascii() and given.isdigit() and len(given) <= _MAX_RANK_DIGITS):
        raise BadRequest(f"{headers.DATA_PARALLEL_RANK} must be a number from 0", param="data_parallel_rank")
    if body.data_parallel_rank not in (None, int(given)):
        raise BadRequest(
            f"data_parallel_rank differs from the header {headers.DATA_PARALLEL_RANK}",
            param="data_parallel_rank",
        )
    body.data_parallel_rank = int(given)


def load_form_of(request: Request) -> str | None:
    """Return the form in which a request asks for the load."""
    return request.headers.get(FORMAT_HEADER)
