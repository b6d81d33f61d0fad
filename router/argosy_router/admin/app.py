"""The admin port's HTTP application, for operators, probes and people; and the explanation of a routing decision.

Owns: the admin routes, and the report of a choice. Must not know: the data plane's connections.
Invariants: with a fleet key, everything but `/health`, `/ready`, `/metrics` and the page's static files needs the admin
key derived from it. Without one, these routes answer only to host names of this machine, which stops DNS rebinding by a
web page. The playground requires what the main port requires. Explaining changes nothing, neither the sequence counter
nor the random generator, so the next request goes where the explanation says unless something happens in between.
"""

from __future__ import annotations

import asyncio
import ipaddress
import random
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from functools import partial
from importlib.resources import files
from typing import Annotated, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from argosy_protocol.errors import (
    ApiError,
    BadRequest,
    Forbidden,
    MethodNotAllowed,
    NotFound,
    PayloadTooLarge,
    Unauthorized,
)
from argosy_protocol.headers import KeyRing, internal_key
from argosy_protocol.reports import ADMIN_KEY_UID, LOAD_PATH, REPORT_PATH
from argosy_router.admin.overview import LoadReports, Overviews
from argosy_router.admin.playground_client import PlaygroundClient
from argosy_router.fleet.candidates import Candidates
from argosy_router.fleet.fleet import Fleet
from argosy_router.fleet.replica import Replica
from argosy_router.fleet.service import Service
from argosy_router.http.messages import Request as RouterRequest
from argosy_router.metrics import CONTENT_TYPE, Metrics
from argosy_router.policy import POLICIES
from argosy_router.prefixes import Prompt, measure
from argosy_router.proxy.accounting import CAPACITY, CLIENT_GONE, AttemptLog, RefusalLog
from argosy_router.proxy.application import RouterApplication
from argosy_router.proxy.call import SESSION_HEADER, find_service, prompt_of, session_of
from argosy_router.proxy.request_body import examine

MAX_WAIT_S = 60.0
MAX_EXPLAINED_BYTES = 4 * 1024 * 1024
"""A million tokens of text; decoding more would block the data plane, which shares this event loop."""
MAX_CHAT_BYTES = 4 * 1024 * 1024
_JSON = "application/json"
Handler = Callable[[Request], Awaitable[Response]]
Q = TypeVar("Q")
PAGE = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
    **{
        f"/{name}.js": (f"{name}.js", "text/javascript; charset=utf-8")
        for name in ("api", "dom", "fleet", "main", "playground")
    },
}
"""path -> file, content type"""
PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


class _Poll(msgspec.Struct):
    """A report, at once, or after one with another number than `after`, or after `wait` seconds."""

    after: Annotated[int, msgspec.Meta(ge=-1)] = -1
    wait: Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT_S)] = 0.0


class _ReportPoll(_Poll):
    """The same of the routable report, and of its changes only, if `after` is of this `epoch`."""

    epoch: Annotated[str, msgspec.Meta(max_length=64)] = ""


