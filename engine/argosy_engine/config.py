"""EngineArgs: every flag of the engine, with vLLM's names. `argosy serve` builds its parser from this class.

This module owns names, bounds, defaults and which combinations are supported. Defaults that depend on the model or the
device are None in EngineArgs. The worker resolves them, those of the device by the functions at the end (a device is
named as torch names it: `cpu`, `cuda` or `cuda:0`), and the core reports the result as `ResolvedConfig` when it is
ready. EngineArgs never changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from msgspec.structs import force_setattr, replace

from argosy_engine.checkpoint.tokenizer_files import TokenizerMode
from argosy_engine.distributed.parallel_config import ParallelConfig
from argosy_engine.errors import OTHER_ENGINES, ConfigError
from argosy_engine.model_configs.model_use import (
    Convert,
    HfOverrides,
    ModelImpl,
    ModelUse,
    PoolerConfig,
    Runner,
)
from argosy_engine.resolved_config import (
    MAX_TEMPLATE_BYTES,
    GenerationConfig,
    MediaArgs,
    RequestDefaults,
    chat_template_source,
)
from argosy_engine.sample.token_logprobs import LogprobsMode
from argosy_fetcher.errors import InvalidSource
from argosy_fetcher.source_uri import from_argument
from argosy_protocol.program.flags import (
    BlockSize,
    Flag,
    InvalidValue,
    KvCacheBytes,
    MaxModelLen,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    Threads,
    convert_arguments,
)

REQUEST_STALL_TIMEOUT = 300.0
"""Seconds; longer than any step or grammar compilation takes, so only requests that are stuck reach it."""

MAX_DEFAULT_SIZE = 512
"""Largest number of requests that is captured by default."""
MAX_CAPTURE_SIZES = 256
CaptureSize = Annotated[int, Meta(ge=1, le=1 << 14)]


class CompilationConfig(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What is compiled, and what is captured for replay (`--compilation-config`). Names are vLLM's."""

    level: Annotated[int, Meta(ge=0, le=3)] = 0
    """0: our kernels and torch's operations as they are; 3: parts of the layers compiled by torch.compile."""
    mode: Annotated[int, Meta(ge=0, le=3)] | None = None
    """vLLM's newer name of the level."""
    cudagraph_mode: Literal["NONE", "FULL", "FULL_DECODE_ONLY", "PIECEWISE", "FULL_AND_PIECEWISE"] = (
        "FULL_DECODE_ONLY"
    )
    cudagraph_capture_sizes: Annotated[tuple[CaptureSize, ...], Meta(max_length=MAX_CAPTURE_SIZES)] = ()
    """Numbers of requests of decodes, and with FULL also of tokens of mixed steps (`worker.cuda_graphs`); empty: both
    are chosen."""

    def __post_init__(self) -> None:
        if self.mode is not None:
            if self.level not in (0, self.mode):
                raise ValueError("level and mode are two names of the same: give one")
            force_setattr(self, "level", self.mode)
            force_setattr(self, "mode", None)

    def check(self) -> None:
        """Reject vLLM's values that are not supported.

        Raises:
            ConfigError: with the reason and what to use.
        """
        if (reason := _REFUSED_LEVELS.get(self.level)) is not None:
            raise ConfigError(
                f"--compilation-config: level {self.level} is not supported, because {reason}; use 0 or 3"
            )


def capture_sizes(
    max_num_seqs: int, wanted: Sequence[int] = (), largest: int = MAX_DEFAULT_SIZE
) -> list[int]:
    """Return the numbers of requests to capture, ascending, at most max_num_seqs.

    Args:
        wanted: `cudagraph_capture_sizes`; default: 1, 2, 4, then steps of 8 to 256 and of 16 to `largest`, and
            max_num_seqs.
    """
    if wanted:
        return sorted({size for size in wanted if size <= max_num_seqs})
    last = min(max_num_seqs, largest)
    sizes = {1, 2, 4, *range(8, 257, 8), *range(272, largest + 1, 16), last}
    return sorted(size for size in sizes if size <= last)


_REFUSED_LEVELS = {
    1: "torch.compile would compile again while requests wait",
    2: "a whole model cannot be compiled at once: attention, experts and sums over ranks are not compiled",
}


