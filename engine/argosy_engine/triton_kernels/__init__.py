"""Our Triton kernels, each with the function that chooses its configuration and launches it.

Nothing here is imported unless a backend on CUDA is chosen (or Triton's interpreter is asked for): importing Triton
takes longer than loading a small model. The attention backend `triton`, `layers` and `sample.kernel_sampler` call the
kernels.
"""
