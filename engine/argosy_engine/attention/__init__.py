"""Attention over the paged KV cache: the metadata of a step, and one backend per way to compute it."""
