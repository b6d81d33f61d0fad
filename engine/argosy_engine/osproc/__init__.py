"""Processes of the operating system, for every program of the engine. No torch.

child_process     children that end with their parent; how a parent ends them
collector         garbage collector while modules are imported
debug_signal      stacks and state on SIGUSR1
file_descriptors  limit of open files
shared_counters   numbers in memory that several processes share
"""
