"""Attention over the paged KV cache: a step's metadata, and the backends (plain torch, CPU kernels)."""

WORKSPACE_BYTES = 256 << 20
"""Limit on the gathered keys and values, or the scores, that the torch backend materialises at a time. Exceeded only
where a single request, or a single query, takes more."""
