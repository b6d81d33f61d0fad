"""HTTP header names and content types shared by router and engine (lower case, as they are compared)."""

from __future__ import annotations

from typing import Final

REQUEST_ID: Final = "x-request-id"
"""Opaque id of one client request; `[A-Za-z0-9._-]{1,128}`, anything else is replaced at the edge."""

REPLICA: Final = "x-argosy-replica"
"""Response: name of the replica that served the request."""

SERVICE: Final = "x-argosy-service"
"""Response: `namespace/name` of the replica's service, which need not be the one whose model name the client used."""

ROUTE: Final = "x-argosy-route"
"""Response: why that replica: `cached`, `predicted`, `load`, `session` or `only`."""

MODE: Final = "x-argosy-mode"
"""Response: what the router knew of that replica: `synced` (its announcements), `stale` (its last ones, and what it was
sent since) or `foreign` (what it was sent)."""

PREDICTED_TOKENS: Final = "x-argosy-predicted-tokens"
"""Response: prompt tokens the router expected to find in the replica's prefix cache."""

INTERNAL_PREFIX: Final = "x-argosy-internal-"
"""Headers with this prefix travel from router to engine only; the router strips them from clients' requests."""

RESUME: Final = INTERNAL_PREFIX + "resume"
"""Request: the sender can resume a stream: chunks carry `token_ids`, and the body's `resume` is the sender's own."""

RESPONSE_ID: Final = INTERNAL_PREFIX + "response-id"
"""Request: what response ids and tool call ids derive from. All attempts at one client request have the same, so that a
stream another engine goes on with keeps its ids; `x-request-id` differs in each."""

MODEL_NAME: Final = INTERNAL_PREFIX + "model-name"
"""Request: the model name that the client used, percent-encoded UTF-8. The engine serves the request whatever its own
names are, and answers by this one: which names mean which engines is for the fleet document to say."""

TENANT: Final = INTERNAL_PREFIX + "tenant"
"""Request: whose it is, as an opaque word: tenants have equal shares of what the engine divides among them."""

TELEMETRY_PATH: Final = "/internal/telemetry"
TELEMETRY_CONTENT_TYPE: Final = "application/vnd.argosy.telemetry"
"""Content type of the telemetry stream. A replica that answers anything else is not one of ours."""
