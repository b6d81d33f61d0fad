"""Requests that a page of another site can make a browser send without asking: none starts work or stores anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from argosy_batch.config import BatchConfig

from .batch_rig import CHATS, lines, stored
from .fake_engine import FakeEngine
from .harness import MODEL, rig

FILE = {"file": ("a.jsonl", lines("a"))}
PURPOSE = {"purpose": "batch"}


@pytest.mark.parametrize("content_type", ["text/plain", "multipart/form-data; boundary=b", None])
async def test_a_body_that_is_not_json_by_its_head_starts_nothing(
    tmp_path: Path, content_type: str | None
) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    async with stored(tmp_path, [engine := FakeEngine()]) as r:
        file_id = (await r.http.post("/v1/files", files=FILE, data=PURPOSE)).json()["id"]
        bodies = {
            "/v1/responses": {"model": MODEL, "input": "a", "background": True},
            "/v1/batches": {"input_file_id": file_id, "endpoint": CHATS, "completion_window": "24h"},
        }
        for path, body in bodies.items():
            answer = await r.http.post(path, content=json.dumps(body), headers=headers)
            assert (answer.status_code, "application/json" in answer.json()["error"]["message"]) == (
                415,
                True,
            )
        assert (await r.http.get("/v1/batches")).json()["data"] == []
        assert not [each for each in engine.requests if each.method == "POST"]
        for path, body in bodies.items():
            answer = await r.http.post(
                path, content=json.dumps(body), headers={"content-type": "Application/JSON; charset=utf-8"}
            )
            assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(("site", "status"), [("cross-site", 403), ("same-origin", 200), ("none", 200)])
async def test_a_page_of_another_site_uploads_no_file(tmp_path: Path, site: str, status: int) -> None:
    async with stored(tmp_path, [FakeEngine()]) as r:
        headers = {"sec-fetch-site": site}
        answer = await r.http.post("/v1/files", files=FILE, data=PURPOSE, headers=headers)
        assert answer.status_code == status, answer.text
        assert len((await r.http.get("/v1/files")).json()["data"]) == (status == 200)


@pytest.mark.parametrize(
    ("origin", "status"),
    [("http://evil.example", 403), ("null", 403), ("http://router.example:8080", 200), (None, 200)],
)
async def test_over_plain_http_the_origin_tells_the_site(
    tmp_path: Path, origin: str | None, status: int
) -> None:
    """Browsers send `sec-fetch-site` over TLS and to localhost only."""
    headers = {"host": "router.example:8080"} | ({} if origin is None else {"origin": origin})
    async with rig([FakeEngine()], storage=BatchConfig(storage=str(tmp_path / "storage"))) as r:
        answer = await r.http.post("/v1/files", files=FILE, data=PURPOSE, headers=headers)
        assert answer.status_code == status, answer.text
        assert len((await r.http.get("/v1/files")).json()["data"]) == (status == 200)
