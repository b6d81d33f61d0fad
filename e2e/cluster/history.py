"""Every version of some objects, recorded by a watch: a state that lasts for a moment is seen too.

Owns the watch and what it has told. Must not know what any object means.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from typing import Any
from urllib.request import urlopen

from cluster.kubectl import Kubectl
from cluster.shell import ClusterError


class History:
    """The versions in the order of the watch, the ones present at its beginning first."""

    def __init__(self) -> None:
        self._events: list[tuple[str, dict[str, Any]]] = []
        self._changed = threading.Condition()
        self._end = ""
        """Why no more will come; empty while the watch goes on."""

    def record(self, lines: Iterable[bytes]) -> None:
        """Add the events of a watch until it ends."""
        end = "the watch has ended"
        try:
            for line in lines:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    end = f"the watch has failed: {event['object'].get('message')}"
                    break
                with self._changed:
                    self._events.append((event["type"], event["object"]))
                    self._changed.notify_all()
        except (OSError, ValueError, HTTPException) as error:  # closed, perhaps within a line or a chunk
            end = f"the watch was cut: {error}"
        with self._changed:
            self._end = end
            self._changed.notify_all()

    @property
    def versions(self) -> list[dict[str, Any]]:
        """The objects as they were after each change; not those that were deleted."""
        with self._changed:
            return [each for kind, each in self._events if kind != "DELETED"]

    def at(self, version: int) -> list[dict[str, Any]]:
        """The objects as they were at a version of the whole API server: the `resourceVersion` of any object of it."""
        with self._changed:
            events = list(self._events)
        living: dict[str, dict[str, Any]] = {}
        for kind, each in events:
            if int(each["metadata"]["resourceVersion"]) > version:
                continue
            living.pop(each["metadata"]["uid"], None)
            if kind != "DELETED":
                living[each["metadata"]["uid"]] = each
        return list(living.values())

    def wait_for(
        self, what: str, accept: Callable[[dict[str, Any]], bool], timeout: float = 120
    ) -> dict[str, Any]:
        """Return the first version, past ones included, that is accepted.

        Raises:
            ClusterError: there was none in time, or the watch has ended; the text says what was waited for.
        """
        deadline, seen = time.monotonic() + timeout, 0
        while True:
            with self._changed:
                if len(self._events) == seen and not self._end:
                    self._changed.wait(max(0.0, deadline - time.monotonic()))
                new, end = self._events[seen:], self._end
            for kind, each in new:
                if kind != "DELETED" and accept(each):
                    return each
            seen += len(new)
            if end and not new:
                raise ClusterError(f"{what}: {end}")
            if time.monotonic() > deadline:
                raise ClusterError(f"{what}: in none of {seen} versions within {timeout:.0f} s")


@contextmanager
def recording(kubectl: Kubectl, path: str, query: str = "") -> Iterator[History]:
    """Record a collection's objects while the block runs, from before its first statement.

    Args:
        path: of the API, as "api/v1/namespaces/NAMESPACE/pods".
        query: a selector, as "labelSelector=a%3Db" or "fieldSelector=metadata.name%3DNAME".
    """
    history = History()
    recorder = None
    try:
        with kubectl.proxy() as url:
            # The head of the answer comes once the watch has begun.
            response = urlopen(f"{url}/{path}?watch=1&{query}", timeout=3600)
            recorder = threading.Thread(target=history.record, args=(response,), name="watch")
            recorder.start()
            yield history
    finally:  # the proxy has ended, and the connection with it
        if recorder is not None:
            recorder.join()
            response.close()
