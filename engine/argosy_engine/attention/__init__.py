"""Attention over the paged KV cache: the metadata of a step, and one backend per way to compute it."""

WORKSPACE_BYTES = 256 << 20
"""Of gathered keys and values, or of scores, that torch's attention writes at a time; more only where one request, or
one query, takes more."""
