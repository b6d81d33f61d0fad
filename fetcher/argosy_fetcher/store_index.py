"""Store index: which models a store has, complete, interrupted or damaged.

Owns finding models by name and revision, and listing them. Must not know sources or transfers. Invariants: it changes
nothing; what cannot be read is not taken for damaged.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from argosy_fetcher import store_layout
from argosy_fetcher.errors import FetchError
from argosy_fetcher.snapshot import Digest
from argosy_fetcher.store_usage import files_below, stored_bytes


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
        root: the directory, as `store_layout.choose_root` finds it.
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
            refs = store_layout.read_refs(directory)
            pinned = store_layout.pinned_revision(refs, source, requested_revision)
            return self._load(directory, pinned or requested_revision, refs, source)

    def pinned_revision(self, source: str, requested_revision: str) -> str | None:
        """Return what a requested revision was pinned to, whether the store still has it or not.

        Raises:
            FetchError: the store cannot be read.
        """
        directory = self._directory(source)
        with _readable(directory):
            refs = store_layout.read_refs(directory)
        return store_layout.pinned_revision(refs, source, requested_revision)

    def find_file(self, source: str, digest: Digest, size: int) -> Path | None:
        """Return a file of a source's complete models that should have this content. The caller checks it."""
        directory = self._directory(source)
        for name in names_in(directory):
            with suppress(OSError):
                model = self._load(directory, name, {}, source)
                manifest = None if model is None else store_layout.read_damaged_manifest(model.path)
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
        name, _, endpoint = source.partition(store_layout.ENDPOINT)
        if found is not None and endpoint:
            return found
        return self.find_at_any_endpoint(name, requested_revision) or found

    def find_at_any_endpoint(self, source: str, requested_revision: str) -> StoredModel | None:
        """Return the model of a source at any endpoint: of those that differ in nothing else, the one that was chosen
        last, or was used last if none was chosen.

        Args:
            source: canonical name without an endpoint.
        """
        wanted = store_layout.equal_revisions(source, requested_revision)
        found = [
            model
            for model in self.list()
            if model.source.partition(store_layout.ENDPOINT)[0] == source
            and not wanted.isdisjoint((model.revision, *model.requested_revisions))
        ]
        return max(found, key=lambda model: (_chosen_at(model.path), model.last_used_at), default=None)

    def damaged_path(self, source: str, requested_revision: str) -> Path | None:
        """Return the directory of a model that `find` would find if it were complete."""
        revision = self.pinned_revision(source, requested_revision) or requested_revision
        path = self._directory(source) / revision
        return path if store_layout.is_revision(revision) and path.is_dir() else None

    def list(self) -> tuple[StoredModel, ...]:
        """Return the complete models, by source and revision, without those that cannot be read."""
        found: list[StoredModel] = []
        for directory in self._source_directories():
            refs: dict[str, str] = {}
            with suppress(OSError):
                refs = store_layout.read_refs(directory)
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
                if name.startswith(store_layout.PARTIAL_PREFIX):
                    source = None
                    with suppress(OSError):
                        source = store_layout.source_of_partial(directory / name)
                    found.append(_incomplete(directory / name, source))
        return _sorted(model for model in found if model is not None)

    def list_damaged(self) -> tuple[StoredModel, ...]:
        """Return the models of which another program has removed or changed files. The next fetch replaces them."""
        found = []
        for directory in self._source_directories():
            for name in names_in(directory):
                with suppress(OSError):
                    if self._is_damaged(directory, name):
                        manifest = store_layout.read_damaged_manifest(directory / name)
                        source = None if manifest is None else manifest.source
                        found.append(_incomplete(directory / name, source))
        return _sorted(model for model in found if model is not None)

    def _directory(self, source: str) -> Path:
        return self.root / store_layout.source_directory(source)

    def _source_directories(self) -> Iterator[Path]:
        for name in names_in(self.root):
            if store_layout.is_source_directory(name) and not (self.root / name).is_symlink():
                yield self.root / name

    def _load(
        self, directory: Path, revision: str, refs: dict[str, str], source: str | None = None
    ) -> StoredModel | None:
        """Return a complete model; None if there is none, or it is that of another source."""
        path = directory / revision
        if not store_layout.is_revision(revision) or path.is_symlink():
            return None
        manifest = store_layout.read_manifest(path)
        if manifest is None or (source is not None and manifest.source != source):
            return None
        try:
            last_used_at = (path / store_layout.LAST_USE).stat().st_mtime
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
        if not store_layout.is_revision(name) or path.is_symlink():
            return False
        is_ours = any((path / own).exists() for own in (store_layout.MANIFEST, store_layout.LAST_USE))
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
        return (path / store_layout.CHOSEN).stat().st_mtime
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
        revision=path.name.removeprefix(store_layout.PARTIAL_PREFIX),
        path=path,
        size=sum(stored_bytes(file, status) for file, status in found),
        last_used_at=max([began_at, *(status.st_mtime for _, status in found)]),
    )


def _sorted(models: Iterable[StoredModel]) -> tuple[StoredModel, ...]:
    return tuple(sorted(models, key=lambda model: (model.source, model.revision)))
