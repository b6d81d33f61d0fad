"""Messages between client, engine core and workers: the contract that both sides of each read. No torch.

Between core and workers are steps (`SchedulerOutput`, `ModelRunnerOutput`), what a worker tells of itself
(`WorkerInfo`, `LoadStep`), and calls of a method of every worker (`CollectiveRpc`). A step is a diff, as in vLLM V1: a
request's prompt is sent once (`NewRequest`), afterwards only changes; token ids and block ids, no text, no hashes.

Between client and core messages are msgpack over ZMQ, or passed by reference within one process. The request type is
sent as a separate one-byte frame, so that the receiver can choose the decoder. A message has one or several pairs of
type and struct. The core's process begins with a handshake, in this order: Hello, Handshake, Loading, Ready. Between
Loading and Ready `Advanced` tells how far the load is, any number of times. `Failed` takes the place of `Ready` if the
core cannot start. Clients in further API processes answer `Attached` instead of `Handshake`.

array_like structs are positional: append new fields at the end, with defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from argosy_engine.attention.kv_cache_spec import KVCacheGroup
from argosy_engine.config import EngineArgs
from argosy_engine.distributed.lockstep import LockstepEnds, Round
from argosy_engine.errors import UtilityFailed
from argosy_engine.model_configs.model_config import ModelConfig
from argosy_engine.params import PoolingParams, SamplingParams
from argosy_engine.resolved_config import MemoryBudget, ResolvedConfig
from argosy_engine.sample.token_logprobs import TokenLogprobs
from argosy_engine.structured.manager import GrammarRequest

BlockIds = list[list[int]]
"""One list per KV cache group of block ids in token order; 0 (the null block) for a block that is no longer read."""


class MediaTensor(Struct, array_like=True, frozen=True, gc=False):
    """A tensor that an encoder reads, as its bytes."""

    dtype: Literal["float32", "float16", "bfloat16", "uint8", "int32", "int64", "bool"]
    shape: tuple[Annotated[int, Meta(ge=0, le=1 << 31)], ...]
    data: bytes
    """In C order, little endian; or a view of a frame, or of a file (`core.proc.media_channel`)."""


class MultimodalFeature(Struct, array_like=True, frozen=True, gc=False):
    """An image, audio clip or video in a prompt, represented by placeholder tokens."""

    modality: str
    identifier: str
    """Digest of the content, and of everything else that the encoder's inputs depend on."""
    offset: int
    """Position of its first placeholder token."""
    length: int
    """Number of placeholder tokens, those between rows and around it included."""
    num_embeds: int = 0
    """How many of them the encoder's outputs replace: those that are the model's placeholder (`VisionSpec`)."""
    grid: tuple[int, ...] = ()
    """[frames, rows, columns] of its outputs, for models with M-RoPE; otherwise empty."""
    inputs: dict[str, MediaTensor] = {}
    """What the encoder reads, by the names of its arguments. Workers get it with the step that encodes
    (`SchedulerOutput.encoder_inputs`), and not with the request."""

    @property
    def num_bytes(self) -> int:
        """Of its tensors."""
        return sum(len(tensor.data) for tensor in self.inputs.values())


class EncoderInput(Struct, array_like=True, frozen=True, gc=False):
    """A multimodal item that a step encodes before it computes tokens."""

    identifier: str
    modality: str
    num_embeds: int
    inputs: dict[str, MediaTensor]


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
    encoder_inputs: list[EncoderInput] = []
    """Items to encode in this step. Workers keep the outputs by their identifiers."""
    freed_encoder_outputs: list[str] = []
    """Identifiers of outputs that workers drop before this step."""


class ModelRunnerOutput(Struct, array_like=True, gc=False):
    """Tokens that a step has sampled, and what else its requests asked for."""

    request_ids: list[str]
    sampled_token_ids: list[list[int]]
    """New tokens of each request: none during its prefill, several if drafts were accepted."""
    logprobs: dict[str, list[TokenLogprobs]] = {}
    """Request id -> entries of the new tokens, for requests that asked for them."""
    prompt_logprobs: dict[str, tuple[int, list[TokenLogprobs]]] = {}
    """Request id -> (number of earlier entries, entries computed in this step). Every prompt token except the first has
    an entry."""
    draft_token_ids: dict[str, list[int]] = {}
    """Request id -> proposed draft tokens, which the next step verifies."""
    pooler_output: dict[str, list[float]] = {}
    """Request id -> vector, for pooling requests whose prompts are complete with this step."""
    errors: dict[str, str] = {}
    """Request id -> reason why the request cannot continue."""
    lost: str = ""
    """Why the step is lost as a whole, with the keys and values that it should have written. Empty: it is not."""
    failed_encodings: dict[str, str] = {}
    """Identifier -> reason why a multimodal item could not be encoded. Requests with it have computed nonsense, which
    others may share already."""


