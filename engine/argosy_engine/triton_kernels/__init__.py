"""Our Triton kernels, each with the function that chooses its configuration and launches it.

Nothing here is imported unless a backend on CUDA is chosen (or Triton's interpreter is asked for): importing Triton
takes longer than loading a small model.

`rope_and_cache` and `paged_attention` are the attention backend `triton`. The others are not called by models and
sampler yet: norms, activations, experts, sampling, processing of logits, log probabilities.
"""
