"""The journal of finished parts, and what damaged ones are worth."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

import pytest

from argosy_fetcher.transfer import PartJournal


def journal(path: Path, *, size: int = 1000, part_bytes: int = 100, has_digest: bool = True) -> PartJournal:
    return PartJournal(path / "journal", size=size, part_bytes=part_bytes, has_digest=has_digest)


def test_finished_parts_are_kept(tmp_path: Path) -> None:
    first = journal(tmp_path)
    assert first.load() == set()
    first.start()
    for part in (3, 0, 9, 3):
        first.add(part)
    assert journal(tmp_path).load() == {0, 3, 9}
    first.delete()
    first.delete()
    assert journal(tmp_path).load() == set()


def test_parts_of_another_division_do_not_count(tmp_path: Path) -> None:
    first = journal(tmp_path)
    first.start()
    first.add(1)
    assert journal(tmp_path, part_bytes=50).load() == set()
    assert journal(tmp_path, size=999).load() == set()
    assert journal(tmp_path).load() == {1}


@pytest.mark.parametrize("cut", range(1, 8))
def test_a_torn_last_line_is_forgotten(tmp_path: Path, cut: int) -> None:
    first = journal(tmp_path, size=100_000)
    first.start()
    empty = (tmp_path / "journal").stat().st_size
    first.add(123)
    first.add(456)
    text = (tmp_path / "journal").read_bytes()
    (tmp_path / "journal").write_bytes(text[:-cut])
    again = journal(tmp_path, size=100_000)
    assert again.load() == ({123} if len(text) - cut >= empty + 4 else set())
    again.add(7)
    assert 7 in journal(tmp_path, size=100_000).load()
    assert journal(tmp_path, size=100_000).load() <= {7, 123}


def test_a_line_that_a_full_disk_cuts_is_taken_back(tmp_path: Path) -> None:
    first = journal(tmp_path, size=100_000)
    first.start()
    first.add(123)
    size = (tmp_path / "journal").stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 2, limits[1]))  # two bytes of the next line fit
    try:
        with pytest.raises(OSError, match="No space left"):
            first.add(456)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    first.add(7)
    assert journal(tmp_path, size=100_000).load() == {123, 7}


@pytest.mark.parametrize("damage", [b"10\n", b"-1\n", b"x\n", b"\xff\n", b"\n"])
def test_a_damaged_journal_counts_as_none(tmp_path: Path, damage: bytes) -> None:
    first = journal(tmp_path)
    first.start()
    first.add(1)
    with (tmp_path / "journal").open("ab") as file:
        file.write(damage)
    assert journal(tmp_path).load() == set()


@pytest.mark.parametrize("text", [b"", b"\n", b"{}\n1\n", b"[1, 2]\n", b'{"size": 1000'])
def test_a_damaged_header_counts_as_none(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "journal").write_bytes(text)
    assert journal(tmp_path).load() == set()


def test_parts_without_a_digest_count_within_one_boot_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("argosy_fetcher.transfer.boot_id", lambda: "first")
    first = journal(tmp_path, has_digest=False)
    first.start()
    first.add(1)
    assert journal(tmp_path, has_digest=False).load() == {1}
    monkeypatch.setattr("argosy_fetcher.transfer.boot_id", lambda: "second")
    assert journal(tmp_path, has_digest=False).load() == set()
    monkeypatch.setattr("argosy_fetcher.transfer.boot_id", lambda: None)
    assert journal(tmp_path, has_digest=False).load() == set()
