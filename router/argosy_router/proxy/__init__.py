"""From a client's request to a replica's answer.

Must not know: how bytes are framed, how replicas are discovered, how a policy chooses.
Invariant: each request is answered exactly once, and its charge is released exactly once, on every path.
"""
