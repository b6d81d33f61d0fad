"""Store index: which models a store has, complete, interrupted or damaged, and what its own files contain.

    ROOT/SLUG-HASH/REVISION/              a complete model, with its manifest and the mark of its last use
    ROOT/SLUG-HASH/.argosy-partial-REVISION/  a model that is being fetched, or whose fetch was interrupted
    ROOT/SLUG-HASH/.argosy-lock           locked by the process that fetches
    ROOT/SLUG-HASH/.argosy-refs.json      requested revision -> the revision that it was pinned to

SLUG is the source's name in letters that every file system takes, and HASH the beginning of its SHA-256. Two sources
could share both, so a manifest names its source. Must not know sources or transfers. Invariants: finding and listing
change nothing; everything read here is bounded, and damaged content counts as absent. What cannot be read does not: it
raises OSError, because it may be whole.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from argosy_fetcher.disk import replace_file
from argosy_fetcher.errors import FetchError, UnsupportedModel
from argosy_fetcher.source import Digest, check_path

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
_PART_SUFFIX: Final = ".part"
"""Of files that are being written: they have their final size, and holes where nothing has arrived yet."""
_OWN_PREFIX: Final = ".argosy-"


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


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model in the store."""

    source: str
    revision: str
    path: Path
    size: int
    """Bytes of its files, or of what has arrived if it is incomplete."""
    last_used_at: float
    """Seconds since the epoch."""
    requested_revisions: tuple[str, ...] = ()
    """What is pinned to this revision; an empty string stands for a source without a revision."""


class StoreIndex:
    """What is in a directory of models. It need not exist.

    Args:
        root: the directory, as `choose_root` finds it.
        now: seconds since the epoch.
    """

    def __init__(self, root: Path, *, now: Callable[[], float] = time.time) -> None:
        self.root = root
        self._now = now

    def find(self, source: str, requested_revision: str) -> StoredModel | None:
        """Return a complete model without any request, if the revision was pinned or is itself immutable.

        Args:
            source: canonical name, as `Source.name`.
            requested_revision: as `Source.requested_revision`; empty if none.

        Raises:
            FetchError: the store cannot be read.
        """
        directory = self._directory(source)
        with _readable(directory):
            refs = read_refs(directory)
            pinned = pinned_revision(refs, source, requested_revision)
            return self._load(directory, pinned or requested_revision, refs, source)

    def pinned_revision(self, source: str, requested_revision: str) -> str | None:
        """Return what a requested revision was pinned to, whether the store still has it or not.

        Raises:
            FetchError: the store cannot be read.
        """
        directory = self._directory(source)
        with _readable(directory):
            refs = read_refs(directory)
        return pinned_revision(refs, source, requested_revision)

    def find_file(self, source: str, digest: Digest, size: int) -> Path | None:
        """Return a file of a source's complete models that should have this content. The caller checks it."""
        directory = self._directory(source)
        for name in names_in(directory):
            with suppress(OSError):
                model = self._load(directory, name, {}, source)
                manifest = None if model is None else read_damaged_manifest(model.path)
                for file in () if manifest is None else manifest.files:
                    if (file.digest, file.size) == (digest, size):
                        return directory / name / file.path
        return None

    def find_offline(self, source: str, requested_revision: str) -> StoredModel | None:
        """Return a complete model for a program that may make no request, and may therefore not know the endpoint that
        the model was fetched from, such as a pod's engine, which has no credentials.

        An endpoint in the name wins if the store has its model. Otherwise all endpoints count, the default one
        included: whoever fetches knows which one is meant, and what was `choose`n last is taken.

        Args:
            source: canonical name, with the endpoint if one is configured.

        Raises:
            FetchError: the store cannot be read.
        """
        found = self.find(source, requested_revision)
        name, _, endpoint = source.partition(ENDPOINT)
        if found is not None and endpoint:
            return found
        return self.find_at_any_endpoint(name, requested_revision) or found

    def find_at_any_endpoint(self, source: str, requested_revision: str) -> StoredModel | None:
        """Return the model of a source at any endpoint: of those that differ in nothing else, the one that was chosen
        last, or was used last if none was chosen.

        Args:
            source: canonical name without an endpoint.
        """
        wanted = equal_revisions(source, requested_revision)
        found = [
            model
            for model in self.list()
            if model.source.partition(ENDPOINT)[0] == source
            and not wanted.isdisjoint((model.revision, *model.requested_revisions))
        ]
        return max(found, key=lambda model: (_chosen_at(model.path), model.last_used_at), default=None)

    def damaged_path(self, source: str, requested_revision: str) -> Path | None:
        """Return the directory of a model that `find` would find if it were complete."""
        revision = self.pinned_revision(source, requested_revision) or requested_revision
        path = self._directory(source) / revision
        return path if is_revision(revision) and path.is_dir() else None

    def list(self) -> tuple[StoredModel, ...]:
        """Return the complete models, by source and revision, without those that cannot be read."""
        found: list[StoredModel] = []
        for directory in self._source_directories():
            refs: dict[str, str] = {}
            with suppress(OSError):
                refs = read_refs(directory)
            for name in names_in(directory):
                with suppress(OSError):
                    if (model := self._load(directory, name, refs)) is not None:
                        found.append(model)
        return _sorted(found)

    def list_partial(self) -> tuple[StoredModel, ...]:
        """Return the models whose fetch is under way or was interrupted."""
        found = []
        for directory in self._source_directories():
            for name in names_in(directory):
                if name.startswith(PARTIAL_PREFIX):
                    source = None
                    with suppress(OSError):
                        source = source_of_partial(directory / name)
                    found.append(_incomplete(directory / name, source))
        return _sorted(model for model in found if model is not None)

    def list_damaged(self) -> tuple[StoredModel, ...]:
        """Return the models of which another program has removed or changed files. The next fetch replaces them."""
        found = []
        for directory in self._source_directories():
            for name in names_in(directory):
                with suppress(OSError):
                    if self._is_damaged(directory, name):
                        manifest = read_damaged_manifest(directory / name)
                        source = None if manifest is None else manifest.source
                        found.append(_incomplete(directory / name, source))
        return _sorted(model for model in found if model is not None)

    def _directory(self, source: str) -> Path:
        return self.root / source_directory(source)

    def _source_directories(self) -> Iterator[Path]:
        for name in names_in(self.root):
            if is_source_directory(name) and not (self.root / name).is_symlink():
                yield self.root / name

    def _load(
        self, directory: Path, revision: str, refs: dict[str, str], source: str | None = None
    ) -> StoredModel | None:
        """Return a complete model; None if there is none, or it is that of another source."""
        path = directory / revision
        if not is_revision(revision) or path.is_symlink():
            return None
        manifest = read_manifest(path)
        if manifest is None or (source is not None and manifest.source != source):
            return None
        try:
            last_used_at = (path / LAST_USE).stat().st_mtime
        except FileNotFoundError:
            return None
        return StoredModel(
            source=manifest.source,
            revision=revision,
            path=path,
            size=sum(file.size for file in manifest.files),
            last_used_at=last_used_at,
            requested_revisions=tuple(wanted for wanted, found in refs.items() if found == revision),
        )

    def _is_damaged(self, directory: Path, name: str) -> bool:
        path = directory / name
        if not is_revision(name) or path.is_symlink():
            return False
        is_ours = any((path / own).exists() for own in (MANIFEST, LAST_USE))
        return is_ours and self._load(directory, name, {}) is None


