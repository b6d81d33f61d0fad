"""From a client's request to a replica's answer.

Owns: the routes of the main port, model names, attempts and their retries, what is forwarded, what is accounted for.
Must not know: how bytes are framed, how replicas are found, how the choice is made.
Invariant: each request is answered exactly once, and its charge is released exactly once, on every path.

    application      routes and authentication
    call_decoding    request -> call
    request_handler  a call's way: rate limits, flow control, exchange, accounting
    exchange         attempts, retries, hedging, migration
    answer           what the client is sent
    dispatcher       the choice of a replica for each attempt
    attempt          a request at one replica
    outcome          what became of a request, for accounting
"""