Device = Literal["auto", "cuda", "cpu"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal[
    "fp8",
    "int8",
    "int4",
    "compressed-tensors",
    "modelopt",
    "mxfp4",
    "gptq",
    "awq",
    "auto-round",
    "bitsandbytes",
]
KVCacheDType = Literal["auto", "fp8", "fp8_e4m3"]
_DTYPES_OF_MODELS = tuple(
    (dtype, "without the flag keys and values have the model's dtype, which --dtype sets; leave it out")
    for dtype in ("bfloat16", "float16", "float32")
)

_REFUSED_CACHE_DTYPES = tuple(
    (dtype, "keys and values in 8 bits are fp8 (e4m3); use it, or leave the flag out")
    for dtype in ("fp8_e5m2", "fp8_inc", "fp8_ds_mla", "nvfp4")
)
_QUANTIZATION_ALIASES = (
    *((name, "modelopt") for name in ("modelopt_fp8", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed")),
    ("gpt_oss_mxfp4", "mxfp4"),
    ("gptq_marlin", "gptq"),
    ("awq_marlin", "awq"),
    ("cpu_awq", "awq"),
    ("inc", "auto-round"),
)
_REFUSED_QUANTIZATIONS = tuple(
    (
        method,
        "such weights are not read; leave the flag out to take what config.json says, or serve another checkpoint, "
        f"{OTHER_ENGINES}",
    )
    for method in (
        *("marlin", "moe_wna16", "gguf", "torchao", "quark", "humming", "tpu_int8", "experts_int8"),
        *("mxfp8", "fbgemm_fp8", "ptpc_fp8"),
    )
)
_LOAD_FORMATS = tuple(
    (name, "auto") for name in ("safetensors", "hf", "runai_streamer", "fastsafetensors", "instanttensor")
)
"""Which files of weights they mean is the same: safetensors. They differ in who reads them."""
_OTHER_FILES = (
    "weights are read from safetensors files; convert the checkpoint, or leave the flag out if it has them"
)
_REFUSED_LOAD_FORMATS = tuple(
    (name, _OTHER_FILES)
    for name in (
        *("tensorizer", "sharded_state", "runai_streamer_sharded", "pt", "npcache", "mistral", "gguf"),
        *("bitsandbytes", "modelexpress", "ipc"),
    )
)


def default_name(model: str) -> str:
    """Return the name of a model that is given none: without revision, and `ORG/NAME` for a repository of the hub, or
    `ORG/NAME:QUANT` for a GGUF file of it.

    What is on this machine has the directory's path, or a built-in model's name. Other sources keep their scheme, but
    no URL its query, which may be a signature.
    """
    try:
        uri = from_argument(model)
    except InvalidSource:
        return model.partition("?")[0]
    if uri.scheme in ("hf", "file", "builtin"):
        return uri.name.partition("://")[2]
    return uri.name.partition("?")[0]


class EngineArgs(MediaArgs, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The engine's flags. Frozen; sent to the core process as msgpack. Those for images are in `MediaArgs`."""

    model: Annotated[
        str,
        Meta(
            min_length=1, max_length=4096, description="ORG/NAME of a Hugging Face hub, a directory or a URI"
        ),
        Flag(is_hidden=True),  # the positional argument
    ]
    revision: Annotated[
        Annotated[str, Meta(min_length=1, max_length=255)] | None,
        Meta(description="branch, tag or commit of a model that is fetched; default: the source's own"),
    ] = None
    download_dir: Annotated[
        Annotated[str, Meta(min_length=1, max_length=4096)] | None,
        Meta(
            description="directory in which fetched models are kept; default: ARGOSY_MODELS_DIR, else a folder of the "
            "user's cache"
        ),
    ] = None
    tokenizer: Annotated[
        Annotated[str, Meta(min_length=1, max_length=4096)] | None,
        Meta(
            description="directory on this machine whose tokenizer and chat template are used instead of the model's"
        ),
    ] = None
    tokenizer_mode: Annotated[
        TokenizerMode,
        Meta(
            description="auto: tokenizer.json, else tekken.json or tokenizer.model.vN by mistral-common (extra "
            "`mistral`), else tiktoken.model or tokenizer.model, converted by transformers; hf: none of Mistral's; "
            "mistral: none but Mistral's"
        ),
        Flag(remedies=(("slow", "there is one implementation of each; leave the flag out"),)),
    ] = "auto"
    served_model_name: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=256)], ...],
        Meta(max_length=64, description="names that clients may use; the first is the canonical one"),
    ] = ()
    device: Annotated[Device, Meta(description="auto: cuda if there is a GPU, else cpu")] = "auto"
    dtype: Annotated[
        DType,
        Meta(description="auto: the checkpoint's; on a CPU without bf16 instructions float32"),
        Flag(aliases=(("half", "float16"), ("float", "float32"))),
    ] = "auto"
    model_impl: Annotated[
        ModelImpl,
        Meta(
            description="whose modelling code runs: argosy (ours) or transformers (its own, over our KV cache; needs "
            "the extra `transformers`); auto: argosy if it has the architecture, else transformers"
        ),
        Flag(aliases=(("vllm", "argosy"),)),
    ] = "auto"
    runner: Annotated[
        Runner,
        Meta(
            description="auto: pooling if the architecture or a modules.json of sentence-transformers says so, else "
            "generate"
        ),
    ] = "auto"
    convert: Annotated[
        Convert,
        Meta(
            description="what a pooling model computes: embed (vectors), classify (scores of labels); auto: as its "
            "architecture says"
        ),
    ] = "auto"
    pooler_config: Annotated[
        PoolerConfig | None,
        Meta(
            description="JSON object, over what the checkpoint says: pooling_type LAST, MEAN or CLS; use_activation: "
            "normalise embeddings, make probabilities of scores; dimensions; logit_mean and logit_sigma; task: as "
            "--convert"
        ),
        Flag(is_json=True),
    ] = None
    hf_overrides: Annotated[
        Annotated[dict[str, Any], Meta(max_length=256)] | None,
        Meta(
            description="JSON object that overrides fields of config.json, such as `rope_scaling`, `rope_theta` or "
            "`max_position_embeddings`; `architectures` may name another head of the same decoder. Objects replace "
            "those of config.json, but nested configs (`text_config`) are merged. A field that this model's config "
            "has no use for is refused. is_matryoshka and matryoshka_dimensions allow `dimensions` of embeddings; "
            "classifier_from_token, method, is_original_qwen3_reranker and use_sep_token are for models that classify"
        ),
        Flag(is_json=True),
    ] = None
    tensor_parallel_size: Annotated[
        int,
        Meta(ge=1, le=1024, description="devices that share every layer of the model; a worker process each"),
        Flag(short="-tp"),
    ] = 1
    pipeline_parallel_size: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="stages that the layers are divided into; a worker process per stage and device",
        ),
        Flag(short="-pp"),
    ] = 1
    nnodes: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="number of machines that the workers are divided among; start `argosy serve` on each with "
            "the same flags but --node-rank, and with --headless on all but the first",
        ),
        Flag(short="-n"),
    ] = 1
    node_rank: Annotated[
        int,
        Meta(ge=0, le=1023, description="index of this machine; 0 has the API server and the engine core"),
        Flag(short="-r"),
    ] = 0
    master_addr: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=253,
            description="name or address of machine 0 in a private network; it listens there, and nowhere else, for "
            "the others",
        ),
    ] = "127.0.0.1"
    master_port: Annotated[
        int, Meta(ge=1, le=65535, description="TCP port on which machine 0 listens for the others")
    ] = 29501
    node_key_file: Annotated[
        Annotated[str, Meta(min_length=1, max_length=4096)] | None,
        Meta(
            description="file with the key, of 16 bytes or more, by which the machines of an engine recognise each "
            "other; default: the variable ARGOSY_NODE_KEY"
        ),
    ] = None
    distributed_timeout_seconds: Annotated[
        Annotated[int, Meta(ge=1, le=86400)] | None,
        Meta(
            description="seconds that the machines of an engine wait for each other at the start (default 600), and "
            "that workers wait for each other in torch.distributed (default 1800)"
        ),
    ] = None
    data_parallel_size: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="number of engine cores behind the API server, each with the whole model, a KV cache and a "
            "batch of its own; a request goes to the one with the least work",
        ),
        Flag(short="-dp"),
    ] = 1
    enable_expert_parallel: Annotated[
        bool,
        Meta(
            description="give each device whole experts instead of a slice of every expert; with "
            "--data-parallel-size the engine cores then run their steps together"
        ),
        Flag(short="-ep"),
    ] = False
    enable_dbo: Annotated[
        bool,
        Meta(description="not supported"),
    ] = False
    load_format: Annotated[
        Literal["auto", "dummy"],
        Meta(description="dummy: random weights, for benchmarks"),
        Flag(aliases=_LOAD_FORMATS, remedies=_REFUSED_LOAD_FORMATS),
    ] = "auto"
    max_model_len: Annotated[
        MaxModelLen | Literal["auto"] | None,
        Meta(
            description="longest prompt plus output; default: the model's; auto or -1: what fits into memory"
        ),
        Flag(is_size=True, aliases=(("-1", "auto"),), form="must be a whole number, auto, or like 4k"),
    ] = None
    block_size: Annotated[BlockSize, Meta(description="tokens per KV block")] = 16
    mamba_block_size: Annotated[
        int,
        Meta(
            ge=16,
            le=1 << 20,
            description="of models with states (Mamba, DeltaNet): tokens after which a state is kept for the prefix "
            "cache, besides those at the ends of prompts and where prompts part",
        ),
    ] = 1024
    quantization: Annotated[
        Quantization | None,
        Meta(
            description="scheme of the weights; default: the checkpoint's; fp8 of an unquantised checkpoint: quantised "
            "to FP8 as it is loaded, on GPUs with FP8 in bfloat16; int8 or int4: to integers in groups of inputs that "
            "share a scale, of which GPUs multiply in bfloat16 and float16"
        ),
        Flag(short="-q", aliases=_QUANTIZATION_ALIASES, remedies=_REFUSED_QUANTIZATIONS),
    ] = None
    kv_cache_dtype: Annotated[
        KVCacheDType,
        Meta(
            description="auto: the model's dtype; fp8 or fp8_e4m3: keys and values in 8 bits, half the memory of "
            "bfloat16, with the checkpoint's scales if it has any (attention backends triton and torch)"
        ),
        Flag(remedies=(*_DTYPES_OF_MODELS, *_REFUSED_CACHE_DTYPES)),
    ] = "auto"
    max_num_seqs: Annotated[MaxNumSeqs, Meta(description="maximum number of running requests")] = 256
    max_num_batched_tokens: Annotated[
        MaxNumBatchedTokens, Meta(description="token budget of one step"), Flag(is_size=True)
    ] = 2048
    long_prefill_token_threshold: Annotated[
        int, Meta(ge=0, le=1 << 20, description="cap on one prompt's share of a step; 0: no cap")
    ] = 0
    max_num_mixed_prefill_tokens: Annotated[
        Annotated[int, Meta(ge=16, le=1 << 20)] | None,
        Meta(
            description="maximum prompt tokens of a step that also decodes; lower values reduce inter-token latency; "
            "default: 256 on a cpu, else no limit"
        ),
    ] = None
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"],
        Meta(description="priority: requests with a lower `priority` go first"),
    ] = "fcfs"
    async_scheduling: Annotated[
        bool | None,
        Meta(description="launch a step before the last one's tokens are known; default: if it saves time"),
    ] = None
    max_num_queued_reqs: Annotated[
        int,
        Meta(
            ge=1,
            le=1 << 20,
            description="maximum number of waiting and running requests; further ones get a 503",
        ),
    ] = 8192
    max_num_queued_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 40)] | None,
        Meta(
            description="maximum prompt tokens of requests without a first token; further requests get a 503"
        ),
    ] = None
    watermark: Annotated[
        float,
        Meta(ge=0.0, le=0.5, description="share of the KV cache kept free at admission while requests run"),
    ] = 0.01
    enable_prefix_caching: Annotated[bool, Meta(description="share KV blocks of equal prefixes")] = True
    kv_cache_metrics: Annotated[
        bool,
        Meta(description="measure how long blocks live in the prefix cache: vllm:kv_block_* at /metrics"),
    ] = False
    kv_cache_metrics_sample: Annotated[
        float, Meta(gt=0.0, le=1.0, description="share of the blocks that --kv-cache-metrics follows")
    ] = 0.01
    enable_chunked_prefill: Annotated[bool, Meta(description="split prompts that exceed the budget")] = True
    gpu_memory_utilization: Annotated[
        Annotated[float, Meta(gt=0.0, le=1.0)] | None,
        Meta(
            description="cuda: share of the device's memory for weights, activations and KV cache "
            "(default 0.9); cpu: share for the KV cache of what weights leave free (default 0.4)"
        ),
    ] = None
    kv_cache_memory_bytes: Annotated[
        KvCacheBytes | None,
        Meta(description="KV cache size of each worker, instead of sizing it from memory"),
        Flag(is_size=True),
    ] = None
    num_gpu_blocks_override: Annotated[
        Annotated[int, Meta(ge=2, le=1 << 30)] | None,
        Meta(description="number of KV blocks, for tests of preemption"),
    ] = None
    enforce_eager: Annotated[
        bool, Meta(description="cuda: launch every kernel of every step, instead of replaying CUDA graphs")
    ] = False
    compilation_config: Annotated[
        CompilationConfig,
        Meta(
            description="JSON object; level or mode: 0 (default: our kernels as they are) or 3 (parts of the layers "
            "compiled by torch.compile at start-up, with a cache); cudagraph_mode: FULL_DECODE_ONLY (default on cuda: "
            "steps that only decode are captured as CUDA graphs), FULL (steps with prompts as well, where that can be; "
            "PIECEWISE and FULL_AND_PIECEWISE mean the same) or NONE; cudagraph_capture_sizes: numbers of requests to "
            "capture, and of tokens of steps with prompts (default: 1, 2, 4, 8 and further, up to --max-num-seqs and "
            "512; tokens 160 to 2048 in 16 sizes)"
        ),
        Flag(is_json=True, short="-cc"),
    ] = CompilationConfig()
    attention_backend: Annotated[
        Literal["auto", "cpu", "triton", "torch", "flash_attn"],
        Meta(
            description="auto: the first that can serve; cpu: our C++ kernels; triton: our kernels for GPUs; "
            "torch: plain torch operations, the reference; flash_attn: the flash-attn library, if it is installed; "
            "vLLM's CPU_ATTN, TRITON_ATTN and FLASH_ATTN are the same"
        ),
        Flag(
            aliases=(("CPU_ATTN", "cpu"), ("TRITON_ATTN", "triton"), ("FLASH_ATTN", "flash_attn")),
            remedies=(
                (
                    "FLASHINFER",
                    "leave it out, or give flash_attn or triton, which have the kernels for GPUs here",
                ),
                ("FLEX_ATTENTION", "leave it out, or give triton, whose kernels are for any GPU"),
                (
                    "TORCH_SDPA",
                    "leave it out, or give cpu, whose kernels are for CPUs, or torch, the reference",
                ),
            ),
        ),
    ] = "auto"
    distributed_executor_backend: Annotated[
        Literal["uni", "mp", "ray", "external_launcher"] | None,
        Meta(
            description="uni: the worker lives in the core's process; mp: every worker in a process of its own; "
            "ray: every worker an actor of Ray, on the nodes of the cluster at RAY_ADDRESS or on this machine; "
            "external_launcher: torchrun starts the program once per worker (LLM only, no server); "
            "default: uni for one worker, mp for several"
        ),
    ] = None
    worker_cls: Annotated[
        str,
        Meta(min_length=1, max_length=512, description="subclass of Worker to run, as package.module.Class"),
    ] = "auto"
    logits_processors: Annotated[
        tuple[Annotated[str, Meta(min_length=3, max_length=512)], ...],
        Meta(max_length=16, description="custom LogitsProcessor classes, as MODULE:CLASS"),
    ] = ()
    max_logprobs: Annotated[
        int,
        Meta(ge=-1, le=1 << 20, description="maximum `logprobs` of a request; -1: the whole vocabulary"),
    ] = 20
    logprobs_mode: Annotated[
        LogprobsMode,
        Meta(
            description="what `logprobs` report: log probabilities or logits, of the model (raw) or of what the "
            "token is drawn from (processed)"
        ),
    ] = "raw_logprobs"
    load_stall_timeout: Annotated[
        float,
        Meta(
            ge=0.0,
            le=86400.0,
            description="seconds without progress after which a load ends, with the stacks of its processes and exit "
            "code 4: no weights were read, nothing was compiled or warmed up, and no new phase began; 0: never. A load "
            "that advances may take any time",
        ),
    ] = 600.0
    request_stall_timeout: Annotated[
        float,
        Meta(
            ge=0.0,
            le=86400.0,
            description="seconds without progress after which the watchdog fails a request; 0: never",
        ),
    ] = REQUEST_STALL_TIMEOUT
    structured_outputs_cache_bytes: Annotated[
        int,
        Meta(ge=0, le=1 << 40, description="size of the cache of compiled grammars"),
        Flag(is_size=True),
    ] = 256 << 20
    enable_auto_tool_choice: Annotated[
        bool,
        Meta(
            description="let the model call tools of its own accord: `tool_choice` auto, the default with tools"
        ),
    ] = True
    tool_call_parser: Annotated[
        Annotated[str, Meta(min_length=1, max_length=64)] | None,
        Meta(
            description="how the model writes tool calls, by vLLM's names: cohere_command3, cohere_command4, "
            "deepseek_v3, deepseek_v31, deepseek_v32, deepseek_v4, ernie45, gemma4, glm45, glm47, granite, "
            "granite4, hermes, hy_v3, kimi_k2, lfm2, llama3_json, llama4_json, llama4_pythonic, llama_nemotron_json, "
            "minimax_m2, mistral, nemotron_json, olmo3, openai, pythonic, qwen3_coder, qwen3_json, qwen3_xml, "
            "seed_oss, solar_open; default: chosen by the chat template and config.json"
        ),
    ] = None
    reasoning_parser: Annotated[
        Annotated[str, Meta(min_length=1, max_length=64)] | None,
        Meta(
            description="how the model marks its reasoning, by vLLM's names: cohere_command3, cohere_command4, "
            "deepseek_r1, deepseek_v3, ernie45, gemma4, glm45, glm47, granite, hy_v3, kimi_k2, minimax_m2, mistral, "
            "nemotron_v3, olmo3, openai_gptoss, qwen3, seed_oss, "
            "solar_open; default: chosen by the chat template"
        ),
    ] = None
    tool_parser_plugin: Annotated[
        Annotated[str, Meta(min_length=1, max_length=4096)] | None,
        Meta(description="Python file that registers further tool parsers"),
    ] = None
    chat_template: Annotated[
        Annotated[str, Meta(min_length=1, max_length=MAX_TEMPLATE_BYTES)] | None,
        Meta(description="file of a chat template, or a template in one line; default: the model's own"),
    ] = None
    default_chat_template_kwargs: Annotated[
        Annotated[dict[str, Any], Meta(max_length=64)] | None,
        Meta(
            description="JSON object of arguments for the chat template, over which those of a request win, such as "
            '`{"enable_thinking": false}`'
        ),
        Flag(is_json=True),
    ] = None
    trust_request_chat_template: Annotated[
        bool,
        Meta(
            description="accept `chat_template` in requests. A template is a program: for clients that you trust"
        ),
    ] = False
    generation_config: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=4096,
            description="where default sampling parameters come from: auto: the model's generation_config.json; vllm: "
            "none; else a directory with such a file, whose max_new_tokens bounds every request",
        ),
    ] = "auto"
    override_generation_config: Annotated[
        GenerationConfig,
        Meta(
            description="JSON object of default sampling parameters over those of --generation-config, such as "
            '`{"temperature": 0.5}`; its max_new_tokens bounds every request'
        ),
        Flag(is_json=True),
    ] = GenerationConfig()
    threads: Annotated[
        Threads | None,
        Meta(
            description="CPU compute threads of each worker; default: the cores this process may use, divided among "
            "the workers of all engine cores"
        ),
    ] = None
    seed: Annotated[
        Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None,
        Meta(
            description="seed for requests without `seed`; repeatable only if the requests arrive in the same order; "
            "default: random"
        ),
    ] = None

    @property
    def has_fp8_kv_cache(self) -> bool:
        return self.kv_cache_dtype != "auto"

    @property
    def tokenizer_path(self) -> Path | None:
        """Directory of the tokenizer, if it is not the model's."""
        if self.tokenizer in (None, self.model):
            return None
        return Path(str(self.tokenizer).removeprefix("file://")).expanduser()

    @property
    def canonical_name(self) -> str:
        """The name that seeds chunk hashes and that `/v1/models` lists first: unless it is given, `default_name`."""
        return self.served_model_name[0] if self.served_model_name else default_name(self.model)

    @property
    def model_use(self) -> ModelUse:
        """How the model is used: to generate or for pooling."""
        return ModelUse(
            runner=self.runner,
            convert=self.convert,
            pooler_config=self.pooler_config or PoolerConfig(),
            hf_overrides=HfOverrides.of(self.hf_overrides or {}),
            model_impl=self.model_impl,
        )

    @property
    def parallel_config(self) -> ParallelConfig:
        return ParallelConfig(
            tensor=self.tensor_parallel_size,
            pipeline=self.pipeline_parallel_size,
            data=self.data_parallel_size,
            enable_expert_parallel=self.enable_expert_parallel,
            nodes=self.nnodes,
        )

    @property
    def request_defaults(self) -> RequestDefaults:
        """The chat template and sampling parameters of requests.

        Raises:
            ConfigError: `--chat-template` cannot be read.
        """
        return RequestDefaults(
            chat_template=None if self.chat_template is None else chat_template_source(self.chat_template),
            chat_template_kwargs=self.default_chat_template_kwargs,
            trust_request_chat_template=self.trust_request_chat_template,
            generation_config=self.generation_config,
            override_generation_config=self.override_generation_config,
        )

    @property
    def executor_backend(self) -> Literal["uni", "mp", "ray", "external_launcher"]:
        """`--distributed-executor-backend` or its default."""
        return self.distributed_executor_backend or ("uni" if self.parallel_config.world_size == 1 else "mp")

    @classmethod
    def of(cls, **fields: object) -> EngineArgs:
        """Build and check the arguments; sizes may be text, such as `64M`.

        Raises:
            ConfigError: an unknown field, a wrong type or a value out of bounds.
        """
        try:
            args = convert_arguments(fields, cls)
        except InvalidValue as error:
            raise ConfigError(str(error)) from None
        args.check()
        return args

    def check(self) -> None:
        """Check combinations of values, and files that they name.

        Raises:
            ConfigError: values contradict each other or are not supported, or a file cannot be read.
        """
        check_parallel_flags(self)
        if not self.enforce_eager:  # which makes the rest of it void, as in vLLM
            self.compilation_config.check()
        self.model_use.pooler_config.check()
        self.request_defaults.check()
        self.media_config(None)
        if isinstance(self.max_model_len, int):
            self.check_model_len(self.max_model_len)

    def check_core_process(self) -> None:
        """Reject a core in a process of its own, as servers have it, where a launcher runs copies of the program.

        Raises:
            ConfigError: the executor needs the core in the program's process.
        """
        if self.executor_backend == "external_launcher":
            raise ConfigError(
                "--distributed-executor-backend external_launcher runs programs that make an LLM(...) without "
                "multiprocess, started by torchrun: all copies must be given the same requests, and the copies of a "
                "server would not be; serve with mp, which starts the workers itself"
            )

    def with_whole_prompts(self, max_model_len: int) -> EngineArgs:
        """Return the arguments of an engine whose model computes each prompt in one step, and keeps nothing of it."""
        return replace(
            self,
            enable_chunked_prefill=False,
            enable_prefix_caching=False,
            long_prefill_token_threshold=0,
            max_num_batched_tokens=max(self.max_num_batched_tokens, max_model_len),
        )

    def check_model_len(self, max_model_len: int) -> None:
        """Check that a prompt of `max_model_len` tokens can be scheduled.

        Raises:
            ConfigError: the prompt exceeds a step's token budget, and chunked prefill is off.
        """
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < max_model_len:
            raise ConfigError(
                f"--no-enable-chunked-prefill needs --max-num-batched-tokens of at least {max_model_len} "
                "(--max-model-len)"
            )


