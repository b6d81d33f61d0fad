"""The API process's socket for the core's messages: order, waiting, and the last message of a core that has ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import zmq

from argosy_engine.core.proc.async_core_client import OutputSocket


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """The core's end and ours."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    ours, core = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    ours.bind(f"ipc://{tmp_path}/out")
    core.connect(f"ipc://{tmp_path}/out")
    yield core, ours
    core.close(linger=0)
    ours.close(linger=0)
    context.term()


@pytest.fixture
async def exited() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


@pytest.fixture
async def messages(
    ends: tuple[zmq.Socket[bytes], zmq.Socket[bytes]], exited: asyncio.Future[None]
) -> AsyncIterator[OutputSocket]:
    opened = OutputSocket(ends[1], exited, lambda: 30.0)
    yield opened
    opened.close()


async def test_messages_come_in_order_whether_awaited_or_not(
    ends: tuple[zmq.Socket[bytes], zmq.Socket[bytes]], messages: OutputSocket
) -> None:
    for number in range(300):
        if number % 3 == 0:
            ends[0].send(b"%d" % number)
            assert await messages.receive() == b"%d" % number
        elif number % 3 == 1:
            waiting = asyncio.ensure_future(messages.receive())
            await asyncio.sleep(0)
            ends[0].send(b"%d" % number)
            ends[0].send(b"%d" % (number + 1))
            assert await waiting == b"%d" % number
        else:
            assert await messages.receive() == b"%d" % number


async def test_a_cancelled_reader_loses_no_message(
    ends: tuple[zmq.Socket[bytes], zmq.Socket[bytes]], messages: OutputSocket
) -> None:
    waiting = asyncio.ensure_future(messages.receive())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    ends[0].send(b"x")
    assert await messages.receive() == b"x"


async def test_the_last_messages_are_read_after_the_cores_end(
    ends: tuple[zmq.Socket[bytes], zmq.Socket[bytes]], messages: OutputSocket, exited: asyncio.Future[None]
) -> None:
    waiting = asyncio.ensure_future(messages.receive())
    await asyncio.sleep(0)
    exited.set_result(None)
    await asyncio.sleep(0)
    assert not waiting.done()
    ends[0].send(b"why")
    assert await waiting == b"why"


async def test_a_core_that_ends_without_a_message_is_told(
    ends: tuple[zmq.Socket[bytes], zmq.Socket[bytes]], exited: asyncio.Future[None]
) -> None:
    messages = OutputSocket(ends[1], exited, lambda: 0.0)
    waiting = asyncio.ensure_future(messages.receive())
    await asyncio.sleep(0)
    exited.set_result(None)
    assert await waiting is None
    messages.close()
