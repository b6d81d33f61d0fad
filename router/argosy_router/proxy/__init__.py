"""From a client's request to a replica's answer.

Owns: the routes of the main port, keys, model names, attempts and their retries, what is forwarded.
Must not know: how bytes are framed, how replicas are found, how the choice is made.
Invariant: each request is answered exactly once, and its charge is released exactly once, on every path.
"""
