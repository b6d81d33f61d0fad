"""Bytes that a launch of one of our kernels reads and writes, from its arguments.

What depends on values is taken at what a step has to move: keys and values of the tokens that its requests can see are
counted once, although a prompt of several query tiles reads them again, from the L2 cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from argosy_engine.triton_kernels.launch import Launch


def launch_bytes(launch: Launch, seq_lens: Sequence[int]) -> int:
    """Return the bytes that a launch moves.

    Args:
        seq_lens: tokens of each request of the step.
    """
    arguments = {name: value for name, value in launch.arguments.items() if isinstance(value, torch.Tensor)}
    if launch.name == "paged_attention_kernel":
        moved = _attention(launch, arguments, seq_lens)
    elif launch.name == "latent_attention_kernel":
        moved = _latent_attention(launch, arguments, seq_lens)
    elif launch.name == "rope_and_cache":
        moved = _rope_and_cache(launch, arguments)
    elif launch.name == "latent_rope_and_cache":
        moved = _latent_rope_and_cache(launch, arguments)
    elif launch.name in _STATES:
        moved = _states(launch, arguments)
    elif launch.name in ("gate_up_experts", "down_experts"):
        moved = _experts(launch, arguments)
    else:
        moved = sum(tensor.nbytes for tensor in arguments.values())
    return moved


def _attention(launch: Launch, arguments: dict[str, torch.Tensor], seq_lens: Sequence[int]) -> int:
    keys = arguments["k_ptr"]
    _, block_size, num_kv_heads, head_dim = keys.shape
    window = launch.arguments["sliding_window"]
    visible = sum(seq_len if window is None else min(seq_len, window) for seq_len in seq_lens)
    tables = sum(4 * -(-seq_len // block_size) for seq_len in seq_lens)
    rest = sum(arguments[name].nbytes for name in ("q_ptr", "out_ptr", "lse_ptr") if name in arguments)
    return 2 * visible * num_kv_heads * head_dim * keys.itemsize + tables + rest


def _latent_attention(launch: Launch, arguments: dict[str, torch.Tensor], seq_lens: Sequence[int]) -> int:
    cache = arguments["cache_ptr"]
    _, block_size, width = cache.shape
    seen = seq_lens[: launch.arguments["num_requests"]]
    tables = sum(4 * -(-seq_len // block_size) for seq_len in seen)
    names = ("q_latent_ptr", "q_rope_ptr", "out_ptr", "lse_ptr")
    rest = sum(arguments[name].nbytes for name in names if name in arguments)
    return sum(seen) * width * cache.itemsize + tables + rest


def _latent_rope_and_cache(launch: Launch, arguments: dict[str, torch.Tensor]) -> int:
    """Of queries only what is rotated is touched."""
    tokens, rope, q = len(arguments["slots_ptr"]), launch.arguments["ROPE"], arguments["q_ptr"]
    rotated = 2 * tokens * launch.arguments["num_heads"] * rope * q.itemsize
    latents = 2 * arguments["compressed_ptr"].nbytes
    return rotated + latents + 4 * tokens * rope + 16 * tokens + arguments["norm_ptr"].nbytes


_STATES = {
    "delta_inputs": ("conv_states_ptr", 1),
    "keep_inputs": ("conv_states_ptr", 1),
    "delta_rule": ("states_ptr", 2),
    "scan_chunks": ("states_ptr", 1),
}
"""Kernels of a Gated DeltaNet with states: which ones, and how often a request's are moved, read or written."""


def _states(launch: Launch, arguments: dict[str, torch.Tensor]) -> int:
    """States are moved of the requests that a launch computes. Of the inputs of the convolution, `keep_inputs` reads
    those that it writes."""
    name, times = _STATES[launch.name]
    state = arguments[name].nbytes // len(arguments[name])
    requests = len(arguments["lens_ptr"])
    if name == "states_ptr":
        requests = launch.grid[0] // launch.arguments["VALUE_HEADS"]
    left_out = {name, "table_ptr"}
    if launch.name == "keep_inputs":
        left_out.add("qkvz_ptr")
        times += 1
    rest = sum(tensor.nbytes for key, tensor in arguments.items() if key not in left_out)
    return rest + requests * (times * state + 8)


def _experts(launch: Launch, arguments: dict[str, torch.Tensor]) -> int:
    """The weights of an expert that no token has chosen are not read. As many are hit as can be."""
    weights = [arguments[name] for name in ("weight_ptr", "scale_ptr") if name in arguments]
    hit = min(1.0, len(arguments["out_ptr"]) / len(weights[0]))
    rest = sum(tensor.nbytes for tensor in arguments.values()) - sum(each.nbytes for each in weights)
    return rest + int(hit * sum(each.nbytes for each in weights))


def _rope_and_cache(launch: Launch, arguments: dict[str, torch.Tensor]) -> int:
    tokens = len(arguments["slots_ptr"])
    head_dim, num_kv_heads = launch.arguments["HEAD_DIM"], launch.arguments["num_kv_heads"]
    qkv = arguments["qkv_ptr"]
    queries = tokens * launch.arguments["num_heads"] * head_dim * qkv.itemsize
    written = 2 * tokens * num_kv_heads * head_dim * arguments["cache_ptr"].itemsize
    tables = 4 * tokens * launch.arguments["ROTARY_DIM"]
    return qkv.nbytes + queries + written + tables + 16 * tokens
