"""What lists and events take of the memory while they are read: a tenant chooses what the objects contain."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest
from aiohttp import ClientSession, StreamReader, web

from argosy_operator.cluster.store import kept_fields
from argosy_operator.event_source import Pages, WatchBody, read_event, read_list, response_class
from argosy_operator.names import DEPLOYMENTS

KIND = {"apiVersion": "apps/v1", "kind": "Deployment"}


def large(number: int) -> dict[str, Any]:
    metadata = {"name": f"d{number}", "namespace": "team", "uid": f"u{number}", "resourceVersion": "7"}
    return {"metadata": metadata, "spec": {"template": [{"name": "A"} for _ in range(3000)]}}


LIST = json.dumps(
    {"kind": "DeploymentList", "metadata": {"continue": "more"}, "items": [large(each) for each in range(10)]}
).encode()


def peak_of(read: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        read()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_of_a_list_one_object_is_in_memory_at_a_time() -> None:
    one = peak_of(lambda: json.loads(json.dumps(large(0))))
    found = read_list(LIST)
    assert (found["kind"], found["metadata"]) == ("DeploymentList", {"continue": "more"})
    kept: list[dict[str, Any]] = []
    assert peak_of(lambda: kept.extend(kept_fields(DEPLOYMENTS, each) for each in found["items"])) < 3 * one
    assert [each["metadata"]["name"] for each in kept] == [f"d{number}" for number in range(10)]
    assert list(read_list(b'{"items": null}')["items"]) == []


@pytest.mark.parametrize("text", [b"", b"[]", b'{"items": {}}', b'{"items": [}'])
def test_what_is_no_list_is_an_error(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"JSON|Expected|truncated"):
        list(read_list(text)["items"])


async def test_kopf_is_given_what_is_kept() -> None:
    """It holds all objects of a list until they were handled, and the last event of each."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=LIST, content_type="application/json")

    app = web.Application()
    app.router.add_get("/{plural}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with ClientSession(response_class=response_class({"deployments": DEPLOYMENTS})) as session:
            async with session.get(f"{url}/deployments") as response:
                found = await response.json()
            async with session.get(f"{url}/others") as response:
                whole = await response.json()
    finally:
        await runner.cleanup()
    assert whole == json.loads(LIST)
    assert found == {**whole, "items": [{**each, "spec": {}} for each in whole["items"]]}


async def test_kopf_asks_for_as_many_objects_as_fit() -> None:
    """It asks with one limit for everything, but the size of objects is a tenant's to choose."""
    limits: list[int] = []

    async def answer(request: web.Request) -> web.Response:
        limits.append(int(request.query["limit"]))
        size = 100_000 if request.query.get("continue") == "large" else 10
        obj = {"metadata": {"name": "d", "namespace": "team", "annotations": {"note": "x" * size}}}
        return web.json_response({"items": [obj] * limits[-1], "metadata": {}})

    app = web.Application()
    app.router.add_get("/{plural}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    kinds = {"deployments": DEPLOYMENTS}
    given: list[int] = []

    async def ask(path: str) -> None:
        async with session.get(f"{url}/{path}") as response:
            given.append(len((await response.json())["items"]))

    try:
        async with ClientSession(
            response_class=response_class(kinds), middlewares=(Pages(kinds),)
        ) as session:
            for token in ("", "&continue=small", "&continue=large", "&continue=small"):
                await ask(f"deployments?limit=10{token}")
            await ask("deployments?limit=10")
            await ask("others?limit=7")
    finally:
        await runner.cleanup()
    assert given == [10, 40, 10, 10, 10, 7], "what is too large is asked for again"
    assert limits == [10, 40, 160, 10, 10, 10, 7]


def test_of_an_event_kopf_is_given_what_is_kept() -> None:
    obj = {**KIND, **large(0)}
    for change in ("ADDED", "MODIFIED", "DELETED"):
        assert read_event(json.dumps({"type": change, "object": obj}))["object"] == {**obj, "spec": {}}
    for other in ({"type": "BOOKMARK", "object": obj}, {"type": "ERROR", "object": {"code": 410}}, []):
        assert read_event(json.dumps(other)) == other


async def test_of_a_watch_kopf_is_given_what_is_kept_in_whatever_pieces_it_comes() -> None:
    obj = {**KIND, **large(0)}
    bookmark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "7"}}}
    sent = b"\n".join(json.dumps(each).encode() for each in ({"type": "ADDED", "object": obj}, bookmark))

    class Body:
        async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
            for start in range(0, len(sent), size):
                yield sent[start : start + size]

    for size in (100_000, len(sent)):
        body = WatchBody(cast(StreamReader, Body()))
        read = b"".join([piece async for piece in body.iter_chunked(size)])
        assert [json.loads(line) for line in read.splitlines()] == [
            {"type": "ADDED", "object": {**obj, "spec": {}}},
            bookmark,
        ]
