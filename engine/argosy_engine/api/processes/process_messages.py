"""What the API processes of one engine say to each other. They run the same code, as the same user."""

from __future__ import annotations

from msgspec import Struct

from argosy_engine.api.server_args import ServerArgs
from argosy_engine.config import EngineArgs
from argosy_engine.frontend.async_llm import SleepMode


class Start(Struct):
    """The first message to a process: what to serve."""

    server_args: ServerArgs
    engine_args: EngineArgs
    num_processes: int
    started: int
    """When the engine started, in seconds since the epoch."""


class ConnectCore(Struct, tag="connect_core"):
    """Connect to the core of a rank, whose sockets are in a directory. Answered once its model is loaded."""

    rank: int
    directory: str


class Attach(Struct, tag="attach"):
    """All cores are connected: load the tokenizer, and serve."""


class GetMetrics(Struct, tag="get_metrics"):
    """Answer with `EngineMetrics.values`."""


class Sleep(Struct, tag="sleep"):
    """`AsyncLLM.follow_sleep`."""

    level: int
    mode: SleepMode


class Ping(Struct, tag="ping"):
    """Answer, to show that the process does not stand still."""


class Drain(Struct, tag="drain"):
    """Reject new requests. Answered once none is running."""


class Stop(Struct, tag="stop"):
    """Accept no more connections, and exit. Answers may take so long to be read."""

    last_bytes_s: float


Call = ConnectCore | Attach | GetMetrics | Sleep | Ping | Drain | Stop


class NumberedCall(Struct):
    number: int
    call: Call


class Answer(Struct):
    """The answer to the call of that number."""

    number: int
    error: str | None = None
    values: list[float] = []


class RelayedRequest(Struct):
    """A request whose body is complete, which another process has let in."""

    method: str
    path: str
    raw_path: bytes
    query_string: bytes
    headers: list[tuple[bytes, bytes]]
    scheme: str
    http_version: str
    client: tuple[str, int] | None
    body: bytes


class ResponseStart(Struct, tag="start"):
    status: int
    headers: list[tuple[bytes, bytes]]


class ResponseBody(Struct, tag="body"):
    body: bytes
    more_body: bool


RelayedResponse = ResponseStart | ResponseBody
