"""`param` in the router's own refusals names the field at fault."""

from __future__ import annotations

from typing import Any

from case_tables import wrong_answers

from .fake_engine import MODEL, FakeEngine
from .harness import rig

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
MESSAGES = [{"role": "user", "content": "hi"}]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"model": MODEL}, "messages"),
    (CHAT, {"model": MODEL, "messages": [{"content": "x"}]}, "messages[0].role"),
    (CHAT, {"model": MODEL, "messages": MESSAGES, "logit_bias": {"1": 1000}}, "logit_bias"),
    (CHAT, {"model": MODEL, "messages": MESSAGES, "bootstrap_host": "x"}, "bootstrap_host"),
    (CHAT, {"model": MODEL, "messages": MESSAGES, "vllm_xargs": {"lora_path": "x"}}, "vllm_xargs"),
    (CHAT, {"model": MODEL, "messages": MESSAGES, "resume": {"created": 1, "choices": [{}]}}, "resume"),
    (CHAT, {"messages": MESSAGES}, "model"),
    (COMPLETIONS, {"model": MODEL}, "prompt"),
    (COMPLETIONS, {"model": MODEL, "prompt": ["a", [1]]}, "prompt"),
    (COMPLETIONS, {"model": MODEL, "prompt": ["a"] * 2000}, "prompt"),
    (EMBEDDINGS, {"model": MODEL, "input": ["a"] * 2000}, "input"),
    (EMBEDDINGS, {"model": MODEL}, "input"),
    ("/tokenize", {"prompt": "a"}, "model"),
    ("/tokenize", {"model": 5}, "model"),
    ("/explain", {"model": MODEL, "messages": [{}]}, "messages[0].role"),
    ("/explain", {"model": MODEL, "prompt": []}, "prompt"),
    ("/explain", {"messages": MESSAGES}, "model"),
]


async def test_param_is_the_field_at_fault() -> None:
    told = []
    async with rig([FakeEngine()], admin_port=0) as r:
        for path, body, param in REFUSED:
            base = r.router.admin_url if path == "/explain" else ""
            answer = await r.http.post(base + path, json=body)
            error = answer.json().get("error", {})
            told.append(((path, body), (400, param), (answer.status_code, error.get("param"))))
        assert not r.engines[0].requests
    assert wrong_answers(told) == {}


async def test_fields_between_engines_and_routers_have_one_message() -> None:
    told = []
    fields: list[tuple[str, Any]] = [
        ("resume", {"created": 1, "choices": [{}]}),
        ("resume", {"choices": [{}]}),
        ("resume", {"created": 1, "choices": [{"token_ids": "x"}]}),
        ("resume", 5),
        ("data_parallel_rank", 0),
        ("data_parallel_rank", "x"),
        ("kv_transfer_params", {}),
    ]
    async with rig([FakeEngine()]) as r:
        for field, value in fields:
            answer = await r.http.post(CHAT, json={"model": MODEL, "messages": MESSAGES, field: value})
            error = answer.json().get("error", {})
            wanted = (400, field, f"{field} is internal to engines and refused from clients")
            came = (answer.status_code, error.get("param"), error.get("message"))
            told.append(((field, value), wanted, came))
    assert wrong_answers(told) == {}
