"""SchedulerOutput: what the scheduler tells the workers to compute in a step.

It is a diff, as in vLLM V1: a request's prompt is sent once (`NewRequest`), afterwards only changes. It contains token
ids and block ids; no text, no hashes.
"""

from __future__ import annotations

from msgspec import Struct

from argosy_engine.distributed.lockstep import Round
from argosy_engine.params.pooling_params import PoolingParams
from argosy_engine.params.sampling_params import SamplingParams

BlockIds = list[list[int]]
"""One list per KV cache group of block ids in token order; 0 (the null block) for a block that is no longer read."""


class MultimodalFeature(Struct, array_like=True, frozen=True, gc=False):
    """An image, audio clip or video in a prompt, represented by placeholder tokens."""

    modality: str
    identifier: str
    """Digest of the content."""
    offset: int
    """Position of its first placeholder token."""
    length: int
    """Number of placeholder tokens."""


class NewRequest(Struct, array_like=True, gc=False):
    """A request that is scheduled for the first time, or again after a preemption."""

    request_id: str
    token_ids: list[int]
    """All known tokens: the prompt and the output so far."""
    block_ids: BlockIds
    num_computed_tokens: int
    sampling_params: SamplingParams
    num_output_tokens: int = 0
    """How many tokens at the end of `token_ids` are output."""
    pooling_params: PoolingParams | None = None
    adapter: str | None = None
    mm_features: list[MultimodalFeature] = []


class GrammarBitmask(Struct, array_like=True, gc=False):
    """Tokens that grammars allow, for the requests of a step that have a grammar and sample."""

    request_ids: list[str]
    bitmask: bytes
    """int32 [rows, ceil(vocab_size / 32)]; token t is allowed if bit t % 32 of word t // 32 is set. A request has one
    row for the next token, and one row for the token after each draft that the step verifies."""


class SchedulerOutput(Struct, array_like=True, gc=False):
    """Step for the workers to compute."""

    new_requests: list[NewRequest]
    new_block_ids: dict[str, BlockIds]
    """Request id -> block ids to append, for requests that the worker already knows."""
    num_scheduled_tokens: dict[str, int]
    """Request id -> number of tokens to compute in this step, in batch order."""
    total_num_scheduled_tokens: int
    finished_request_ids: list[str]
    """Ids of requests whose slots the worker frees before this step: finished, aborted or preempted."""
    scheduled_spec_token_ids: dict[str, list[int]]
    """Request id -> draft tokens at the end of its scheduled tokens."""
    grammar: GrammarBitmask | None = None
    awaits_grammar: bool = False
    """Whether the bitmask follows later (`PendingOutput.sample`), because it depends on tokens that are in flight."""
    new_token_ids: dict[str, int] = {}
    """Request id -> the one token that it computes in this step, for pipeline stages that have not sampled it. Only
    with pipeline parallelism."""
    round: Round | None = None
    """What all engine cores have agreed to compute in this step, if they share experts."""
