"""PlainApp answers as FastAPI does, whether it calls an endpoint itself or not."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fastapi import FastAPI, HTTPException, Request, Response
from starlette.responses import JSONResponse, StreamingResponse

from argosy_engine.api.app import PlainApp, handle_errors
from argosy_protocol.errors import NotFound


def with_routes(app: FastAPI) -> FastAPI:
    @app.get("/{name}/first")
    async def shadowing(name: str) -> dict[str, str]:
        return {"name": name}

    @app.get("/a/first")
    async def shadowed(request: Request) -> Response:
        return Response("never")

    @app.post("/echo")
    async def echo(request: Request) -> Response:
        return Response(await request.body(), 201, {"x-query": request.url.query})

    @app.post("/headers")
    async def lookups(request: Request) -> Response:
        headers = request.headers
        found = [
            headers.get("X-Twice"),
            headers.get("x-none"),
            headers.get("x-none", "default"),
            headers["x-twice"],
        ]
        there = ["x-twice" in headers, "X-Twice" in headers, "x-none" in headers]
        return JSONResponse([found, there, headers.getlist("x-twice"), len(headers), headers.get("x-latin")])

    @app.get("/number")
    async def number(count: int) -> int:
        return count

    @app.get("/missing")
    async def missing(request: Request) -> Response:
        raise NotFound("no such thing")

    @app.get("/teapot")
    async def teapot(request: Request) -> Response:
        raise HTTPException(404)

    @app.get("/broken")
    async def broken(request: Request) -> Response:
        raise KeyError("secret")

    @app.get("/broken/stream")
    async def broken_stream(request: Request) -> Response:
        async def pieces() -> Any:
            yield b"first"
            raise KeyError("secret")

        return StreamingResponse(pieces())

    @app.get("/broken/response")
    async def broken_response(request: Request) -> Response:
        class Broken(Response):
            async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
                raise NotFound("found out late")

        return Broken()

    handle_errors(app)
    return app


def plain_app() -> PlainApp:
    app = PlainApp(docs_url=None, redoc_url=None, openapi_url=None)
    with_routes(app)
    app.call_directly(
        {"/echo", "/headers", "/missing", "/teapot", "/broken", "/broken/stream", "/broken/response"}
    )
    return app


CALLS = [
    ("POST", "/echo"),
    ("POST", "/echo?a=b"),
    ("GET", "/echo"),
    ("POST", "/echo/"),
    ("POST", "/headers"),
    ("OPTIONS", "/echo"),
    ("HEAD", "/missing"),
    ("GET", "/a/first"),
    ("GET", "/number?count=7"),
    ("GET", "/number?count=x"),
    ("GET", "/missing"),
    ("GET", "/teapot"),
    ("GET", "/nowhere"),
    ("GET", "/broken"),
    ("GET", "/broken/stream"),
    ("GET", "/broken/response"),
]


HEADERS: list[tuple[Any, Any]] = [("x-twice", "first"), ("X-Twice", "second"), (b"x-latin", b"\xe9")]


async def answer_of(app: FastAPI, method: str, path: str, root_path: str = "") -> tuple[Any, ...]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False, root_path=root_path)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        answer = await client.request(
            method, path, content=b"body" if method == "POST" else None, headers=HEADERS
        )
        return answer.status_code, sorted(answer.headers.items()), answer.content


@pytest.mark.parametrize("root_path", ["", "/prefix"])
@pytest.mark.parametrize(("method", "path"), CALLS)
async def test_answers_are_those_of_fastapi(method: str, path: str, root_path: str) -> None:
    theirs = with_routes(FastAPI(docs_url=None, redoc_url=None, openapi_url=None))
    expected = await answer_of(theirs, method, path, root_path)
    assert await answer_of(plain_app(), method, path, root_path) == expected


@pytest.mark.parametrize("path", ["/broken", "/broken/stream"])
async def test_an_unexpected_error_reaches_the_server_which_logs_it(path: str) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(plain_app()), base_url="http://x") as client:
        with pytest.raises(KeyError):
            await client.get(path)


async def test_plain_endpoints_are_called_without_the_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    app = plain_app()

    async def framework(*_: Any) -> None:
        raise AssertionError("asked")

    monkeypatch.setattr(FastAPI, "__call__", framework)
    assert (await answer_of(app, "POST", "/echo"))[0] == 201
    with pytest.raises(AssertionError, match="asked"):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            await client.get("/number?count=7")
