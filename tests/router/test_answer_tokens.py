"""Finding the usage in the last bytes of a response."""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable

import pytest

from argosy_router.proxy.answer_tokens import event_usage, find_usage, response_end_usage, without_progress

USAGE = b'"usage": {"prompt_tokens": 12, "total_tokens": 20, "prompt_tokens_details": {"cached_tokens": 8}}'


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        (b"{" + USAGE + b"}", (12, 8, 0)),
        (b'{"usage":{"prompt_tokens":3}}', (3, 0, 0)),
        (
            b'{"usage":{"input_tokens":12,"input_tokens_details":{"cached_tokens":5},"output_tokens":3,'
            b'"total_tokens":15}}',
            (12, 5, 3),
        ),
        (b'{"usage":{"input_tokens":7,"cache_read_input_tokens":5,"output_tokens":3}}', (12, 5, 3)),
        (b'{"usage":null}', None),
        (b'{"choices":[]}', None),
        (b'data: {"choices":[{"text":"\\"usage\\": {\\"prompt_tokens\\": 99}"}]}', None),
        (b"data: {" + USAGE + b"}\n\ndata: [DONE]\n\n", (12, 8, 0)),
        (b"", None),
    ],
)
def test_usage_is_found_at_the_end(tail: bytes, expected: tuple[int, int, int] | None) -> None:
    usage = find_usage(tail)
    assert (usage and (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)) == expected


FORGED = b'"tools":[{"parameters":{"usage":{"input_tokens":1,"output_tokens":2,"total_tokens":3}}}]'
CREATED = b'event: response.created\ndata: {"response":{' + FORGED + b',"usage":null,"user":null}}\n\n'
REAL = b'"usage":{"input_tokens":12,"output_tokens":3,"total_tokens":15}'


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (FORGED + b"," + REAL, (12, 0, 3)),
        (FORGED + b"," + REAL + b',"user":"usage"', (12, 0, 3)),
        (FORGED + b',"usage":null', None),
        (FORGED + b',"usage": null,"user":"\\"input_tokens\\":9"', None),
    ],
)
@pytest.mark.parametrize("name", [b"completed", b"incomplete", b"failed"])
def test_a_responses_usage_is_that_of_its_last_event(
    name: bytes, fields: bytes, expected: tuple[int, int, int] | None
) -> None:
    end = b'event: response.%b\ndata: {"response":{%b}}\n\n' % (name, fields)
    for events in (end, CREATED + end, end.replace(b"\n", b"\r\n")):
        usage = response_end_usage(events)
        assert (usage and (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)) == expected


def test_what_a_response_repeats_of_its_request_is_no_usage() -> None:
    assert response_end_usage(CREATED) is None
    assert response_end_usage(CREATED.replace(b',"usage":null', b"")) is None
    assert response_end_usage(b"") is None


def of_length(number: int, kind: str) -> bytes:
    """An event with the word so many times."""
    repeated = {
        "words of a schema": b'"usage",' * number,
        "objects": b'"usage":{"a":1},' * number,
        "tokens of log probabilities": b'{"token":"usage","logprob":-1.5},' * number,
        "ends of other events": b'"usage"\r\n\r\n' * number,
    }[kind]
    return b'data: {"choices":[{"index":0}],"x":[' + repeated + b'0],"usage":{"completion_tokens":7}}\n\n'


@pytest.mark.parametrize(
    "kind", ["words of a schema", "objects", "tokens of log probabilities", "ends of other events"]
)
@pytest.mark.parametrize("scan", [lambda events: list(event_usage(events)), without_progress])
def test_the_time_of_a_scan_grows_with_the_length_of_an_event(
    kind: str, scan: Callable[[bytes], object]
) -> None:
    """Who asks for a stream may have an event repeat the word, in the schema of a tool, as often as a body can. CPU
    times are compared: an event of 16 times the length took 256 times as long."""

    def cpu_s(number: int) -> float:
        events = of_length(number, kind)
        return min(timeit.repeat(lambda: scan(events), timer=time.process_time, number=1, repeat=3))

    assert cpu_s(80_000) < 64 * max(cpu_s(5_000), 0.0005)


def test_of_what_an_event_repeats_its_last_usage_counts() -> None:
    assert [found[:2] for found in event_usage(of_length(3, "objects") * 2)] == [(0, 7), (0, 7)]
    forged = b'data: {"tools":[{"usage":{"completion_tokens":9}}],"usage":{"completion_tokens":7}}\r\n\r\n'
    assert [found[:2] for found in event_usage(forged + b"data: [DONE]\n\n" + forged)] == [(0, 7), (0, 7)]
    assert list(event_usage(b'data: {"tools":["usage"],"usage":null}\n\n')) == []
