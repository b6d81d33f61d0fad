"""The worker of one device: weights, KV cache tensor, and the runner that executes a scheduled step.

Must not know: the engine core, text, how it is run.

    worker             chooses device and dtype, loads the weights, sizes the KV cache
    memory_profiling   runs the largest steps to measure their peak memory
    warm_up            runs the variants of kernels before the first request
    model_runner       turns a scheduled step into tensors, and runs the forward pass
    pipeline           passes hidden states from stage to stage
    kv_cache           groups of layers, and their views of the block pool
    input_batch        state of the running requests in preallocated arrays
    step_arrays        a scheduled step as numpy arrays
    step_inputs        its tensors on a CPU
    device_inputs      its tensors on a GPU: fixed buffers, filled by one copy
    staging_buffer     what a step sends to the device, in one pinned buffer
    device_runtime     asynchronous copies of a CUDA device
    compilation        whether layers are compiled, with which cache
    compilation_cache  generated code that processes share
    cuda_graphs        captured forward passes of decode steps
    pending_step       a launched step whose tokens are not on the host yet
    async_output       sampled tokens while they are copied to the host
    host_copies        pinned memory that results are copied to
    rejection_sampler  verifies draft tokens
    pooler             vectors of prompts
"""
