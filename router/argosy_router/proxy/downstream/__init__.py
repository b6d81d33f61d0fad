"""The client's side of a request: the answer, comments that keep a connection open, and wrappers around clients.

Must not know: attempts, retries, which replica answers.
"""
