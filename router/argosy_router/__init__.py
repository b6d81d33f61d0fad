"""Argosy's router: one OpenAI endpoint in front of every replica of every model.

`http` implements HTTP/1.1, `discovery` finds replicas, `fleet` keeps their load, health and cached prefixes, `auth`
maps keys to accounts and their limits, `flow_control` decides when a request may go, `policy` chooses the replica,
`proxy` forwards the request, `observability` and `metrics` record it, `batch` is the way to `argosy batch`,
`responses` stores responses, `gateway` picks replicas for gateways, `admin` is the admin port, and `server` assembles
the parts.
"""
