"""Errors on the wire."""

from __future__ import annotations

import json

import pytest

from argosy_protocol.errors import (
    MAX_REASON_BYTES,
    NO_REASON,
    BadRequest,
    ErrorReason,
    TooManyRequests,
    Unavailable,
    no_route,
)


def test_retry_hints_are_what_sdks_read() -> None:
    assert Unavailable("x", retry_after_s=0.25).headers() == {"retry-after": "1", "retry-after-ms": "250"}


def test_a_path_with_v1_twice_is_explained() -> None:
    assert no_route("POST", "/v1/nothing").message == "no route POST /v1/nothing"
    assert no_route("POST", "/v1/v1/messages").message.endswith("the client's base URL has /v1 twice")


OPENAI = {
    "message": "m",
    "type": "invalid_request_error",
    "code": "unsupported",
    "param": "messages[0].content",
}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"error": OPENAI}, ("invalid_request_error", "unsupported", "messages[0].content")),
        ({"object": "error", **OPENAI}, ("invalid_request_error", "unsupported", "messages[0].content")),
        ({"error": {"type": "BadRequestError", "code": 400, "param": None}}, ("BadRequestError", "", "")),
        (
            {
                "type": "error",
                "error": {"type": "overloaded_error", "details": {"error_code": "resource_busy"}},
            },
            ("overloaded_error", "resource_busy", ""),
        ),
        ({"error": "text"}, NO_REASON),
        ({"error": {"type": ["list"], "code": {}, "param": 1, "details": "text"}}, NO_REASON),
        (["list"], NO_REASON),
    ],
)
def test_the_reason_of_an_error_is_read_from_its_body(body: object, reason: tuple[str, str, str]) -> None:
    assert ErrorReason.read(json.dumps(body).encode()) == reason


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>502</html>",
        b'{"error": {"type": "\xff"}}',
        b'{"error":{"details":' + b"[" * 8000 + b"]" * 8000 + b"}}",
        json.dumps({"error": {**OPENAI, "message": "m" * MAX_REASON_BYTES}}).encode(),
    ],
    ids=["empty", "page", "no-text", "deep", "large"],
)
def test_nothing_is_read_from_other_bodies(body: bytes) -> None:
    assert ErrorReason.read(body) == NO_REASON


@pytest.mark.parametrize(
    "value",
    [
        "two words",
        "temperature\nstatus=200",
        "temperature\n",
        "temperature\r",
        "<script>alert(1)</script>",
        "\x1b[31mred",
        "param=x",
        'a"b',
        "größe",
        "ｐａｒａｍ",
        "٣",
        "sk-proj-abcdef",
        "hf_aB3dE5fG7hI9jK1lM3nO5pQ7rS9tU1vW3x",
        "9f86d081884c7d659a2feaa0c55ad015",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc",
        "messages[0][",
        "a..b",
        "a" * 33,
        "a." * 32 + "a",
        "",
    ],
)
def test_a_reason_has_nothing_that_could_break_a_log_or_betray_a_secret(value: str) -> None:
    assert ErrorReason.of(value, value, value) == NO_REASON
    assert (
        ErrorReason.read(json.dumps({"error": {"type": value, "code": value, "param": value}}).encode())
        == NO_REASON
    )
    assert BadRequest("m", param=value, code=value).reason() == ("invalid_request_error", "", "")


def test_an_error_of_ones_own_tells_its_reason() -> None:
    assert TooManyRequests("m", code="rate_limit_exceeded").reason() == (
        "rate_limit_error",
        "rate_limit_exceeded",
        "",
    )
    given = BadRequest("m", param="tools[12].function.parameters").reason()
    assert given == ("invalid_request_error", "", "tools[12].function.parameters")
