"""Credentials: named values for sources, from the environment and from files.

Owns where values come from. Must not know what a source does with them. Invariant: a value is never part of a message.

The names are those of the services' own tools (`HF_TOKEN`, `AWS_ACCESS_KEY_ID`, ...); each source says which it reads.
Files are how containers get them without an environment that child processes inherit: `ARGOSY_CREDENTIALS_DIR` is a
directory with one file per name, such as a mounted Secret.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from argosy_fetcher.errors import InvalidSource

DIRECTORY_ENV: Final = "ARGOSY_CREDENTIALS_DIR"
MAX_FILES: Final = 64
MAX_FILE_BYTES: Final = 1 << 20
"""The largest Secret of Kubernetes."""
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,252}")
_ALIASES: Final = {".dockerconfigjson": "DOCKER_AUTH_CONFIG"}
"""Keys that a type of Secret prescribes -> the value's name."""


def load_credentials(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment's variables, overridden by the files of `ARGOSY_CREDENTIALS_DIR` if it is set.

    Args:
        environment: os.environ if left out.

    Raises:
        InvalidSource: the directory or a file in it cannot be read, is too large, or is not text, or there is no file.
    """
    values = dict(os.environ if environment is None else environment)
    if directory := values.get(DIRECTORY_ENV):
        values |= read_directory(Path(directory))
    return values


def read_directory(directory: Path) -> dict[str, str]:
    """Read a directory of credentials: a file's name is a value's name. Surrounding white space is not part of values.

    Other names that begin with a dot, some of which are Kubernetes' own in a mounted Secret, are left out.

    Raises:
        InvalidSource: as `load_credentials`.
    """
    values: dict[str, str] = {}
    try:
        files = {_ALIASES.get(path.name, path.name): path for path in sorted(directory.iterdir())}
        named = {name: path for name, path in files.items() if _NAME.fullmatch(name) and path.is_file()}
        if not named:
            raise InvalidSource(
                f"{DIRECTORY_ENV}: {directory} has no files; in a cluster, the Secret of spec.model.secretRef is "
                "missing or empty: create it, with keys named like the source's variables"
            )
        if len(named) > MAX_FILES:
            raise InvalidSource(f"{DIRECTORY_ENV}: {directory} has more than {MAX_FILES} files")
        for name, path in named.items():
            values[name] = _read(path)
    except OSError as error:
        raise InvalidSource(f"{DIRECTORY_ENV}: cannot read {directory}: {error.strerror}") from None
    return values


def _read(file: Path) -> str:
    with file.open("rb") as opened:
        content = opened.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise InvalidSource(f"{DIRECTORY_ENV}: {file} is larger than {MAX_FILE_BYTES} bytes")
    try:
        return content.decode().strip()
    except UnicodeDecodeError:
        raise InvalidSource(f"{DIRECTORY_ENV}: {file} is not UTF-8 text") from None