def check_parallel_flags(args: EngineArgs) -> None:
    """Reject layouts that are not supported.

    Raises:
        ConfigError: a parallel size is not, or not by this executor.
    """
    if args.async_scheduling and args.pipeline_parallel_size > 1:
        raise ConfigError(
            "--async-scheduling needs --pipeline-parallel-size 1: the steps of a pipeline overlap without it"
        )
    if args.enable_dbo:
        raise ConfigError(
            "--enable-dbo is not supported: it hides the transfers of tokens between machines, and cores that "
            "share experts are on one machine, where its two half batches would read the experts twice; leave it "
            "out"
        )
    world_size = args.parallel_config.world_size
    if args.distributed_executor_backend == "uni" and world_size > 1:
        raise ConfigError(
            f"--distributed-executor-backend uni runs one worker, and {world_size} are needed; use mp"
        )
    if args.executor_backend == "external_launcher" and args.request_stall_timeout not in (
        0.0,
        REQUEST_STALL_TIMEOUT,
    ):
        raise ConfigError(
            "--request-stall-timeout cannot be used with --distributed-executor-backend external_launcher: the "
            "copies of the program have no common time, so no request is failed for its age; leave it out"
        )
    if args.parallel_config.shares_experts and args.executor_backend not in ("uni", "mp"):
        raise ConfigError(
            f"--enable-expert-parallel with --data-parallel-size {args.data_parallel_size} needs "
            f"--distributed-executor-backend mp, not {args.executor_backend}: cores that share experts agree on "
            "their steps on one machine"
        )
    _check_nodes(args)


