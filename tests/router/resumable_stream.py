"""A fake engine's stream that can be resumed anywhere: every token is a function of (choice, position).

The script writes streams as our engines do (`api/endpoints/chat.py`) and continues them by `resume`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from argosy_protocol.headers import IN_COMMENTS, RESPONSE_ID, RESUME

from .fake_engine import DONE, MODEL, Connection, Received

PROMPT_TOKENS = 7


def length(choice: int) -> int:
    """Tokens of a choice: they end one after another, not together."""
    return 3 + 2 * (choice % 3)


def token(choice: int, position: int) -> int:
    return 1000 * choice + position


def events(request: Received) -> list[bytes]:
    """The stream that answers `request`, as whole events, `[DONE]` included."""
    body, is_chat = request.json, "chat" in request.path
    prompts = 1 if is_chat or isinstance(body["prompt"], str) else len(body["prompt"])
    count = (body.get("n") or 1) * prompts
    resume = body.get("resume")
    said = (
        [list(choice.get("token_ids", ())) for choice in resume["choices"]]
        if resume
        else [[] for _ in range(count)]
    )
    over = [choice.get("finished", False) for choice in resume["choices"]] if resume else [False] * count
    assert len(said) == count
    for choice, ids in enumerate(said):
        assert ids == [token(choice, position) for position in range(len(ids))], (
            "gaps, doubles or others' ids"
        )
        assert over[choice] == (len(ids) == length(choice))
    given = request.headers.get(RESUME)
    has_comments = given == IN_COMMENTS and not body.get("return_token_ids", False)
    with_ids = (given is not None and not has_comments) or body.get("return_token_ids", False)
    assert with_ids or has_comments or resume is None
    head = {
        "id": "cmpl-" + (request.headers.get(RESPONSE_ID) or request.headers["x-request-id"]),
        "object": "chunk",
        "created": resume["created"] if resume else 1000,
        "model": MODEL,
    }

    def chunk(choices: list[dict[str, Any]], usage: Any = None, comment: bytes = b":ids \n") -> bytes:
        data = b"data: " + json.dumps({**head, "choices": choices, "usage": usage}).encode() + b"\n\n"
        return (comment if has_comments else b"") + data

    def part(choice: int, ids: list[int], finish: str | None) -> dict[str, Any]:
        text = "".join(f"{choice}.{token_id} " for token_id in ids)
        fields: dict[str, Any] = {"delta": {"content": text}} if is_chat else {"text": text}
        if body.get("logprobs"):
            fields["logprobs"] = {"content": [{"token": str(i), "logprob": -i / 10} for i in ids]}
        return {"index": choice, **fields, "finish_reason": finish, "token_ids": ids if with_ids else None}

    stream = []
    if is_chat and resume is None:
        role: dict[str, Any] = {
            "delta": {"role": "assistant", "content": ""},
            "finish_reason": None,
            "token_ids": [] if with_ids else None,
        }
        stream.append(chunk([{"index": choice, **role} for choice in range(count)]))
    for position in range(max(map(length, range(count)))):
        for choice in range(count):
            if len(said[choice]) <= position < length(choice):
                finish = "stop" if position + 1 == length(choice) else None
                ids = [token(choice, position)]
                comment = b":ids %d %d\n" % (choice, *ids)
                if has_comments and position % 2:
                    stream.append(b":ids %d \n\n" % choice)
                stream.append(chunk([part(choice, ids, finish)], comment=comment))
    if (body.get("stream_options") or {}).get("include_usage"):
        generated = sum(map(length, range(count)))
        usage = {
            "prompt_tokens": PROMPT_TOKENS,
            "completion_tokens": generated,
            "total_tokens": PROMPT_TOKENS + generated,
        }
        stream.append(chunk([], usage))
    return [*stream, DONE]


@dataclass
class ResumableStream:
    """A script for `FakeEngine`s. The n-th stream dies after `deaths[n]` bytes of events; later ones are whole."""

    deaths: list[int] = field(default_factory=list)
    last_words: bytes = b""
    """Sent in place of what follows; the response then ends in order."""

    async def __call__(self, connection: Connection, request: Received) -> None:
        data = b"".join(events(request))
        connection.begin_stream()
        if not self.deaths:
            connection.chunk(data)
            connection.end_stream()
            return
        life = self.deaths.pop(0)
        if life:
            connection.chunk(data[:life])
        if self.last_words:
            connection.chunk(self.last_words)
            connection.end_stream()
            return
        await connection.writer.drain()
        connection.die()


def fold(stream: bytes) -> dict[str, Any]:
    """What a client has in the end. Fails on anything but whole events of one stream that ends once."""
    assert stream.endswith(b"\n\n")
    lines = stream.removesuffix(b"\n\n").split(b"\n\n")
    assert [line for line in lines if line == b"data: [DONE]"] == lines[-1:]
    chunks = [json.loads(line.removeprefix(b"data: ")) for line in lines[:-1]]
    assert len({(c["id"], c["created"], c["model"]) for c in chunks}) == 1
    told: dict[str, Any] = {"roles": 0, "usage": [c["usage"] for c in chunks if c["usage"]], "choices": {}}
    for choice in (choice for c in chunks for choice in c["choices"]):
        have = told["choices"].setdefault(
            choice["index"], {"text": "", "ids": [], "logprobs": [], "finish": []}
        )
        assert not have["finish"], "nothing follows a choice's end"
        told["roles"] += "role" in choice.get("delta", {})
        have["text"] += choice.get("text") or choice.get("delta", {}).get("content", "")
        have["ids"] += choice["token_ids"] or []
        have["logprobs"] += (choice.get("logprobs") or {}).get("content", [])
        have["finish"] += [choice["finish_reason"]] if choice["finish_reason"] else []
    return told
