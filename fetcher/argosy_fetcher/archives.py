"""Archives: takes the files that are served out of tar archives from hostile places.

Owns formats, decompression and their bounds, which members are written, and what layers of an image do to each other.
Must not know what makes a model complete (`selection`).
Invariants: a member's path is data and never used as one: members are written under numbers in one directory; links are
never made or followed; files that are not served are not written.
"""

from __future__ import annotations

import gzip
import re
import tarfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Literal, Protocol, cast

from argosy_fetcher.disk import MARGIN, FreeSpace, require_space
from argosy_fetcher.errors import FetchError, UnsupportedModel
from argosy_fetcher.selection import CONFIG, is_served_name
from argosy_fetcher.source import MAX_FILES, Packing, check_path

MAX_MEMBERS: Final = 500_000
"""Images on a full distribution have about 100,000 files."""
MAX_RATIO: Final = 200
"""Decompressed bytes per byte of an archive, beyond `RATIO_FREE_BYTES`. Weights compress to half at best."""
RATIO_FREE_BYTES: Final = 1 << 30
_CHUNK_BYTES: Final = 1 << 20
_MAX_PAX_BYTES: Final = 32 << 10
"""Of one pax header, and of all global ones together. Names and times take hundreds of bytes."""
_MAX_TAR_HEADERS_BYTES: Final = 256 << 10
"""Of all that stands before a member's content, such as the map of a sparse file."""
_MAX_DIGITS: Final = 128
_DIGITS: Final = re.compile(rb"[0-9]+")
_TAR_END: Final = bytes(tarfile.BLOCKSIZE)
_WHITEOUT: Final = ".wh."
"""Prefix of a file in an image's layer that removes a file of the layers below."""
_OPAQUE: Final = ".wh..wh..opq"
"""A file in an image's layer that removes what the layers below have in its folder."""


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
        min_free: FreeSpace = MARGIN,
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
                if base.startswith(_WHITEOUT):
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

    def _write(self, member: Member, members: TarReader) -> UnpackedFile:
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


class _Damaged(Exception):
    """The archive is not what its format demands, or exceeds a bound."""


@dataclass(frozen=True, slots=True)
class Member:
    path: str
    """As the archive has it, without a leading `./`."""
    size: int
    kind: Literal["file", "link", "other"]


def require_unpacker(packing: Packing) -> None:
    """Check that what reads a format is installed.

    Raises:
        FetchError: it is not.
    """
    if packing == "tar+zstd":
        try:
            import zstandard  # noqa: F401
        except ImportError:
            raise FetchError(
                "archives with zstd need a package: `pip install '.[fetch]'` in the checkout"
            ) from None


@contextmanager
def open_archive(path: Path, packing: Packing, name: str) -> Iterator[TarReader]:
    """Open an archive, and turn whatever its parsers raise into an error that names it.

    Args:
        name: the model and the archive, for messages.

    Raises (from the block):
        UnsupportedModel: the archive is damaged or exceeds a bound.
        FetchError: what reads this format is not installed.
        OSError: the disk failed.
    """
    try:
        limit = MAX_RATIO * path.stat().st_size + RATIO_FREE_BYTES
        with ExitStack() as stack:
            raw = stack.enter_context(path.open("rb"))
            yield TarReader(_ForwardReader(_decompressed(raw, packing, stack), limit))
    except (FetchError, MemoryError):
        raise
    except Exception as error:  # parsers of hostile input raise anything
        if isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile):
            raise
        reason = str(error)[:200] or type(error).__name__
        raise UnsupportedModel(
            f"{name}: the archive cannot be unpacked: {reason}; pack it again as tar, tar.gz or tar.zst"
        ) from error


class _Bytes(Protocol):
    def read(self, size: int, /) -> bytes: ...


def _decompressed(raw: IO[bytes], packing: Packing, stack: ExitStack) -> _Bytes:
    if packing == "tar":
        return raw
    if packing == "tar+gzip":
        return stack.enter_context(gzip.GzipFile(fileobj=raw, mode="rb"))
    if packing != "tar+zstd":
        raise _Damaged(f"unknown packing {packing}")
    require_unpacker(packing)
    import zstandard

    reader = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True, closefd=False)
    return cast(_Bytes, stack.enter_context(reader))


