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
    elif launch.name == "rope_and_cache":
        moved = _rope_and_cache(launch, arguments)
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
