"""The replica's side of a request: one attempt, its request head and ids, and how its response is read.

Must not know: other attempts at the same request, retries, the client.
"""
