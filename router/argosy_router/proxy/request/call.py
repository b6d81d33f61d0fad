"""A decoded request of a client.

Owns: what the router knows about a request after decoding it. Must not know: how it was decoded, connections,
replicas.
Invariant: the body that is forwarded is the client's own bytes, except for the value of `model` where the engine
would not know the name the client used, of `priority` where the client's key or the engine has a say in it, of
`cache_salt` where the key's cache is private, and of `stream_options` where a stream would not report its usage, or an
engine of another make would not report it all along.
Engines of other makes get only the fields that `foreign_fields` lists.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from xxhash import xxh3_64_hexdigest

from argosy_protocol.headers import RESPONSE_ID, TENANT
from argosy_router.auth.accounts import Account
from argosy_router.fleet.replica import Replica
from argosy_router.fleet.service import Service
from argosy_router.prompts.prompt_hash import Prompt
from argosy_router.proxy.request.body_rewrite import with_fields
from argosy_router.proxy.request.foreign_fields import keep_foreign_fields
from argosy_router.proxy.request.model_names import Renaming
from argosy_router.proxy.request.stream_shape import StreamShape
from argosy_router.proxy.request.token_estimate import TokenEstimate

if TYPE_CHECKING:
    from argosy_router.observability.tracing import Trace

_RESPONSE_ID: Final = RESPONSE_ID.encode()
_TENANT: Final = TENANT.encode()


class Call:
    """One generation request."""

    __slots__ = (
        "account",
        "asked_model",
        "body",
        "canary_of",
        "client_model",
        "endpoint",
        "estimate",
        "headers",
        "hides_progress",
        "hides_usage",
        "internal_headers",
        "is_body_reduced",
        "is_charged",
        "is_stream",
        "path",
        "priority",
        "prompt",
        "renaming",
        "request_id",
        "service",
        "shape",
        "stream_interval",
        "trace",
    )

    def __init__(
        self,
        service: Service,
        prompt: Prompt,
        request_id: bytes,
        headers: bytes,
        body: bytes,
        path: bytes,
        account: Account,
        estimate: TokenEstimate,
    ) -> None:
        self.service = service
        self.prompt = prompt
        self.request_id = request_id
        self.headers = headers
        """Header lines that every replica gets, without ids and the length."""
        tenant = xxh3_64_hexdigest(account.name.encode()).encode() if account.name else b""
        self.internal_headers = b"%b: %b\r\n" % (_RESPONSE_ID, request_id)
        """Header lines that only Argosy engines get."""
        if tenant:
            self.internal_headers += b"%b: %b\r\n" % (_TENANT, tenant)
        self.endpoint = "completions"
        """Endpoint of the API, of which `foreign_fields` has a list."""
        self.body = body
        self.is_body_reduced = False
        """Whether `body` has been reduced to the fields that engines of other makes get."""
        self.path = path
        self.asked_model = ""
        """What the client, and so the body, calls the model, if a header tells all engines that name; else empty."""
        self.client_model = service.model
        """What the client calls the model."""
        self.account = account
        self.estimate = estimate
        """What the request is expected to take of its key's limits and of the service."""
        self.priority = 0
        self.is_stream = False
        self.shape: StreamShape | None = None
        """The shape of a stream that can be continued by another replica; else None."""
        self.is_charged = False
        """Whether the request was charged to its key's limits at its head."""
        self.hides_usage = False
        """Whether the router, not the client, asked the stream for its usage."""
        self.hides_progress = False
        """Whether the router, not the client, asked the stream to report its usage in every event."""
        self.stream_interval = 1
        """Tokens of a sequence that an engine may keep back until an event has as many."""
        self.renaming: Renaming | None = None
        """Set if the engine knows the model by another name than the client used."""
        self.canary_of: Service | None = None
        """The service the client named, if it has a canary, which may be `service`."""
        self.trace: Trace | None = None
        """Set if requests are traced."""

    def name_response(self, response_id: bytes) -> None:
        """Have engines answer with a response of this id (`resp_...`)."""
        name = response_id.removeprefix(b"resp_")
        given = b"%b: %b\r\n" % (_RESPONSE_ID, self.request_id)
        self.internal_headers = self.internal_headers.replace(given, b"%b: %b\r\n" % (_RESPONSE_ID, name))

    def reduce_body(self) -> None:
        """Reduce the body to the fields that engines of other makes get; an Argosy engine would ignore the others."""
        if not self.is_body_reduced:
            self.is_body_reduced = True
            self.body = keep_foreign_fields(self.body, self.endpoint)

    def rename_body(self, replica: Replica) -> None:
        """Put into the body the name by which `replica` knows the model, if no header can tell it the client's. Such a
        replica joined after the request was decoded; its answer will have its own name for the model."""
        name = replica.announced_name or self.service.spec.started_name
        if self.asked_model and name != self.asked_model:
            self.body = with_fields(self.body, {"model": name})

    @property
    def key_name(self) -> str:
        """Name of the client's API key; empty where no keys are needed."""
        return self.account.name
