"""The key by which the machines of an engine recognise each other.

While a key is replaced, a machine may have the one before as well: two machines need one key in common. So a machine
that starts with the new key joins one that started before."""

from __future__ import annotations

import os
from pathlib import Path

from argosy_engine.config import EngineArgs
from argosy_engine.errors import ConfigError

MIN_KEY_BYTES = 16
MAX_KEY_BYTES = 4096
MAX_KEYS = 8
KEY_VARIABLE = "ARGOSY_NODE_KEY"


def read_keys(args: EngineArgs) -> tuple[bytes, ...]:
    """Return the keys of the engine's machines, the newest first: the lines of the variable, or the one of the file,
    whose bytes may be any.

    Raises:
        ConfigError: there is none, there are more than `MAX_KEYS`, one is too short or too long, or the file cannot be
            read.
    """
    if args.node_key_file is None:
        source = KEY_VARIABLE
        keys = [line.strip().encode() for line in os.environ.get(KEY_VARIABLE, "").strip().splitlines()]
    else:
        source = f"--node-key-file {args.node_key_file}"
        try:
            with Path(args.node_key_file).open("rb") as file:
                keys = [key] if (key := file.read(MAX_KEY_BYTES + 1).strip()) else []
        except OSError as error:
            raise ConfigError(f"{source}: {error.strerror}") from None
    if not keys:
        raise ConfigError(
            f"--nnodes {args.nnodes} needs a key by which the machines recognise each other: give all of them the same "
            f"--node-key-file or {KEY_VARIABLE}, such as 32 random bytes in hexadecimal digits"
        )
    if len(keys) > MAX_KEYS:
        raise ConfigError(f"{source}: it has {len(keys)} keys, one a line, and must have at most {MAX_KEYS}")
    for key in keys:
        if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
            raise ConfigError(
                f"{source}: the key has {len(key)} bytes, and must have {MIN_KEY_BYTES} to {MAX_KEY_BYTES}"
            )
    return tuple(keys)
