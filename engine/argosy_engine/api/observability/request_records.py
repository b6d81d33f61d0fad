"""RequestRecords: the ASGI layer that makes a record of each request, and logs it at its end (`--access-log`).

Owns: which requests are recorded, and the form of a line. Must not know: routes, what requests ask for.
Invariant: a line has no prompt, no output, no key, and no text of a client that could break it.
"""

from __future__ import annotations

import json
import logging
import time
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from argosy_engine.frontend.observer import Observer, RequestRecord, RequestTimings, current_record
from argosy_protocol import headers
from argosy_protocol.errors import MAX_REASON_BYTES, ErrorReason

logger = logging.getLogger("argosy.access")

MAX_TEXT: Final = 128
"""Length of a client's text in a line."""
_TRACE_HEADERS: Final = frozenset((b"traceparent", b"tracestate"))
_REQUEST_ID: Final = headers.REQUEST_ID.lower().encode()
_PROBES: Final = frozenset(("/health", "/ping", "/ready", "/version", "/metrics", "/load"))
"""Asked for every few seconds; not recorded unless they fail."""
_INTERNAL: Final = "/internal/"


class RequestRecords:
    """
    Args:
        is_logged: whether a line is logged; records are for spans as well.
    """

    def __init__(self, app: ASGIApp, *, is_logged: bool) -> None:
        self._app = app
        self._is_logged = is_logged

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = {
            name.decode(): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in _TRACE_HEADERS
        }
        record = RequestRecord(scope["method"], scope["path"], context)

        error_body = bytearray()

        async def send_recorded(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                if not record.request_id:
                    record.request_id = _request_id_of(message)
            elif record.first_byte is None and message.get("body"):
                record.first_byte = time.monotonic()
            if record.status >= 400 and len(error_body) <= MAX_REASON_BYTES:
                error_body.extend(message.get("body", b"")[: MAX_REASON_BYTES + 1])
            await send(message)

        token = current_record.set(record)
        try:
            await self._app(scope, receive, send_recorded)
        finally:
            current_record.reset(token)
            if error_body:
                record.error = ErrorReason.read(bytes(error_body))
            if self._is_logged and _is_shown(record):
                logger.info("%s", line_of(record, time.monotonic()))


class RecordedOutputs(Observer):
    """Fills in what the engine computes for a request."""

    def on_tokens(self, timings: RequestTimings, count: int, now: float, is_first: bool) -> None:
        record = timings.record
        if record is not None and is_first and not timings.choices.is_recorded:
            timings.choices.is_recorded = True
            record.add_prompt(timings.num_prompt, timings.num_cached, timings.queued_s)

    def on_finished(self, timings: RequestTimings, num_prompt: int, num_output: int, reason: str) -> None:
        if timings.record is not None:
            timings.record.add_choice(num_output, reason)


def line_of(record: RequestRecord, now: float) -> str:
    """Return a request's line, `name=value` with `-` where a field does not apply; `now` is in monotonic seconds."""
    has_output = record.prompt_tokens is not None
    ttft_s = None if record.first_byte is None else record.first_byte - record.arrived
    fields = {
        "request": _word(record.request_id),
        "method": _word(record.method),
        "path": _word(record.path),
        "status": str(record.status or "-"),
        "model": _word(record.model),
        "tenant": _word(record.tenant),
        "prompt_tokens": str(record.prompt_tokens) if has_output else "-",
        "cached_tokens": str(record.cached_tokens) if has_output else "-",
        "completion_tokens": str(record.completion_tokens) if has_output else "-",
        "finish": ",".join(record.finish_reasons) or "-",
        "queue_ms": _milliseconds(record.queued_s if has_output else None),
        "ttft_ms": _milliseconds(ttft_s),
        "duration_ms": _milliseconds(now - record.arrived),
        "error_type": record.error.type or "-",
        "error_code": record.error.code or "-",
        "error_param": record.error.param or "-",
    }
    return " ".join(f"{name}={value}" for name, value in fields.items())


def _is_shown(record: RequestRecord) -> bool:
    if record.is_relayed or record.path.startswith(_INTERNAL):
        return False
    return record.path not in _PROBES or record.status >= 400


def _request_id_of(start: Message) -> str:
    for name, value in start.get("headers", ()):
        if name.lower() == _REQUEST_ID:
            return bytes(value).decode("latin-1")
    return ""


def _word(text: str) -> str:
    """Return a text so that it is one value of one line."""
    text = text[:MAX_TEXT]
    is_plain = text.isascii() and text.isprintable() and not any(character in text for character in ' ="\\')
    return (text or "-") if is_plain else json.dumps(text)


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000.0:.1f}"
