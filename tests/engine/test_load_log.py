"""Log lines about a load: none for a short one, few for a long one."""

from __future__ import annotations

import logging

import pytest

from argosy_engine.api.serve import LoadLog
from argosy_engine.messages import LoadStep


def test_phases_and_percents_are_logged_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    now = 0.0
    log = LoadLog(clock=lambda: now)
    for _ in range(50):
        now += 0.02
        log.note(LoadStep("weights", 1, 1000))
    assert caplog.messages == [], "it has just begun"
    for second in range(2, 32):
        now = float(second)
        for _ in range(10):
            log.note(LoadStep("weights", second * 10, 1000))
    assert caplog.messages == [
        "loading the model: weights, 2 %",
        "loading the model: weights, 12 %",
        "loading the model: weights, 22 %",
    ]
    log.note(LoadStep("kv cache"))
    log.note(LoadStep("tokenizer"))
    assert caplog.messages[3:] == ["loading the model: kv cache", "loading the model: tokenizer"]
