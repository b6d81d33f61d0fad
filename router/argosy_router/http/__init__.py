"""HTTP/1.1 server and client: asyncio protocols around llhttp.

Owns: framing, limits, deadlines, back-pressure, connection reuse.
Must not know: models, replicas, OpenAI, policies, metrics.
Invariant: whatever llhttp accepts although RFC 9112 forbids it, or we do not support it (duplicate Host, CONNECT,
transfer codings other than chunked), is refused here, so that no two hops can disagree about where a message ends.
Offers of other protocols (`Upgrade`) are ignored.
"""
