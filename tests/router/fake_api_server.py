"""The part of a Kubernetes API server that discovery uses: list and watch of ConfigMaps and pods."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, urlsplit

Object = dict[str, Any]

DEEP = "deep"
"""Stands for 9,000 levels in an answer."""


@dataclass
class FakeApiServer:
    """Objects by (collection, namespace, name). `status` other than 200 refuses everything, like an outage."""

    port: int = 0
    status: int = 200
    second_s: float = 1.0
    """How long a second of a watch takes."""
    drops_events: bool = False
    """Watches stay silent: a change is seen only by the next list."""
    watch_answer: bytes = b""
    """Response to every watch, instead of events; the connection then stays open."""
    list_answer: bytes = b""
    """Body of the response to every list, instead of objects."""
    forbidden: set[tuple[str, str]] = field(default_factory=set)
    """(collection, namespace) that may not be read."""
    forbidden_status: int = 403
    lists: list[str] = field(default_factory=list)
    watched: list[str] = field(default_factory=list)
    """Versions from which watches went on."""
    oldest: int = 0
    """Version before which changes are forgotten."""
    refused: list[str] = field(default_factory=list)
    """Collections that were asked for during an outage."""
    _objects: dict[tuple[str, str, str], Object] = field(default_factory=dict)
    _version: int = 1
    _history: list[tuple[int, str, tuple[str, str, str], Object]] = field(default_factory=list)
    _watches: list[tuple[str, str, dict[str, str], asyncio.StreamWriter]] = field(default_factory=list)
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _held: dict[tuple[str, str], asyncio.Event] = field(default_factory=dict)

    async def __aenter__(self) -> FakeApiServer:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def put(self, collection: str, namespace: str, name: str, **fields: Any) -> None:
        """Creates or replaces an object and tells the watches."""
        key = (collection, namespace, name)
        self._version += 1
        metadata = {
            "name": name,
            "namespace": namespace,
            "uid": f"uid-{name}",
            "resourceVersion": str(self._version),
            **fields.pop("metadata", {}),
        }
        event = "MODIFIED" if key in self._objects else "ADDED"
        self._objects[key] = {"metadata": metadata, **fields}
        self._tell(event, key, self._objects[key])

    def delete(self, collection: str, namespace: str, name: str) -> None:
        key = (collection, namespace, name)
        self._version += 1
        item = self._objects.pop(key)
        item["metadata"]["resourceVersion"] = str(self._version)
        self._tell("DELETED", key, item)

    def expire_watches(self) -> None:
        """410 on every watch, as after a compaction."""
        for _, _, _, writer in self._watches:
            _send_event(writer, "ERROR", {"kind": "Status", "code": 410, "metadata": {}})

    @contextlib.contextmanager
    def holding(self, collection: str, namespace: str) -> Iterator[None]:
        """Leave lists and watches of a collection that are asked for now without an answer until the end."""
        self._held[collection, namespace] = asyncio.Event()
        try:
            yield
        finally:
            self._held.pop((collection, namespace)).set()

    def bookmark(self) -> None:
        """Tell all watches how far they have come, if they asked for it."""
        for _, _, query, writer in self._watches:
            if query.get("allowWatchBookmarks") == "true":
                _send_event(writer, "BOOKMARK", {"metadata": {"resourceVersion": str(self._version)}})

    def forget_history(self) -> None:
        """As after a compaction: no watch can go on from an earlier version."""
        self.oldest = self._version

    def cut_watches(self) -> None:
        for _, _, _, writer in self._watches:
            writer.transport.abort()

    def _tell(self, event: str, key: tuple[str, str, str], item: Object) -> None:
        if self.drops_events:
            return
        self._history.append((self._version, event, key, item))
        for collection, namespace, query, writer in self._watches:
            if (collection, namespace) == key[:2] and _selected(item, query):
                _send_event(writer, event, item)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                await self._answer(head.split(" ", 2)[1], reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            self._watches = [watch for watch in self._watches if watch[3] is not writer]
            writer.transport.abort()

    async def _answer(self, target: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        url = urlsplit(target)
        query = dict(parse_qsl(url.query))
        _, _, _, _, namespace, collection = url.path.split("/")
        if (held := self._held.get((collection, namespace))) is not None:
            await held.wait()
        status = self.forbidden_status if (collection, namespace) in self.forbidden else self.status
        if status != 200:
            self.refused.append(collection)
            body = json.dumps({"kind": "Status", "code": status}).encode()
            writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))
        elif query.get("watch") == "true" and self.watch_answer:
            writer.write(self.watch_answer)
        elif query.get("watch") == "true":
            self.watched.append(query["resourceVersion"])
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            if int(query["resourceVersion"]) < self.oldest:
                _send_event(writer, "ERROR", {"kind": "Status", "code": 410, "metadata": {}})
            for version, event, key, item in self._history:
                is_new = version > int(query["resourceVersion"])
                if is_new and (collection, namespace) == key[:2] and _selected(item, query):
                    _send_event(writer, event, item)
            watch = (collection, namespace, query, writer)
            self._watches.append(watch)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(float(query["timeoutSeconds"]) * self.second_s):
                    await reader.read(1)
                raise ConnectionResetError
            self._watches.remove(watch)
            writer.write(b"0\r\n\r\n")
        else:
            self.lists.append(target)
            items = [
                item
                for (kind, where, _), item in self._objects.items()
                if (kind, where) == (collection, namespace) and _selected(item, query)
            ]
            start = int(query.get("continue", "0"))
            end = start + int(query.get("limit", len(items)))
            metadata = {
                "resourceVersion": str(self._version),
                **({"continue": str(end)} if end < len(items) else {}),
            }
            body = self.list_answer or _encoded({"metadata": metadata, "items": items[start:end]})
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
            writer.write(head + b"content-length: %d\r\n\r\n%b" % (len(body), body))


def _selected(item: Object, query: dict[str, str]) -> bool:
    labels = item["metadata"].get("labels", {})
    for term in filter(None, query.get("labelSelector", "").split(",")):
        name, _, value = term.partition("=")
        if labels.get(name) != value:
            return False
    field_term = query.get("fieldSelector", "")
    return not field_term or item["metadata"]["name"] == field_term.removeprefix("metadata.name=")


def _encoded(answer: Object) -> bytes:
    return json.dumps(answer).replace(f'"{DEEP}"', '{"f:a":' * 9000 + "{}" + "}" * 9000).encode()


def _send_event(writer: asyncio.StreamWriter, event: str, item: Object) -> None:
    line = _encoded({"type": event, "object": item}) + b"\n"
    writer.write(b"%x\r\n%b\r\n" % (len(line), line))
