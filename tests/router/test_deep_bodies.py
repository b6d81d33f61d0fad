"""Deeply nested JSON is refused by the router and reaches no replica."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

from argosy_protocol.json_limits import MAX_DEPTH
from case_tables import wrong_answers

from .fake_engine import MODEL, FakeEngine
from .harness import rig

USER = {"role": "user", "content": "Hi"}
SLOT = '"SLOT"'


FIELDS: list[tuple[str, str, dict[str, Any]]] = [
    ("/v1/chat/completions", "tools", {"messages": [USER], "tools": [{"function": "SLOT"}]}),
    ("/v1/chat/completions", "documents", {"messages": [USER], "documents": [{"a": "SLOT"}]}),
    ("/v1/chat/completions", "unknown", {"messages": [USER], "unknown": "SLOT"}),
    ("/v1/completions", "prompt", {"prompt": "SLOT"}),
    ("/v1/embeddings", "input", {"input": "SLOT"}),
    ("/tokenize", "prompt", {"prompt": "SLOT"}),
    ("/detokenize", "tokens", {"tokens": "SLOT"}),
]


async def test_deep_bodies_are_refused_and_the_field_named() -> None:
    told = []
    kinds = (("[", "]"), ('{"a":', "}"))
    async with rig([FakeEngine()]) as r:
        for (path, field, body), levels, (opening, closing) in product(
            FIELDS, (MAX_DEPTH, 900, 100_000), kinds
        ):
            text = json.dumps({"model": MODEL, **body}).replace(
                SLOT, opening * levels + "1" + closing * levels
            )
            answer = await r.http.post(path, content=text, headers={"content-type": "application/json"})
            error = answer.json().get("error", {})
            is_told = "nested too deeply" in error.get("message", "")
            asked = (path, body, levels, opening)
            told.append((asked, (400, field, True), (answer.status_code, error.get("param"), is_told)))
        assert not r.engines[0].requests
    assert wrong_answers(told) == {}
