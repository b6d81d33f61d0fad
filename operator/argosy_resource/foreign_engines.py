"""Engines besides ours that a service may run: stock vLLM and SGLang.

Owns what is known of each: its program, the flags that fields of the resource become, the flags that are not the user's
to set, and how it gets its key. Must not know resources or pods. Invariant: a field that an engine cannot honour is
refused by a rule, never ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    reserved: Mapping[str, str]
    """Further flags that the operator sets, or that would keep routers from reaching it, without dashes, each with the
    remedy or the reason."""

    @property
    def own_flags(self) -> dict[str, str]:
        """All flags that `spec.engine.args` may not give, without dashes, each with the remedy or the reason."""
        flags = {flag: f"use spec.{_path(field)}" for field, flag in self.fields.items()}
        flags |= {self.no_prefix_caching: _PREFIX_CACHING, self.expert: "use spec.parallelism.expert"}
        flags |= {
            self.model_flag: _MODEL,
            **dict.fromkeys(self.switches, "routers need it, so it is always set"),
        }
        named = {flag.removeprefix("--"): reason for flag, reason in flags.items() if flag}
        return named | {name: reason for name, reason in self.reserved.items() if name not in named}

    @property
    def refusals(self) -> dict[str, tuple[tuple[str, ...], str]]:
        """Reason -> the flags that are refused for it, and the pattern of their arguments. Together the patterns match
        what `own_pattern` does, and each argument matches one of them: the beginning of several flags is that of the
        first."""
        flags: dict[str, list[str]] = {}
        patterns: dict[str, list[str]] = {}
        earlier: list[str] = []
        for name, reason in self.own_flags.items():
            flags.setdefault(reason, []).append(name)
            beginnings = [name[:length] for length in range(1, len(name) + 1)]
            taken = sum(any(other.startswith(each) for other in earlier) for each in beginnings)
            if taken < len(name):
                patterns.setdefault(reason, []).append(_shortened(name, taken + 1))
            earlier.append(name)
        return {reason: (tuple(flags[reason]), _arguments(each)) for reason, each in patterns.items()}

    @property
    def own_pattern(self) -> str:
        """Matches an argument whose flag is one of `own_flags`, as the engine's parser (argparse) reads it: shortened,
        and in vLLM with underscores or with a key of JSON behind a dot. No other flag is a short form of these."""
        return _arguments(map(_shortened, self.own_flags))


def _arguments(names: Iterable[str]) -> str:
    """Pattern of the arguments with flags of these patterns."""
    return f"^--({'|'.join(names)})([=.]|$)"


def _shortened(name: str, least: int = 1) -> str:
    """Pattern of the name and of its beginnings of at least so many characters."""
    chars = ["[_-]" if each == "-" else each for each in name]
    return "".join(chars[:least]) + "".join(f"({each}" for each in chars[least:]) + ")?" * len(chars[least:])


def _path(field: str) -> str:
    """Path below `spec` of a key of `ForeignEngine.fields`."""
    if field in ("tensor", "pipeline", "data"):
        return f"parallelism.{field}"
    first, *others = field.removesuffix("_bytes").split("_")
    return "engine." + first + "".join(each.capitalize() for each in others)


READY_PATH: Final = "/health"
"""Both answer it once the model is loaded."""

_MODEL: Final = "use spec.model.source"
_PREFIX_CACHING: Final = "use spec.engine.enablePrefixCaching"
LISTENS: Final = "engines listen where routers and probes call them, by plain HTTP"
NAMES: Final = "use spec.model.servedName and aliases"
OWN_KEY: Final = "an engine has the key of its service's Secret"
_ONE_NODE: Final = "the operator starts one node of such an engine, which would wait for others for ever"
_RESERVED: Final[Mapping[str, str]] = {
    **dict.fromkeys(("host", "port", "root-path", "ssl-keyfile", "ssl-certfile", "ssl-ca-certs"), LISTENS),
    "api-key": OWN_KEY,
    "config": "list the flags of the file here",
    "model": _MODEL,
    "served-model-name": NAMES,
    **dict.fromkeys(("nnodes", "node-rank"), _ONE_NODE),
}

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
        reserved={
            **_RESERVED,
            "uds": LISTENS,
            "enable-prefix-caching": _PREFIX_CACHING,
            **dict.fromkeys(("headless", "master-addr", "master-port"), _ONE_NODE),
        },
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
        reserved={
            **_RESERVED,
            "tp-size": "use spec.parallelism.tensor",
            "pp-size": "use spec.parallelism.pipeline",
            "dp-size": "use spec.parallelism.data",
            "admin-api-key": OWN_KEY,
            "dist-init-addr": _ONE_NODE,
        },
    ),
}
"""By `spec.engine.type`."""
