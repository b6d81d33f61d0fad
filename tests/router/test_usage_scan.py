"""Finding the usage in the last bytes of a response."""

from __future__ import annotations

import pytest

from argosy_router.proxy.upstream.usage_scan import find_usage

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