class WorkerInfo(Struct, frozen=True, kw_only=True):
    """Model, device and memory that a worker has determined at its start."""

    model_path: str
    model_fingerprint: str
    config: ModelConfig
    device: str
    dtype: str
    memory: MemoryBudget
    kv_cache_groups: tuple[KVCacheGroup, ...]
    phases: tuple[tuple[str, float], ...]
    seed: int | None = None
    """Seed for an engine without `--seed`, if copies of it must draw the same tokens."""


MAX_RPC_TIMEOUT_S = 86400.0


class CollectiveRpc(Struct, array_like=True, frozen=True):
    """Call of a public method of every worker. Arguments and results must be msgpack values.

    Raises (from the constructor, and when decoded):
        UtilityFailed: the timeout is not a number of seconds.
    """

    method: str
    timeout: float | None = None
    """Seconds to wait for the answers; None means no limit. The call itself is not cancelled."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}

    def __post_init__(self) -> None:
        timeout: Any = self.timeout  # a caller's value, which no decoder has checked
        if timeout is not None and not (
            isinstance(timeout, (int, float)) and 0 < timeout < MAX_RPC_TIMEOUT_S
        ):
            raise UtilityFailed(
                f"collective_rpc: timeout is a number of seconds above 0, not {timeout!r:.64}"
            )


class LoadStep(Struct, frozen=True, array_like=True):
    """What a worker's load has reached. A load advances with every new one."""

    phase: Annotated[str, Meta(max_length=64)]
    """Such as `weights` or `kv cache`."""
    num_done: Annotated[int, Meta(ge=0)] = 0
    """In the phase `weights` bytes of the checkpoint."""
    num_total: Annotated[int, Meta(ge=0)] = 0
    """0: unknown."""

    def __str__(self) -> str:
        return f"{self.phase}, {100 * self.num_done // self.num_total} %" if self.num_total else self.phase


OnLoadStep = Callable[[LoadStep], None]


def ignore_step(step: LoadStep) -> None:
    pass


class LatestStep:
    """The latest step of any worker. Threads may note steps while another one reads."""

    def __init__(self) -> None:
        self.count = 0
        self.step = LoadStep("imports")

    def note(self, step: LoadStep) -> None:
        self.step = step
        self.count += 1


class RequestType:
    """First frame of each pair in a client's message."""

    ADD = b"\x00"
    ABORT = b"\x01"
    UTILITY = b"\x03"
    TENSOR = b"\x05"
    """The bytes of a tensor of the request that is added next (`core.proc.media_channel`)."""
    FILE = b"\x07"
    """The handle of the file that has all tensors of an image of that request."""
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
    determines the turns between this call and other requests (`WaitingQueue`)."""
    tenant: str = ""
    """Tenant as named by a trusted router; empty if none is named."""
    call_id: str = ""
    """The same for all sequences (prompts, choices) of a call, so that calls can share the slots fairly
    (`WaitingQueue`); empty in a call of one sequence."""
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
    encoder_cache_queries: int = 0
    """Multimodal items whose encoder outputs requests began to need since the last report."""
    encoder_cache_hits: int = 0
    """Of them, those whose outputs were kept."""


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


class Hello(Struct, tag="HELLO", tag_field="status"):
    """First message of the core process to its client."""

    pid: int


class Handshake(Struct, tag="INIT", tag_field="status"):
    """The client's answer: the arguments to run with."""

    engine_args: EngineArgs
    data_parallel_rank: int = 0
    lockstep: LockstepEnds | None = None
    """Of cores that share experts: what the core's process has inherited."""


class Attached(Struct, tag="ATTACHED", tag_field="status"):
    """The answer of a client that did not start the core."""

    client_index: int


class Loading(Struct, tag="LOADING", tag_field="status"):
    """The sockets of all clients are connected, so their files may be deleted; the core loads the model."""


class Advanced(Struct, tag="PROGRESS", tag_field="status"):
    """The load has advanced."""

    step: LoadStep


class Ready(Struct, tag="READY", tag_field="status"):
    """The core is ready to serve with this configuration."""

    config: ResolvedConfig


class Failed(Struct, tag="FAILED", tag_field="status"):
    """The core could not start. `message` is meant for the person who started it."""

    message: str
    is_config_error: bool


HandshakeMessage = Hello | Handshake | Attached | Loading | Advanced | Ready | Failed


SLEEP_LEVELS = (1, 2)


def check_sleep_level(level: int) -> None:
    """
    Raises:
        UtilityFailed: the level does not exist.
    """
    if level not in SLEEP_LEVELS:
        raise UtilityFailed(
            f"there is no sleep level {level}; there are {SLEEP_LEVELS[0]} and {SLEEP_LEVELS[1]}"
        )
