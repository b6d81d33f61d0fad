"""Attention over the paged KV cache.

    params           constants of one layer's attention, known from config.json; no torch
    kv_cache_spec    what a layer keeps in the KV cache, and which blocks that takes; no torch
    selector         registry of backends, and the choice between them; no torch
    backend          what a backend is
    layer            Attention, the module that every model uses
    latent           LatentAttention, the same for models whose cache keeps latents
    metadata         a step's requests, positions and slots
    rotary           rotary tables, in plain torch
    torch_rms_norm   the norm of heads, in plain torch
    torch_attn       backend `torch`: the reference; latent_torch and decode_batches belong to it
    cpu_attn         backend `cpu`: our C++ kernels; native_step and native_decoder belong to it
    triton_attn      backend `triton`: our kernels for GPUs
    flash_attn       backend `flash_attn`: the library, if installed; flash_attn_versions belongs to it
    self_test        what a backend must compute on the device before it is used

A backend is one module that is imported only if it is chosen.
"""

WORKSPACE_BYTES = 256 << 20
"""Limit on the gathered keys and values, or the scores, that the torch backend materialises at a time. Exceeded only
where a single request, or a single query, takes more."""
