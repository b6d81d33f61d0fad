"""/server_info, /tokenizer_info, and the OpenAPI document, which agrees with what the server decodes."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from jsonschema import Draft202012Validator

from argosy_engine.api.app import build_app, documented_routes
from argosy_engine.api.served_engine import Engine
from argosy_engine.api.server_args import ServerArgs
from argosy_engine.checkpoint.model_folder import resolve_model
from argosy_engine.frontend.chat_template import ChatTemplate
from argosy_protocol.api_descriptions import openapi_document
from argosy_protocol.errors import BadRequest
from argosy_protocol.openai import decode_request, unsupported
from documented_routes import documented_operations, operations

TINY = resolve_model("builtin://tiny")
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}


class Config(msgspec.Struct):
    model_path: str = str(TINY)
    max_model_len: int = 64

    @property
    def tokenizer_path(self) -> str:
        return self.model_path


def http_of(**flags: bool) -> httpx.AsyncClient:
    engine = Engine(("tiny",), options=ServerArgs(**flags))
    template = ChatTemplate("{{ messages }}", {})
    engine.llm = SimpleNamespace(config=Config(), renderer=SimpleNamespace(template=template))  # type: ignore[assignment]
    transport = httpx.ASGITransport(app=build_app(engine))
    return httpx.AsyncClient(transport=transport, base_url="http://engine")


async def test_server_info_has_the_configuration_but_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "hidden")
    monkeypatch.setenv("VLLM_HOST_IP", "10.0.0.1")
    async with http_of() as http:
        info = await http.get("/server_info", params={"config_format": "json"})
        text = await http.get("/server_info")
        wrong = await http.get("/server_info", params={"config_format": "xml"})
    assert info.json()["vllm_config"] == {"model_path": str(TINY), "max_model_len": 64}
    assert "max_model_len=64" in text.json()["vllm_config"]
    assert info.json()["vllm_env"]["VLLM_HOST_IP"] == "10.0.0.1"
    assert "hidden" not in info.text
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "config_format")


async def test_tokenizer_info_needs_its_flag() -> None:
    async with http_of() as http:
        closed = await http.get("/tokenizer_info")
    assert closed.status_code == 404
    assert "--enable-tokenizer-info-endpoint" in closed.json()["error"]["message"]
    async with http_of(enable_tokenizer_info_endpoint=True) as http:
        info = (await http.get("/tokenizer_info")).json()
    given = json.loads((TINY / "tokenizer_config.json").read_text())
    assert info == given | {"chat_template": "{{ messages }}"}


async def test_the_document_has_every_route() -> None:
    async with http_of() as http:
        document = (await http.get("/openapi.json")).json()
        page = await http.get("/docs")
    assert operations(document) == documented_operations("engine")
    assert "openapi.json" in page.text
    async with http_of(disable_fastapi_docs=True) as http:
        assert (await http.get("/openapi.json")).status_code == 404
        assert (await http.get("/docs")).status_code == 404


def document_of_engine() -> dict[str, Any]:
    return openapi_document("engine", documented_routes(build_app(Engine(("tiny",)))))


def validator(document: dict[str, Any], name: str) -> Draft202012Validator:
    return Draft202012Validator({**document, "$ref": f"#/components/schemas/{name}"})


def test_the_messages_api_is_described() -> None:
    document = document_of_engine()
    bodies, error = {}, {"type": "error", "error": {"type": "api_error", "message": "x"}}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        operation = document["paths"][path]["post"]
        bodies[path] = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        refused = operation["responses"]["default"]["content"]["application/json"]["schema"]["$ref"]
        assert validator(document, refused.rpartition("/")[2]).is_valid(error)
    whole = validator(document, bodies["/v1/messages"].rpartition("/")[2])
    assert whole.is_valid({"model": "m", "max_tokens": 1, **CHAT})
    assert not whole.is_valid({"model": "m", **CHAT})
    assert not whole.is_valid({"model": "m", "max_tokens": 1, **CHAT, "container": "c"})
    assert not whole.is_valid({"model": "m", "max_tokens": 1, **CHAT, "temperature": 1.5})
    assert validator(document, bodies["/v1/messages/count_tokens"].rpartition("/")[2]).is_valid(
        {"model": "m", **CHAT, "container": {}}
    )
    streamed = document["paths"]["/v1/messages"]["post"]["responses"]["200"]["content"]
    assert streamed.keys() == {"application/json", "text/event-stream"}


@pytest.mark.parametrize(
    ("fields", "is_valid"),
    [
        ({}, True),
        ({"input": [{"role": "user", "content": "x"}]}, True),
        ({"input": [{"role": 5}]}, False),
        ({"prompt": None, "conversation": False}, True),
        ({"prompt": {"id": "p"}}, False),
        ({"max_output_tokens": 0}, False),
        ({"include": ["everything"]}, False),
    ],
)
def test_the_document_describes_responses(fields: dict[str, Any], is_valid: bool) -> None:
    document = document_of_engine()
    schema = {**document, "$ref": "#/components/schemas/ResponsesRequest"}
    assert Draft202012Validator(schema).is_valid({"model": "m", "input": "x", **fields}) is is_valid


@pytest.fixture(scope="module")
def chat_schema() -> Draft202012Validator:
    document = document_of_engine()
    schema = {**document, "$ref": "#/components/schemas/ChatCompletionRequest"}
    return Draft202012Validator(schema)


@pytest.mark.parametrize(
    ("fields", "is_valid"),
    [
        ({}, True),
        ({"temperature": 2, "stop": ["a"], "n": None, "unknown": 1}, True),
        ({"temperature": 2.5}, False),
        ({"n": 129}, False),
        ({"n": "one"}, False),
        ({"stop": ["a"] * 5}, False),
        ({"truncate_prompt_tokens": -1, "truncation_side": "right"}, True),
        ({"truncate_prompt_tokens": -2}, False),
        ({"truncation_side": "middle"}, False),
        ({"chat_template": 5}, False),
        ({"functions": []}, True),
        ({"functions": [{"name": "f"}]}, False),
        ({"modalities": ["text"]}, True),
        ({"modalities": ["audio"]}, False),
        ({"thinking_token_budget": 5}, True),
        ({"thinking_token_budget": -2}, False),
        ({"kv_transfer_params": {}}, False),
        ({"messages": "x"}, False),
    ],
)
def test_the_document_and_the_server_accept_the_same_bodies(
    chat_schema: Draft202012Validator, fields: dict[str, Any], is_valid: bool
) -> None:
    body = CHAT | fields
    assert chat_schema.is_valid(body) == is_valid
    try:
        is_taken = unsupported(decode_request("chat/completions", json.dumps(body).encode())) is None
    except BadRequest:
        is_taken = False
    assert is_taken == is_valid
