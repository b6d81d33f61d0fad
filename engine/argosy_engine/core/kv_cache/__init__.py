"""The KV cache as blocks: allocation, prefix caching, eviction.

Must not know: tensors, steps, budgets.

    kv_cache_manager  block tables of requests, prefix hits, reserved blocks
    state_blocks      states of requests, and their checkpoints
    block_pool        free queue, reference counts, prefix cache, eviction
    block_hash        hash of a block and its prefix
    prefix_announcer  changes of the prefix cache, for routers
    waiting_tokens    uncached tokens of waiting requests
"""
