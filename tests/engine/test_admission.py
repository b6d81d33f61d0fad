"""Refusals at the door: the caps, what counts against them, and when to come back."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from argosy_engine.errors import EngineBusy
from argosy_engine.frontend.admission import MAX_RETRY_S, AdmissionControl
from processes import free_port, running, wait_until


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_requests_in_flight_are_capped_and_leave_room_when_they_end() -> None:
    admission = AdmissionControl(2, None)
    for name in "ab":
        admission.check(1)
        admission.enter(name, 10)
    admission.start("a")
    with pytest.raises(EngineBusy, match="2 requests are waiting or running, at most 2 may"):
        admission.check(1)
    admission.leave("a")
    admission.check(1)
    with pytest.raises(EngineBusy):
        admission.check(2)


def test_prompt_tokens_count_until_the_first_token() -> None:
    admission = AdmissionControl(100, 50)
    admission.enter("a", 30)
    admission.check(1, 20)
    with pytest.raises(EngineBusy, match="30 prompt tokens are waiting, at most 50 may"):
        admission.check(1, 21)
    admission.start("a")
    admission.check(1, 50)
    admission.leave("a")
    assert admission.num_queued_tokens == admission.num_reqs == 0


def test_a_long_prompt_alone_is_not_refused() -> None:
    admission = AdmissionControl(100, 50)
    admission.check(1, 5000)


def test_a_request_that_ends_before_its_first_token_gives_its_tokens_back() -> None:
    admission = AdmissionControl(100, 50)
    admission.enter("a", 50)
    admission.leave("a")
    assert admission.num_queued_tokens == 0


@pytest.mark.parametrize(
    ("rate", "tokens", "expected"),
    [(10.0, 40, 2.0), (1000.0, 40, 1.0), (0.01, 40, MAX_RETRY_S), (0.0, 40, 1.0)],
)
def test_the_hint_follows_the_measured_prefill_rate(rate: float, tokens: int, expected: float) -> None:
    admission = AdmissionControl(100, 50)
    admission.prefill_tokens_per_s = rate
    admission.enter("a", 30)
    with pytest.raises(EngineBusy) as refused:
        admission.check(1, tokens)
    assert refused.value.retry_after_s == expected


def test_the_hint_follows_the_rate_at_which_requests_end() -> None:
    clock = Clock()
    admission = AdmissionControl(6, None, clock)
    for name in "abcdefghij":
        admission.enter(name, 1)
    for name in "abcd":
        clock.now += 2.0
        admission.leave(name)
    with pytest.raises(EngineBusy) as refused:
        admission.check(4)
    # Four ended within six seconds; room for four takes as long as four more.
    assert refused.value.retry_after_s == 6.0


def test_a_full_engine_answers_503_with_a_hint_and_recovers(tmp_path: Path) -> None:
    port = free_port()
    command = ["argosy_engine.api.serve", "builtin://tiny", "--threads", "1", "--port", str(port),
               "--max-num-queued-reqs", "1"]  # fmt: skip
    body = {"prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with (
        running(command, tmp_path / "log", port=port) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        with http.stream("POST", "/v1/completions", json=body) as first:
            next(first.iter_lines())
            refused = http.post("/v1/completions", json={"prompt": "Two", "max_tokens": 1})
        assert refused.status_code == 503
        assert "at most 1 may" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
        one = {"prompt": "Two", "max_tokens": 1}
        wait_until(lambda: http.post("/v1/completions", json=one).is_success, "the aborted stream's room")
        wrong = http.post("/v1/completions", json={"prompt": "Two", "max_tokens": 1, "priority": 1})
        assert wrong.status_code == 400
        assert wrong.json()["error"]["param"] == "priority"
