"""Deeply nested JSON is refused by the router and reaches no replica."""

from __future__ import annotations

import json
from typing import Any

import pytest

from argosy_protocol.json_limits import MAX_DEPTH

from .fake_engine import MODEL, FakeEngine
from .harness import rig

USER = {"role": "user", "content": "Hi"}
SLOT = '"SLOT"'


@pytest.mark.parametrize("levels", [MAX_DEPTH, 900, 100_000])
@pytest.mark.parametrize(
    ("path", "field", "body"),
    [
        ("/v1/chat/completions", "tools", {"messages": [USER], "tools": [{"function": "SLOT"}]}),
        ("/v1/chat/completions", "documents", {"messages": [USER], "documents": [{"a": "SLOT"}]}),
        ("/v1/chat/completions", "unknown", {"messages": [USER], "unknown": "SLOT"}),
        ("/v1/completions", "prompt", {"prompt": "SLOT"}),
        ("/v1/embeddings", "input", {"input": "SLOT"}),
        ("/tokenize", "prompt", {"prompt": "SLOT"}),
        ("/detokenize", "tokens", {"tokens": "SLOT"}),
    ],
)
async def test_deep_bodies_are_refused_and_the_field_named(
    path: str, field: str, body: dict[str, Any], levels: int
) -> None:
    async with rig([FakeEngine()]) as r:
        for opening, closing in ("[", "]"), ('{"a":', "}"):
            text = json.dumps({"model": MODEL, **body}).replace(
                SLOT, opening * levels + "1" + closing * levels
            )
            answer = await r.http.post(path, content=text, headers={"content-type": "application/json"})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, field)
            assert "nested too deeply" in error["message"]
        assert not r.engines[0].requests
