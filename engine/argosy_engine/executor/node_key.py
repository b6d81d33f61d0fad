"""The key by which the machines of an engine recognise each other."""

from __future__ import annotations

import os
from pathlib import Path

from argosy_engine.config import EngineArgs
from argosy_engine.errors import ConfigError

MIN_KEY_BYTES = 16
MAX_KEY_BYTES = 4096
KEY_VARIABLE = "ARGOSY_NODE_KEY"


def read_key(args: EngineArgs) -> bytes:
    """Return the key of the engine's machines.

    Raises:
        ConfigError: there is none, it is too short or too long, or its file cannot be read.
    """
    if args.node_key_file is None:
        key, source = os.environ.get(KEY_VARIABLE, "").strip().encode(), KEY_VARIABLE
    else:
        source = f"--node-key-file {args.node_key_file}"
        try:
            with Path(args.node_key_file).open("rb") as file:
                key = file.read(MAX_KEY_BYTES + 1).strip()
        except OSError as error:
            raise ConfigError(f"{source}: {error.strerror}") from None
    if not key:
        raise ConfigError(
            f"--nnodes {args.nnodes} needs a key by which the machines recognise each other: give all of them the same "
            f"--node-key-file or {KEY_VARIABLE}, such as 32 random bytes in hexadecimal digits"
        )
    if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
        raise ConfigError(
            f"{source}: the key has {len(key)} bytes, and must have {MIN_KEY_BYTES} to {MAX_KEY_BYTES}"
        )
    return key
