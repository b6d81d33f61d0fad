"""One file of a model while its parts arrive."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from argosy_fetcher.source import RemoteFile
from argosy_fetcher.transfer import PartialFile
from scripted_source import digest_of

CONTENT = bytes(range(200))


def test_parts_do_not_count_after_a_failed_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may drop what it could not write, and tells so once."""
    remote = RemoteFile("model.safetensors", len(CONTENT), digest_of(CONTENT, "sha256"))
    file = PartialFile(remote, tmp_path / remote.path, 100)
    file.resume()
    for part in file.missing_parts():
        start, stop = file.bounds(part)
        with file.opened() as descriptor:
            os.pwrite(descriptor, CONTENT[start:stop], start)
        file.finish_part(part)
    assert file.is_intact()

    def refuse(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(OSError, match="Input/output error"):
            file.sync()
    again = PartialFile(remote, tmp_path / remote.path, 100)
    again.resume()
    assert again.missing_parts() == [0, 1]
    assert not again.is_complete
