"""Attention over the paged KV cache: what a layer asks for, and the backends that compute it."""
