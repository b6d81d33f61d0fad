"""`param` of every refusal names the request field at fault, as the client spelt it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from processes import Server, free_port, running

pytestmark = pytest.mark.timeout(300)

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
LONG = "word " * 200_000
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
BAD_PARAMETERS = {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}
BAD_TOOL = {"type": "function", "function": {"name": "f", "strict": True, "parameters": BAD_PARAMETERS}}
BAD_TAG = {"type": "structural_tag", "format": {"type": "nope"}}
BAD_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": BAD_PARAMETERS}}
LARGE_ARGS = {str(index): "x" * 4000 for index in range(60)}


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    port = free_port()
    arguments = ["argosy_engine.api.serve", "builtin://tiny", "--served-model-name", "tiny", "--threads", "1"]
    arguments += ["--max-model-len", "2048", "--max-num-queued-reqs", "8", "--port", str(port)]
    log = tmp_path_factory.mktemp("serve") / "log"
    with running(arguments, log, port=port, env={"ARGOSY_API_KEY": "k"}) as server:
        yield from _client(server)


def _client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers={"authorization": "Bearer k"}, timeout=60) as client:
        yield client


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {**MESSAGES, **fields}


def said(message: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": [message]}


def completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"prompt": "a", **fields}


def call(arguments: Any) -> tuple[str, dict[str, Any]]:
    return said({"role": "assistant", "tool_calls": [{"function": arguments}]})


REFUSED: list[tuple[tuple[str, dict[str, Any]], str]] = [
    # missing, of a wrong type, out of bounds
    ((CHAT, {}), "messages"),
    ((CHAT, {"messages": []}), "messages"),
    (said({"content": "x"}), "messages[0].role"),
    (said({"role": "user", "content": 5}), "messages[0].content"),
    (said({"role": "user", "content": [{"type": "image_url"}]}), "messages[0].content[0]"),
    (said({"role": "assistant", "tool_calls": [{}]}), "messages[0].tool_calls[0]"),
    (chat(stream="yes"), "stream"),
    (chat(stream_options={"include_usage": 5}), "stream_options.include_usage"),
    (chat(temperature=-1), "temperature"),
    (chat(model=5), "model"),
    (chat(n=200), "n"),
    (chat(cache_salt=""), "cache_salt"),
    (chat(logit_bias={"a": 1}), "logit_bias"),
    (chat(logit_bias={"1": 1000}), "logit_bias"),
    (chat(logit_bias={"99999999": 1}), "logit_bias"),
    (chat(stop=[""]), "stop[0]"),
    (chat(stop_token_ids=[1 << 30]), "stop_token_ids"),
    (chat(repetition_detection={"max_pattern_size": 5}), "repetition_detection"),
    (chat(repetition_detection={"max_pattern_size": -5}), "repetition_detection.max_pattern_size"),
    ((COMPLETIONS, {}), "prompt"),
    (completion(prompt=[]), "prompt"),
    (completion(prompt=""), "prompt"),
    (completion(prompt=["a", [1]]), "prompt"),
    (completion(prompt=[1 << 20]), "prompt"),
    (completion(min_tokens=50), "min_tokens"),
    (completion(max_tokens=0), "max_tokens"),
    ((EMBEDDINGS, {}), "input"),
    ((EMBEDDINGS, {"input": ""}), "input"),
    ((EMBEDDINGS, {"input": ["a", ""]}), "input[1]"),
    ((EMBEDDINGS, {"input": [[5], []]}), "input[1]"),
    (chat(request_id="bad id"), "request_id"),
    (completion(request_id="a\n"), "request_id"),
    ((EMBEDDINGS, {"input": "a", "request_id": "ä"}), "request_id"),
    ((EMBEDDINGS, {"input": "a", "dimensions": 0}), "dimensions"),
    ((EMBEDDINGS, {"input": "a", "dimensions": 8}), "dimensions"),
    (("/tokenize", {}), "prompt"),
    (("/tokenize", {"prompt": "a", **MESSAGES}), "messages"),
    (("/tokenize", {"messages": [{}]}), "messages[0].role"),
    (("/detokenize", {}), "tokens"),
    (("/detokenize", {"tokens": [1 << 20]}), "tokens"),
    # too long
    (said({"role": "user", "content": LONG}), "messages"),
    (chat(max_tokens=100_000), "max_tokens"),
    (chat(max_completion_tokens=100_000), "max_completion_tokens"),
    (chat(max_completion_tokens=100_000, stream=True), "max_completion_tokens"),
    (completion(prompt=LONG), "prompt"),
    (completion(max_tokens=100_000), "max_tokens"),
    ((EMBEDDINGS, {"input": LONG}), "input"),
    (("/tokenize", {"prompt": LONG}), "prompt"),
    (("/tokenize", {"messages": [{"role": "user", "content": LONG}]}), "messages"),
    # too many
    (chat(n=9), "n"),
    (completion(prompt=["a"] * 9), "prompt"),
    (completion(prompt=["a"] * 5, n=2), "n"),
    (completion(prompt=["a"] * 1000, n=100), "n"),
    ((EMBEDDINGS, {"input": ["a"] * 9}), "input"),
    # the shape of the output
    (chat(response_format={"type": "x"}), "response_format.type"),
    (chat(response_format={"type": "json_schema"}), "response_format.json_schema"),
    (chat(response_format=BAD_TAG), "response_format"),
    (chat(response_format=BAD_SCHEMA), "response_format.json_schema.schema"),
    (chat(structured_outputs={"regex": "(", "disable_any_whitespace": True}), "structured_outputs.regex"),
    (chat(structured_outputs=5), "structured_outputs"),
    (chat(structured_outputs={}), "structured_outputs"),
    (chat(structured_outputs={"foo": 1}), "structured_outputs.foo"),
    (chat(structured_outputs={"regex": "("}), "structured_outputs.regex"),
    (chat(structured_outputs={"regex": "("}, stream=True), "structured_outputs.regex"),
    (chat(structured_outputs={"grammar": "root ::= nothing"}), "structured_outputs.grammar"),
    (chat(structured_outputs={"structural_tag": BAD_TAG}), "structured_outputs.structural_tag"),
    (
        chat(structured_outputs={"regex": "a"}, response_format={"type": "json_object"}),
        "structured_outputs",
    ),
    (chat(guided_json={}), "guided_json"),
    (chat(tool_choice="required"), "tool_choice"),
    (chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}}), "tool_choice"),
    (chat(tools=[{}]), "tools[0]"),
    (chat(tools=[BAD_TOOL], tool_choice="required"), "tools[0].function.parameters"),
    # what this engine does not do
    (chat(vllm_xargs={"a": 1}), "vllm_xargs"),
    (chat(vllm_xargs=LARGE_ARGS), "vllm_xargs"),
    (chat(chat_template="x"), "chat_template"),
    (chat(continue_final_message=True), "continue_final_message"),
    (chat(priority=1), "priority"),
    (chat(resume={"created": 1, "choices": [{}]}), "resume"),
    (chat(kv_transfer_params={}), "kv_transfer_params"),
    (completion(suffix="b"), "suffix"),
    (completion(best_of=3), "best_of"),
    # log probabilities and beams
    (chat(top_logprobs=3), "top_logprobs"),
    (chat(logprobs=True, top_logprobs=30), "top_logprobs"),
    (completion(prompt_logprobs=1, stream=True), "prompt_logprobs"),
    (completion(echo=True, logprobs=30), "logprobs"),
    (chat(use_beam_search=True, n=40), "n"),
    (chat(use_beam_search=True, top_p=0.5), "top_p"),
    (chat(use_beam_search=True, max_completion_tokens=100_000), "max_completion_tokens"),
    (completion(use_beam_search=True, best_of=100), "best_of"),
    (completion(use_beam_search=True, n=3, best_of=2), "best_of"),
    (completion(use_beam_search=True, prompt=["a"] * 500, best_of=10), "best_of"),
    # administration
    (("/sleep?level=7", {}), "level"),
    (("/sleep?mode=x", {}), "mode"),
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, EMBEDDINGS, "/tokenize", "/detokenize", "/sleep"])
def test_param_is_the_field_at_fault(path: str, http: httpx.Client) -> None:
    cases = [(request, param) for request, param in REFUSED if request[0].partition("?")[0] == path]
    assert cases
    otherwise = {}
    for (target, body), param in cases:
        answer = http.post(target, json=body)
        if (answer.status_code, answer.json().get("error", {}).get("param")) != (400, param):
            otherwise[target, json.dumps(body)[:80], param] = answer.text[:500]
    assert otherwise == {}


def test_a_message_uses_the_client_s_name_of_the_field(http: httpx.Client) -> None:
    path, body = chat(vllm_xargs=LARGE_ARGS)
    assert http.post(path, json=body).json()["error"]["message"].startswith("vllm_xargs takes ")


@pytest.mark.parametrize("body", ["{", "[]", '"a"', '{"prompt": "\\ud800"}'])
def test_a_body_that_is_no_request_has_no_field_at_fault(body: str, http: httpx.Client) -> None:
    answer = http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] is None