def names_in(directory: Path) -> list[str]:
    """Return the names in a directory, sorted; none if it cannot be read."""
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


@contextmanager
def _readable(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FetchError(
            f"the store cannot be read: {error.filename or directory}: {error.strerror or error}; check its owner and "
            "permissions, and its disk"
        ) from error


def _chosen_at(path: Path) -> float:
    try:
        return (path / CHOSEN).stat().st_mtime
    except OSError:
        return 0.0


def _incomplete(path: Path, source: str | None) -> StoredModel | None:
    """Return a model that is interrupted or damaged; None if it has just been published or removed."""
    try:
        began_at = path.stat().st_mtime
    except OSError:
        return None
    found = tuple(files_below(path))
    return StoredModel(
        source=source or path.parent.name,
        revision=path.name.removeprefix(PARTIAL_PREFIX),
        path=path,
        size=sum(stored_bytes(file, status) for file, status in found),
        last_used_at=max([began_at, *(status.st_mtime for _, status in found)]),
    )


def _sorted(models: Iterable[StoredModel]) -> tuple[StoredModel, ...]:
    return tuple(sorted(models, key=lambda model: (model.source, model.revision)))


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


class StoreUsage:
    """Bytes of models, with each file counted once, however many models link to it: revisions of a model share files,
    and Hugging Face's own cache shares files with the store."""

    def __init__(self, models: Iterable[Path]) -> None:
        self._files = {path: _files_of(path) for path in models}
        self._num_users = Counter(inode for files in self._files.values() for inode in files)
        self.total = sum(
            {inode: size for files in self._files.values() for inode, size in files.items()}.values()
        )

    def remove(self, model: Path) -> None:
        """Take a model out of the total."""
        for inode, size in self._files.pop(model, {}).items():
            self._num_users[inode] -= 1
            if not self._num_users[inode]:
                self.total -= size


def unshared_bytes(model: Path) -> int:
    """Return the bytes that the removal of a directory frees: those of files without a link elsewhere."""
    files = list(files_below(model))
    num_links = Counter(_inode(found) for _, found in files)
    unshared = {
        _inode(found): stored_bytes(path, found)
        for path, found in files
        if num_links[_inode(found)] == found.st_nlink
    }
    return sum(unshared.values())


def stored_bytes(path: Path, found: os.stat_result) -> int:
    """Return the bytes of a file, or of what has arrived of it."""
    return found.st_blocks * 512 if path.name.endswith(_PART_SUFFIX) else found.st_size


def files_below(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield a directory's files, at any depth, but the store's own, and those that vanish or cannot be read."""
    try:
        entries = list(os.scandir(path))
    except OSError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from files_below(Path(entry.path))
            continue
        if not entry.name.startswith(_OWN_PREFIX):
            with suppress(OSError):
                yield Path(entry.path), entry.stat(follow_symlinks=False)


def _files_of(model: Path) -> dict[tuple[int, int], int]:
    return {_inode(found): stored_bytes(path, found) for path, found in files_below(model)}


def _inode(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino
