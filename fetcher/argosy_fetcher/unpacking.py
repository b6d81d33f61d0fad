"""Unpacking: takes the files that are served out of archives, safely.

Owns which members are written and what layers of an image do to each other. Must not know formats (`archive_members`)
or what makes a model complete (`selection`).
Invariants: members are written under numbers in one directory, so no member's name reaches the file system; links are
never made or followed; files that are not served are not written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from argosy_fetcher.archive_members import Member, MemberReader, open_archive
from argosy_fetcher.disk import FreeSpace, require_space
from argosy_fetcher.errors import UnsupportedModel
from argosy_fetcher.selection import CONFIG, is_served_name
from argosy_fetcher.snapshot import MAX_FILES, Packing, check_path

_WHITEOUT: Final = ".wh."
"""Prefix of a file in an image's layer that removes a file of the layers below."""
_OPAQUE: Final = ".wh..wh..opq"
"""A file in an image's layer that removes what the layers below have in its folder."""

_MARGIN: Final = FreeSpace()


@dataclass(frozen=True, slots=True)
class UnpackedFile:
    path: Path
    """Where its content is."""
    size: int


class Unpacker:
    """Gathers files from archives and from files that are not packed, in the order in which they are given.

    Args:
        directory: an empty directory for the unpacked files.
        model: the model's name, for messages.
        on_progress: called for each piece that was written, and for each member.
    """

    def __init__(
        self,
        directory: Path,
        model: str,
        min_free: FreeSpace = _MARGIN,
        *,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.files: dict[str, UnpackedFile] = {}
        """The files by their path in the archives."""
        self._directory = directory
        self._model = model
        self._min_free = min_free
        self._on_progress = on_progress
        self._num_written = 0

    def add_file(self, name: str, path: Path, size: int) -> None:
        """Add a file as it is."""
        self.files[check_path(name)] = UnpackedFile(path, size)

    def add_archive(self, name: str, path: Path, packing: Packing, folders: Collection[str] = ()) -> None:
        """Unpack the served files of an archive. They replace those of the same path.

        Args:
            folders: what else than these is left out, unless it is empty; an empty name stands for the top folder.

        Raises:
            UnsupportedModel: the archive is damaged, or a served file has an unsafe name or is a link.
            NoSpace, OSError: the disk is full or fails.
        """
        added: dict[str, UnpackedFile] = {}
        below = _Whiteouts(self.files)
        with open_archive(path, packing, f"{self._model}: {name}") as members:
            for member in members:
                self._on_progress()
                folder, _, base = member.path.rpartition("/")
                if base.startswith(_WHITEOUT) and packing != "zip":
                    below.add(member.path)
                elif folders and folder not in folders:
                    continue
                elif is_served_name(base) and member.kind != "other":
                    self._check(member)
                    added[member.path] = self._write(member, members)
        for hidden in below.hidden():
            dropped = self.files.pop(hidden)
            if dropped.path.parent == self._directory:
                dropped.path.unlink()
        self.files.update(added)

    def _check(self, member: Member) -> None:
        if member.kind == "link":
            raise UnsupportedModel(
                f"{self._model}: {member.path[:200]!r} is a link or a sparse file in its archive; neither is unpacked: "
                "pack it again with tar --dereference --hard-dereference"
            )
        check_path(member.path)
        if self._num_written >= MAX_FILES:
            raise UnsupportedModel(f"{self._model}: its archives have more than {MAX_FILES} files of models")

    def _write(self, member: Member, members: MemberReader) -> UnpackedFile:
        require_space(self._directory, member.size, self._model, self._min_free)
        target = self._directory / f"{self._num_written:06}"
        self._num_written += 1
        with target.open("xb") as file:
            for chunk in members.chunks():
                file.write(chunk)
                self._on_progress()
        return UnpackedFile(target, member.size)


class _Whiteouts:
    """What one layer removes of the files of the layers below it. Removals of anything else are not kept."""

    def __init__(self, below: Mapping[str, UnpackedFile]) -> None:
        self._paths = {path: list(_with_folders(path)) for path in below}
        self._known = {name for names in self._paths.values() for name in names}
        self._removed: set[str] = set()

    def add(self, path: str) -> None:
        """Note a whiteout by its path in the layer."""
        folder, _, base = path.rpartition("/")
        prefix = f"{folder}/" if folder else ""
        removed = prefix if base == _OPAQUE else prefix + base.removeprefix(_WHITEOUT)
        if removed in self._known and base != _WHITEOUT:
            self._removed.add(removed)

    def hidden(self) -> list[str]:
        """Return the paths of the removed files."""
        return [path for path, names in self._paths.items() if not self._removed.isdisjoint(names)]


def _with_folders(path: str) -> Iterator[str]:
    """Yield what hides a path when it is removed: itself, each folder above, and each folder's content (`FOLDER/`)."""
    yield ""
    yield path
    for end, character in enumerate(path):
        if character == "/":
            yield path[:end]
            yield path[: end + 1]


def model_folder(files: Collection[str], model: str, preferred: Sequence[str] = ()) -> str:
    """Return the folder of the model among unpacked files: the first preferred one with a config.json, or else that of
    the only config.json with as few folders above it.

    Args:
        files: paths.
        preferred: names of folders; an empty one stands for the top folder.

    Returns:
        The folder's path with a slash at the end, or an empty string.

    Raises:
        UnsupportedModel: there is no config.json, or the choice is not clear.
    """
    for name in preferred:
        folder = f"{name}/" if name else ""
        if f"{folder}{CONFIG}" in files:
            return folder
    folders = [path.removesuffix(CONFIG) for path in files if path.rpartition("/")[2] == CONFIG]
    if not folders:
        raise UnsupportedModel(f"{model}: there is no {CONFIG} in it; pack a model in Hugging Face's layout")
    depth = min(folder.count("/") for folder in folders)
    found = sorted(folder for folder in folders if folder.count("/") == depth)
    if len(found) > 1:
        raise UnsupportedModel(
            f"{model}: there are several models in it ({', '.join(map(ascii, found[:3]))}); pack one"
        )
    return found[0]
