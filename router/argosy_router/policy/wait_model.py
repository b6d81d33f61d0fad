"""Waiting time: what a replica's load costs a new request, in seconds, without the request's own prefill.

    wait(w) = queued(w) / prefill_rate(w)                                              prompts queued ahead
            + EXPECTED_OUTPUT_TOKENS * decode_step(w) * requests(w) / max_num_seqs(w)  share of decode slots taken
            + KV_PRESSURE_S * k / (1 - k),  k = kv_usage(w)                            risk of preemption

Owns: the load terms shared by policies. Must not know: prompts, caches.
"""

from __future__ import annotations

from typing import Final

from argosy_router.policy.policy_interface import Candidate

EXPECTED_OUTPUT_TOKENS: Final = 64
"""Decode steps that a new request shares with the running ones: half a short answer, as they end meanwhile."""
KV_PRESSURE_S: Final = 0.05
"""At 90 % KV use, where preemption is near, the term is 0.45 s: the price of recomputing a few thousand tokens."""
_MAX_KV: Final = 0.99


def waiting_s(candidate: Candidate) -> float:
    """wait(w), in seconds."""
    kv = candidate.kv_usage
    decode_s = EXPECTED_OUTPUT_TOKENS * candidate.decode_step_s * candidate.requests / candidate.max_num_seqs
    queue = candidate.queued_tokens / candidate.prefill_tokens_per_s + decode_s
    if not kv:
        return queue
    kv = min(kv, _MAX_KV)
    return queue + KV_PRESSURE_S * kv / (1.0 - kv)


def waiting_terms(candidate: Candidate) -> dict[str, float]:
    """The summands of wait(w)."""
    kv = min(candidate.kv_usage, _MAX_KV)
    return {
        "queue_s": candidate.queued_tokens / candidate.prefill_tokens_per_s,
        "decode_s": EXPECTED_OUTPUT_TOKENS
        * candidate.decode_step_s
        * candidate.requests
        / candidate.max_num_seqs,
        "kv_s": KV_PRESSURE_S * kv / (1.0 - kv),
    }
