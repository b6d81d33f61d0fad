"""Versions of the flash-attn library: which are installed, and which computes on a device. No torch.

They are separate programs with separate calls: version 2 is the package `flash-attn`, version 3 (Hopper) is built from
the folder `hopper` of its repository, version 4 (Hopper and Blackwell) is the package `flash-attn-4`.
"""

from __future__ import annotations

from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path

V2_PAGE_SIZE = 256
"""Tokens of which a page of version 2 holds a multiple, and so the only `--block-size` that it can serve."""


def installed_versions() -> tuple[int, ...]:
    """Return the installed versions. Only looks for files, because an import takes seconds and starts CUDA."""
    found = []
    package = find_spec("flash_attn")
    folders = [Path(folder) for folder in package.submodule_search_locations or ()] if package else []
    if any((folder / "flash_attn_interface.py").is_file() for folder in folders):
        found.append(2)
    if find_spec("flash_attn_interface") is not None:
        found.append(3)
    if any((folder / "cute").is_dir() for folder in folders):
        found.append(4)
    return tuple(found)


def version_for(capability: tuple[int, int], installed: Collection[int]) -> int | None:
    """Return the version to use on a device of this compute capability, or None if none of the installed can."""
    by_major = {8: (2,), 9: (3, 4, 2), 10: (4, 2), 11: (4, 2)}
    return next((version for version in by_major.get(capability[0], (2,)) if version in installed), None)