class _Latest(msgspec.Struct):
    """Latest decisions: how many, and of which model; of all of them without one."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=CAPACITY)] = 100
    model: Annotated[str, msgspec.Meta(max_length=512)] = ""


class _LatestRefusals(msgspec.Struct):
    limit: Annotated[int, msgspec.Meta(ge=1, le=CAPACITY)] = 100


class _Explained(msgspec.Struct):
    """A chat of one message, to be explained."""

    model: Annotated[str, msgspec.Meta(max_length=512)]
    prompt: Annotated[str, msgspec.Meta(max_length=8192)] = ""
    session: Annotated[str, msgspec.Meta(max_length=512)] = ""


def admin_keys(fleet_keys: Iterable[bytes]) -> list[str]:
    """Keys for the internal routes; none without a fleet key, which leaves them open."""
    return [internal_key(key, ADMIN_KEY_UID) for key in fleet_keys]


def build_admin(
    fleet: Fleet,
    metrics: Metrics,
    decisions: AttemptLog,
    refusals: RefusalLog,
    keys: KeyRing,
    names: Collection[str],
    application: RouterApplication,
    overviews: Overviews,
    loads: LoadReports,
    name: str,
) -> Starlette:
    """Build the admin application.

    Args:
        names: host names that requests may use if there are no `keys`; addresses and localhost are always allowed.
        loads: makes the reports by which the operator scales.
        name: the router's name in reports.
    """

    def guard(request: Request) -> None:
        if keys:
            if not keys.accepts(request.headers.get("authorization")):
                raise Unauthorized("missing or wrong admin key")
        elif not _is_ours(request.headers.get("host", ""), names):
            raise Forbidden("the admin port does not accept this host name; --admin-name allows it")

    async def health(_: Request) -> Response:
        return _json(b"{}")

    async def ready(_: Request) -> Response:
        return _json(b"{}", 200 if application.is_ready else 503)

    async def exposition(_: Request) -> Response:
        return Response(await metrics.scrape(), headers={"content-type": CONTENT_TYPE.decode()})

    async def report(request: Request) -> Response:
        asked = _query(request, _ReportPoll)
        if asked.wait and asked.after >= 0:
            await fleet.wait_for_change(asked.after, asked.wait)
        found = fleet.report(name, since=asked.after, epoch=asked.epoch)
        return _json(msgspec.json.encode(found))

    async def load(request: Request) -> Response:
        asked = _query(request, _Poll)
        if asked.wait and asked.after >= 0:
            await loads.wait_for_hold(asked.after, asked.wait)
        return _json(msgspec.json.encode(loads.now(name)))

    async def latest(request: Request) -> Response:
        asked = _query(request, _Latest)
        records = decisions.latest(asked.limit, asked.model)
        return _json(msgspec.json.encode([record.as_dict() for record in records]))

    async def refused(request: Request) -> Response:
        records = refusals.latest(_query(request, _LatestRefusals).limit)
        return _json(msgspec.json.encode([record.as_dict() for record in records]))

    async def explain_request(request: Request) -> Response:
        if request.method == "POST":
            session = request.headers.get(SESSION_HEADER.decode(), "").encode("latin-1")
            return _json(explain_body(fleet, await _body(request, MAX_EXPLAINED_BYTES), session))
        asked = _query(request, _Explained)
        message = {"role": "user", "content": asked.prompt}
        body = msgspec.json.encode({"model": asked.model, "messages": [message]})
        return _json(explain_body(fleet, body, asked.session.encode()))

    async def overview(_: Request) -> Response:
        view = await overviews.now(is_ready=application.is_ready, is_draining=application.is_draining)
        return _json(msgspec.json.encode(view))

    async def chat(request: Request) -> Response:
        if not keys and not application.is_open:
            raise Forbidden(
                "the playground is disabled, because clients need keys and the router has no admin key"
            )
        inner = RouterRequest(
            b"POST", b"/v1/chat/completions", list(request.headers.raw), is_http10=False, keep_alive=True
        )
        inner.body = await _body(request, MAX_CHAT_BYTES)
        client = PlaygroundClient()
        application.chat(client, inner)
        gone = asyncio.ensure_future(request.receive())  # the body was read, so only a disconnect can follow
        await asyncio.wait((client.head, gone), return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not client.head.done():
            client.leave()
            return Response(status_code=CLIENT_GONE)
        status, headers = client.head.result()
        answer = StreamingResponse(client.body(), status)
        answer.raw_headers = headers
        return answer

    def guarded(path: str, handler: Handler, *methods: str) -> Route:
        async def answer(request: Request) -> Response:
            guard(request)
            return await handler(request)

        return Route(path, answer, methods=methods or ("GET",))

    page = files("argosy_router.admin").joinpath("page")
    return Starlette(
        routes=[
            Route("/health", health),
            Route("/ready", ready),
            Route("/metrics", exposition),
            guarded(REPORT_PATH, report),
            guarded(LOAD_PATH, load),
            guarded("/decisions", latest),
            guarded("/refusals", refused),
            guarded("/explain", explain_request, "GET", "POST"),
            guarded("/overview", overview),
            guarded("/playground/chat/completions", chat, "POST"),
            *(
                _file(path, page.joinpath(file).read_bytes(), content_type)
                for path, (file, content_type) in PAGE.items()
            ),
        ],
        exception_handlers={ApiError: _refuse, HTTPException: _refuse_route},
    )


async def _refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return Response(error.body(), error.http_status, error.headers(), _JSON)


async def _refuse_route(request: Request, error: Exception) -> Response:
    """Refuse a path or a method that there is none of."""
    assert isinstance(error, HTTPException)
    refusal: ApiError = NotFound(f"the admin port has no {request.url.path[:256]}")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "").split(", ")
        refusal = MethodNotAllowed(f"{request.method[:16]} is not allowed here", allowed)
    return await _refuse(request, refusal)


def _json(body: bytes, status: int = 200) -> Response:
    return Response(body, status, media_type=_JSON)


def _is_ours(authority: str, names: Collection[str]) -> bool:
    """Whether a `Host` header names this machine whatever DNS says (an address, localhost), or one of `names`."""
    try:
        host = (urlsplit(f"//{authority}").hostname or "").removesuffix(".")
        if (
            host == "localhost"
            or host.endswith(".localhost")
            or host in {name.lower() for name in names if name}
        ):
            return True
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _file(path: str, content: bytes, content_type: str) -> Route:
    """Serve a static file of the page without a key: it has no secrets, and all data it shows need the key."""

    async def file(_: Request) -> Response:
        return Response(content, headers=PAGE_HEADERS | {"content-type": content_type})

    return Route(path, file)


def _query(request: Request, kind: type[Q]) -> Q:
    """The parameters of a request's URL; others are ignored.

    Raises:
        BadRequest: one is missing or out of its bounds.
    """
    try:
        return msgspec.convert(dict(request.query_params), kind, strict=False)
    except msgspec.ValidationError as error:
        raise BadRequest(str(error)) from None


async def _body(request: Request, limit: int) -> bytes:
    """Read a request's body.

    Raises:
        PayloadTooLarge: it is longer than `limit` bytes.
    """
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > limit:
            raise PayloadTooLarge(f"the request body exceeds the limit of {limit} bytes")
    return bytes(body)


class _Kind(msgspec.Struct):
    """Field that distinguishes a chat from a completion."""

    messages: msgspec.Raw = msgspec.Raw()


def explain_body(fleet: Fleet, body: bytes, session: bytes) -> bytes:
    """Explain the routing of a request's body, as JSON.

    Raises:
        BadRequest, NotFound: as the main port would.
    """
    try:
        is_chat = bool(bytes(msgspec.json.decode(body, type=_Kind).messages))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"request body is not a JSON object: {str(error)[:200]}") from None
    asked, prompts = examine("chat/completions" if is_chat else "completions", body, has_state=False)
    service, adapter = find_service(fleet, asked.model)
    declared = session_of(asked.session, session)
    if declared and not adapter:  # otherwise a canary is drawn by the request id, which does not exist yet
        service = fleet.answering(service, declared)
    measured = measure(prompts, service.hasher.seed(adapter, asked.cache_salt or ""))
    prompt = prompt_of(service, asked.model, measured, declared, adapter, drawn_by=declared)
    return msgspec.json.encode(explain(fleet, service, prompt, time.monotonic()))


class CandidateReport(Struct, frozen=True, kw_only=True):
    """One replica that could get the request."""

    replica: str
    state: str
    hit_tokens: int
    """Prompt tokens expected in its cache."""
    hit_source: str
    """`announced` by the replica, `expected` because the replica was sent the prefix, or `none`."""
    terms: dict[str, float]
    """The policy's figures, in seconds if the name ends in `_s`."""
    cost_s: float
    """Sum of the terms that are in seconds."""
    queued_tokens: int
    requests: int
    kv_usage: float
    prefill_tokens_per_s: float
    decode_step_s: float
    is_measured: bool
    """Whether the speed of its prefill was measured; else its peers' or a prior is assumed."""


