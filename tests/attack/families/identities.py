"""Requests that pretend to be another request or to come from the router, and names of models that do not exist."""

from __future__ import annotations

from typing import Any

from ..fleet import ENGINE_KEY, MODEL, PARTIAL_ALIAS, UNKNOWN_ADAPTER
from ..target import CHAT, COMPLETIONS, Attack, Target

FOREIGN_FIELDS: tuple[dict[str, Any], ...] = (
    {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 1}},
    {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 7},
    {"lora_path": "/etc/passwd"},
    {"data_parallel_rank": 7},
    {"resume": {"created": 1, "choices": [{"token_ids": [5, 6]}]}},
    {"cache_salt": "s" * 1024},
    {"priority": -(1 << 31)},
    {"prompt_embeds": "AAAA"},
    {"chat_template": "{{ 1 / 0 }}"},
    {"chat_template_kwargs": {"messages": [], "tools": 7, "raise_exception": 1}},
)
FOREIGN_HEADERS: tuple[dict[str, str], ...] = (
    {"x-data-parallel-rank": "7"},
    {"x-argosy-internal": "1", "x-argosy-replica": "r0"},
    {"x-forwarded-for": "10.0.0.1, " * 500},
    {"x-request-id": "\x7f" + "a" * 127},
    {"traceparent": "00-" + "0" * 32 + "-" + "0" * 16 + "-01"},
    {"content-encoding": "gzip"},
    {"expect": "100-continue"},
    {"upgrade": "websocket", "connection": "upgrade"},
)
NAMES = (
    f"{MODEL}:{UNKNOWN_ADAPTER}",
    f"{MODEL}:nobody",
    PARTIAL_ALIAS,
    f"{PARTIAL_ALIAS}:{UNKNOWN_ADAPTER}",
    UNKNOWN_ADAPTER,
    "default/tiny",
    "default/nobody",
    "../../etc/passwd",
    "a" * 512,
    "a" * 513,
    "\u0000",
    "",
    "tiny\r\nx-a: b",
)


def _chat(**fields: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "max_tokens": 8,
        "messages": [{"role": "user", "content": "hi"}],
        **fields,
    }


async def equal_ids(target: Target) -> None:
    """Send sixteen requests at a time with the same id, in the header and in the body."""

    async def once(number: int) -> None:
        name = f"same-{number // 16 % 3}"
        fields = {"request_id": name} if number % 2 else {}
        headers = {"x-request-id": name}
        await target.ask(CHAT, _chat(stream=number % 3 == 0, **fields), headers=headers)

    await target.volley(once, in_flight=16, most=400)


async def equal_ids_at_engine(target: Target) -> None:
    engine = target.fleet.engines[0]

    async def once(number: int) -> None:
        headers = {"x-request-id": "same"}
        await target.ask(CHAT, _chat(request_id="same"), headers=headers, key=ENGINE_KEY, port=engine.port)

    await target.volley(once, in_flight=16, most=200)


async def foreign_fields(target: Target) -> None:
    async def once(number: int) -> None:
        fields = FOREIGN_FIELDS[number % len(FOREIGN_FIELDS)]
        await target.ask(CHAT, _chat(**fields), headers=FOREIGN_HEADERS[number % len(FOREIGN_HEADERS)])

    await target.volley(once)


async def names(target: Target) -> None:
    async def once(number: int) -> None:
        await target.ask(CHAT, _chat(model=NAMES[number % len(NAMES)]))

    await target.volley(once, in_flight=12, most=400)


async def content_parts(target: Target) -> None:
    """Send images and other content parts that the model does not support."""
    pixel = "data:image/png;base64," + "iVBORw0KGgo" * 20_000
    parts: tuple[Any, ...] = (
        [{"type": "image_url", "image_url": {"url": pixel}}],
        [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}],
        [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}],
        [{"type": "image_url"}],
        [{"type": "input_audio", "input_audio": {"data": "AAAA" * 50_000, "format": "wav"}}],
        [{"type": "video_url", "video_url": {"url": pixel}}],
        [{"type": "nonsense"}] * 1024,
        [{}],
        [{"type": "text", "text": 7}],
        [{"type": "text", "text": "a"}] * 1024,
    )  # fmt: skip

    async def once(number: int) -> None:
        message = {"role": "user", "content": parts[number % len(parts)]}
        await target.ask(CHAT, _chat(messages=[message]))

    await target.volley(once, in_flight=6)


async def other_routes(target: Target) -> None:
    """Request routes that need no model, are for administrators only, or do not exist."""
    paths: tuple[tuple[str, object], ...] = (
        ("/v1/models", None),
        ("/sleep", {}),
        ("/reset_prefix_cache", {}),
        ("/internal/telemetry", None),
        ("/debug", None),
        ("/v1/embeddings", {"model": MODEL, "input": ["a"] * 2000}),
        ("/v1/embeddings", {"model": MODEL, "input": [[1 << 30]]}),
        ("/tokenize", {"model": MODEL, "prompt": "a" * 1_000_000}),
        ("/detokenize", {"model": MODEL, "tokens": [1 << 30]}),
        ("/detokenize", {"model": MODEL, "tokens": [5] * 500_000}),
        (COMPLETIONS + "/../../metrics", None),
        ("/" + "%2e%2e/" * 100, None),
    )

    async def once(number: int) -> None:
        path, body = paths[number % len(paths)]
        await target.ask(path, body)

    await target.volley(once)


ATTACKS = (
    Attack("equal request ids", equal_ids),
    Attack("equal request ids at an engine", equal_ids_at_engine),
    Attack("foreign fields and headers", foreign_fields),
    Attack("models that are not there", names),
    Attack("content parts", content_parts),
    Attack("other routes", other_routes),
)
