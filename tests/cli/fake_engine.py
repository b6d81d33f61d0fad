"""An engine without a model, run by a supervisor in place of `argosy serve`.

Its behaviour comes from the manifest's `engine.env`: FAKE_EXIT ends the process at once with that code,
after printing FAKE_TEXT, FAKE_LOADS keeps it from becoming ready,
FAKE_LIFE_S ends it so many seconds after it was ready, FAKE_ANSWER is what it says. A chat answer takes FAKE_ANSWER_S,
so that requests are under way when things change.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys

ANSWER = os.environ.get("FAKE_ANSWER", "hello")
ANSWER_S = float(os.environ.get("FAKE_ANSWER_S", "0.05"))


class FakeEngine:
    def __init__(self) -> None:
        self.running = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.is_draining = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                method, path, _ = head.split(" ", 2)
                headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                await self.answer(writer, method, path, headers, body)
        except (EOFError, OSError):
            pass
        finally:
            writer.close()

    async def answer(
        self, writer: asyncio.StreamWriter, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> None:
        if path == "/ready" and "FAKE_LOADS" in os.environ:
            return respond(writer, 503, {"status": "loading"})
        if path in ("/ready", "/health", "/metrics"):
            return respond(writer, 200, {"status": "ready"})
        if headers.get("authorization", "") != f"bearer {os.environ['ARGOSY_API_KEY'].lower()}":
            return respond(writer, 401, {"error": {"message": "no key", "type": "authentication_error"}})
        if method != "POST" or path != "/v1/chat/completions":
            return respond(writer, 404, {"error": {"message": "not here", "type": "not_found_error"}})
        if self.is_draining:
            return respond(writer, 503, {"error": {"message": "draining", "type": "service_unavailable"}})
        self.running += 1
        self.idle.clear()
        try:
            await self.chat(writer, json.loads(body))
        finally:
            self.running -= 1
            if not self.running:
                self.idle.set()

    async def chat(self, writer: asyncio.StreamWriter, request: dict[str, object]) -> None:
        if not request.get("stream"):
            await asyncio.sleep(ANSWER_S)
            message = {"role": "assistant", "content": ANSWER}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            return respond(writer, 200, {"id": "1", "object": "chat.completion", "choices": [choice]})
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        for word in (*ANSWER.split(" "), None):
            delta = {} if word is None else {"content": word + " "}
            choice = {"index": 0, "delta": delta, "finish_reason": "stop" if word is None else None}
            chunk(writer, {"id": "1", "object": "chat.completion.chunk", "choices": [choice]})
            await writer.drain()
            await asyncio.sleep(ANSWER_S / 4)
        data = b"data: [DONE]\n\n"
        writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data))


def respond(writer: asyncio.StreamWriter, status: int, document: object) -> None:
    body = json.dumps(document).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)


def chunk(writer: asyncio.StreamWriter, document: object) -> None:
    data = b"data: " + json.dumps(document).encode() + b"\n\n"
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    options, _ = parser.parse_known_args()
    engine = FakeEngine()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    server = await asyncio.start_server(engine.serve, options.host, options.port)
    print("fake engine listens", flush=True)
    if "FAKE_LIFE_S" in os.environ:
        asyncio.get_running_loop().call_later(float(os.environ["FAKE_LIFE_S"]), os._exit, 3)
    await stop.wait()
    engine.is_draining = True
    server.close()
    await engine.idle.wait()


if __name__ == "__main__":
    print("arguments", sys.argv[1:], flush=True)
    if "FAKE_EXIT" in os.environ:
        print(os.environ.get("FAKE_TEXT", "fake engine: told to fail"), flush=True)
        sys.exit(int(os.environ["FAKE_EXIT"]))
    asyncio.run(main())