class ExcludedReport(Struct, frozen=True, kw_only=True):
    """One replica that could not get the request."""

    replica: str
    state: str
    reason: str


class Explanation(Struct, frozen=True, kw_only=True):
    """The whole choice."""

    model: str
    service: str
    policy: str
    prompt_tokens: int
    prompt_chunks: int
    replica: str | None
    """The replica that the request would go to."""
    reason: str
    """Value of the `x-argosy-route` header, or why no replica is available."""
    predicted_cached_tokens: int = 0
    predicted_ttft_s: float | None = None
    """None: the replica's speed was not measured yet."""
    candidates: tuple[CandidateReport, ...] = ()
    excluded: tuple[ExcludedReport, ...] = ()


def explain(fleet: Fleet, service: Service, prompt: Prompt, now: float) -> Explanation:
    """Explain the choice for a request that would arrive now."""
    policy = fleet.policy or service.spec.policy
    rng = random.Random()  # noqa: S311 - a copy of the one that breaks ties
    rng.setstate(fleet.rng.getstate())
    tokens = service.lengths.tokens(prompt)
    explained = partial(
        Explanation,
        model=service.spec.model,
        service=service.spec.qualified_name,
        policy=policy,
        prompt_tokens=tokens,
        prompt_chunks=len(prompt.hashes),
    )
    try:
        candidates = service.candidates.below_limit(now, name=prompt.name)
        choice = service.choose(prompt, now, rng, policy=policy, is_trial=True)
    except ApiError as error:
        excluded = _excluded(service, prompt, (), now)
        return explained(replica=None, reason=error.message, excluded=excluded)
    return explained(
        replica=choice.replica.name,
        reason=choice.decision.reason,
        predicted_cached_tokens=choice.decision.predicted_tokens,
        predicted_ttft_s=choice.measured_ttft_s,
        candidates=_candidates(service, prompt, candidates, policy),
        excluded=_excluded(service, prompt, candidates.replicas, now),
    )


