"""Grammar mask, allowed tokens, min_tokens, logit_bias and penalties in one pass over the logits, and the counts of
tokens that penalties read.

The order and the results are those of `sample/sampler.py` and its processors: masks, suppression of end tokens, bias,
then the penalties on the biased logit. What concerns any token of the vocabulary is dense: a mask has one bit per token
(allowed_token_ids may list the whole vocabulary, so they are a mask too), and the penalties read counts. What concerns
few tokens is a list of edits per request.

A table of counts has one entry per request with penalties: int32 [E, vocab_size], where the sign bit says that the
token occurs in the prompt, and the other bits count it in the output. So an entry takes four bytes per token of the
vocabulary, whatever the length of the request, and is read at the same positions as the logits. The owner chooses the
number of entries and which request has which; `sample_tokens` counts the tokens that it draws.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from argosy_engine.triton_kernels.launch import cdiv, launch

UNLIKELY = -1e30
"""Highest logit of a suppressed token, which is sampled only where every other token is masked out."""

_BLOCK = 2048
_EDITS = 256


@dataclass(frozen=True, slots=True)
class RowMasks:
    """Masks of allowed tokens and the rows that they apply to."""

    entries: torch.Tensor
    """int32 [R], each row's mask; -1: none."""
    bitmask: torch.Tensor
    """int32 [G, ceil(vocab_size / 32)]; token t is allowed if bit t % 32 of word t // 32 is set (xgrammar's layout)."""


@dataclass(frozen=True, slots=True)
class RowPenalties:
    """Penalties and the rows that they apply to."""

    entries: torch.Tensor
    """int32 [R], each row's entry; -1: none."""
    token_counts: torch.Tensor
    """int32 [E, vocab_size], the counts."""
    values: torch.Tensor
    """float32 [E, 3]: repetition, frequency, presence."""


@dataclass(frozen=True, slots=True)
class RowEdits:
    """Changes of single tokens' logits and the rows that they apply to. The tokens of an entry are distinct."""

    entries: torch.Tensor
    """int32 [R], each row's entry; -1: none."""
    lengths: torch.Tensor
    """int32 [E], number of tokens; entries may be apart, here and below."""
    token_ids: torch.Tensor
    """int32 [E, L]"""
    biases: torch.Tensor
    """float32 [E, L], as far apart as `token_ids`, added to the logits (logit_bias); minus infinity bans the token."""
    first_positions: torch.Tensor
    """int64 [E, L], the first position at which the token is not suppressed (min_tokens); 0: never suppressed."""


