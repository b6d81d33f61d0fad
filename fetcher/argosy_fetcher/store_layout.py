"""Store layout: names of directories and files in a store, and what its own files contain.

    ROOT/SLUG-HASH/REVISION/              a complete model, with its manifest and the mark of its last use
    ROOT/SLUG-HASH/.argosy-partial-REVISION/  a model that is being fetched, or whose fetch was interrupted
    ROOT/SLUG-HASH/.argosy-lock           locked by the process that fetches
    ROOT/SLUG-HASH/.argosy-refs.json      requested revision -> the revision that it was pinned to

SLUG is the source's name in letters that every file system takes, and HASH the beginning of its SHA-256. Two sources
could share both, so a manifest names its source. Everything read here is bounded, and damaged content counts as absent.
What cannot be read does not: it raises OSError, because it may be whole.
"""

from __future__ import annotations

import errno
import hashlib
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from argosy_fetcher.disk import replace_file
from argosy_fetcher.errors import FetchError, UnsupportedModel
from argosy_fetcher.snapshot import Digest, check_path

MANIFEST: Final = ".argosy-model.json"
LAST_USE: Final = ".argosy-used"
"""Its modification time is the last use. Processes that use the model hold a shared lock on it."""
CHOSEN: Final = ".argosy-chosen"
"""Its modification time is when a program that may make requests last wanted this model, from this endpoint."""
LOCK: Final = ".argosy-lock"
REFS: Final = ".argosy-refs.json"
SNAPSHOT: Final = ".argosy-snapshot.json"
"""In a partial directory: the snapshot whose files it gathers."""
PARTIAL_PREFIX: Final = ".argosy-partial-"
TRASH_PREFIX: Final = ".argosy-trash-"
REFUSED: Final = ".argosy-refused"
"""In a partial directory: why what was fetched into it is not served."""
PACKED: Final = ".argosy-packed"
UNPACKED: Final = ".argosy-unpacked"
ENDPOINT: Final = "?endpoint="
"""In a source's canonical name, before the address of a hub or a bucket's store other than the default one."""

_DEFAULT_REVISIONS: Final = {"hf": "main", "oci": "latest"}
"""What a source without a revision means, by its scheme."""
_ABSENT: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG})
"""What opening a file says if there is none of this name. Anything else is a failure to read it."""
_REVISION: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SOURCE_DIRECTORY: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*-[0-9a-f]{8}")
MAX_REFUSAL_BYTES: Final = 4096
_MAX_SLUG: Final = 80
_MAX_OWN_FILE_BYTES: Final = 64 << 20
_MAX_REFS: Final = 256
"""Requested revisions that are remembered per source; the oldest are forgotten."""


class StoredFile(msgspec.Struct, frozen=True):
    path: str
    size: int
    digest: Digest | None = None
    """What the content was checked against; None if the source announced none."""


class Manifest(msgspec.Struct, frozen=True):
    """Content of `.argosy-model.json`."""

    source: str
    revision: str
    files: tuple[StoredFile, ...]
    fetched_at: datetime


class _Origin(msgspec.Struct, frozen=True):
    """The part of a snapshot's record that says where it comes from."""

    source: str


def choose_root(option: str | None, environ: Mapping[str, str]) -> Path:
    """Return the store's directory: the option, or ARGOSY_MODELS_DIR, or below HF_HOME, or in the user's cache.

    Raises:
        FetchError: none of them is set, and the user has no home directory.
    """
    if chosen := option or environ.get("ARGOSY_MODELS_DIR"):
        return _expanded(chosen)
    if hub_home := environ.get("HF_HOME"):
        return _expanded(hub_home) / "argosy"
    cache = environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if cache.startswith("/") else _expanded("~/.cache")) / "argosy" / "models"


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError:
        raise FetchError(
            "there is no home directory to keep models in; set ARGOSY_MODELS_DIR or --download-dir"
        ) from None


