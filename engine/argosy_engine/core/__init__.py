"""The engine core: scheduler, KV cache, busy loop, and its clients. It never sees text."""
