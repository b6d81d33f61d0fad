"""Flags of `vllm serve` that have no setting here, so that its command lines start unchanged or name what is missing.

A flag whose effect this engine has anyway, or cannot miss, is accepted with a line that says so. One that asks for
something that the engine does not do is refused with the reason, unless its value asks for nothing.

Owns: the two lists. Must not know: the flags that the engine honours (`config`, `server_args`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NamedTuple


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


_NO_LORA = "adapters are not served yet; serve the merged model"
_ONE_NODE = "an engine's cores are processes of one node; run one service per node behind the router"
_LOCAL_SIZE = "data-parallel-size-local"
_NO_TRANSFER = "KV caches are not moved between engines; the router sends a prefix to where it is cached"

WITHOUT_EFFECT = (
    VllmFlag("disable-log-requests", "requests are logged with --enable-log-requests only", True),
    VllmFlag("enable-log-outputs", "what models write is never logged", True),
    VllmFlag("enable-log-deltas", "what models write is never logged", True),
    VllmFlag("max-log-len", "prompts are never logged"),
    VllmFlag("enable-prompt-tokens-details", "usage always has prompt_tokens_details", True),
    VllmFlag("enable-server-load-tracking", "/load always answers", True),
    VllmFlag("enable-sleep-mode", "/sleep and /wake_up always exist, for the admin key", True),
    VllmFlag("trust-remote-code", "a checkpoint's code is never run; the engine's own model is", True),
    VllmFlag("uvicorn-log-level", "--log-level is the level of all messages"),
    VllmFlag("disable-uvicorn-access-log", "requests are logged with --access-log only", True),
    VllmFlag("disable-access-log-for-endpoints", "--access-log leaves out probes and /metrics"),
    VllmFlag("swap-space", "preempted requests are computed anew"),
    VllmFlag("prefix-caching-hash-algo", "blocks are compared by hashes that clients cannot choose"),
    VllmFlag("disable-frontend-multiprocessing", "the core always has a process of its own", True),
    VllmFlag("disable-custom-all-reduce", "there is no kernel of its own for all-reduce", True),
    VllmFlag("disable-cascade-attention", "there is no cascade attention", True),
    VllmFlag("max-seq-len-to-capture", "--compilation-config says what is captured"),
    VllmFlag("max-parallel-loading-workers", "weights are read in the order of the checkpoint's files"),
    VllmFlag("limit-mm-per-prompt", "images, videos and audio are refused"),
    VllmFlag("reasoning-config", "the reasoning parser knows the marks around the reasoning"),
    VllmFlag("chat-template-content-format", "templates get the content of a message as text"),
    VllmFlag("data-parallel-backend", "--distributed-executor-backend says what runs the workers"),
)

REFUSED = (
    VllmFlag(_LOCAL_SIZE, _ONE_NODE),
    VllmFlag("data-parallel-address", _ONE_NODE, neutral=("127.0.0.1", "localhost")),
    VllmFlag("data-parallel-rpc-port", _ONE_NODE),
    VllmFlag("data-parallel-start-rank", _ONE_NODE, neutral=("0",)),
    VllmFlag("data-parallel-rank", _ONE_NODE, neutral=("0",)),
    VllmFlag("data-parallel-hybrid-lb", _ONE_NODE, True),
    VllmFlag("data-parallel-external-lb", _ONE_NODE, True),
    VllmFlag("enable-lora", _NO_LORA, True),
    VllmFlag("lora-modules", _NO_LORA, is_list=True),
    VllmFlag("max-loras", _NO_LORA, neutral=("0",)),
    VllmFlag("max-lora-rank", _NO_LORA),
    VllmFlag("max-cpu-loras", _NO_LORA),
    VllmFlag("kv-transfer-config", _NO_TRANSFER),
    VllmFlag("kv-offloading-size", "KV caches are not kept in the host's memory", neutral=("0",)),
    VllmFlag("kv-events-config", "routers read /internal/telemetry instead"),
    VllmFlag("cpu-offload-gb", "weights stay on the device", neutral=("0", "0.0")),
    VllmFlag("speculative-config", "speculative decoding cannot be configured yet"),
    VllmFlag(
        "collect-detailed-traces",
        "spans (--otlp-traces-endpoint) have the times of queue, prefill and decode, and no others",
        is_list=True,
    ),
    VllmFlag("tokenizer", "the tokenizer is that of the model's directory"),
    VllmFlag(
        "tokenizer-mode",
        "the tokenizer is tokenizer.json; docs/models.md says how Mistral's tekken.json becomes one",
        neutral=("auto", "hf"),
    ),
    VllmFlag(
        "config-format",
        "the configuration is config.json, also of Mistral's models; their params.json is not read",
        neutral=("auto", "hf"),
    ),
    VllmFlag("hf-config-path", "the configuration is that of the model's directory"),
    VllmFlag("task", "--runner and --convert say what a model does", neutral=("auto", "generate")),
    VllmFlag("response-role", "answers have the role assistant", neutral=("assistant",)),
    VllmFlag("tool-server", "the server calls no tools"),
    VllmFlag("grpc", "there is no gRPC server", True),
)


def add_vllm_flags(
    parser: argparse.ArgumentParser,
    without_effect: Sequence[VllmFlag] = WITHOUT_EFFECT,
    refused: Sequence[VllmFlag] = REFUSED,
) -> None:
    """Add the flags, in two groups of the help text. Those of `vllm serve` if no others are given."""
    groups = (
        (parser.add_argument_group("vLLM's flags without effect"), without_effect),
        (parser.add_argument_group("vLLM's flags that are refused"), refused),
    )
    for group, flags in groups:
        for flag in flags:
            names = [f"--{flag.name}", *([flag.short] if flag.short else [])]
            but = f"; accepted: {', '.join(flag.neutral)}" if flag.neutral else ""
            if flag.is_switch:
                group.add_argument(
                    names[0],
                    action=argparse.BooleanOptionalAction,
                    default=None,
                    help=flag.reason,
                    dest=flag.dest,
                )
            else:
                group.add_argument(
                    *names,
                    nargs="+" if flag.is_list else None,
                    metavar=flag.name.split("-")[-1].upper(),
                    help=flag.reason + but,
                    dest=flag.dest,
                )


def check_vllm_flags(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    data_parallel_size: int = 1,
    without_effect: Sequence[VllmFlag] = WITHOUT_EFFECT,
    refused: Sequence[VllmFlag] = REFUSED,
) -> None:
    """Tell on standard error which of the given flags have no effect; end with code 2 if one is refused.

    Args:
        data_parallel_size: number of engine cores, all of which must be local.
    """
    for flag in refused:
        neutral = (str(data_parallel_size),) if flag.name == _LOCAL_SIZE else flag.neutral
        value = getattr(options, flag.dest)
        if value and value not in neutral:
            parser.error(f"--{flag.name} is not supported: {flag.reason}")
    for flag in without_effect:
        if getattr(options, flag.dest) is not None:
            print(f"{parser.prog}: --{flag.name} has no effect: {flag.reason}", file=sys.stderr)
