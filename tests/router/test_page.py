"""The admin page: access, figures, and the page in a browser."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import chromium
from argosy_protocol.fleet import FleetDocument, ModelFetchState
from argosy_protocol.headers import internal_key
from argosy_protocol.reports import ADMIN_KEY_UID
from argosy_protocol.telemetry import Load
from argosy_router.admin.app import PAGE
from argosy_router.admin.overview import INTERVAL_S, SAMPLES, History, quantile
from argosy_router.metric_series import Labels
from chromium import Page, browser

from .fake_engine import DONE, Connection, FakeEngine, Received, completion, event
from .harness import DEADLINE_S, Rig, chat, rig, service

FLEET_KEY = b"0123456789abcdef"
ADMIN_KEY = internal_key(FLEET_KEY, ADMIN_KEY_UID)
SCREENSHOTS = os.environ.get("ARGOSY_SCREENSHOTS")
"""Directory that the browser's tests leave pictures in."""


async def answer(connection: Connection, request: Received) -> None:
    usage = json.loads(completion(prompt_tokens=120, cached=96))["usage"]
    if not request.json.get("stream"):
        connection.answer(200, completion(prompt_tokens=120, cached=96))
        return
    connection.begin_stream()
    connection.chunk(event("").replace(b'"content": ""', b'"reasoning": "Tides..."'))
    for piece in ("<b>The tide", " turns", " at six.</b>"):
        connection.chunk(event(piece))
    connection.chunk(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
    connection.chunk(DONE)
    connection.end_stream()


def admin(key: str = ADMIN_KEY) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


# what the page reads


async def test_the_page_is_static_and_locked_down() -> None:
    async with rig([], fleet_key=FLEET_KEY, admin_port=0) as r:
        for path in PAGE:
            response = await r.http.get(r.router.admin_url + path)
            assert response.status_code == 200
            policy = response.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
            assert "unsafe" not in policy
            assert response.headers["x-content-type-options"] == "nosniff"
            text = response.text.replace("http://www.w3.org/", "")
            assert "http://" not in text
            assert "https://" not in text
            assert "innerHTML" not in text, "what models say is text"


async def test_the_overview_tells_what_replicas_do() -> None:
    async with rig([FakeEngine(script=answer), FakeEngine(script=answer)], admin_port=0) as r:
        for number in range(4):
            await r.chat(f"{number} " * 100)
        overview = (await r.http.get(r.router.admin_url + "/overview")).json()
        assert (overview["state"], overview["version"] != "") == ("ready", True)
        (service,) = overview["services"]
        assert (service["model"], service["policy"]) == ("tiny", "cost")
        assert [replica["name"] for replica in service["replicas"]] == ["r0", "r1"]
        assert {replica["state"] for replica in service["replicas"]} == {"synced"}
        used = [replica for replica in service["replicas"] if replica["hit_ratio"] is not None]
        assert used
        assert {replica["hit_ratio"] for replica in used} == {0.8}
        assert service["trend"]["recent"]["hit_ratio"] == 0.8
        assert service["trend"]["recent"]["failed_ratio"] == 0


async def test_nothing_is_shown_as_measured_that_is_not() -> None:
    """Routing assumes a speed until an engine has told its own."""
    async with rig([FakeEngine(script=answer)], admin_port=0) as r:
        base = r.router.admin_url

        async def speeds() -> tuple[Any, ...]:
            (shown,) = (await r.http.get(base + "/overview")).json()["services"][0]["replicas"]
            explained = (await r.http.post(base + "/explain", json=chat())).json()
            await r.chat("some text", stream=True)
            (decision, *_) = (await r.http.get(base + "/decisions?limit=9")).json()
            (candidate,) = explained["candidates"]
            return (
                shown["prefill_tokens_per_s"],
                explained["predicted_ttft_s"],
                candidate["is_measured"],
                decision["predicted_ttft_s"],
            )

        assert await speeds() == (None, None, False, None)
        r.engines[0].announce(Load(core_step_age_s=0.0, prefill_tokens_per_s=500.0))
        await r.until(lambda: r.replica(0).load.measured.prefill_tokens_per_s == 500.0)
        prefill, expected_s, is_measured, noted_s = await speeds()
        assert (prefill, is_measured) == (500.0, True)
        assert expected_s > 0
        assert noted_s > 0


FETCHING = ModelFetchState(source="hf://org/name", state="fetching 40 %")


async def test_the_overview_tells_how_far_the_fetch_of_a_model_is() -> None:
    async with rig([], wait=False, fields={"fetch": FETCHING}, admin_port=0) as r:
        (service,) = (await r.http.get(r.router.admin_url + "/overview")).json()["services"]
        assert (service["model_source"], service["model_fetch"]) == ("hf://org/name", "fetching 40 %")


async def test_an_overview_of_many_services_reads_the_sums_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were read for each service: with 200 of ten replicas each view held the event loop for 120 ms, and 25
    times as long with a thousand."""
    documents = [service([], name=f"s{number}", model=f"m{number}") for number in range(20)]
    async with rig([], document=FleetDocument(services=tuple(documents)), admin_port=0) as r:
        read = 0
        requests = r.router.metrics.requests

        def sums() -> list[tuple[Labels, float]]:
            nonlocal read
            read += 1
            return requests.sums()

        monkeypatch.setattr(r.router.metrics, "requests", SimpleNamespace(labels=requests.labels, sums=sums))
        shown = (await r.http.get(r.router.admin_url + "/overview")).json()["services"]
        assert {each["model"] for each in shown} == {f"m{number}" for number in range(20)}
        assert 1 <= read <= 4, "and by the history itself, perhaps"


async def test_curves_are_bounded_and_follow_the_sums() -> None:
    async with rig([FakeEngine(script=answer)]) as r:
        history = History(r.router.metrics)
        await r.chat()
        now = 1000.0
        for _ in range(SAMPLES + 20):
            history.sample(now)
            now += INTERVAL_S
        assert {figures.requests_per_s for figures in history.trends(now)("tiny").curve} == {0.0}
        await r.chat()
        await r.chat()
        history.sample(now)
        trend = history.trends(now)("tiny")
        assert len(trend.curve) == SAMPLES - 1
        assert trend.curve[-1].requests_per_s == 2 / INTERVAL_S
        assert trend.curve[-1].output_tokens_per_s == 2 / INTERVAL_S
        assert history.trends(now)("unknown").curve == []


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, None), (0.25, 0.5), (0.5, 1.0), (0.75, 2.0), (1.0, 4.0)]
)
def test_quantiles_are_interpolated(share: float, expected: float | None) -> None:
    assert quantile(share, [2, 1, 1, 0], [1, 2, 4]) == expected


HOSTS = {
    "127.0.0.1:8081": True,
    "[::1]:8081": True,
    "LOCALHOST": True,
    "a.localhost:1": True,
    "router.example": True,
    "evil.example:8081": False,
    "127.0.0.1.evil.example": False,
    "127.0.0.1@evil.example": False,
    "localhost.evil": False,
    "[::1": False,
    "": False,
}


@pytest.mark.parametrize("host", HOSTS)
async def test_without_a_key_no_web_page_gets_at_the_admin_port_by_its_own_name(host: str) -> None:
    async with rig([FakeEngine()], admin_port=0, admin_names=("router.example",)) as r:
        url, headers = r.router.admin_url, {"host": host}
        for request in (
            r.http.get(url + "/overview", headers=headers),
            r.http.post(url + "/playground/chat/completions", json=chat(), headers=headers),
        ):
            response = await request
            assert response.status_code == (200 if HOSTS[host] else 403), response.text
        assert (await r.http.get(url + "/health", headers=headers)).status_code == 200, "probes use any name"


async def test_with_the_admin_key_the_host_is_free() -> None:
    async with rig([FakeEngine()], fleet_key=FLEET_KEY, admin_port=0) as r:
        response = await r.http.get(
            r.router.admin_url + "/overview", headers=admin() | {"host": "any.example"}
        )
        assert response.status_code == 200


async def test_the_playground_goes_through_the_router() -> None:
    async with rig([FakeEngine(script=answer)], fleet_key=FLEET_KEY, admin_port=0, api_keys=("secret",)) as r:
        url = r.router.admin_url + "/playground/chat/completions"
        assert (await r.http.post(url, json=chat())).status_code == 401
        assert (await r.http.post(url, json=chat(), headers=admin("secret"))).status_code == 401
        response = await r.http.post(url, json=chat(stream=True), headers=admin())
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-argosy-replica"] == "r0"
        assert response.content.endswith(DONE)
        assert ADMIN_KEY not in str(r.engines[0].requests[0].headers)
        unary = await r.http.post(url, json=chat(), headers=admin())
        assert unary.json()["choices"][0]["message"]["content"] == "hello"
        wrong = await r.http.post(url, json=chat() | {"model": "none"}, headers=admin())
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (404, "model_not_found")
        assert r.metric('requests_total{code="200",model="tiny"}') == 2


async def test_the_playground_is_no_way_around_the_clients_keys() -> None:
    async with rig([FakeEngine()], admin_port=0, api_keys=("secret",)) as r:
        response = await r.http.post(r.router.admin_url + "/playground/chat/completions", json=chat())
        assert response.status_code == 403


@pytest.mark.parametrize("has_begun", [False, True])
async def test_leaving_the_playground_aborts_the_request(has_begun: bool) -> None:
    working, aborted = asyncio.Event(), asyncio.Event()

    async def work(connection: Connection, _: Received) -> None:
        if has_begun:
            connection.begin_stream()
            connection.chunk(event("x"))
        working.set()
        await connection.gone()
        aborted.set()

    async with rig([FakeEngine(script=work)], admin_port=0) as r:
        url = r.router.admin_url + "/playground/chat/completions"
        asking = asyncio.ensure_future(r.http.post(url, json=chat(stream=True)))
        await asyncio.wait_for(working.wait(), DEADLINE_S)
        asking.cancel()
        await asyncio.wait_for(aborted.wait(), DEADLINE_S)
        await r.until(lambda: r.router.requests.inflight == 0)


async def test_an_unread_playground_answer_pauses_the_engine() -> None:
    sent = 0

    async def pour(connection: Connection, _: Received) -> None:
        nonlocal sent
        connection.begin_stream()
        connection.writer.transport.set_write_buffer_limits(high=1)
        while True:
            connection.chunk(event("x" * 65536))
            await connection.writer.drain()
            sent += 65536

    async with rig([FakeEngine(script=pour)], admin_port=0) as r:
        url = r.router.admin_url + "/playground/chat/completions"
        async with r.http.stream("POST", url, json=chat(stream=True)):
            before = -1
            async with asyncio.timeout(DEADLINE_S):
                while sent != before or not sent:
                    before = sent
                    await asyncio.sleep(0.2)
            assert sent < 50_000_000


# the page itself

needs_browser = pytest.mark.skipif(
    chromium.EXECUTABLE is None, reason="no Chromium on this machine (Debian's package `chromium`)"
)


@pytest.fixture
async def page() -> AsyncIterator[Page]:
    async with browser() as tab:
        await tab.look()
        yield tab


async def picture(page: Page, name: str) -> None:
    """Sees that something was painted."""
    shot = await page.screenshot()
    assert len(shot) > 5_000
    if SCREENSHOTS:
        await asyncio.to_thread(Path(SCREENSHOTS, f"{name}.png").write_bytes, shot)


async def open_page(r: Rig, page: Page, view: str = "") -> None:
    await page.goto(f"{r.router.admin_url}/{view}")
    await page.until("document.getElementById('key-dialog')?.open")
    await page.type("not the key")
    await page.press("Enter")
    await page.until("!document.getElementById('key-wrong').hidden")
    await page.type(ADMIN_KEY)
    await page.press("Enter")
    await page.until("document.getElementById('state').textContent === 'Ready'")


def cells(table: str) -> str:
    rows = f"[...document.querySelectorAll('#{table} tbody tr')]"
    return f"{rows}.map(row => [...row.cells].map(cell => cell.textContent))"


@needs_browser
async def test_a_person_sees_the_fleet(page: Page) -> None:
    engines = [FakeEngine(script=answer), FakeEngine(script=answer)]
    async with rig(engines, fleet_key=FLEET_KEY, admin_port=0) as r:
        await open_page(r, page)
        await page.until("document.querySelectorAll('#replicas tbody tr').length === 2")
        assert await page.js("document.getElementById('decisions-empty').hidden") is False
        await picture(page, "empty")
        await page.js("window.kept = document.querySelector('#replicas tbody tr')")
        for number in range(3):
            await r.chat(f"{number} " * 100, stream=True, stream_options={"include_usage": True})
        await page.until("document.querySelectorAll('#decisions tbody tr').length === 3")
        await page.until(f"{cells('decisions')}.every(row => row[10] === '200' && row[6] === '96')")
        assert await page.js(
            "window.kept.isConnected && window.kept === document.querySelector('#replicas tbody tr')"
        ), "rows are brought up to date, not made anew"
        (first, second) = await page.js(cells("replicas"))
        assert (first[:2], second[:2]) == (["r0", "synced"], ["r1", "synced"])
        await engines[1].stop()
        await page.until(f"{cells('replicas')}[1][1] !== 'synced'")
        await page.look(dark=True)
        await picture(page, "dark")
        light = "getComputedStyle(document.body).backgroundColor"
        dark = await page.js(light)
        await page.look()
        assert await page.js(light) != dark
        refused = [problem for problem in page.problems if "401" not in problem]
        assert refused == []


@needs_browser
async def test_a_person_sees_why_requests_failed(page: Page) -> None:
    error = {"message": "secret", "type": "t", "code": "unsupported", "param": "tools[0]"}

    async def script(connection: Connection, request: Received) -> None:
        connection.answer(400, json.dumps({"error": error}).encode())

    async with rig([FakeEngine(script=script)], fleet_key=FLEET_KEY, admin_port=0) as r:
        await page.goto(f"{r.router.admin_url}/#key={ADMIN_KEY}")
        await page.until("document.getElementById('refusals-empty')?.checkVisibility()")
        await r.chat()
        await r.http.post("/v1/chat/completions", json={**chat(), "model": "another"})
        await page.until(f"{cells('decisions')}.some(row => row[10] === '400')")
        await page.until(f"{cells('refusals')}.length === 1")
        (decision,) = await page.js(cells("decisions"))
        assert decision[10:] == ["400", "unsupported, tools[0]"]
        (refusal,) = await page.js(cells("refusals"))
        assert refusal[2:] == ["–", "404", "model_not_found, model"]
        assert "secret" not in await page.js("document.body.textContent")


@needs_browser
async def test_a_person_sees_all_services_also_on_a_phone(page: Page) -> None:
    engines = [FakeEngine(script=answer), FakeEngine(script=answer)]
    async with rig(engines, fleet_key=FLEET_KEY, admin_port=0) as r:
        other = service([engines[1]], name="other", uid="u2", model="large")
        r.discovery.set(FleetDocument(services=(service([engines[0]]), other)))
        await page.look(width=390, height=844)
        await page.goto(f"{r.router.admin_url}/#key={ADMIN_KEY}")
        await page.until(f"{cells('services')}.length === 2")
        await page.until(f"{cells('services')}.every(row => row[2] === '1 / 1')")
        shown = await page.js(cells("services"))
        assert [row[:2] for row in shown] == [["default/svc", "tiny"], ["default/other", "large"]]
        await page.js("[...document.querySelectorAll('#services button')].at(-1).click()")
        await page.until("document.getElementById('model').selectedOptions[0].textContent === 'large'")
        top = "document.querySelector('#replicas tbody tr').getBoundingClientRect().bottom"
        await page.until(f"document.querySelector('#replicas tbody tr') && {top} < innerHeight")
        await picture(page, "phone")
        assert await page.js("document.querySelector('.bar').getBoundingClientRect().height") < 60
        assert await page.js("document.documentElement.scrollWidth <= innerWidth")
        assert page.problems == []


@needs_browser
async def test_a_person_sees_how_far_the_fetch_of_a_model_is(page: Page) -> None:
    fields = {"fetch": FETCHING}
    async with rig([], wait=False, fields=fields, fleet_key=FLEET_KEY, admin_port=0) as r:
        await page.goto(f"{r.router.admin_url}/#key={ADMIN_KEY}")
        shown = "(document.getElementById('replicas-empty')?.textContent ?? '')"
        await page.until(f"{shown}.includes('Model: fetching 40 % (hf://org/name)')")
        r.discovery.set(FleetDocument(services=(service([], fetch=ModelFetchState(state="cached")),)))
        await page.until(f"!{shown}.includes('Model:')")
        assert page.problems == []


@needs_browser
async def test_a_key_in_the_address_is_taken_and_hidden(page: Page) -> None:
    async with rig([FakeEngine()], fleet_key=FLEET_KEY, admin_port=0) as r:
        await page.goto(f"{r.router.admin_url}/#key={ADMIN_KEY}")
        await page.until("document.getElementById('state')?.textContent === 'Ready'")
        assert ADMIN_KEY not in await page.js("location.href")
        assert await page.js("document.getElementById('key-dialog').open") is False
        assert page.problems == []


@needs_browser
async def test_a_person_chats_with_the_keyboard(page: Page) -> None:
    async with rig([FakeEngine(script=answer)], fleet_key=FLEET_KEY, admin_port=0) as r:
        await open_page(r, page, "#playground")
        await page.until("!document.getElementById('send').disabled")
        assert await page.js("document.activeElement.id") == "prompt"
        await page.type("When does the tide turn?")
        await page.press("Enter")
        await page.until("document.querySelectorAll('.message .meta')[1]?.textContent.includes('r0')")
        said: list[str] = await page.js(
            "[...document.querySelectorAll('.message .said')].map(e => e.textContent)"
        )
        assert said == ["When does the tide turn?", "<b>The tide turns at six.</b>"]
        assert await page.js("document.querySelectorAll('.thought')[1].textContent") == "Tides..."
        assert await page.js("document.querySelectorAll('.message b').length") == 0
        facts = await page.js("document.getElementById('facts').textContent")
        assert "120 tokens" in facts
        assert "96 in fact" in facts
        assert await page.js("document.querySelector('#candidates tr.chosen').cells[0].textContent") == "r0"
        await picture(page, "playground")
        sent: Any = r.engines[0].requests[-1].json
        assert sent["messages"] == [{"role": "user", "content": "When does the tide turn?"}]
        stops = []
        for _ in range(4):
            await page.press("Tab")
            stops.append(await page.js("document.activeElement.id"))
        assert stops == ["choose-picture", "explain", "send", "system"]
        assert await page.js("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        assert [problem for problem in page.problems if "401" not in problem] == []


PICTURE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII="


def give(data: str, media_type: str, how: str) -> str:
    """JavaScript that gives the page a file as a person does who chooses or pastes it."""
    made = (
        "const transfer = new DataTransfer();"
        f"transfer.items.add(new File([{data}], 'file', {{ type: '{media_type}' }}));"
    )
    if how == "paste":
        event = "new ClipboardEvent('paste', { clipboardData: transfer, cancelable: true })"
        return f"(() => {{ {made} document.getElementById('prompt').dispatchEvent({event}); }})()"
    return (
        f"(() => {{ {made} const chooser = document.getElementById('picture-file');"
        "chooser.files = transfer.files; chooser.dispatchEvent(new Event('change')); })()"
    )


@needs_browser
@pytest.mark.parametrize("how", ["choose", "paste"])
async def test_a_person_asks_about_a_picture(page: Page, how: str) -> None:
    async with rig([FakeEngine(script=answer)], fleet_key=FLEET_KEY, admin_port=0) as r:
        await open_page(r, page, "#playground")
        await page.until("!document.getElementById('send').disabled")
        note = "document.getElementById('picture-note').textContent"
        await page.js(give("new Uint8Array((2 << 20) + 1)", "image/png", "choose"))
        assert "at most 2 MiB" in await page.js(note)
        await page.js(give("'text'", "text/plain", "choose"))
        assert await page.js(note) == "This file is no picture."
        assert await page.js("document.getElementById('picture').hidden")
        largest = base64.b64decode(PICTURE).ljust(2 << 20, b"\0")
        file = f"Uint8Array.from(atob('{PICTURE}').padEnd(2 << 20, '\\0'), c => c.charCodeAt(0))"
        await page.js(give(file, "image/png", how))
        await page.until("document.getElementById('thumbnail').naturalWidth === 1")
        assert await page.js(note) == ""
        await page.type("What is it?")
        await page.press("Enter")
        await page.until("document.querySelectorAll('.message .meta')[1]?.textContent.includes('r0')")
        assert await page.js("document.querySelector('.message img').naturalWidth") == 1
        assert await page.js("document.getElementById('picture').hidden"), "it is sent once"
        sent: Any = r.engines[0].requests[-1].json
        url = f"data:image/png;base64,{base64.b64encode(largest).decode()}"
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
        assert sent["messages"] == [{"role": "user", "content": parts}]
        await page.js(give(file, "image/png", how))
        await page.until(f"{note} === 'This chat has too many pictures. Start a new chat.'")
        assert [problem for problem in page.problems if "401" not in problem] == []
