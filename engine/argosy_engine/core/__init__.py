"""The engine core: from a client's requests to scheduled steps and sampled tokens.

Owns: requests, scheduling, the KV cache's blocks, the busy loop, and the clients that reach it.
Must not know: text, HTTP, tensors, how workers run.

    proc                 the core's process, the handle that starts and ends it, its clients
    engine_core          one step per call: schedule, launch, process the output
    resolve_config       the engine's configuration from arguments, model and device
    sched                the scheduler, its queues, the steps that it plans and has in flight
    kv_cache             block pool, prefix cache, block tables
    request              the state of one request
    repetition_detector  ends a request that repeats itself
    request_watchdog     finds requests without progress
    sleep_state          frees weights and KV cache, and loads them again
    state_dump           the core's state as text, for its log
"""
