"""Compiles our Triton kernels ahead of time for GPUs that this machine does not have, and reports what came out."""
