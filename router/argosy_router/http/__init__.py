"""HTTP/1.1 server and client: asyncio protocols around llhttp.

Owns: framing, limits, deadlines, back-pressure, connection reuse.
Must not know: models, replicas, OpenAI, policies, metrics.
Invariant: whatever llhttp accepts although RFC 9112 forbids it, or we do not support it (duplicate Host, CONNECT,
transfer codings other than chunked), is refused here, so that no two hops can disagree about where a message ends.
Offers of other protocols (`Upgrade`) are ignored.

    server_connection    one client's connection: order of requests, deadlines, responses
    request_reader       parses and checks the requests of a connection
    connection_limit     how many clients may be connected, and which connections close to admit others
    body_memory          bound on the memory of request bodies, and shares of it
    cross_origin         which web pages may read answers, by the headers for browsers
    read_coalescing      one turn of the event loop per interval while many streams send
    tls, tls_listener    certificates that are reloaded; handshakes within the connection limit
    upstream_connection  one connection to a replica: requests, deadlines, responses
    pool                 keep-alive connections to one replica
    fetch                small GET requests to replicas
    sse                  event boundaries of a stream
    server_interface     between a server, its application and what answers a request
    upstream_errors      how a replica fails to respond: not connected, lost, too late, malformed
    messages             requests, headers and status lines
    deadlines            timer wheel
"""
