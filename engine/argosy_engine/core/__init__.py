"""The engine core: scheduler, KV cache, busy loop, and the clients that talk to it. It never sees text."""