def _check_nodes(args: EngineArgs) -> None:
    """Reject a division among machines that is not supported.

    Raises:
        ConfigError: the workers cannot be divided, this machine is none of them, or another flag forbids it.
    """
    if args.node_rank >= args.nnodes:
        raise ConfigError(
            f"--node-rank {args.node_rank} needs --nnodes {args.node_rank + 1} or more: ranks begin with 0"
        )
    if args.nnodes == 1:
        return
    world_size = args.parallel_config.world_size
    if world_size % args.nnodes:
        raise ConfigError(
            f"--nnodes {args.nnodes} must divide the number of workers equally, and --tensor-parallel-size times "
            f"--pipeline-parallel-size is {world_size}"
        )
    if args.data_parallel_size > 1:
        raise ConfigError(
            f"--nnodes {args.nnodes} needs --data-parallel-size 1: an engine's cores are processes of one "
            "machine; run one service per machine behind the router"
        )
    if args.executor_backend != "mp":
        raise ConfigError(
            f"--nnodes {args.nnodes} needs --distributed-executor-backend mp, not {args.executor_backend}: Ray "
            "and torchrun know the machines themselves"
        )


MAX_NUM_MIXED_PREFILL_TOKENS_ON_CPU = 256
"""On a CPU prompt tokens take so long that each chunk delays the decoding requests noticeably. Chunks of 512 are 5 to
11 % faster per token and double that delay."""