def _candidates(
    service: Service, prompt: Prompt, candidates: Candidates, policy: str
) -> tuple[CandidateReport, ...]:
    request, length = service.route_request(prompt, candidates)
    rows = POLICIES[policy].terms(request, candidates.loads)
    reports = []
    for position, (replica, terms) in enumerate(zip(candidates.replicas, rows, strict=True)):
        hit = request.hits.get(position, 0)
        source = "none"
        if hit:
            source = "announced" if service.is_announced(replica, prompt.hashes, length) else "expected"
        load = replica.load
        reports.append(
            CandidateReport(
                replica=replica.name,
                state=replica.state,
                hit_tokens=hit,
                hit_source=source,
                terms=terms,
                cost_s=sum(value for name, value in terms.items() if name.endswith("_s")),
                queued_tokens=load.queued_tokens,
                requests=load.requests,
                kv_usage=load.kv_usage,
                prefill_tokens_per_s=load.prefill_tokens_per_s,
                decode_step_s=load.decode_step_s,
                is_measured=load.measured.prefill_tokens_per_s > 0.0,
            )
        )
    return tuple(reports)


def _excluded(
    service: Service, prompt: Prompt, among: Collection[Replica], now: float
) -> tuple[ExcludedReport, ...]:
    return tuple(
        ExcludedReport(
            replica=replica.name, state=replica.state, reason=_why_not(service, prompt, replica, now)
        )
        for replica in sorted(service.replicas.values(), key=lambda replica: replica.name)
        if replica not in among
    )


def _why_not(service: Service, prompt: Prompt, replica: Replica, now: float) -> str:
    if not replica.serves(prompt.name._replace(side="")):
        return f"it does not have {prompt.name.name!r}"
    if not replica.serves(prompt.name):
        return "it is on the other side of the canary rollout"
    if replica.is_draining or replica.has_announced_drain:
        return "it is draining"
    if not replica.is_routable:
        return "its health check fails" if replica.link == "foreign" else "it has not been reached yet"
    if not replica.health.admits(now):
        return "its last requests failed; it is tried again soon"
    if replica.health.is_suspect:
        return "its engine core has not turned for a while"
    if replica.health.is_in_cooldown(now):
        return f"it said that it is full; it is asked again in {replica.health.cooldown_until - now:.1f} s"
    limit = service.spec.limits.max_inflight_per_replica
    return f"it has its limit of {limit} requests" if limit else "others are healthier"
