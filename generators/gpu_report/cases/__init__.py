"""The cases of each kernel, one module per kernel module with a function `cases`, and those of whole steps."""

from gpu_report.case import Cases
from gpu_report.cases import (
    fp8_linear,
    fused_moe,
    gated_delta_net,
    latent_attention,
    mamba,
    moe_routing,
    packed_linear,
    paged_attention,
    process_logits,
    published_models,
    quantize_fp8,
    rms_norm,
    rope_and_cache,
    sampling,
    short_conv,
    silu_and_mul,
    top_logprobs,
)

ALL_CASES: dict[str, Cases] = {
    "fp8_linear": fp8_linear.cases,
    "fused_moe": fused_moe.cases,
    "gated_delta_net": gated_delta_net.cases,
    "latent_attention": latent_attention.cases,
    "mamba": mamba.cases,
    "moe_routing": moe_routing.cases,
    "packed_linear": packed_linear.cases,
    "paged_attention": paged_attention.cases,
    "process_logits": process_logits.cases,
    "published_models": published_models.cases,
    "quantize_fp8": quantize_fp8.cases,
    "rms_norm": rms_norm.cases,
    "rope_and_cache": rope_and_cache.cases,
    "sampling": sampling.cases,
    "short_conv": short_conv.cases,
    "silu_and_mul": silu_and_mul.cases,
    "top_logprobs": top_logprobs.cases,
}
"""By the name of the kernel module; of whole steps, `published_models`."""
