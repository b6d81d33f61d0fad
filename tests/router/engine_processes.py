"""Real engines as processes that tests share, and clients that read their streams through the router."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from argosy_protocol.fleet import Endpoint, FleetDocument, FleetService
from message_events import message, parsed
from processes import Server, answers, free_port, running

from .harness import Rig

STREAMS = 50

ENGINE = [
    *("argosy_engine.api.serve", "builtin://tiny", "--served-model-name", "tiny", "--threads", "1"),
    *("--dtype", "float32", "--max-num-seqs", "96", "--disable-log-stats", "--any-model-name"),
    *("--shutdown-timeout", "0"),
]

SUBJECTS = ("the sea", "a lantern", "the harbor", "two cats", "an old clock")

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "minLength": 20, "maxLength": 40},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 8, "maxItems": 8},
    },
    "required": ["title", "tags"],
    "additionalProperties": False,
}

LONG: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True}

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, **LONG},
    "seeded, with penalties": {"temperature": 1.5, "frequency_penalty": 0.5, "presence_penalty": 0.3, **LONG},
    "stop strings": {"temperature": 1.2, "min_tokens": 60, "stop": ["e", "\n\n", "zebra crossing"], **LONG},
    "log probabilities": {"temperature": 0.8, "logprobs": True, "top_logprobs": 2, **LONG},
    "two choices": {"temperature": 1.4, "n": 2, "logprobs": True, **LONG},
    "usage": {"temperature": 0.9, "stream_options": {"include_usage": True}, **LONG},
    "reasoning": {"temperature": 1.1, "chat_template_kwargs": {"enable_thinking": True}, **LONG},
    "JSON schema": {
        "temperature": 1.0,
        "max_tokens": 400,
        "response_format": {"type": "json_schema", "json_schema": {"name": "note", "schema": SCHEMA}},
    },
    "a tool call": {"temperature": 0.3, "max_tokens": 120, "tools": [TOOL], "tool_choice": "required"},
    "completion": {"temperature": 1.3, "echo": True, "n": 2, **LONG},
    "message": {"temperature": 0, "max_tokens": 100, "thinking": {"type": "adaptive"}},
}


def calls() -> list[tuple[str, str, dict[str, Any]]]:
    """Kind, path and body of each stream."""
    made = []
    for number in range(STREAMS):
        kind = list(KINDS)[number % len(KINDS)]
        text = f"Tell me about {SUBJECTS[number // len(KINDS)]}."
        body = {"model": "tiny", "stream": True, "seed": number, **KINDS[kind]}
        if kind == "completion":
            made.append((kind, "/v1/completions", {**body, "prompt": text}))
        else:
            path = "/v1/messages" if kind == "message" else "/v1/chat/completions"
            made.append((kind, path, {**body, "messages": [{"role": "user", "content": text}]}))
    return made


class EnginePool:
    """Engines for all tests of this process. One that a test has ended is replaced when the next test asks.

    Tests use prompts of their own where it matters what is cached.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._servers: list[Server] = []
        self._stack = ExitStack()

    def take(self, count: int) -> list[Server]:
        self._servers = [
            server
            for server in self._servers
            if server.process.poll() is None and answers(f"{server.url}/ready")
        ]
        with ThreadPoolExecutor() as starters:
            self._servers += starters.map(self._start, range(len(self._servers), count))
        return self._servers[:count]

    def _start(self, _: int) -> Server:
        port = free_port()
        arguments = [*ENGINE, "--port", str(port)]
        return self._stack.enter_context(running(arguments, self._folder / f"log{port}", port=port))

    def close(self) -> None:
        self._stack.close()


@pytest.fixture(scope="session")
def engine_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePool]:
    pool = EnginePool(tmp_path_factory.mktemp("engines"))
    yield pool
    pool.close()


@pytest.fixture
def engines(engine_pool: EnginePool) -> list[Server]:
    return engine_pool.take(2)


def document(engines: list[Server], routable: int) -> FleetDocument:
    """Both engines, all but `routable` draining."""
    endpoints = tuple(
        Endpoint(name=f"r{number}", url=engine.url, draining=number != routable)
        for number, engine in enumerate(engines)
    )
    service = FleetService(namespace="default", name="svc", uid="u", model="tiny", endpoints=endpoints)
    return FleetDocument(services=(service,))


class Stream:
    """One client."""

    def __init__(self, r: Rig, number: int) -> None:
        self._r = r
        self._number = number
        self.has_begun = asyncio.Event()

    async def read(self) -> dict[str, Any]:
        """What the stream says in the end; fails on anything but one whole stream.

        A plain connection, HTTP/1.0: a client library would keep one core too busy for the streams to flow."""
        _, path, body = calls()[self._number]
        reader, writer = await asyncio.open_connection(*self._r.router.address)
        content = json.dumps(body).encode()
        writer.write(
            f"POST {path} HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n"
            f"x-request-id: stream-{self._number}\r\n\r\n".encode()
            + content
        )
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 "), head
        self.has_begun.set()
        told = fold(await reader.read())
        writer.close()
        return told


_undisturbed: dict[int, dict[str, Any]] = {}


async def undisturbed(r: Rig, count: int) -> list[dict[str, Any]]:
    """What the first `count` streams say in the end when nothing happens to an engine. It is asked once."""
    missing = [number for number in range(count) if number not in _undisturbed]
    told = await asyncio.gather(*(Stream(r, number).read() for number in missing))
    _undisturbed.update(zip(missing, told, strict=True))
    return [_undisturbed[number] for number in range(count)]


def fold(raw: bytes) -> dict[str, Any]:
    """Return what a client of a real engine has in the end, by field and choice; tool calls and reasoning as well."""
    if b"event: message_start" in raw:
        whole = message(parsed(raw))
        usage = whole.pop("usage")
        prompt_tokens = usage["input_tokens"] + usage["cache_read_input_tokens"]
        whole["usage"] = [[prompt_tokens, usage["output_tokens"]]]  # caches differ
        return {**whole, "finish_reason": {0: [whole["stop_reason"]]}}
    lines = raw.removesuffix(b"\n\n").split(b"\n\n")
    assert lines[-1] == b"data: [DONE]"
    chunks = [json.loads(line.removeprefix(b"data: ")) for line in lines[:-1] if not line.startswith(b":")]
    assert not any("error" in chunk for chunk in chunks), chunks[-1]
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    told: dict[str, Any] = defaultdict(lambda: defaultdict(list))
    told["usage"] = [
        [c["usage"]["prompt_tokens"], c["usage"]["completion_tokens"]] for c in chunks if c["usage"]
    ]
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        index = choice["index"]
        delta = choice["delta"] if "delta" in choice else {"content": choice["text"]}
        for name in ("role", "content", "reasoning"):
            told[name][index] += delta.get(name) or ""
        for call in delta.get("tool_calls") or []:
            if "id" in call:
                told["tool_calls"][index].append(call)
            else:
                told["tool_calls"][index][-1]["function"]["arguments"] += call["function"]["arguments"]
        told["token_ids"][index] += choice["token_ids"] or []
        told["logprobs"][index] += (choice["logprobs"] or {}).get("content", [])
        for name in ("finish_reason", "stop_reason"):
            told[name][index] += [choice[name]] if choice[name] is not None else []
    return told
