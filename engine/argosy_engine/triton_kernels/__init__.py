"""Our Triton kernels, each with the function that chooses its configuration and launches it.

    paged_attention          attention over the paged KV cache
    paged_attention_kernel   its kernel
    attention_tiles          its tile sizes
    split_kv                 in how many segments it reads a long sequence
    rope_and_cache           what comes between the qkv projection and attention

    rms_norm                 RMSNorm
    silu_and_mul             the activation of gated MLPs
    activations              the same inside other kernels
    fused_moe                products of a mixture of experts
    moe_routing              which tokens go to which expert
    gated_delta_net          Gated DeltaNets between their projections
    mamba                    Mamba-2 layers between their projections
    short_conv               LFM2's short convolutions between their projections
    state_steps              where the states of a step's requests are, and the last inputs of convolutions
    quantize_fp8             activations to FP8
    fp8_rows                 the same inside other kernels

    process_logits           masks, logit_bias and penalties
    penalty_counts           each request's tokens, for the penalties
    cut_logits               the logits that tokens are drawn from, for --logprobs-mode
    sampling                 temperature, top-k, top-p, min-p and the draw
    nucleus                  finds the cut of top-k, top-p and min-p
    token_noise              the draw's random numbers
    top_logprobs             log probabilities and ranks
    ordered_keys             integers in the order of floats

    launch                   starts kernels, and records launches
    device_traits            what a configuration depends on

Nothing here is imported unless a backend on CUDA is chosen (or Triton's interpreter is asked for): importing Triton
takes longer than loading a small model. The attention backend `triton`, `models.triton_layer_kernels`,
`models.experts`, `layers.delta_net`, `layers.mamba`, `layers.short_conv`, `models.quantization` and
`sample.kernel_sampler` call the kernels.
"""