def process_logits(
    logits: torch.Tensor,
    positions: torch.Tensor,
    *,
    grammar: RowMasks | None = None,
    allowed: RowMasks | None = None,
    edits: RowEdits | None = None,
    penalties: RowPenalties | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the float32 logits [R, vocab_size] that result, in one launch.

    A program takes 2048 tokens of one row and visits a list of edits only for its row's own entry.

    Args:
        logits: [R, vocab_size], bfloat16, float16 or float32; rows may be apart, a row is contiguous.
        positions: int64 [R], index, in its sequence, of the token to sample; -1: padding, whose logits are not written.
        out: receives the result; not the logits themselves, which are read again for the edits.

    Raises:
        ValueError: `out` is `logits`.
    """
    if out is None:
        out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    elif out is logits:
        raise ValueError("process_logits needs another tensor for its result than the logits")
    num_rows, vocab_size = logits.shape
    launch(
        _process_logits,
        (num_rows, cdiv(vocab_size, _BLOCK)),
        logits_ptr=logits,
        out_ptr=out,
        positions_ptr=positions,
        grammar_entries_ptr=grammar.entries if grammar else None,
        grammar_ptr=grammar.bitmask if grammar else None,
        allowed_entries_ptr=allowed.entries if allowed else None,
        allowed_ptr=allowed.bitmask if allowed else None,
        penalty_entries_ptr=penalties.entries if penalties else None,
        token_counts_ptr=penalties.token_counts if penalties else None,
        penalties_ptr=penalties.values if penalties else None,
        edit_entries_ptr=edits.entries if edits else None,
        edit_lengths_ptr=edits.lengths if edits else None,
        edit_ids_ptr=edits.token_ids if edits else None,
        biases_ptr=edits.biases if edits else None,
        first_positions_ptr=edits.first_positions if edits else None,
        vocab_size=vocab_size,
        row_stride=logits.stride(0),
        out_stride=out.stride(0),
        num_words=cdiv(vocab_size, 32),
        lengths_stride=edits.lengths.stride(0) if edits else 0,
        edits_stride=edits.token_ids.stride(0) if edits else 0,
        first_positions_stride=edits.first_positions.stride(0) if edits else 0,
        BLOCK=_BLOCK,
        EDITS=_EDITS,
    )
    return out


@triton.jit
def _process_logits(
    logits_ptr,
    out_ptr,
    positions_ptr,
    grammar_entries_ptr,
    grammar_ptr,
    allowed_entries_ptr,
    allowed_ptr,
    penalty_entries_ptr,
    token_counts_ptr,
    penalties_ptr,
    edit_entries_ptr,
    edit_lengths_ptr,
    edit_ids_ptr,
    biases_ptr,
    first_positions_ptr,
    vocab_size,
    row_stride,
    out_stride,
    num_words,
    lengths_stride,
    edits_stride,
    first_positions_stride,
    BLOCK: tl.constexpr,
    EDITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + row)
    if position < 0:
        return
    start = tl.program_id(1) * BLOCK
    ids = start + tl.arange(0, BLOCK)
    is_token = ids < vocab_size
    row_ptr, row_out_ptr = logits_ptr + row * row_stride, out_ptr + row * out_stride
    x = tl.load(row_ptr + ids, mask=is_token, other=0.0).to(tl.float32)
    x = _mask(x, ids, is_token, row, grammar_entries_ptr, grammar_ptr, num_words)
    x = _mask(x, ids, is_token, row, allowed_entries_ptr, allowed_ptr, num_words)
    x = _penalize(x, ids, is_token, row, penalty_entries_ptr, token_counts_ptr, penalties_ptr, vocab_size)
    tl.store(row_out_ptr + ids, x, mask=is_token)
    if edit_entries_ptr is not None:
        entry = tl.load(edit_entries_ptr + row).to(tl.int64)
        if entry >= 0:
            # An edit comes before the penalties, so its token's logit is computed anew and written over the other.
            tl.debug_barrier()
            length = tl.load(edit_lengths_ptr + entry * lengths_stride)
            for first in range(0, length, EDITS):
                at = first + tl.arange(0, EDITS)
                edited = tl.load(edit_ids_ptr + entry * edits_stride + at, mask=at < length, other=-1)
                is_edit = (edited >= start) & (edited < tl.minimum(start + BLOCK, vocab_size))
                value = tl.load(row_ptr + edited, mask=is_edit, other=0.0).to(tl.float32)
                value = _mask(value, edited, is_edit, row, grammar_entries_ptr, grammar_ptr, num_words)
                value = _mask(value, edited, is_edit, row, allowed_entries_ptr, allowed_ptr, num_words)
                first_position = tl.load(
                    first_positions_ptr + entry * first_positions_stride + at, mask=is_edit, other=0
                )
                value = tl.where((position < first_position) & (value > -1e30), -1e30, value)
                value += tl.load(biases_ptr + entry * edits_stride + at, mask=is_edit, other=0.0)
                value = _penalize(
                    value,
                    edited,
                    is_edit,
                    row,
                    penalty_entries_ptr,
                    token_counts_ptr,
                    penalties_ptr,
                    vocab_size,
                )
                tl.store(row_out_ptr + edited, value, mask=is_edit)


@triton.jit
def _mask(x, ids, is_token, row, entries_ptr, bitmask_ptr, num_words):
    if entries_ptr is not None:
        entry = tl.load(entries_ptr + row).to(tl.int64)
        if entry >= 0:
            words = tl.load(bitmask_ptr + entry * num_words + ids // 32, mask=is_token, other=0)
            x = tl.where((words >> (ids % 32)) & 1 != 0, x, float("-inf"))
    return x


@triton.jit
def _penalize(x, ids, is_token, row, entries_ptr, counts_ptr, penalties_ptr, vocab_size):
    if entries_ptr is not None:
        entry = tl.load(entries_ptr + row).to(tl.int64)
        if entry >= 0:
            counts = tl.load(counts_ptr + entry * vocab_size + ids, mask=is_token, other=0)
            repetition = tl.load(penalties_ptr + entry * 3)
            frequency = tl.load(penalties_ptr + entry * 3 + 1)
            presence = tl.load(penalties_ptr + entry * 3 + 2)
            in_output = counts & 0x7FFFFFFF
            x = tl.where(counts != 0, tl.where(x > 0, x / repetition, x * repetition), x)
            x = x - frequency * in_output.to(tl.float32) - tl.where(in_output > 0, presence, 0.0)
    return x


IN_PROMPT = -(1 << 31)
"""The sign bit."""

_COUNT_BLOCK = 1024


def clear_entries(token_counts: torch.Tensor, entries: torch.Tensor) -> None:
    """Set entries to zero, before requests take them.

    Args:
        token_counts: int32 [E, vocab_size].
        entries: int32 [N]; -1: padding.
    """
    vocab_size = token_counts.shape[1]
    launch(
        _clear_entries,
        (len(entries), cdiv(vocab_size, 4 * _COUNT_BLOCK)),
        counts_ptr=token_counts,
        entries_ptr=entries,
        vocab_size=vocab_size,
        BLOCK=4 * _COUNT_BLOCK,
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
        (cdiv(len(token_ids), _COUNT_BLOCK),),
        counts_ptr=token_counts,
        entries_ptr=entries,
        token_ids_ptr=token_ids,
        is_output_ptr=is_output,
        num_tokens=len(token_ids),
        vocab_size=token_counts.shape[1],
        BLOCK=_COUNT_BLOCK,
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
