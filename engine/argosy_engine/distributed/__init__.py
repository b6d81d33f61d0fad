"""Several processes that compute one model: which part each has, and how they exchange tensors.

Must not know: models, the scheduler, how the processes are started. `parallel_config` and `lockstep` need no torch.
"""
