"""Flags of vLLM that have no setting here, so that its command lines start unchanged or name what is missing.

A flag whose effect this engine has anyway, or cannot miss, is accepted with a line that says so. One that asks for
something that the engine does not do is refused with the reason, unless its value asks for nothing.

The lists have the flags of `vllm serve` as of vLLM 0.32: `WITHOUT_EFFECT` and `REFUSED` those that manifests may have
as well, whose rules in the API server grow with each name, and the others those of command lines only.
`tests/engine/test_vllm_command_lines.py` has the names of all of vLLM's flags. Must not know: the flags that the engine
honours (`config`, `server_args`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NamedTuple

from argosy_protocol.program.flags import add_switch


class VllmFlag(NamedTuple):
    """A flag of vLLM without a setting."""

    name: str
    """Without leading dashes."""
    reason: str
    """Why it has no effect, or cannot be used."""
    is_switch: bool = False
    """Whether it takes no value."""
    neutral: tuple[str, ...] = ()
    """Values that ask for nothing, of a flag that is refused otherwise."""
    short: str = ""
    is_list: bool = False
    """Whether it takes several values."""

    @property
    def dest(self) -> str:
        return f"vllm.{self.name}"


LOCAL_SIZE = "data-parallel-size-local"
"""A flag that may be the number of all cores."""


def add_vllm_flags(
    parser: argparse.ArgumentParser,
    without_effect: Sequence[VllmFlag],
    refused: Sequence[VllmFlag],
    settings: Sequence[VllmFlag] = (),
    *,
    is_listed: bool = True,
) -> None:
    """Add the flags, in groups of the help text.

    Args:
        settings: flags that have an effect, which `vllm_settings` knows.
        is_listed: whether the help text has them.
    """
    groups = (
        *([(parser.add_argument_group("vLLM's flags with another name here"), settings)] if settings else []),
        (parser.add_argument_group("vLLM's flags without effect"), without_effect),
        (parser.add_argument_group("vLLM's flags that are refused"), refused),
    )
    for group, flags in groups:
        for flag in flags:
            names = [f"--{flag.name}", *([flag.short] if flag.short else [])]
            but = f"; accepted: {', '.join(flag.neutral)}" if flag.neutral else ""
            told = flag.reason + but if is_listed else argparse.SUPPRESS
            if flag.is_switch:
                add_switch(group, flag.name, told, flag.dest, flag.short)
            else:
                group.add_argument(
                    *names,
                    nargs="+" if flag.is_list else None,
                    metavar=flag.name.split("-")[-1].upper(),
                    help=told,
                    dest=flag.dest,
                )


def check_vllm_flags(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    without_effect: Sequence[VllmFlag],
    refused: Sequence[VllmFlag],
    data_parallel_size: int = 1,
) -> None:
    """Tell on standard error which of the given flags have no effect; end with code 2 if one is refused.

    Args:
        data_parallel_size: number of engine cores, all of which must be local.
    """
    for flag in refused:
        neutral = (str(data_parallel_size),) if flag.name == LOCAL_SIZE else flag.neutral
        value = getattr(options, flag.dest)
        if value and value not in neutral:
            parser.error(f"--{flag.name} is not supported: {flag.reason}")
    for flag in without_effect:
        value = getattr(options, flag.dest)
        if value is not None:
            print(f"{parser.prog}: --{flag.name} has no effect: {flag.reason}", file=sys.stderr)


_NO_CODE = "a checkpoint's code is never run; its model runs on argosy's own code or on transformers'"
_NO_LORA = "adapters are not served yet; serve the merged model"
_ONE_NODE = "an engine's cores are processes of one node; run one service per node behind the router"
_NO_TRANSFER = "KV caches are not moved between engines; the router sends a prefix to where it is cached"

_OWN_KERNELS = "the engine chooses among its own kernels and torch's; --attention-backend says which attend"
_KERNEL_CHOICES = (
    *(
        "kernel-config",
        "moe-backend",
        "linear-backend",
        "ir-op-priority",
        "gdn-prefill-backend",
    ),
    *("kda-decode-backend", "kda-prefill-backend", "sparse-indexer-topk-backend", "all2all-backend"),
)
_KERNEL_SWITCHES = (
    *("enable-flashinfer-autotune", "enable-batch-sharded-sampling", "enable-hc-sp", "use-fp64-gumbel"),
    *("disable-nccl-for-dp-synchronization", "kv-sharing-fast-prefill", "enable-shm-tensor-arena"),
)
_ONE_WAY = "images are processed, sent and encoded in one way; videos are not served"
_MEDIA = (
    "mm-device-do-normalize",
    *("mm-encoder-attn-backend", "mm-encoder-attn-dtype", "mm-encoder-fp8-scale-path", "mm-hasher-algorithm"),
    *("mm-encoder-fp8-scale-save-margin", "mm-encoder-fp8-scale-save-path"),
    *("mm-ipc-gpu-memory-gb", "mm-processor-cache-type", "mm-processor-device"),
    *("mm-shm-cache-max-object-size-mb", "video-pruning-method"),
    *("video-pruning-rate", "ec-manager-config"),
)
_MEDIA_SWITCHES = (
    *("disable-chunked-mm-input", "interleave-mm-strings", "skip-mm-profiling"),
    "enable-flash-late-interaction",
)
_NO_MAMBA = "states, such as Mamba's, are kept in the model's own way; --mamba-block-size says how often"
_MAMBA = (
    *(
        "mamba-backend",
        "mamba-cache-dtype",
        "mamba-cache-mode",
        "mamba-cache-philox-rounds",
    ),
    *(
        "mamba-ssm-cache-dtype",
        "mamba-ssu-algorithm",
        "replayssm-buffer-len",
        "prefix-cache-retention-interval",
    ),
)
_MAMBA_SWITCHES = (
    *("enable-mamba-cache-stochastic-rounding", "enable-mamba-shared-prefix-checkpoint", "use-replayssm"),
)
_NO_COHERE = "there is no /cohere"
_NO_OFFLOAD = "weights stay on the device"
_NO_DRAFTS = "speculative decoding cannot be configured yet"
_NO_EXPERT_BALANCE = "experts stay where they are loaded"
_NO_CONTEXT_PARALLEL = "the tokens of a request are not divided among devices"
_NO_DP_SUPERVISOR = "there is one address for all cores; a router is in front of several engines"
_NO_UBATCHES = "there are no micro-batches"
_NO_ROPE_FLAG = "use --hf-overrides, such as '{\"rope_theta\": 1e6}' or '{\"rope_scaling\": {...}}'"
ONE_BACKEND = "there is one backend of grammars, xgrammar"
ANY_WHITESPACE = (
    "grammars allow white space in JSON; a request forbids it: structured_outputs.disable_any_whitespace"
)
NO_PLUGIN_OF_REASONING = (
    "the chat template or --reasoning-parser tells the form of the reasoning; --tool-parser-plugin is for tool calls "
    "only"
)
_SAYS_CAPTURED = "--compilation-config says what is captured"
_NO_SWAP = "preempted requests are computed anew"
_NOT_MEASURED = "it is not measured"

WITHOUT_EFFECT = (
    VllmFlag("disable-log-requests", "requests are logged with --enable-log-requests only", True),
    VllmFlag("enable-log-outputs", "what models write is never logged", True),
    VllmFlag("enable-log-deltas", "what models write is never logged", True),
    VllmFlag("max-log-len", "prompts are never logged"),
    VllmFlag("enable-prompt-tokens-details", "usage always has prompt_tokens_details", True),
    VllmFlag("enable-server-load-tracking", "/load always answers", True),
    VllmFlag("enable-sleep-mode", "/sleep and /wake_up always exist, for the admin key", True),
    VllmFlag("trust-remote-code", _NO_CODE, True),
    VllmFlag("uvicorn-log-level", "--log-level is the level of all messages"),
    VllmFlag("disable-uvicorn-access-log", "requests are logged with --access-log only", True),
    VllmFlag("disable-access-log-for-endpoints", "--access-log leaves out probes and /metrics"),
    VllmFlag("swap-space", _NO_SWAP),
    VllmFlag("prefix-caching-hash-algo", "blocks are compared by hashes that clients cannot choose"),
    VllmFlag("disable-frontend-multiprocessing", "the core always has a process of its own", True),
    VllmFlag("disable-custom-all-reduce", "there is no kernel of its own for all-reduce", True),
    VllmFlag("disable-cascade-attn", "there is no cascade attention", True),
    VllmFlag("max-seq-len-to-capture", _SAYS_CAPTURED),
    VllmFlag("max-parallel-loading-workers", "weights are read in the order of the checkpoint's files"),
    VllmFlag("reasoning-config", "the reasoning parser knows the marks around the reasoning"),
    VllmFlag("chat-template-content-format", "a template gets texts, or parts if it renders only these"),
    VllmFlag(
        "data-parallel-backend", "--distributed-executor-backend says what runs the workers", short="-dpb"
    ),
    VllmFlag("data-parallel-address", "the engine's cores are processes of this node", short="-dpa"),
    VllmFlag("data-parallel-rpc-port", "the engine's cores are processes of this node", short="-dpp"),
)

RARE_WITHOUT_EFFECT = (
    VllmFlag(
        "exclude-tools-when-tool-choice-none",
        "a prompt has no tools if tool_choice is none, in any case",
        True,
    ),
    VllmFlag("renderer-num-workers", "short prompts need no thread, and long ones have their own"),
    VllmFlag("model-loader-extra-config", "weights are read in parallel in any case"),
    VllmFlag("code-revision", _NO_CODE),
    VllmFlag("ignore-patterns", "only the files that are needed are fetched", is_list=True),
    VllmFlag("use-tqdm-on-load", "a terminal gets a bar while the model is loaded", True),
    VllmFlag("log-error-stack", "an error that is not the client's is always logged with its stack", True),
    VllmFlag("jit-monitor-mode", "kernels are compiled before the engine is ready"),
    VllmFlag("jit-monitor-verbose", "kernels are compiled before the engine is ready", True),
    VllmFlag("scheduler-reserve-full-isl", "a prompt is admitted if all of it fits, in any case", True),
    VllmFlag("disable-hybrid-kv-cache-manager", "it saves memory where a model has sliding windows", True),
    VllmFlag("enable-cumem-allocator", "/sleep frees memory without an allocator of its own", True),
    VllmFlag("allow-deprecated-quantization", "--quantization lists what can be served", True),
    VllmFlag("optimization-level", "--compilation-config says what is compiled", short="-O"),
    VllmFlag("aggregate-engine-logging", "all cores log to one place in any case", True),
    VllmFlag("enable-ep-weight-filter", "each worker reads its own experts in any case", True),
    VllmFlag("fail-on-environ-validation", "vLLM's variables are not read", True),
    VllmFlag("show-hidden-metrics-for-version", "no metrics are hidden"),
    VllmFlag("swa-bounded-replay", "windows are kept as the model says", True),
    VllmFlag("performance-mode", "there is one mode"),
    VllmFlag("attention-config", _OWN_KERNELS, short="-ac"),
    *(VllmFlag(name, _OWN_KERNELS) for name in _KERNEL_CHOICES),
    *(VllmFlag(name, _OWN_KERNELS, True) for name in _KERNEL_SWITCHES),
    *(VllmFlag(name, _ONE_WAY) for name in _MEDIA),
    *(VllmFlag(name, _ONE_WAY, True) for name in _MEDIA_SWITCHES),
    *(VllmFlag(name, _NO_MAMBA) for name in _MAMBA),
    *(VllmFlag(name, _NO_MAMBA, True) for name in _MAMBA_SWITCHES),
    *(VllmFlag(name, _NO_COHERE) for name in ("cohere-format", "cohere-is-reasoning-model")),
    # Earlier versions of vLLM had the following ones, and samples still do.
    VllmFlag("guided-decoding-backend", ONE_BACKEND),
    VllmFlag("guided-decoding-disable-fallback", ONE_BACKEND, True),
    VllmFlag("num-scheduler-steps", "every step is scheduled, while the one before runs"),
    VllmFlag("num-lookahead-slots", "blocks are allocated as they are needed"),
    VllmFlag("use-v2-block-manager", "there is one block manager", True),
    VllmFlag("enable-reasoning", "--reasoning-parser alone turns it on", True),
    VllmFlag("max-context-len-to-capture", _SAYS_CAPTURED),
    VllmFlag("disable-async-output-proc", "outputs are always processed beside the next step", True),
    VllmFlag("preemption-mode", _NO_SWAP),
    VllmFlag("scheduler-delay-factor", "a prompt begins as soon as there is room"),
)

REFUSED = (
    VllmFlag(LOCAL_SIZE, _ONE_NODE, short="-dpl"),
    VllmFlag("data-parallel-start-rank", _ONE_NODE, neutral=("0",), short="-dpr"),
    VllmFlag("data-parallel-rank", _ONE_NODE, neutral=("0",), short="-dpn"),
    VllmFlag("data-parallel-hybrid-lb", _ONE_NODE, True, short="-dph"),
    VllmFlag("data-parallel-external-lb", _ONE_NODE, True, short="-dpe"),
    VllmFlag("enable-lora", _NO_LORA, True),
    VllmFlag("lora-modules", _NO_LORA, is_list=True),
    VllmFlag("max-loras", _NO_LORA, neutral=("0",)),
    VllmFlag("max-lora-rank", _NO_LORA),
    VllmFlag("max-cpu-loras", _NO_LORA),
    VllmFlag("kv-transfer-config", _NO_TRANSFER),
    VllmFlag("kv-offloading-size", "KV caches are not kept in the host's memory", neutral=("0",)),
    VllmFlag("kv-events-config", "routers read /internal/telemetry instead"),
    VllmFlag("cpu-offload-gb", _NO_OFFLOAD, neutral=("0", "0.0")),
    VllmFlag("speculative-config", _NO_DRAFTS, short="-sc"),
    VllmFlag(
        "collect-detailed-traces",
        "spans (--otlp-traces-endpoint) have the times of queue, prefill and decode, and no others",
        is_list=True,
    ),
    VllmFlag(
        "config-format",
        "the configuration is config.json, also of Mistral's models; their params.json is not read",
        neutral=("auto", "hf"),
    ),
    VllmFlag("hf-config-path", "the configuration is that of the model's directory"),
    VllmFlag(
        "task",
        "a model that was made to embed or to classify needs no flag, another one --runner pooling, and --convert "
        "says what it computes",
        neutral=("auto", "generate"),
    ),
    VllmFlag("response-role", "answers have the role assistant", neutral=("assistant",)),
    VllmFlag("tool-server", "the server calls no tools"),
    VllmFlag("grpc", "there is no gRPC server", True),
)

RARE_REFUSED = (
    VllmFlag("ec-transfer-config", _NO_TRANSFER),
    VllmFlag("kv-offloading-backend", "KV caches are not kept in the host's memory", neutral=("native",)),
    VllmFlag("cpu-offload-params", _NO_OFFLOAD, is_list=True),
    VllmFlag("offload-backend", _NO_OFFLOAD, neutral=("auto",)),
    VllmFlag("offload-group-size", _NO_OFFLOAD, neutral=("0",)),
    VllmFlag("offload-num-in-group", _NO_OFFLOAD, neutral=("1",)),
    VllmFlag("offload-params", _NO_OFFLOAD, is_list=True),
    VllmFlag("offload-prefetch-step", _NO_OFFLOAD, neutral=("1",)),
    *(VllmFlag(name, _NO_DRAFTS) for name in ("spec-method", "spec-model", "spec-tokens")),
    VllmFlag("per-request-spec-decode-metrics", _NO_DRAFTS, neutral=("none",)),
    VllmFlag("enable-eplb", _NO_EXPERT_BALANCE, True),
    VllmFlag("eplb-config", _NO_EXPERT_BALANCE),
    VllmFlag("expert-placement-strategy", _NO_EXPERT_BALANCE, neutral=("linear",)),
    VllmFlag("enable-elastic-ep", "the number of cores is fixed while an engine runs", True),
    VllmFlag("elastic-ep-max-dp-size", "the number of cores is fixed while an engine runs"),
    VllmFlag("decode-context-parallel-size", _NO_CONTEXT_PARALLEL, neutral=("1",), short="-dcp"),
    VllmFlag("prefill-context-parallel-size", _NO_CONTEXT_PARALLEL, neutral=("1",), short="-pcp"),
    *(
        VllmFlag(name, _NO_CONTEXT_PARALLEL)
        for name in ("cp-kv-cache-interleave-size", "dcp-kv-cache-interleave-size", "dcp-comm-backend")
    ),
    VllmFlag("dcp-q-replicate", _NO_CONTEXT_PARALLEL, True),
    VllmFlag("data-parallel-multi-port-external-lb", _NO_DP_SUPERVISOR, True, short="-dpm"),
    *(
        VllmFlag(name, _NO_DP_SUPERVISOR)
        for name in (
            *("data-parallel-supervisor-port", "dp-supervisor-probe-interval-s"),
            *("dp-supervisor-probe-timeout-s", "dp-supervisor-probe-failure-threshold", "dp-sync-interval"),
        )
    ),
    *(
        VllmFlag(name, _NO_UBATCHES)
        for name in ("dbo-decode-token-threshold", "dbo-prefill-token-threshold", "ubatch-size")
    ),
    VllmFlag("enable-fault-tolerance", "an engine ends if a worker does", True),
    VllmFlag("fault-tolerance-config", "an engine ends if a worker does"),
    VllmFlag("cpu-distributed-timeout-seconds", "--distributed-timeout-seconds is for all devices"),
    VllmFlag("device-ids", "CUDA_VISIBLE_DEVICES says which devices there are"),
    VllmFlag("device-memory-utilization", "--gpu-memory-utilization is for all devices"),
    VllmFlag("numa-bind", "processes are not bound to nodes of memory; numactl does it", True),
    *(
        VllmFlag(name, "processes are not bound to nodes of memory; numactl does it", is_list=True)
        for name in ("numa-bind-cpus", "numa-bind-nodes")
    ),
    VllmFlag("enable-prompt-embeds", "prompts are texts or token ids", True),
    VllmFlag("enable-mm-embeds", "images are sent as pictures, not as embeddings", True),
    VllmFlag("mm-encoder-only", "an engine serves the whole model, not its encoder alone", True),
    VllmFlag("default-mm-loras", _NO_LORA),
    *(VllmFlag(name, _NO_LORA) for name in ("lora-dtype", "max-lora-cls-labels")),
    VllmFlag("lora-target-modules", _NO_LORA, is_list=True),
    *(
        VllmFlag(name, _NO_LORA, True)
        for name in (
            *("enable-mixed-moe-lora-format", "enable-moe-shared-loras", "enable-tower-connector-lora"),
            *("fully-sharded-loras", "specialize-active-lora"),
        )
    ),
    VllmFlag("enable-return-routed-experts", "answers do not tell of experts", True),
    VllmFlag("return-sampling-mask", "answers do not tell of masks", True),
    VllmFlag(
        "enable-per-request-metrics", "--access-log and spans (--otlp-traces-endpoint) have the times", True
    ),
    VllmFlag("fingerprint-mode", "system_fingerprint is null", neutral=("none",)),
    VllmFlag("fingerprint-value", "system_fingerprint is null"),
    VllmFlag("sse-keep-alive-interval", "the router sends comments to clients that wait", neutral=("0",)),
    VllmFlag("tool-strict-level", "tool_choice required or a name enforces the schema", neutral=("auto",)),
    VllmFlag(
        "anthropic-disabled-thinking-effort", "thinking is turned off where the model can", neutral=("auto",)
    ),
    VllmFlag("enable-offline-docs", "/docs loads a script from cdn.jsdelivr.net", True),
    VllmFlag("enable-scale-out", "there are no endpoints of tokens in and out", True),
    VllmFlag("tokens-only", "there are no endpoints of tokens in and out", True),
    VllmFlag("skip-tokenizer-init", "there are no endpoints of tokens in and out", True),
    VllmFlag("grpc-port", "there is no gRPC server"),
    VllmFlag("ssl-cert-reqs", "--ssl-ca-certs requires a client's certificate"),
    VllmFlag("ssl-ciphers", "the ciphers are OpenSSL's default"),
    VllmFlag("hf-token", "the variable HF_TOKEN has the token; a command line is visible to other users"),
    VllmFlag(
        "tokenizer-revision", "the tokenizer is that of the model's directory, or a directory (--tokenizer)"
    ),
    VllmFlag("model-class-overrides", "there is one implementation of every model"),
    VllmFlag("reasoning-parser-plugin", NO_PLUGIN_OF_REASONING),
    VllmFlag("io-processor-plugin", "there are no plugins for what models read and write"),
    VllmFlag("worker-extension-cls", "--worker-cls runs a class of your own"),
    VllmFlag("scheduler-cls", "there is one scheduler, with --scheduling-policy"),
    VllmFlag("additional-config", "there are no platforms of others"),
    VllmFlag("quantization-config", "the checkpoint says how it is quantised"),
    VllmFlag("kv-cache-dtype-skip-layers", "all layers keep their cache in one dtype", is_list=True),
    VllmFlag("disable-sliding-window", "windows are part of the model", True),
    VllmFlag("max-num-active-seqs", "--max-num-seqs bounds the requests of a step"),
    VllmFlag("max-num-scheduled-tokens", "--max-num-batched-tokens bounds the tokens of a step"),
    VllmFlag("long-prefill-token-threshold-adaptive", "--long-prefill-token-threshold is fixed", True),
    VllmFlag("prefill-schedule-interval", "every step may begin prompts", neutral=("1",)),
    VllmFlag("prefix-match-unit", "prefixes are shared block by block"),
    *(
        VllmFlag(name, "there is no code that loads weights in this way")
        for name in (
            *("pt-load-map-location", "safetensors-prefetch-block-size", "safetensors-prefetch-num-threads"),
        )
    ),
    VllmFlag(
        "safetensors-load-strategy",
        "weights are read as they are needed",
        neutral=("lazy", "prefetch", "eager"),
    ),
    VllmFlag("profiler-config", "the engine has no profiler", neutral=("{}",)),
    *(VllmFlag(name, _NOT_MEASURED, True) for name in ("cudagraph-metrics", "enable-mfu-metrics")),
    VllmFlag("enable-layerwise-nvtx-tracing", _NOT_MEASURED, True),
    VllmFlag("enable-logging-iteration-details", _NOT_MEASURED, True),
    VllmFlag("ray-workers-use-nsight", _NOT_MEASURED, True),
    VllmFlag("custom-histogram-buckets", "the buckets are vLLM's default", is_list=True),
    VllmFlag("log-config-file", "--log-level is the setting of logs"),
    VllmFlag("logging-config", "--log-level is the setting of logs"),
    VllmFlag("enable-nccl-comm-suspend", "communicators stay while an engine sleeps", True),
    VllmFlag("sleep-mode-offload-cudagraph", "graphs are captured anew", True),
    VllmFlag("sleep-preserve-parameter-names", "/sleep keeps all weights, or none", is_list=True),
    VllmFlag("weight-transfer-config", "weights are not updated while an engine runs"),
    VllmFlag("enable-trace-replay", "steps are not recorded", True),
    VllmFlag("watermark-config", "answers have no watermarks"),
    VllmFlag("aux-output-config", "models have one output"),
    VllmFlag("diffusion-config", "diffusion models are not served", short="-dc"),
    VllmFlag("engram-config", "models with such memories are not served"),
    # Earlier versions of vLLM had the following ones, and samples still do.
    *(VllmFlag(name, _NO_ROPE_FLAG) for name in ("rope-scaling", "rope-theta")),
    *(VllmFlag(name, _NO_DRAFTS) for name in ("speculative-model", "num-speculative-tokens")),
    VllmFlag("guided-decoding-disable-any-whitespace", ANY_WHITESPACE, True),
    VllmFlag("enable-prompt-adapter", _NO_LORA, True),
    VllmFlag("worker-use-ray", "--distributed-executor-backend ray says the same", True),
)

OF_SERVERS = frozenset(
    (
        *("disable-log-requests", "enable-log-outputs", "enable-log-deltas", "max-log-len"),
        *("enable-prompt-tokens-details", "enable-server-load-tracking", "uvicorn-log-level"),
        *("disable-uvicorn-access-log", "disable-access-log-for-endpoints"),
        *("disable-frontend-multiprocessing", "chat-template-content-format"),
        *("exclude-tools-when-tool-choice-none", "log-error-stack", "enable-flash-late-interaction"),
        *(
            "cohere-format",
            "cohere-is-reasoning-model",
            "lora-modules",
            "response-role",
            "tool-server",
            "grpc",
        ),
        *("data-parallel-supervisor-port", "dp-supervisor-probe-interval-s"),
        *("dp-supervisor-probe-timeout-s", "dp-supervisor-probe-failure-threshold"),
        *("enable-per-request-metrics", "fingerprint-mode", "fingerprint-value"),
        *("sse-keep-alive-interval", "tool-strict-level", "anthropic-disabled-thinking-effort"),
        *(
            "enable-offline-docs",
            "enable-scale-out",
            "tokens-only",
            "grpc-port",
            "ssl-cert-reqs",
            "ssl-ciphers",
        ),
    )
)
"""Flags of vLLM's server only; the others are its engine's."""

ENGINE_WITHOUT_EFFECT = (
    *(flag for flag in (*WITHOUT_EFFECT, *RARE_WITHOUT_EFFECT) if flag.name not in OF_SERVERS),
    # Settings of our servers.
    VllmFlag("disable-log-stats", "lines of statistics are a server's", True),
    VllmFlag("enable-log-requests", "a server logs its requests", True),
    VllmFlag("log-level", "the program says which messages are logged"),
    VllmFlag("stream-interval", "answers are not streamed"),
    VllmFlag("shutdown-timeout", "nobody waits for requests when the program ends"),
)
"""Flags of vLLM's engine for programs that are no servers."""
ENGINE_REFUSED = (
    *(flag for flag in (*REFUSED, *RARE_REFUSED) if flag.name not in OF_SERVERS),
    VllmFlag("otlp-traces-endpoint", "spans are a server's"),
)