class _ForwardReader:
    """What tarfile needs of a seekable file, over a stream that only goes forward, with bounds.

    Args:
        limit: bytes that the stream may have.
    """

    def __init__(self, stream: _Bytes, limit: int) -> None:
        self.last_header = b""
        """What `read` returned last."""
        self.num_global_bytes = 0
        """Bytes of global pax headers so far. tarfile copies them all for each member that has a pax header."""
        self._stream = stream
        self._limit = limit
        self._position = 0
        self._num_header_bytes = 0
        self._are_pax_records_next = False

    def tell(self) -> int:
        return self._position

    def begin_member(self) -> None:
        """Begin the headers of the next member."""
        self._num_header_bytes = 0

    def expect_pax_records(self) -> None:
        """Check what is read next as the content of a pax header."""
        self._are_pax_records_next = True

    def read(self, size: int) -> bytes:
        """Return `size` bytes of headers, or less at the end."""
        self._num_header_bytes += size
        if size < 0 or self._num_header_bytes > _MAX_TAR_HEADERS_BYTES:
            raise _Damaged(f"a header has more than {_MAX_TAR_HEADERS_BYTES} bytes")
        self.last_header = self.read_content(size)
        if self._are_pax_records_next:
            self._are_pax_records_next = False
            _check_pax_records(self.last_header)
        return self.last_header

    def read_content(self, size: int) -> bytes:
        """Return `size` bytes, or less at the end."""
        found = self._stream.read(size)
        while len(found) < size and (more := self._stream.read(size - len(found))):
            found += more
        self._position += len(found)
        if self._position > self._limit:
            raise _Damaged(f"it decompresses to more than {self._limit} bytes")
        return found

    def seek(self, position: int) -> int:
        if position < self._position:
            raise _Damaged("its headers point backwards")
        while self._position < position:
            if not self.read_content(min(position - self._position, _CHUNK_BYTES)):
                raise _Damaged("it ends in the middle of a file")
        return position

    def drain(self) -> None:
        """Read to the end, where decompressors check what they have returned."""
        while self.read_content(_CHUNK_BYTES):
            pass


class _TarInfo(tarfile.TarInfo):
    """A member whose pax headers are checked before tarfile's regular expressions see them, which take quadratic time
    for hostile ones (CVE-2024-6232, mended in Python 3.11.10 and 3.12.6)."""

    def _proc_pax(self, archive: Any) -> Any:
        stream: _ForwardReader = archive.fileobj
        if self.type == tarfile.XGLTYPE:
            stream.num_global_bytes += max(self.size, 0)
        if self.size > _MAX_PAX_BYTES:
            raise _Damaged(f"a header has more than {_MAX_PAX_BYTES} bytes")
        if stream.num_global_bytes > _MAX_PAX_BYTES:
            raise _Damaged(f"its global headers have more than {_MAX_PAX_BYTES} bytes")
        stream.expect_pax_records()
        return super()._proc_pax(archive)


def _check_pax_records(data: bytes) -> None:
    """Check that a pax header is a sequence of `LENGTH KEY=VALUE\\n`, whose search takes linear time.

    Raises:
        _Damaged: it is not, or has an endless number.
    """
    position = 0
    while position < len(data) and data[position]:
        digits = data[position : position + 8].partition(b" ")[0]
        length = int(digits) if digits.isdigit() else 0
        record = data[position : position + length]
        if not record.endswith(b"\n") or len(record) < length or b"=" not in record[len(digits) + 2 :]:
            raise _Damaged("a pax header is malformed")
        position += length
    if max(map(len, _DIGITS.findall(data)), default=0) > _MAX_DIGITS:
        raise _Damaged(f"a pax header has a number of more than {_MAX_DIGITS} digits")


class TarReader:
    """Iterates over members. `chunks` yields the content of the current one."""

    def __init__(self, stream: _ForwardReader) -> None:
        self._stream = stream
        self._current: tarfile.TarInfo | None = None

    def __iter__(self) -> Iterator[Member]:
        archive: Any = tarfile.TarFile(fileobj=cast(IO[bytes], self._stream), mode="r", tarinfo=_TarInfo)
        number = 0
        while (info := archive.next()) is not None:
            archive.members = []  # tarfile keeps all that it has seen
            self._stream.begin_member()
            number += 1
            if number > MAX_MEMBERS:
                raise _Damaged(f"it has more than {MAX_MEMBERS} files")
            if info.size < 0:
                raise _Damaged("a file has a negative size")
            self._current = info
            kind: Literal["file", "link", "other"] = "other"
            if info.isreg() and not info.issparse():
                kind = "file"
            elif info.issym() or info.islnk() or info.issparse():
                kind = "link"
            yield Member(_without_dot(info.name), info.size, kind)
        if self._stream.last_header != _TAR_END:  # tarfile takes a cut or damaged header for the end
            raise _Damaged("it ends without the mark of its end")
        self._stream.drain()

    def chunks(self) -> Iterator[bytes]:
        assert self._current is not None
        self._stream.seek(self._current.offset_data)
        missing = self._current.size
        while missing > 0:
            chunk = self._stream.read_content(min(missing, _CHUNK_BYTES))
            if not chunk:
                raise _Damaged("it ends in the middle of a file")
            missing -= len(chunk)
            yield chunk


def _without_dot(path: str) -> str:
    while path.startswith("./"):
        path = path[2:].lstrip("/")
    return path
