"""What a machine that joins an engine says of itself, compared with what machine 0 would say.

Version, device and flags have to be the same, because workers that differ would compute different things or wait for
each other forever.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import socket

import msgspec

from argosy_engine.config import EngineArgs
from argosy_engine.executor.node_messages import NodeHello
from argosy_engine.sizing.device import visible_gpus
from argosy_protocol import __version__

_LONGEST_SHOWN = 80
_OF_ONE_MACHINE = frozenset(
    {
        "model",  # a path; the name is compared, and the weights once they are loaded
        "revision",
        "served_model_name",
        "download_dir",
        "device",  # what it stands for is compared
        "threads",
        "node_rank",
        "master_addr",
        "master_port",
        "node_key_file",
        "distributed_timeout_seconds",
    }
)
"""Flags that machines may give different values."""


def hello(args: EngineArgs) -> NodeHello:
    """Describe this machine.

    Args:
        args: before or after the model was fetched.
    """
    flags = msgspec.to_builtins(args)
    return NodeHello(
        node_rank=args.node_rank,
        host_name=socket.gethostname(),
        version=__version__,
        torch=importlib.metadata.version("torch"),
        device=(("cuda" if visible_gpus() else "cpu") if args.device == "auto" else args.device),
        model_name=args.canonical_name,
        flags={
            name: _short(msgspec.json.encode(value, order="sorted").decode())
            for name, value in flags.items()
            if name not in _OF_ONE_MACHINE
        },
    )


def _short(value: str) -> str:
    if len(value) <= _LONGEST_SHOWN:
        return value
    return f"sha256:{hashlib.sha256(value.encode()).hexdigest()[:16]}"


def mismatch(first: NodeHello, joiner: NodeHello) -> str | None:
    """Say what has to be the same on both machines and is not; None if nothing.

    Args:
        first: machine 0.
    """
    for what, ours, theirs, remedy in (
        ("Argosy", first.version, joiner.version, "install the same version everywhere"),
        ("torch", first.torch, joiner.torch, "install the same version everywhere"),
        (
            "the model",
            first.model_name,
            joiner.model_name,
            "give both the same model, or --served-model-name",
        ),
        ("the device", first.device, joiner.device, "give both the same --device"),
    ):
        if ours != theirs:
            return f"{what} is {theirs} on node {joiner.node_rank} and {ours} on node 0; {remedy}"
    for name in sorted(first.flags.keys() | joiner.flags.keys()):
        ours, theirs = (each.flags.get(name, "the default") for each in (first, joiner))
        if ours != theirs:
            return (
                f"--{name.replace('_', '-')} is {theirs} on node {joiner.node_rank} and {ours} on node 0; start every "
                "node with the same flags"
            )
    return None
