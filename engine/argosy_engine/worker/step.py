"""What the scheduler tells the worker in each step, and what comes back.

Diff-based, as in vLLM V1: a request's prompt travels once (`NewRequest`), afterwards only what changed.
Plain token ids and block ids; no text, no hashes.
"""

from __future__ import annotations

from msgspec import Struct

from argosy_engine.sample.params import SamplingParams
from argosy_engine.sample.pooling_params import PoolingParams
from argosy_engine.sample.token_logprobs import TokenLogprobs

BlockIds = list[list[int]]
"""Per KV cache group the blocks in token order; 0 where one is no longer read."""


class MultimodalFeature(Struct, array_like=True, frozen=True, gc=False):
    """A picture, sound or video in a prompt, behind placeholder tokens."""

    modality: str
    identifier: str
    """Digest of its content."""
    offset: int
    """Position of its first placeholder."""
    length: int
    """Number of placeholders."""


class NewRequest(Struct, array_like=True, gc=False):
    """First schedule of a request, or its resumption after a preemption (then with the tokens generated so far)."""

    request_id: str
    token_ids: list[int]
    """Every token known so far: prompt, and output of before the preemption."""
    block_ids: BlockIds
    num_computed_tokens: int
    sampling_params: SamplingParams
    num_output_tokens: int = 0
    """How many of the last `token_ids` are output."""
    pooling_params: PoolingParams | None = None
    adapter: str | None = None
    mm_features: list[MultimodalFeature] = []


class GrammarBitmask(Struct, array_like=True, gc=False):
    """What grammars allow next; only requests that have one and sample in this step."""

    request_ids: list[str]
    bitmask: bytes
    """int32 [rows, ceil(vocab_size / 32)], token t allowed if bit t % 32 of word t // 32 is set. A request has a row
    for the next token, and one behind each draft that the step verifies."""


class SchedulerOutput(Struct, array_like=True, gc=False):
    new_requests: list[NewRequest]
    new_block_ids: dict[str, BlockIds]
    """Of the requests the worker already knows, those that got blocks; to be appended."""
    num_scheduled_tokens: dict[str, int]
    """Request id -> tokens to compute in this step; the order is the batch order."""
    total_num_scheduled_tokens: int
    finished_request_ids: list[str]
    """Requests whose slots the worker frees before this step: finished, aborted or preempted."""
    scheduled_spec_token_ids: dict[str, list[int]]
    """Request id -> drafts that its scheduled tokens end with."""
    grammar: GrammarBitmask | None = None
    awaits_grammar: bool = False
    """The mask depends on tokens that are still under way and follows (`PendingOutput.sample`)."""


class ModelRunnerOutput(Struct, array_like=True, gc=False):
    request_ids: list[str]
    sampled_token_ids: list[list[int]]
    """Per request the new tokens, several when drafts were accepted; none while its prompt is being computed."""
    logprobs: dict[str, list[TokenLogprobs]] = {}
    """Of the new tokens, for requests that asked for them."""
    prompt_logprobs: dict[str, tuple[int, list[TokenLogprobs]]] = {}
    """Of prompt tokens computed in this step, with the number of those before them that have some: all but the first
    prompt token."""
    draft_token_ids: dict[str, list[int]] = {}
    """Guesses at the tokens that follow, for the next step to verify."""
    pooler_output: dict[str, list[float]] = {}
    """Vectors of the prompts that ended in this step, for requests that asked for one."""
    errors: dict[str, str] = {}
    """Requests that cannot go on, and why."""
