"""Memory report: formats the memory budget as a table, for `argosy doctor`, `argosy serve` and `LLMEngine`'s log."""

from __future__ import annotations

from collections.abc import Sequence

from argosy_engine.resolved_config import MemoryBudget

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def size(num_bytes: int) -> str:
    """Format a number of bytes with a binary unit."""
    for unit, name in _UNITS:
        if num_bytes >= unit:
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes} B"


def budget_table(*budgets: MemoryBudget) -> str:
    """Format the budget in five lines, or six for a model with states, numbers right-aligned.

    Args:
        budgets: those of all data-parallel ranks, of which the smallest is shown.
    """
    budget = min(budgets, key=lambda each: each.num_blocks)
    if budget.device == "cuda":
        share = f"{budget.utilization:g} of {size(budget.total_bytes)}, {size(budget.available_bytes)} free at start"
    else:
        share = f"{budget.utilization:g} of what weights leave of {size(budget.available_bytes)}"
    kind = "peak of the largest step" + ("" if budget.device == "cuda" else ", estimated")
    workers = f"on each of {budget.num_workers} workers, as below" if budget.num_workers > 1 else ""
    reason = share if budget.limited_by == "memory" else f"set by {budget.limited_by}"
    rows = [
        ("weights", size(budget.weights_bytes), workers),
        ("activations", size(budget.activation_bytes), kind),
    ]
    if not budget.request_blocks and not budget.num_states:
        rows.append(("KV cache", "none", "an encoder computes each prompt whole"))
        return _lines(rows, len(budgets))
    rows += [
        (
            "KV cache",
            size(budget.kv_cache_bytes),
            f"{budget.num_blocks} blocks of {budget.block_size}; {reason}",
        ),
        (
            "capacity",
            str(budget.kv_cache_tokens),
            f"tokens, {size(budget.block_bytes // budget.block_size)} each",
        ),
        ("concurrency", f"{budget.max_concurrency:.1f}", f"requests of {budget.max_model_len} tokens"),
    ]
    if budget.state_bytes:
        kept = f"of {size(budget.state_bytes)}, one of each request that runs, the others of cached prefixes"
        rows.insert(3, ("states", str(budget.num_states - 1), kept))
    return _lines(rows, len(budgets))


def _lines(rows: Sequence[tuple[str, str, str]], num_ranks: int) -> str:
    lines = [f"  {name:<14}{value:>12}  {note}".rstrip() for name, value, note in rows]
    return "\n".join(lines if num_ranks == 1 else [f"  each of {num_ranks} data-parallel ranks:", *lines])
