"""HTTP/1.1 on the wire, both sides, as asyncio protocols around llhttp.

Owns: framing, limits, deadlines, back-pressure, connection reuse.
Must not know: models, replicas, OpenAI, policies, metrics.
Invariant: what llhttp alone would let through and RFC 9112 does not (duplicate Host, CONNECT, upgrades, transfer
codings other than chunked) is refused here, so that no two hops can disagree about where a message ends.
"""
