"""The KV cache: block pool, prefix cache, block tables of requests, and what routers are told about them."""
