"""/sleep and /wake_up on a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from processes import Server, answers
from served_engine import ADMIN_KEY, AUTHORIZED, FOREVER

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def admin(tiny_server: Server) -> Iterator[httpx.Client]:
    """Wakes the engine up in the end, whatever fails: other tests use it."""
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    with httpx.Client(base_url=tiny_server.url, headers=headers, timeout=60) as client:
        yield client
        client.post("/wake_up")


def test_an_engine_sleeps_and_wakes_up_the_same(tiny_server: Server, admin: httpx.Client) -> None:
    plain = httpx.Client(base_url=tiny_server.url, headers=AUTHORIZED, timeout=60)

    def ask() -> httpx.Response:
        body = {"prompt": "Tell me of the sea and of ships. " * 20, "max_tokens": 20, "temperature": 0}
        return plain.post("/v1/completions", json=body)

    with plain:
        before = ask().json()["choices"][0]["text"]
        assert plain.post("/sleep").status_code == 401
        for wrong in ("level=0", "level=3", "level=x", "mode=now"):
            assert admin.post(f"/sleep?{wrong}").status_code == 400
        assert admin.get("/is_sleeping").json() == {"is_sleeping": False}

        with plain.stream("POST", "/v1/completions", json=FOREVER) as response:
            lines = response.iter_lines()
            next(lines)
            assert admin.post("/sleep?level=1").status_code == 200
            events = [line for line in lines if line.startswith("data: ")]
        assert "put to sleep" in json.loads(events[-2][6:])["error"]["message"]

        assert admin.get("/is_sleeping").json() == {"is_sleeping": True}
        ready = plain.get("/ready")
        assert (ready.status_code, ready.json()) == (503, {"status": "sleeping"})
        assert answers(tiny_server.url + "/health")
        assert 'sleep_state="weights_offloaded"} 1.0' in plain.get("/metrics").text
        refused = ask()
        assert refused.status_code == 503
        assert "asleep" in refused.json()["error"]["message"]
        assert "retry-after" in refused.headers

        assert admin.post("/sleep?level=2&mode=wait").status_code == 200
        assert admin.post("/wake_up").status_code == 200
        assert answers(tiny_server.url + "/ready")
        after = ask().json()
        assert after["choices"][0]["text"] == before
        assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert ask().json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert admin.post("/reset_prefix_cache").status_code == 200
        assert ask().json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
