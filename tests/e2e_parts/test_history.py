"""What a watch has told, asked for afterwards."""

from __future__ import annotations

import json
import threading
from http.client import IncompleteRead
from queue import SimpleQueue
from typing import Any

import pytest

from cluster.history import History
from cluster.shell import ClusterError


def line(kind: str, version: int, uid: str = "a", **fields: Any) -> bytes:
    metadata = {"uid": uid, "resourceVersion": str(version)}
    return json.dumps({"type": kind, "object": {"metadata": metadata, **fields}}).encode() + b"\n"


def test_a_state_that_has_passed_is_found() -> None:
    history = History()
    history.record([line("ADDED", 1, state="new"), line("MODIFIED", 2, state="brief"), line("MODIFIED", 3)])
    assert (
        history.wait_for("it", lambda each: each.get("state") == "brief")["metadata"]["resourceVersion"]
        == "2"
    )
    assert [each.get("state") for each in history.versions] == ["new", "brief", None]


def test_a_state_that_comes_is_waited_for() -> None:
    history, lines = History(), SimpleQueue[bytes]()
    recorder = threading.Thread(target=history.record, args=(iter(lines.get, b""),))
    recorder.start()

    def is_new(each: dict[str, Any]) -> bool:
        if each["metadata"]["resourceVersion"] == "1":
            lines.put(line("MODIFIED", 2))  # once what was there has been looked at
            return False
        return True

    lines.put(line("ADDED", 1))
    assert history.wait_for("it", is_new, 60)["metadata"]["resourceVersion"] == "2"
    lines.put(b"")
    recorder.join()


def test_objects_at_a_version() -> None:
    history = History()
    changes = (line("ADDED", 7, "a", n=1), line("ADDED", 5, "b", n=2), line("MODIFIED", 8, "b", n=3))
    history.record([*changes, line("DELETED", 9, "a", n=1), line("ADDED", 11, "c", n=4)])
    numbers = {
        version: sorted(each["n"] for each in history.at(version)) for version in (4, 6, 7, 8, 9, 10, 11)
    }
    assert numbers == {4: [], 6: [2], 7: [1, 2], 8: [1, 3], 9: [3], 10: [3], 11: [3, 4]}


def test_a_watch_that_ends_or_fails_ends_the_wait() -> None:
    def cut() -> Any:
        yield line("ADDED", 1)
        raise IncompleteRead(b"")

    failed = b'{"type": "ERROR", "object": {"message": "too old resource version"}}'
    told = {}
    for name, lines in {"end": [line("DELETED", 1)], "error": [failed], "cut": cut()}.items():
        history = History()
        history.record(lines)
        with pytest.raises(ClusterError) as caught:
            history.wait_for("the moon", lambda each: False, 60)
        told[name] = str(caught.value)
    assert told == {
        "end": "the moon: the watch has ended",
        "error": "the moon: the watch has failed: too old resource version",
        "cut": f"the moon: the watch was cut: {IncompleteRead(b'')}",
    }


def test_what_does_not_come_in_time_is_told() -> None:
    with pytest.raises(ClusterError, match="the moon: in none of 0 versions within 0 s"):
        History().wait_for("the moon", lambda each: True, 0)
