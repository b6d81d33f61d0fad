"""Argosy's router: one OpenAI endpoint in front of every replica of every model.

`http` implements HTTP/1.1, `discovery` finds replicas, `fleet` keeps their load, health and cached prefixes (found in
`prefixes`), `auth` maps keys to accounts, `ratelimit` and `flow_control` decide when a request may go, `policy` chooses
the replica, `proxy` forwards the request, `observability` and `metrics` record it, `storage` keeps what clients leave
with the router, `batch` runs batches of requests, `admin` is the admin port, `router_document` describes the main port,
`server` assembles the parts, and `backoff` says how long to wait after failures.
"""
