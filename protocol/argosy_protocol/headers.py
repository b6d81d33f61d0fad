"""HTTP headers between router and engine: names and content types (in lower case, as they are compared), and the bearer
keys that one of them carries.

The operator and the routers hold one fleet key; the engines of a service accept only
`internal_key(fleet key, service UID)`. The operator can thus put a service's key into a Secret in the service's own
namespace without disclosing the key of any other service, and no key has to be stored or synchronised.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Iterable
from typing import Final

REQUEST_ID: Final = "x-request-id"
"""Opaque id of one client request, of the form `REQUEST_ID_FORM`; any other value is replaced by a generated one."""
REQUEST_ID_FORM: Final = "[A-Za-z0-9._-]{1,128}"
"""What is safe in headers and logs."""

ANTHROPIC_REQUEST_ID: Final = "request-id"
"""The same in answers of Anthropic's API."""

REPLICA: Final = "x-argosy-replica"
"""Response: name of the replica that served the request."""

SERVICE: Final = "x-argosy-service"
"""Response: `namespace/name` of the replica's service, which need not be the one whose model name the client used."""

ROUTE: Final = "x-argosy-route"
"""Response: why that replica was chosen: `cached`, `predicted`, `load`, `session`, `only` or `busy`."""

MODE: Final = "x-argosy-mode"
"""Response: the router's source of knowledge about that replica: `synced` (its telemetry), `stale` (its telemetry until
that was lost, and what it was sent since) or `foreign` (what it was sent)."""

PREDICTED_TOKENS: Final = "x-argosy-predicted-tokens"
"""Response: prompt tokens the router expected to find in the replica's prefix cache."""

DATA_PARALLEL_RANK: Final = "x-data-parallel-rank"
"""Request to an engine: the core that computes it, as the field `data_parallel_rank`. Routers do not send it."""

RESOURCE_BUSY: Final = "x-argosy-resource-busy"
"""Response of an engine, with 503: it refuses requests like this one, such as long prompts, and answers others."""

DROPPED_TOOLS: Final = "x-argosy-dropped-tools"
"""Response: types of the request's tools that only the servers of OpenAI or Anthropic run, and of which the model was
not told; `other` stands for all that are not known."""

INTERNAL_PREFIX: Final = "x-argosy-internal-"
"""Prefix of headers that only a router may send to an engine; the router strips them from clients' requests."""

RESUME: Final = INTERNAL_PREFIX + "resume"
"""Request: the sender can resume a stream, so the stream carries token ids, and the body's `resume` field is trusted.
With the value `IN_COMMENTS` the ids come in comments, of which clients need not see anything; with any other, as
older routers send it, in the chunks."""

IN_COMMENTS: Final = "comments"
ID_COMMENT: Final = b":ids "
"""Beginning of the comment line `:ids INDEX ID,ID,...`, the first line of an event or all of it: the token ids that the
event adds to a choice, perhaps none. `:ids ` alone comes with an event that adds none to any choice. An event whose
choices have `token_ids` themselves needs no comment."""

RESPONSE_ID: Final = INTERNAL_PREFIX + "response-id"
"""Request: the id from which response ids and tool call ids are derived. All attempts at one client request share it,
so that a stream keeps its ids when another engine continues it; `x-request-id` differs in each attempt."""

MODEL_NAME: Final = INTERNAL_PREFIX + "model-name"
"""Request: the model name that the client used, as percent-encoded UTF-8. The engine serves the request whatever its
own names are, and uses this one in its answers, because the fleet document defines which names mean which engines."""

TENANT: Final = INTERNAL_PREFIX + "tenant"
"""Request: its tenant, as an opaque word. Tenants get equal shares of what the engine divides among them."""

RESOLVED: Final = INTERNAL_PREFIX + "resolved"
"""Request to /v1/responses: its input is the whole conversation, and the router stores the response itself, under the
id that `RESPONSE_ID` gives it."""

TELEMETRY_PATH: Final = "/internal/telemetry"
TELEMETRY_CONTENT_TYPE: Final = "application/vnd.argosy.telemetry"
"""Content type of the telemetry stream. A replica that answers with any other is foreign."""


def internal_key(fleet_key: bytes, service_uid: str) -> str:
    """Derive the bearer key of one service's engines: HMAC-SHA256, URL-safe base64 without padding (43 characters).

    Raises:
        ValueError: the fleet key is shorter than 16 bytes or the UID is empty.
    """
    return _derived(fleet_key, b"argosy-internal-key/1", service_uid)


def node_key(fleet_key: bytes, service_uid: str) -> str:
    """Derive the key by which the nodes of one service's engines know each other, of the same form.

    Raises:
        ValueError: the fleet key is shorter than 16 bytes or the UID is empty.
    """
    return _derived(fleet_key, b"argosy-node-key/1", service_uid)


def _derived(fleet_key: bytes, purpose: bytes, service_uid: str) -> str:
    if len(fleet_key) < 16:
        raise ValueError("fleet key must have at least 16 bytes")
    if not service_uid:
        raise ValueError("service UID must not be empty")
    digest = hmac.new(fleet_key, purpose + b"\0" + service_uid.encode(), hashlib.sha256).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def bearer_token(authorization: str) -> str | None:
    """Return the key in an `Authorization` header value, `Bearer KEY` with a case-insensitive scheme; None if it is of
    another scheme."""
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


class KeyRing:
    """A set of accepted bearer keys, held as SHA-256 digests and compared in constant time."""

    def __init__(self, keys: Iterable[str]) -> None:
        self.replace(keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def replace(self, keys: Iterable[str]) -> None:
        """Accept these keys from now on, and no others."""
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys if key]

    def accepts(self, authorization: str | None) -> bool:
        """Whether an `Authorization` header value carries one of the keys (`Bearer KEY`, scheme case-insensitive)."""
        token = bearer_token(authorization or "")
        digest = hashlib.sha256((token or "").encode()).digest()
        accepted = False
        for known in self._digests:  # no early exit: the time taken must not depend on which key matched
            accepted |= hmac.compare_digest(known, digest)
        return accepted and token is not None
