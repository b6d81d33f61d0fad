"""Several processes that compute one model: which part each has, and how they exchange tensors.

    parallel_config     sizes of the parallel dimensions, and where a rank is in them; no torch
    process_name        names of cores and workers in logs, messages and lists of processes
    lockstep            steps that engine cores which share experts launch together; no torch
    parallel_state      this process's groups, joined over torch.distributed
    launch_environment  what a launcher such as torchrun tells a process; no torch
    launched_groups     the groups of a process that a launcher has started
    engine_copies       what the copies of an engine core that a launcher has started tell each other
    unfinished_calls    groups that were left while a call on them was unfinished
    communicator        collectives of one group

Must not know: models, the scheduler, how the processes are started.
"""
