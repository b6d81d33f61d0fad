"""Comments that keep a stream's connection open while there is nothing to send.

Owns: the comment, when one is due, and how the answer continues inside a stream that has begun with comments.
Must not know: attempts, which replica answers.

Load balancers close a connection on which nothing is sent for a minute or so; comments prevent this. Their price: the
status is 200 from the first comment on, and a later failure becomes an error event. Comments are no part of an answer,
so the request may still be sent to another replica.
"""

from __future__ import annotations

from dataclasses import dataclass

from argosy_router.http.server_interface import Client, ClientListener
from argosy_router.proxy.downstream.api_shape import error_event

STREAM_HEADERS = b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
COMMENT = b": keep-alive\n\n"


@dataclass(frozen=True, slots=True)
class CommentSchedule:
    """When the client of a stream that has no event for it gets a comment. Times in seconds."""

    interval_s: float = 10.0
    """Time between two comments: a sixth of the idle time that common load balancers allow. After an event the first
    comment comes within twice this time."""
    after_s: float = 15.0
    """A request that was sent to a replica and not accepted gets comments once it is this old. Most failures happen
    earlier, and can then still have a status of their own."""


class CommentedStream:
    """Wraps a client whose event stream has begun with comments, and sends the answer inside that stream."""

    def __init__(self, client: Client, path: bytes) -> None:
        """`path` is the request's."""
        self._client = client
        self._path = path

    def attach(self, listener: ClientListener) -> None:
        self._client.attach(listener)

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        """Send a whole answer as one event: it is an error, or the answer of an engine that did not stream."""
        line = b" ".join(body.splitlines())
        self._client.send(error_event(line, self._path) if status >= 400 else b"data: %b\n\n" % line)
        self._client.finish()

    def start(self, status: int, headers: bytes, first: bytes) -> None:
        self._client.send(first)

    def send(self, data: bytes) -> None:
        self._client.send(data)

    def finish(self) -> None:
        self._client.finish()

    def abort(self) -> None:
        self._client.abort()
