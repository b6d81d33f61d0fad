"""Messages between a client and the engine core: msgpack over ZMQ, or passed by reference within one process.

array_like structs are positional: append new fields at the end, with defaults. The request type is sent as a separate
one-byte frame, so that the receiver can choose the decoder. A message has one or several pairs of type and struct.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from msgspec import Struct

from argosy_engine.messages.scheduler_output import MultimodalFeature
from argosy_engine.params.pooling_params import PoolingParams
from argosy_engine.params.sampling_params import SamplingParams
from argosy_engine.sample.token_logprobs import TokenLogprobs
from argosy_engine.structured.manager import GrammarRequest


class RequestType:
    """First frame of each pair in a client's message."""

    ADD = b"\x00"
    ABORT = b"\x01"
    UTILITY = b"\x03"
    HANDSHAKE = b"\x06"


class FinishReason(IntEnum):
    """Why a request has ended."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4

    def __str__(self) -> str:
        return self.name.lower()


class ErrorKind(IntEnum):
    """Cause of a request's error, which tells who must act."""

    INVALID = 0
    """The request cannot be served; the client must change it."""
    INTERNAL = 1
    """A fault of the engine; the client cannot do anything about it."""
    BUSY = 2
    """What the request needs is overloaded, such as the compiler of grammars; the client should try again later."""
    INVALID_GRAMMAR = 3
    """The grammar or schema of the request cannot be enforced; the client must change it."""
    ASLEEP = 4
    """The engine is asleep; the client should try again later."""


class ChunkEnd(Struct, array_like=True, gc=False, frozen=True):
    """A chunk hash of the prompt and the number of prompt tokens up to the end of that chunk."""

    hash: int
    token_end: int


class EngineCoreRequest(Struct, array_like=True, omit_defaults=True, gc=False):
    """Request of a client: one sequence to generate, or one prompt to pool."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    arrival_time: float
    """When the API received the request, by `time.time()`."""
    cache_salt: str | None = None
    chunk_ends: list[ChunkEnd] = []
    priority: int = 0
    resume_token_ids: list[int] = []
    """Output of an earlier run of this request, which this run resumes. It counts as output and is not sent again."""
    pooling_params: PoolingParams | None = None
    """Asks for a vector pooled from the prompt. The one token that is sampled with it is discarded."""
    grammar: GrammarRequest | None = None
    """Grammar that the output must match."""
    adapter: str | None = None
    """Name and version of the adapter whose weights serve the request."""
    mm_features: list[MultimodalFeature] = []
    """Multimodal items in the order of their positions."""
    batch_offset: int = 0
    """In a call of several prompts, the tokens of its prompts up to the end of this one; 0 in a call of one prompt. It
    determines the turns between this call and other requests (`TurnClock`)."""
    tenant: str = ""
    """Tenant as named by a trusted router; empty if none is named."""
    call_id: str = ""
    """The same for all sequences (prompts, choices) of a call, so that calls can share the slots fairly (`CallQueue`);
    empty in a call of one sequence."""
    data_parallel_rank: int | None = None
    """Engine core that computes the request. None: the client chooses one, and sets this when it sends the request."""
    client_index: int = 0
    """API process that gets the outputs."""
    final_only: bool = False
    """Whether nobody reads the output before it is complete, as vLLM's `RequestOutputKind.FINAL_ONLY`, so that tokens
    between the first and the last may arrive late and together. There are no stop strings then."""


class UtilityCall(Struct, array_like=True, gc=False):
    """Call of a utility of the core by name."""

    call_id: int
    method: str
    args: list[Any]
    client_index: int = 0
    """API process that gets the result."""


class UtilityOutput(Struct, array_like=True, gc=False):
    """Result of a `UtilityCall`, or why it failed."""

    call_id: int
    failure: str | None = None
    result: Any = None
    client_index: int = 0
    """Of the call."""


class PrefillStats(Struct, array_like=True, gc=False):
    """Statistics of a request's prefill, sent with its first token."""

    num_cached_tokens: int
    queued_s: float
    prefill_s: float


class HeldStep(Struct, array_like=True, gc=False, frozen=True):
    """A step whose tokens the core has held back (`HeldOutputs`)."""

    timestamp: float
    """When the step's message was made, in monotonic seconds."""
    num_tokens: int


class EngineCoreOutput(Struct, array_like=True, omit_defaults=True, gc=False):
    """New tokens of a request, and its end if `finish_reason` is set."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id that ended the request, or `repetition_detected`."""
    prefill_stats: PrefillStats | None = None
    error: str | None = None
    num_preemptions: int = 0
    logprobs: list[TokenLogprobs] | None = None
    """One entry per new token, if the request asked for them."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """One entry per prompt token except the first; sent with the first output."""
    pooling_output: list[float] | None = None
    error_kind: ErrorKind = ErrorKind.INVALID
    held_steps: list[HeldStep] = []
    """Earlier steps, whose tokens are the first ones of `new_token_ids`."""


class BlockLife(Struct, array_like=True, gc=False):
    """A KV block's time in the prefix cache, in seconds."""

    lifetime_s: float
    """From its allocation to its eviction."""
    idle_s: float
    """From its last use, or else its allocation, to its eviction."""
    reuse_gaps_s: list[float] = []
    """Between its last uses."""


class SchedulerStats(Struct, array_like=True, omit_defaults=True, gc=False):
    """Load of the core, and counters since the last report."""

    num_running: int = 0
    num_waiting: int = 0
    queued_uncached_tokens: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_queries: int = 0
    """Tokens looked up since the last report."""
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    iteration_tokens: int = 0
    longest_step_s: float = 0.0
    num_stalled: int = 0
    """Requests that the watchdog has failed since the last report."""
    num_yielding: int = 0
    """Of the running and waiting requests, sequences of calls with several."""
    num_deferred: int = 0
    """Of the waiting requests, those that wait for a grammar, and not for room."""
    num_tokens_elsewhere: int = 0
    """Generated tokens that were sent to other API processes since the last report."""
    num_recomputed_tokens: int = 0
    """Tokens of preempted requests that were computed again since the last report."""
    evicted_blocks: list[BlockLife] = []
    """Sampled blocks that were evicted since the last report (`--kv-cache-metrics`)."""


class ResidencyDelta(Struct, array_like=True, omit_defaults=True, gc=False):
    """Changes of the prefix cache as chunk hashes, to be applied in this order: cleared, removed, stored."""

    cleared: bool = False
    removed: list[int] = []
    stored: list[ChunkEnd] = []


class EngineCoreOutputs(Struct, array_like=True, omit_defaults=True, gc=False):
    """Message from the core to its client: outputs of a step, or a heartbeat."""

    outputs: list[EngineCoreOutput] = []
    stats: SchedulerStats | None = None
    residency: ResidencyDelta | None = None
    utility: UtilityOutput | None = None
    dead: str | None = None
    """Reason why the core is dying; set in its last message."""
    engine_index: int = 0
    """Data-parallel rank of the core, set by the client that receives the message."""
    timestamp: float = 0.0
    """When the core held this message back (`HeldOutputs`), in monotonic seconds; 0: it was sent at once."""
