"""ResolvedConfig: what an engine runs with, once model and device have decided what the flags left open."""

from __future__ import annotations

import sys
from typing import Literal

from msgspec import Struct

from argosy_engine.model_configs.pooling_spec import PoolingSpec
from argosy_engine.request_defaults import RequestDefaults
from argosy_engine.sample.token_logprobs import LogprobsMode


class MemoryBudget(Struct, frozen=True, kw_only=True):
    """How a device's memory is divided up. `sizing.kv_cache_sizing.plan_memory` makes it."""

    device: str
    """`cpu` or `cuda`."""
    num_workers: int = 1
    """Workers that share the model. Each needs as much as is given here, on a device of its own or on the same CPU."""
    total_bytes: int
    """The device's memory; on a CPU, the most that this process may use (the host's memory or its cgroup's limit)."""
    available_bytes: int
    """Memory that was free when the engine started; on a CPU, a worker's share of it."""
    utilization: float
    """`--gpu-memory-utilization` or its default."""
    weights_bytes: int
    activation_bytes: int
    """Peak of the largest step: measured on CUDA, estimated on a CPU and before the model is loaded."""
    block_bytes: int
    """One KV block over the layers that share it (all layers if they are of one kind)."""
    block_size: int
    num_blocks: int
    """Number of KV blocks, including the null block."""
    request_blocks: int
    """Blocks that one request of full length holds at most."""
    max_model_len: int
    limited_by: Literal["memory", "--kv-cache-memory-bytes", "--num-gpu-blocks-override", "--max-num-seqs"]
    """What determines the number of blocks. `--max-num-seqs`: more blocks could never be used."""
    state_bytes: int = 0
    """States of one request over all recurrent layers; 0: there are none."""
    num_states: int = 0
    """Number of blocks with states, including the null block."""

    @property
    def most_running(self) -> int:
        """Requests that can run at once, as far as states limit it."""
        return self.num_states - 1 if self.num_states else sys.maxsize

    @property
    def kv_cache_bytes(self) -> int:
        return self.num_blocks * self.block_bytes + self.num_states * self.state_bytes

    @property
    def kv_cache_tokens(self) -> int:
        """Capacity in tokens of full-length requests. With windows or chunks it exceeds the number of slots, because
        requests free the blocks that no later token reads. 0 for encoders."""
        full_length = -(-self.max_model_len // self.block_size) * self.block_size
        if not self.request_blocks and not self.num_states:
            return 0  # an encoder keeps nothing of a request
        in_states = (self.num_states - 1) * full_length
        if not self.request_blocks:  # states alone
            return in_states
        in_blocks = (self.num_blocks - 1) * full_length // self.request_blocks
        return min(in_blocks, in_states) if self.num_states else in_blocks

    @property
    def max_concurrency(self) -> float:
        """Number of full-length requests that fit into the KV cache at once; 0 for encoders."""
        return self.kv_cache_tokens / self.max_model_len


class ParserConfig(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The flags that choose the parsers of the model's output."""

    enable_auto_tool_choice: bool = True
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    tool_parser_plugin: str | None = None


class TokenizerConfig(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where the tokenizer is, if it is no tokenizer.json in the model's directory."""

    path: str | None = None
    """Directory with tokenizer_config.json and chat template (`--tokenizer`); None: the model's."""
    folder: str | None = None
    """Directory with the tokenizer.json that is loaded; None: the same."""
    mistral_file: str | None = None
    """The file that mistral-common encodes with."""


class ResolvedConfig(Struct, frozen=True, kw_only=True):
    """Configuration with all defaults resolved. The core sends it to every client in its READY message."""

    model_path: str
    model_name: str
    model_fingerprint: str
    architecture: str
    device: str
    dtype: str
    max_model_len: int
    vocab_size: int
    embedding_size: int
    """Number of elements of an embedding."""
    is_matryoshka: bool
    """Whether requests may ask for embeddings with fewer `dimensions`."""
    matryoshka_dimensions: tuple[int, ...]
    """Permitted `dimensions`; empty: any number, if `is_matryoshka`."""
    block_size: int
    num_gpu_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_queued_reqs: int
    max_num_queued_tokens: int | None
    scheduling_policy: Literal["fcfs", "priority"]
    async_scheduling: bool
    epoch: str
    eos_token_ids: tuple[int, ...]
    logits_processors: tuple[str, ...]
    max_logprobs: int
    """-1: the whole vocabulary."""
    logprobs_mode: LogprobsMode
    startup_phases: tuple[tuple[str, float], ...]
    """(phase, seconds) in order, for the start-up table."""
    memory: MemoryBudget
    """The first data-parallel rank's."""
    seed: int | None = None
    has_copies: bool = False
    """Whether other processes run copies of this core, which are given the same requests."""
    parsers: ParserConfig = ParserConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    request_defaults: RequestDefaults = RequestDefaults()
    pooling: PoolingSpec | None = None
    """How the model pools; None: it generates."""
    kv_cache_metrics: bool = False
    rank_memory: tuple[MemoryBudget, ...] = ()
    """With data parallelism the memory budget of each rank."""

    @property
    def tokenizer_path(self) -> str:
        """Directory with tokenizer_config.json and chat template."""
        return self.tokenizer.path or self.model_path

    @property
    def tokenizer_folder(self) -> str:
        """Directory with the tokenizer.json that is loaded."""
        return self.tokenizer.folder or self.tokenizer_path

    @property
    def memory_of_ranks(self) -> tuple[MemoryBudget, ...]:
        """Memory budget of each data-parallel rank."""
        return self.rank_memory or (self.memory,)

    @property
    def data_parallel_size(self) -> int:
        return len(self.memory_of_ranks)
