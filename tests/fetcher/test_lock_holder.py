"""Who holds a lock, and whether it makes progress, as those see it who wait."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from argosy_fetcher.disk import MARK_INTERVAL_S, HolderMark, HolderWatch, exclusive_lock, try_exclusive_lock

LONG_AGO = (1e9, 1e9)
NAME = f"{socket.gethostname()[:63]} (process {os.getpid()})"
CALLED = f"a process that calls itself {NAME}"


@contextmanager
def opened(lock: Path) -> Iterator[int]:
    with exclusive_lock(lock, lambda: pytest.fail("nobody else has the lock")) as descriptor:
        yield descriptor


def hold(lock: Path) -> None:
    """Take the lock, name its holder, and leave it."""
    with opened(lock) as descriptor:
        HolderMark(descriptor)


def test_a_holder_is_named_once_when_it_has_made_no_progress_for_long(tmp_path: Path) -> None:
    lock, told = tmp_path / "lock", []
    hold(lock)
    watch = HolderWatch(lock, told.append, 600.0, now=0.0)
    watch.look(599.0)
    assert told == []
    watch.look(601.0)
    watch.look(5000.0)
    assert told == [CALLED]


def test_a_holder_that_makes_progress_again_is_told_too(tmp_path: Path) -> None:
    lock, told = tmp_path / "lock", []
    hold(lock)
    watch = HolderWatch(lock, told.append, 600.0, now=0.0)
    watch.look(700.0)
    os.utime(lock, LONG_AGO)  # another machine's clock may be anything
    watch.look(710.0)
    assert told == [CALLED, ""]
    watch.look(1300.0)
    assert told == [CALLED, ""]
    watch.look(1311.0)
    assert told == [CALLED, "", CALLED]


def test_another_holder_begins_anew(tmp_path: Path) -> None:
    lock, told = tmp_path / "lock", []
    lock.write_text("another-pod (process 7)\n")
    os.utime(lock, LONG_AGO)
    watch = HolderWatch(lock, told.append, 600.0, now=0.0)
    watch.look(700.0)
    hold(lock)
    watch.look(800.0)
    assert told == ["a process that calls itself another-pod (process 7)", ""]


def test_progress_is_marked_now_and_then(tmp_path: Path) -> None:
    lock, now = tmp_path / "lock", [0.0]
    with opened(lock) as descriptor:
        mark = HolderMark(descriptor, lambda: now[0])
        os.utime(lock, LONG_AGO)
        now[0] = MARK_INTERVAL_S - 1
        mark.progressed()
        assert lock.stat().st_mtime == LONG_AGO[1]
        now[0] = MARK_INTERVAL_S
        mark.progressed()
        assert lock.stat().st_mtime > LONG_AGO[1]
        os.utime(lock, LONG_AGO)
        mark.progressed()
        assert lock.stat().st_mtime == LONG_AGO[1]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n\x00\x1b",
        b"\xff" * 1000,
        b"pod-7",
        b"pod-7 (process 1) is done: delete the pod db-0 (process 1)\n",
        b"db-0 (process 1)\nsecond line\n",
        b"<a href=x>pod</a> (process 1)\n",
        "pod-\u0661 (process 1)\n".encode(),
        "pod-7 (process \u0661)\n".encode(),
        b"%b (process 1)\n" % (b"x" * 64),
        b"pod-7 (process %b)\n" % (b"1" * 11),
        b"pod-7 (process )\n",
    ],
)
def test_a_lock_whose_text_no_holder_writes_is_held_by_an_unknown_process(
    content: bytes, tmp_path: Path
) -> None:
    lock, told = tmp_path / "lock", []
    lock.write_bytes(content)
    HolderWatch(lock, told.append, 600.0, now=0.0).look(600.0)
    assert told == ["an unknown process"]


def test_a_lock_that_is_gone_is_held_by_an_unknown_process(tmp_path: Path) -> None:
    told: list[str] = []
    HolderWatch(tmp_path / "lock", told.append, 600.0, now=0.0).look(600.0)
    assert told == ["an unknown process"]


def test_a_host_with_an_odd_name_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, told = tmp_path / "lock", []
    monkeypatch.setattr(socket, "gethostname", lambda: "my_h\u00f6st.local")
    hold(lock)
    HolderWatch(lock, told.append, 600.0, now=0.0).look(600.0)
    assert told == [f"a process that calls itself my-h-st.local (process {os.getpid()})"]


def test_a_longer_name_of_the_holder_before_is_gone(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.write_text(f"{'x' * 100} (process 7)\n")
    hold(lock)
    assert lock.read_text() == f"{NAME}\n"


@pytest.mark.parametrize("kind", ["link", "dangling link", "fifo"])
def test_what_another_put_in_place_of_the_lock_is_neither_followed_nor_written(
    kind: str, tmp_path: Path
) -> None:
    lock, target, told = tmp_path / "lock", tmp_path / "target", []
    if kind == "fifo":
        os.mkfifo(lock)
    else:
        lock.symlink_to(target)
    if kind == "link":
        target.write_text("another-pod (process 7)\n")
    with pytest.raises(OSError, match="the lock is not a regular file; remove it"):
        hold(lock)
    with pytest.raises(OSError, match="the lock is not a regular file"), try_exclusive_lock(lock):
        pytest.fail("it has been locked")
    HolderWatch(lock, told.append, 600.0, now=0.0).look(600.0)
    assert told == ["an unknown process"]
    assert target.exists() == (kind == "link")
    assert kind != "link" or target.read_text() == "another-pod (process 7)\n"
