"""Requests as bytes: a valid one for every endpoint, changed in its bytes, its JSON and its framing.

Owns: the corpus and the changes. Must not know: sockets, which answers are right.
Invariant: the same seed gives the same cases.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .raw_client import RawCase

CHAT = [{"role": "user", "content": "Hi"}]
TOOL = {
    "name": "f",
    "description": "d",
    "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, *CHAT],
        "tools": [{"type": "function", "function": TOOL}],
        "tool_choice": "auto", "logprobs": True, "top_logprobs": 2, "n": 2, "seed": 1, "stop": ["x"],
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
        "stream": True, "stream_options": {"include_usage": True}, "logit_bias": {"5": 1.5},
        "chat_template_kwargs": {"enable_thinking": False}, "structured_outputs": None,
    },
    "/v1/chat/completions/batch": {"messages": [CHAT, CHAT], "temperature": 0.5},
    "/v1/completions": {
        "prompt": ["a", "b"], "echo": True, "logprobs": 1, "best_of": None, "suffix": None, "stop_token_ids": [3],
        "structured_outputs": {"regex": "[ab]+"}, "truncate_prompt_tokens": 4, "prompt_logprobs": 1,
    },
    "/v1/responses": {
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "1"},
        ],
        "tools": [{"type": "function", **TOOL}], "store": True, "instructions": "Be brief.", "stream": True,
        "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}, "previous_response_id": None,
    },
    "/v1/messages": {
        "max_tokens": 4, "system": [{"type": "text", "text": "Be brief."}],
        "messages": [
            *CHAT,
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "1"}]},
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
        "thinking": {"type": "disabled"}, "tool_choice": {"type": "auto"}, "stream": True,
    },
    "/v1/messages/count_tokens": {"messages": CHAT, "system": "Be brief."},
    "/v1/embeddings": {"input": ["a", "b"], "encoding_format": "base64", "dimensions": None},
    "/classify": {"input": ["a"]},
    "/pooling": {"input": "a", "encoding_format": "float"},
    "/v1/score": {"queries": "a", "documents": ["b", "c"]},
    "/v1/rerank": {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1},
    "/tokenize": {"prompt": "a b", "add_special_tokens": True, "return_token_strs": True},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/v1/batches": {"input_file_id": "file-x", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
}  # fmt: skip
"""A body that is valid, or nearly so, by its path."""
FORM = (
    b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\ncontent-disposition: form-data; name="file"; filename="a.jsonl"\r\n'
    b"content-type: application/jsonl\r\n\r\n{}\r\n--b--\r\n"
)
VALUES: Sequence[Any] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 1e308, -0.0, 1e-320, "", "a", "\0", "\ud800",
    "\U0010ffff" * 3, "x" * 5000, [], {}, [[]], [None], {"": None}, {"type": "object"}, {"$ref": "#"}, [{}],
    "NaN", "{", "{{ 1/0 }}", {"type": "string", "pattern": "(a|b"}, [[[[[[1]]]]]], "<|im_start|>", "data: [DONE]\n\n",
    "../../etc/passwd",
)  # fmt: skip
TOKENS = (
    b"null", b"[", b"]", b"{", b"}", b'"', b"\\", b",", b":", b"\xff", b"\xc0\x80", b"\x00", b"1e999", b"-", b"NaN",
    b"\\ud800", b"\\u0000", b"\r\n", b"\n\n", b"true", b'"":',
)  # fmt: skip


def cases(paths: Sequence[str], models: Sequence[str], seed: int) -> Iterator[RawCase]:
    """Yield cases without an end."""
    chance = random.Random(seed)
    bodies = {path: body for path, body in BODIES.items() if path in paths}
    has_files = "/v1/files" in paths
    changes: list[Callable[[random.Random, dict[str, Any]], bytes]] = [_other_values, _other_bytes, _plain]
    while True:
        if has_files and chance.random() < 0.1:
            yield _upload(chance)
            continue
        path = chance.choice(list(bodies))
        body = {"model": chance.choice(models), **bodies[path]} if path != "/v1/batches" else bodies[path]
        if path in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
            body = {**body, "stream": chance.random() < 0.5}
            if not body["stream"]:
                body.pop("stream_options", None)
        change = chance.choices(changes, (6, 4, 1))[0]
        yield _framed(chance, path, change(chance, body), change.__name__.strip("_"))


def _plain(_: random.Random, body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


def _other_values(chance: random.Random, body: dict[str, Any]) -> bytes:
    """Replace, add and remove values of the JSON."""
    changed = copy.deepcopy(body)
    for _ in range(chance.randint(1, 3)):
        container: Any = changed
        for _ in range(chance.randint(0, 5)):
            inner = [value for value in _values(container) if isinstance(value, (dict, list)) and value]
            if not inner:
                break
            container = chance.choice(inner)
        value = copy.deepcopy(chance.choice(VALUES))
        if isinstance(container, dict):
            key = chance.choice([*container, "unknown"])
            if chance.random() < 0.2:
                container.pop(key, None)
            else:
                container[key] = value
        elif container:
            container[chance.randrange(len(container))] = value
    return json.dumps(changed).encode()


def _values(container: Any) -> list[Any]:
    return list(container.values() if isinstance(container, dict) else container)


def _other_bytes(chance: random.Random, body: dict[str, Any]) -> bytes:
    return _scrambled(chance, json.dumps(body).encode())


def _scrambled(chance: random.Random, given: bytes) -> bytes:
    """Flip, remove, repeat, insert and cut bytes."""
    data = bytearray(given)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data) + 1)
        kind = chance.randrange(5)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del data[at : at + chance.randint(1, 8)]
        elif kind == 2:
            data[at:at] = data[at : at + chance.randint(1, 40)] * chance.choice((1, 1, 2, 200))
        elif kind == 3:
            data[at:at] = chance.choice(TOKENS)
        else:
            del data[at:]
    return bytes(data)


def _upload(chance: random.Random) -> RawCase:
    form = _scrambled(chance, FORM) if chance.random() < 0.9 else FORM
    multipart = b"multipart/form-data"
    parameters = (b"; boundary=b", b'; boundary="b"', b"", b"; boundary=" + b"y" * 80)
    kind = b"application/json" if chance.random() < 0.1 else multipart + chance.choice(parameters)
    return _framed(chance, "/v1/files", form, "form", kind)


def _framed(
    chance: random.Random, path: str, body: bytes, name: str, kind: bytes = b"application/json"
) -> RawCase:
    """Return a request with the body, whose head or framing may be changed as well."""
    head = b"POST %b HTTP/1.1\r\nhost: a\r\nconnection: close\r\n" % path.encode()
    kind_line = b"content-type: %b\r\n" % kind
    length = b"content-length: %d\r\n" % len(body)
    framing = chance.choices(
        ("plain", "split", "chunked", "cut", "head", "odd chunks", "kind"), (10, 3, 3, 2, 2, 1, 1)
    )[0]
    name = f"{name}, {framing}"
    match framing:
        case "split":
            whole = head + kind_line + length + b"\r\n" + body
            at = sorted(chance.randrange(len(whole)) for _ in range(3))
            pieces = tuple(whole[start:end] for start, end in zip((0, *at), (*at, len(whole)), strict=True))
            return RawCase(name, pieces, path)
        case "chunked":
            chunks = _chunked(chance, body) + b"0\r\n\r\n"
            return RawCase(name, (head + kind_line + b"transfer-encoding: chunked\r\n\r\n" + chunks,), path)
        case "odd chunks":
            chunks = _scrambled(chance, _chunked(chance, body) + b"0\r\n\r\n")
            sent = head + kind_line + b"transfer-encoding: chunked\r\n\r\n" + chunks
            return RawCase(name, (sent,), path, has_end=False)
        case "cut":
            more = len(body) + chance.randint(1, 100)
            sent = head + kind_line + b"content-length: %d\r\n\r\n" % more + body
            return RawCase(name, (sent,), path, has_end=False)
        case "head":
            lines = _scrambled(chance, head + kind_line + length) + b"\r\n"
            return RawCase(name, (lines + body,), "", has_end=False)
        case "kind":
            other = chance.choice(
                (b"", b"content-type: text/plain\r\n", b"content-type: \xff\r\n", kind_line * 2)
            )
            return RawCase(name, (head + other + length + b"\r\n" + body,), path)
    return RawCase(name, (head + kind_line + length + b"\r\n" + body,), path)


def _chunked(chance: random.Random, body: bytes) -> bytes:
    size = chance.randint(1, 400)
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
