"""From a client's request to a replica's answer.

Owns: the routes of the main port, model names, attempts and their retries, what is forwarded, what is accounted for.
Must not know: how bytes are framed, how replicas are discovered, how a policy chooses.
Invariant: each request is answered exactly once, and its charge is released exactly once, on every path.

    application      routes and authentication
    stored_routes    the interface of routes that answer from the storage
    response_routes  the interface of the routes below /v1/responses, where responses are stored
    request_handler  the steps of a request: rate limits, flow control, exchange, accounting
    queued_call      a request in the queue of flow control
    pending_request  the interface of a request that flow control starts, queues or refuses
    exchange         one request from dispatch to its end: attempts, retries, hedging, migration
    dispatcher       the choice of a replica for each attempt

    downstream       the client's side: the answer
    resilience       retries, hedging, outlier detection
    accounting       outcomes, and what is counted, logged and billed
    upstream         the replica's side: one attempt and its response
    request          decoding and rewriting of the client's request
"""
