"""/openapi.json and /docs of the main port: every route, and nothing but routes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from argosy_router import server
from documented_routes import documented_operations, operations

from .batch_rig import stored
from .fake_engine import FakeEngine
from .harness import MODEL, Rig, rig

METHODS = ("GET", "POST", "DELETE", "PUT", "PATCH")
KEPT = ("/v1/files", "/v1/batches", "/v1/responses/")
COUNT = "/v1/responses/input_tokens"


async def document_of(r: Rig) -> dict[str, Any]:
    response = await r.http.get("/openapi.json")
    assert (response.status_code, response.headers["content-type"]) == (200, "application/json")
    document: dict[str, Any] = response.json()
    return document


async def test_the_document_is_made_before_there_are_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first request for it held up all others for a tenth of a second."""

    def too_late(*_: object) -> None:
        raise AssertionError

    async with rig([FakeEngine()]) as r:
        monkeypatch.setattr(server, "openapi_document", too_late)
        assert (await r.http.get("/openapi.json")).status_code == 200


async def test_the_document_has_every_route_of_the_reference(tmp_path: Path) -> None:
    expected = documented_operations("router")
    async with stored(tmp_path, [FakeEngine()]) as r:
        assert operations(await document_of(r)) == expected
    async with rig([FakeEngine()]) as r:
        has = operations(await document_of(r))
    assert has == {(path, method) for path, method in expected if path == COUNT or not path.startswith(KEPT)}


async def test_every_operation_of_the_document_exists_and_no_other_of_its_paths(tmp_path: Path) -> None:
    async with stored(tmp_path, [FakeEngine()]) as r:
        document = await document_of(r)
        for path in document["paths"]:
            described = document["paths"][path] | (
                document["paths"]["/v1/responses/{name}"] if path == COUNT else {}
            )
            for method in METHODS:
                response = await r.http.request(method, path.replace("{name}", "x"), json={})
                is_known = response.status_code != 405 and "no route" not in response.text
                assert is_known == (method.lower() in described), (method, path, response.text)


async def test_answers_are_as_described(tmp_path: Path) -> None:
    async with stored(tmp_path, [FakeEngine()]) as r:
        document = await document_of(r)
        upload = {"files": {"file": ("a", b"{}")}, "data": {"purpose": "batch"}}
        answers = {
            ("/v1/models", "get"): await r.http.get("/v1/models"),
            ("/v1/models/{name}", "get"): await r.http.get(f"/v1/models/{MODEL}"),
            ("/v1/files", "post"): await r.http.post("/v1/files", **upload),  # type: ignore[arg-type]
            ("/v1/files", "get"): await r.http.get("/v1/files"),
            ("/v1/batches", "get"): await r.http.get("/v1/batches"),
        }
        refusals = {
            ("/v1/batches", "post"): await r.http.post("/v1/batches", json={}),
            ("/v1/messages", "post"): await r.http.post("/v1/messages", json={}),
            ("/v1/files/{name}", "get"): await r.http.get("/v1/files/x"),
        }
    for (path, method), response in (answers | refusals).items():
        status = "default" if (path, method) in refusals else "200"
        content = document["paths"][path][method]["responses"][status]["content"]
        schema = {**document, **content["application/json"]["schema"]}
        assert response.is_success == (status == "200"), response.text
        Draft202012Validator(schema).validate(response.json())


@pytest.mark.parametrize("path", ["/openapi.json", "/docs"])
async def test_the_document_needs_a_key(tmp_path: Path, path: str) -> None:
    async with stored(tmp_path, [FakeEngine()]) as r:
        assert (await r.http.get(path)).status_code == 200
        async with httpx.AsyncClient(base_url=r.router.url) as stranger:
            assert (await stranger.get(path)).status_code == 401


async def test_the_page_loads_the_document_beside_it() -> None:
    async with rig([FakeEngine()]) as r:
        page = await r.http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert 'url: "openapi.json"' in page.text
