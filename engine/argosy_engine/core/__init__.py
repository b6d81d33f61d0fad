"""The engine core: from a client's requests to scheduled steps and sampled tokens.

Owns: requests, scheduling, the KV cache's blocks, the busy loop, and (in `proc`) its process and the clients that reach
it. Must not know: text, HTTP, tensors, how workers run.
"""
