"""Engines besides ours that a service may run: stock vLLM and SGLang.

Owns what is known of each: its program, the flags that fields of the resource become, the flags that are not the user's
to set, and how it gets its key. Must not know resources or pods. Invariant: a field that an engine cannot honour is
refused by a rule, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from msgspec import Struct

EngineType = Literal["argosy", "vllm", "sglang"]


def default_image_value(engine_type: str) -> str:
    """The value of the Helm chart that names the image of engines for which a manifest names none."""
    return "engine.image" if engine_type == "argosy" else f"engine.{engine_type}Image"


class ForeignEngine(Struct, frozen=True, kw_only=True):
    """How one of them is started and reached."""

    command: tuple[str, ...]
    """The program, whatever the image's entry point is."""
    model_flag: str = ""
    """Flag before the model's directory; empty if it is the first argument."""
    switches: tuple[str, ...] = ()
    """Flags that it always gets."""
    fields: Mapping[str, str]
    """Field of `spec.engine` or `spec.parallelism` (as in Python) -> the flag that has its value."""
    no_prefix_caching: str
    expert: str = ""
    """Flag of `parallelism.expert`; empty if there is none."""
    takes_aliases: bool
    """Whether it answers to several names."""
    key_variable: str = ""
    """Environment variable from which it reads its key; empty if it only has a flag for it."""
    reserved: tuple[str, ...]
    """Further flags that the operator sets, or that would keep routers from reaching it, without dashes."""

    @property
    def own_flags(self) -> tuple[str, ...]:
        """All flags that `spec.engine.args` may not give, without dashes."""
        flags = (*self.fields.values(), self.no_prefix_caching, self.expert, self.model_flag, *self.switches)
        return tuple(dict.fromkeys([*(flag.removeprefix("--") for flag in flags if flag), *self.reserved]))

    @property
    def own_pattern(self) -> str:
        """Matches an argument whose flag is one of `own_flags`, as the engine's parser (argparse) reads it: shortened,
        and in vLLM with underscores or with a key of JSON behind a dot. No other flag is a short form of these."""
        return f"^--({'|'.join(map(_shortened, self.own_flags))})([=.]|$)"


def _shortened(name: str) -> str:
    """Pattern of the name and of its beginnings."""
    first, *others = ["[_-]" if each == "-" else each for each in name]
    return first + "".join(f"({each}" for each in others) + ")?" * len(others)


READY_PATH: Final = "/health"
"""Both answer it once the model is loaded."""

_LISTENING: Final = (
    "host",
    "port",
    "root-path",
    "ssl-keyfile",
    "ssl-certfile",
    "ssl-ca-certs",
    "api-key",
    "config",
)
_NODES: Final = ("nnodes", "node-rank")
"""The operator starts no further nodes of these engines, so the first one would wait for them for ever."""

FOREIGN_ENGINES: Final[Mapping[EngineType, ForeignEngine]] = {
    "vllm": ForeignEngine(
        command=("vllm", "serve"),
        fields={
            "dtype": "--dtype",
            "max_model_len": "--max-model-len",
            "max_num_seqs": "--max-num-seqs",
            "max_num_batched_tokens": "--max-num-batched-tokens",
            "block_size": "--block-size",
            "kv_cache_memory_bytes": "--kv-cache-memory-bytes",
            "gpu_memory_utilization": "--gpu-memory-utilization",
            "shutdown_timeout_seconds": "--shutdown-timeout",
            "tensor": "--tensor-parallel-size",
            "pipeline": "--pipeline-parallel-size",
            "data": "--data-parallel-size",
        },
        no_prefix_caching="--no-enable-prefix-caching",
        expert="--enable-expert-parallel",
        takes_aliases=True,
        key_variable="VLLM_API_KEY",
        reserved=(
            *_LISTENING,
            "uds",
            "model",
            "served-model-name",
            "enable-prefix-caching",
            "headless",
            *_NODES,
            "master-addr",
            "master-port",
        ),
    ),
    "sglang": ForeignEngine(
        command=("python3", "-m", "sglang.launch_server"),
        model_flag="--model-path",
        switches=("--enable-metrics",),
        fields={
            "device": "--device",
            "dtype": "--dtype",
            "max_model_len": "--context-length",
            "max_num_seqs": "--max-running-requests",
            "max_num_batched_tokens": "--chunked-prefill-size",
            "block_size": "--page-size",
            "gpu_memory_utilization": "--mem-fraction-static",
            "tensor": "--tensor-parallel-size",
            "pipeline": "--pipeline-parallel-size",
            "data": "--data-parallel-size",
        },
        no_prefix_caching="--disable-radix-cache",
        takes_aliases=False,
        reserved=(
            *_LISTENING,
            "model",
            "served-model-name",
            "tp-size",
            "pp-size",
            "dp-size",
            "admin-api-key",
            *_NODES,
            "dist-init-addr",
        ),
    ),
}
"""By `spec.engine.type`."""
