"""Repositories of the hub look-alike: files by commit, with the ids that git and Git LFS give them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

LARGE_SUFFIXES = (
    ".bin", ".ckpt", ".gguf", ".h5", ".model", ".msgpack", ".onnx", ".pt", ".pth", ".safetensors",
)  # fmt: skip
"""What the `.gitattributes` of a model's repository gives to Git LFS."""
LARGE_BYTES = 10 << 20
"""From this size on the hub asks for Git LFS."""

Content = bytes | Path


@dataclass(frozen=True)
class HubFile:
    """One file of a commit. `sha256` is None if the file lies in git itself."""

    content: Content
    size: int
    blob_id: str
    sha256: str | None
    pointer_size: int

    @property
    def etag(self) -> str:
        """What the hub and Hugging Face's cache call the content."""
        return self.sha256 or self.blob_id


@dataclass(frozen=True)
class Commit:
    sha: str
    files: Mapping[str, HubFile]


@dataclass
class Repository:
    """A repository with branches and tags.

    Attributes:
        gate: what needs the author's consent: nothing, the content of files, or their list too.
    """

    name: str
    is_private: bool = False
    gate: str = "none"
    is_disabled: bool = False
    commits: dict[str, Commit] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def add(self, files: Mapping[str, Content], ref: str = "main") -> Commit:
        """Add a commit with exactly these files, and let `ref` point to it."""
        made = {path: make_file(path, content) for path, content in files.items()}
        ids = [f"{path} {file.blob_id}" for path, file in sorted(made.items())]
        sha = hashlib.sha1("\n".join([self.name, self.refs.get(ref, ""), *ids]).encode()).hexdigest()
        commit = self.commits[sha] = Commit(sha, made)
        self.refs[ref] = sha
        return commit

    def at(self, revision: str) -> Commit | None:
        return self.commits.get(self.refs.get(revision, revision))


def make_file(path: str, content: Content) -> HubFile:
    size = content.stat().st_size if isinstance(content, Path) else len(content)
    if not path.endswith(LARGE_SUFFIXES) and size < LARGE_BYTES:
        return HubFile(content, size, _blob_id(_read(content)), None, 0)
    sha256 = _sha256(content)
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()
    return HubFile(content, size, _blob_id(pointer), sha256, len(pointer))


def files_under(folder: Path) -> dict[str, Content]:
    """Return the files of a directory as a commit's, without reading them."""
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


def _read(content: Content) -> bytes:
    return content.read_bytes() if isinstance(content, Path) else content


def _blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _sha256(content: Content) -> str:
    if isinstance(content, Path):
        with content.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    return hashlib.sha256(content).hexdigest()
