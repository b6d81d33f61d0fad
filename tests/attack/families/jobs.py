"""Files, batches and stored responses: misused by their clients, and kept by a program that freezes, dies, finds
rubbish in its storage, or waits for a bucket."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal

from ..fleet import ATTACKER_KEY, MODEL
from ..target import COMPLETIONS, Attack, Target
from ..wire import HOST, Broken, ask, reset

FREEZE_S = 8.0
_AWAY = frozenset({200, 404, 429, 503})
_BOUNDARY = "attack"
_serials = itertools.count()


def _form(content: bytes) -> bytes:
    lines = (
        f'--{_BOUNDARY}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        f'--{_BOUNDARY}\r\ncontent-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
    )
    return lines.encode() + content + f"\r\n--{_BOUNDARY}--\r\n".encode()


def _head(length: int, boundary: str = _BOUNDARY) -> bytes:
    return (
        f"POST /v1/files HTTP/1.1\r\nhost: {HOST}\r\nauthorization: Bearer {ATTACKER_KEY}\r\nconnection: close\r\n"
        f"content-type: multipart/form-data; boundary={boundary}\r\ncontent-length: {length}\r\n\r\n"
    ).encode()


def _lines(count: int) -> bytes:
    return b"".join(
        json.dumps(
            {
                "custom_id": str(number),
                "method": "POST",
                "url": COMPLETIONS,
                "body": {"model": MODEL, "prompt": f"{number}", "max_tokens": 30, "ignore_eos": True},
            }
        ).encode()
        + b"\n"
        for number in range(count)
    )


async def _upload(target: Target, content: bytes) -> str:
    """Upload a file; return its id, or nothing."""
    form = _form(content)
    with contextlib.suppress(OSError, ValueError, asyncio.IncompleteReadError):
        reader, writer = await asyncio.open_connection(HOST, target.fleet.port)
        try:
            writer.write(_head(len(form)) + form)
            answer = await reader.read()
            target.saw(int(answer[9:12]), answer, allowed=_AWAY | {403, 507})
            return str(json.loads(answer.partition(b"\r\n\r\n")[2]).get("id", ""))
        finally:
            writer.close()
    return ""


async def uploads_cut(target: Target) -> None:
    """Forms that are cut at any point, lie about their length, or are none."""
    rng = random.Random(0)
    form = _form(b"x" * 300_000)

    async def once(number: int) -> None:
        head = _head(
            (len(form), 1 << 40, 10, len(form) + 1)[number % 4], ("attack", "other")[number % 7 == 0]
        )
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(HOST, target.fleet.port)
            writer.write((head + form)[: rng.randrange(len(head), len(head) + len(form))])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rng.random()):
                    await reader.read()
            reset(writer.transport)
        target.outcomes["left"] += 1

    await target.volley(once, in_flight=16, most=400)


async def _start_batches(target: Target, count: int, lines: int) -> None:
    for _ in range(count):
        if target.is_over:
            return
        file_id = await _upload(target, _lines(lines))
        if file_id:
            body = {"input_file_id": file_id, "endpoint": COMPLETIONS, "completion_window": "24h"}
            await target.ask("/v1/batches", body, allowed=_AWAY | {400, 403})


async def batches(target: Target) -> None:
    """As many batches as the key may have, and lists of them."""
    await _start_batches(target, 8, 100)

    async def once(_: int) -> None:
        await target.ask("/v1/batches?limit=100")
        await target.ask("/v1/files")

    await target.volley(once, in_flight=8, most=400)


async def _responses(target: Target) -> None:
    async def once(number: int) -> None:
        body = {
            "model": MODEL,
            "input": f"{number} " * 150,
            "max_output_tokens": 5,
            "stream": number % 2 == 0,
        }
        await target.ask("/v1/responses", body, allowed=_AWAY)
        await target.ask(f"/v1/responses/resp_{'0' * 52}", None, allowed=_AWAY)

    await target.volley(once, in_flight=8, most=400)


async def _while_used(target: Target, strike: int, pause_s: float, end: int) -> None:
    """Strike the program while it is used."""
    program = target.fleet.batch
    load = asyncio.create_task(_responses(target))
    more = asyncio.create_task(_start_batches(target, 4, 50))
    try:
        await asyncio.sleep(min(1.0, target.seconds_left / 3))
        os.kill(program.pid, strike)
        target.outcomes["batch hit"] += 1
        await asyncio.sleep(pause_s)
    finally:
        if end:
            os.kill(program.pid, end)
        for task in (load, more):
            task.cancel()
        await asyncio.gather(load, more, return_exceptions=True)
    if not end:
        assert program.popen is not None
        await asyncio.to_thread(program.popen.wait, 60)
        program.start()
    await _until_answering(target)


async def _until_answering(target: Target) -> None:
    async with asyncio.timeout(60.0):
        while True:
            with contextlib.suppress(OSError, Broken, TimeoutError):
                answer = await ask(target.fleet.port, "/v1/files", None, key=ATTACKER_KEY, timeout_s=5.0)
                if answer.status == 200:
                    return
            await asyncio.sleep(0.1)


async def program_frozen(target: Target) -> None:
    await _while_used(target, signal.SIGSTOP, FREEZE_S, signal.SIGCONT)


async def program_killed(target: Target) -> None:
    await _while_used(target, signal.SIGKILL, 2.0, 0)


async def bucket_stalls(target: Target) -> None:
    """The storage's server takes connections and answers nothing. Only with a bucket (`--bucket`)."""
    bucket = target.fleet.bucket
    assert bucket is not None
    load = asyncio.create_task(_responses(target))
    more = asyncio.create_task(_start_batches(target, 4, 50))
    try:
        await asyncio.sleep(min(1.0, target.seconds_left / 3))
        os.kill(bucket.pid, signal.SIGSTOP)
        target.outcomes["bucket stalled"] += 1
        await asyncio.sleep(FREEZE_S)
    finally:
        os.kill(bucket.pid, signal.SIGCONT)
        for task in (load, more):
            task.cancel()
        await asyncio.gather(load, more, return_exceptions=True)
    await _until_answering(target)


async def rubbish(target: Target) -> None:
    """Objects that cannot be read, among those of the storage."""
    objects = target.fleet.storage / "objects"

    async def once(number: int) -> None:
        for path in sorted(objects.glob("leases/*/*.json"))[:2]:
            with contextlib.suppress(OSError):
                path.write_bytes((b"", b'{"holder":', b"\xff" * 100, b"[]")[number % 4])
        folder = objects / "leases" / f"{next(_serials)}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "x.json").write_bytes(b"?")
        await target.ask("/v1/batches", None)
        await asyncio.sleep(0.5)

    await _start_batches(target, 2, 50)
    await target.volley(once, in_flight=1, most=20)
    await _until_answering(target)


ATTACKS = (
    Attack("uploads that are cut", uploads_cut),
    Attack("many batches", batches),
    Attack("the jobs' program frozen", program_frozen, is_slow=True),
    Attack("the jobs' program killed", program_killed, is_slow=True),
    Attack("rubbish in the storage", rubbish, is_slow=True, needs_bucket=False),
    Attack("a bucket that stalls", bucket_stalls, is_slow=True, needs_bucket=True),
)