def is_revision(name: str) -> bool:
    """Whether a name may be that of a revision's directory."""
    return _REVISION.fullmatch(name) is not None


def is_source_directory(name: str) -> bool:
    return _SOURCE_DIRECTORY.fullmatch(name) is not None


def source_directory(source: str) -> str:
    """Return the name of a source's directory."""
    slug = re.sub(r"[^A-Za-z0-9._]+", "-", source)[:_MAX_SLUG].strip("-._") or "model"
    return f"{slug}-{hashlib.sha256(source.encode()).hexdigest()[:8]}"


def read_manifest(directory: Path, revision: str | None = None) -> Manifest | None:
    """Return the manifest of a complete model; None if there is none, or a file is missing or has another size.

    Args:
        revision: the directory's name if left out.

    Raises:
        OSError: something cannot be read.
    """
    manifest = read_damaged_manifest(directory)
    if manifest is None or manifest.revision != (revision or directory.name):
        return None
    try:
        for file in manifest.files:
            if (directory / check_path(file.path)).stat().st_size != file.size:
                return None
    except UnsupportedModel:
        return None
    except OSError as error:
        if error.errno in _ABSENT:
            return None
        raise
    return manifest


def read_damaged_manifest(directory: Path) -> Manifest | None:
    """Return a manifest that may not be true."""
    manifest: Manifest | None = _read(directory / MANIFEST, Manifest)
    return manifest


def write_manifest(directory: Path, manifest: Manifest) -> None:
    replace_file(directory / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=1))


def read_refs(directory: Path) -> dict[str, str]:
    """Return what the requested revisions of a source were pinned to; the last one was pinned last."""
    refs: dict[str, str] | None = _read(directory / REFS, dict[str, str])
    return {wanted: found for wanted, found in (refs or {}).items() if is_revision(found)}


def pinned_revision(refs: Mapping[str, str], source: str, requested_revision: str) -> str | None:
    """Return what a requested revision of a source was pinned to."""
    equal = equal_revisions(source, requested_revision)
    return next((found for wanted, found in reversed([*refs.items()]) if wanted in equal), None)


def equal_revisions(source: str, requested_revision: str) -> frozenset[str]:
    """Return what else a requested revision can be called, and itself: `main` of a hub and no revision are the same."""
    default = _DEFAULT_REVISIONS.get(source.partition("://")[0])
    names = {requested_revision}
    return frozenset(names | {"", default} if default and requested_revision in ("", default) else names)


def write_ref(directory: Path, source: str, requested_revision: str, revision: str) -> None:
    """Pin a requested revision. Called with the source's lock held."""
    refs = read_refs(directory)
    if pinned_revision(refs, source, requested_revision) == revision:
        return
    for wanted in equal_revisions(source, requested_revision):
        refs.pop(wanted, None)
    refs[requested_revision] = revision
    kept = dict(list(refs.items())[-_MAX_REFS:])
    replace_file(directory / REFS, msgspec.json.format(msgspec.json.encode(kept), indent=1))


def read_snapshot_record(directory: Path) -> bytes:
    """Return the record of the snapshot that a partial directory gathers; empty if there is none."""
    return _read_bytes(directory / SNAPSHOT)


def read_refusal(directory: Path) -> str:
    """Return why the content of a partial directory was refused; empty if it was not."""
    return _read_bytes(directory / REFUSED)[:MAX_REFUSAL_BYTES].decode(errors="replace")


def source_of_partial(directory: Path) -> str | None:
    """Return the source's name from the record of a partial directory."""
    record: _Origin | None = _read(directory / SNAPSHOT, _Origin)
    return None if record is None else record.source


def _read(path: Path, kind: Any) -> Any:
    """Return a JSON file's content; None if it is missing or of another type."""
    try:
        return msgspec.json.decode(_read_bytes(path), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _read_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_OWN_FILE_BYTES + 1)
    except OSError as error:
        if error.errno in _ABSENT:
            return b""
        raise
    return data if len(data) <= _MAX_OWN_FILE_BYTES else b""
