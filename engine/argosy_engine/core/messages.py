"""What travels between a client and the engine core, as msgpack over ZMQ or by reference in one process.

array_like structs are positional: new fields are appended, with defaults. The request type is a one-byte frame of
its own, so that the receiver can choose the decoder.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from msgspec import Struct

from argosy_engine.config import EngineArgs, ResolvedConfig
from argosy_engine.sample.params import SamplingParams
from argosy_engine.sample.pooling_params import PoolingParams
from argosy_engine.sample.token_logprobs import TokenLogprobs
from argosy_engine.structured.manager import GrammarRequest
from argosy_engine.worker.step import MultimodalFeature


class RequestType:
    ADD = b"\x00"
    ABORT = b"\x01"
    UTILITY = b"\x03"
    HANDSHAKE = b"\x06"


class FinishReason(IntEnum):
    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4

    def __str__(self) -> str:
        return self.name.lower()


class ErrorKind(IntEnum):
    """Who must act on a request that ended with an error."""

    INVALID = 0
    """The client: the request as it is cannot be served."""
    INTERNAL = 1
    """Nobody but us."""
    BUSY = 2
    """The client, later."""
    INVALID_GRAMMAR = 3
    """The client: the shape that it asks of the output cannot be enforced."""


class ChunkEnd(Struct, array_like=True, gc=False, frozen=True):
    """A chunk hash of the prompt and the number of prompt tokens up to the end of that chunk."""

    hash: int
    token_end: int


class EngineCoreRequest(Struct, array_like=True, omit_defaults=True, gc=False):
    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    arrival_time: float
    """time.time() at the API, for queue-time statistics"""
    cache_salt: str | None = None
    chunk_ends: list[ChunkEnd] = []
    priority: int = 0
    resume_token_ids: list[int] = []
    """Output of an earlier run of this request, which this one continues: it counts as output, and is not repeated."""
    pooling_params: PoolingParams | None = None
    """Asks for a vector made of the prompt. The one token of output that comes with it means nothing."""
    grammar: GrammarRequest | None = None
    """What the output must look like."""
    adapter: str | None = None
    """Name and version of the adapter whose weights serve the request."""
    mm_features: list[MultimodalFeature] = []
    """In the order of their positions."""
    batch_offset: int = 0
    """In a call of several prompts, their tokens up to the end of this one; 0 in a call of one. The prompts of a call
    take turns with other clients' requests by it (`RequestQueue`)."""
    tenant: str = ""
    """Whose request it is, by the word of a router; empty where none says it."""
    call_id: str = ""
    """The same for all sequences (prompts, choices) of a call, which share its seats (`CallQueue`); empty in a call of
    one sequence."""


class UtilityCall(Struct, array_like=True, gc=False):
    call_id: int
    method: str
    args: list[Any]


class UtilityOutput(Struct, array_like=True, gc=False):
    call_id: int
    failure: str | None = None
    result: Any = None


class PrefillStats(Struct, array_like=True, gc=False):
    """Sent with a request's first token."""

    num_cached_tokens: int
    queued_s: float
    prefill_s: float


class EngineCoreOutput(Struct, array_like=True, omit_defaults=True, gc=False):
    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id, when one ended the request, or `repetition_detected`."""
    prefill_stats: PrefillStats | None = None
    error: str | None = None
    num_preemptions: int = 0
    logprobs: list[TokenLogprobs] | None = None
    """One per new token, for requests that asked."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Of all prompt tokens but the first; sent with the first output."""
    pooling_output: list[float] | None = None
    error_kind: ErrorKind = ErrorKind.INVALID


class SchedulerStats(Struct, array_like=True, omit_defaults=True, gc=False):
    num_running: int = 0
    num_waiting: int = 0
    queued_uncached_tokens: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_queries: int = 0
    """tokens looked up since the last report"""
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    iteration_tokens: int = 0
    longest_step_s: float = 0.0
    num_stalled: int = 0
    """Requests failed by the watchdog since the last report."""


class ResidencyDelta(Struct, array_like=True, omit_defaults=True, gc=False):
    """Changes of the prefix cache in terms of chunk hashes, in order: cleared, then removed, then stored."""

    cleared: bool = False
    removed: list[int] = []
    stored: list[ChunkEnd] = []


class EngineCoreOutputs(Struct, array_like=True, omit_defaults=True, gc=False):
    outputs: list[EngineCoreOutput] = []
    stats: SchedulerStats | None = None
    residency: ResidencyDelta | None = None
    utility: UtilityOutput | None = None
    dead: str | None = None
    """Set in the last message of a core that dies, with the reason."""


class Hello(Struct, tag="HELLO", tag_field="status"):
    """First message of the core process."""

    pid: int


class Handshake(Struct, tag="INIT", tag_field="status"):
    """The client's answer: what to run."""

    engine_args: EngineArgs


class Loading(Struct, tag="LOADING", tag_field="status"):
    """Both sockets are connected, so their files may go; the model loads."""


class Ready(Struct, tag="READY", tag_field="status"):
    config: ResolvedConfig


class Failed(Struct, tag="FAILED", tag_field="status"):
    """The core could not start; `message` is meant for the person who started it."""

    message: str
    is_config_error: bool


HandshakeMessage = Hello | Handshake | Loading | Ready | Failed
