"""Permissions of a model's files: the error for a file or a folder that the engine's user may not read.

A copy keeps the owner's rights: safetensors writes files with mode 0600, and in a pod another user serves them.
"""

from __future__ import annotations

import os
from pathlib import Path

from argosy_engine.errors import ConfigError


def may_not_read(folder: Path, file: Path) -> ConfigError:
    """Return the error for `file`, or a folder above it, that this process has no permission to read.

    Args:
        folder: the model's folder.
    """
    return ConfigError(f"cannot read {file}: {permission_fault(folder)}")


def permission_fault(folder: Path) -> str:
    """Return the fault and its remedy, for errors that name the file themselves."""
    return (
        f"permission denied to user {os.geteuid()}; let its users read the model, in the place that it is stored: "
        f"chmod -R a+rX {folder}"
    )
