"""Counts of each request's tokens on the device, for the repetition, frequency and presence penalties.

A table has one entry per request with penalties: int32 [E, vocab_size], where the sign bit says that the token occurs
in the prompt, and the other bits count it in the output. So an entry takes four bytes per token of the vocabulary,
whatever the length of the request, and `process_logits` reads it at the same positions as the logits. The owner chooses
the number of entries and which request has which; `sample_tokens` counts the tokens that it draws.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from argosy_engine.triton_kernels.launch import launch

IN_PROMPT = -(1 << 31)
"""The sign bit."""

_BLOCK = 1024


def clear_entries(token_counts: torch.Tensor, entries: torch.Tensor) -> None:
    """Set entries to zero, before requests take them.

    Args:
        token_counts: int32 [E, vocab_size].
        entries: int32 [N]; -1: padding.
    """
    vocab_size = token_counts.shape[1]
    launch(
        _clear_entries,
        (len(entries), triton.cdiv(vocab_size, 4 * _BLOCK)),
        counts_ptr=token_counts,
        entries_ptr=entries,
        vocab_size=vocab_size,
        BLOCK=4 * _BLOCK,
    )


def count_tokens(
    token_counts: torch.Tensor, entries: torch.Tensor, token_ids: torch.Tensor, is_output: torch.Tensor
) -> None:
    """Add tokens, of any number of requests, to the entries' counts.

    Args:
        token_counts: int32 [E, vocab_size].
        entries: int32 [N], the entry that each token belongs to; -1: padding.
        token_ids: int32 or int64 [N].
        is_output: bool [N]; false: the token is in the prompt.
    """
    launch(
        _count_tokens,
        (triton.cdiv(len(token_ids), _BLOCK),),
        counts_ptr=token_counts,
        entries_ptr=entries,
        token_ids_ptr=token_ids,
        is_output_ptr=is_output,
        num_tokens=len(token_ids),
        vocab_size=token_counts.shape[1],
        BLOCK=_BLOCK,
    )


@triton.jit
def _clear_entries(counts_ptr, entries_ptr, vocab_size, BLOCK: tl.constexpr):
    entry = tl.load(entries_ptr + tl.program_id(0)).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if entry >= 0:
        tl.store(counts_ptr + entry * vocab_size + ids, tl.zeros([BLOCK], tl.int32), mask=ids < vocab_size)


@triton.jit
def _count_tokens(
    counts_ptr, entries_ptr, token_ids_ptr, is_output_ptr, num_tokens, vocab_size, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    entry = tl.load(entries_ptr + at, mask=at < num_tokens, other=-1).to(tl.int64)
    token = tl.load(token_ids_ptr + at, mask=at < num_tokens, other=0)
    is_output = tl.load(is_output_ptr + at, mask=at < num_tokens, other=0) != 0
    count = counts_ptr + entry * vocab_size + token
    tl.atomic_add(count, 1, mask=(entry >= 0) & is_output, sem="relaxed")
    tl.atomic_or(count, -2147483648, mask=(entry >= 0) & ~is_output, sem="relaxed")