MEMORY_UTILIZATION_ON_CUDA = 0.9

MEMORY_UTILIZATION_ON_CPU = 0.4
"""Lets a laptop run two replicas and a browser beside them."""


def max_num_mixed_prefill_tokens(args: EngineArgs, device: str) -> int | None:
    """Return `--max-num-mixed-prefill-tokens`; None means no limit."""
    return args.max_num_mixed_prefill_tokens or (
        MAX_NUM_MIXED_PREFILL_TOKENS_ON_CPU if device == "cpu" else None
    )


def memory_utilization(args: EngineArgs, device: str) -> float:
    """Return `--gpu-memory-utilization`, whose meaning depends on the device as well (`sizing.kv_cache_sizing`)."""
    return args.gpu_memory_utilization or (
        MEMORY_UTILIZATION_ON_CPU if device == "cpu" else MEMORY_UTILIZATION_ON_CUDA
    )


def async_scheduling(args: EngineArgs, device: str) -> bool:
    """Return `--async-scheduling`.

    By default everywhere but on a CPU worker in the core's own process (uni, external_launcher), which computes a step
    while it launches it, so that there is nothing to overlap, and with a pipeline, whose steps overlap anyway.
    """
    if args.pipeline_parallel_size > 1:
        return False
    if args.async_scheduling is None:
        return device != "cpu" or args.executor_backend not in ("uni", "external_launcher")
    return args.async_scheduling
