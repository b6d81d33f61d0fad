"""Commands that ask a router's admin port: which key they send to one that is not the local fleet's."""

from __future__ import annotations

import pytest

from argosy.main import main
from argosy_protocol.headers import internal_key
from argosy_protocol.reports import ADMIN_KEY_UID
from scripted_http import Asked, Reply, ScriptedHttp

FLEET_KEY = "0123456789abcdef"
DERIVED = internal_key(FLEET_KEY.encode(), ADMIN_KEY_UID)


@pytest.mark.parametrize(
    ("environment", "arguments", "key"),
    [
        ({}, [], ""),
        ({"ARGOSY_FLEET_KEY": FLEET_KEY}, [], DERIVED),
        ({"ARGOSY_FLEET_KEY": FLEET_KEY, "ARGOSY_ROUTER_ADMIN_KEY": "admin"}, [], "admin"),
        ({"ARGOSY_FLEET_KEY": "short", "ARGOSY_ROUTER_ADMIN_KEY": "admin"}, ["--admin-key", "flag"], "flag"),
    ],
)
def test_the_key_of_an_admin_port(
    environment: dict[str, str], arguments: list[str], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ARGOSY_FLEET_KEY", "ARGOSY_ROUTER_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    def answer(asked: Asked) -> Reply:
        return Reply(body=b"[]")

    with ScriptedHttp(answer) as http:
        assert main(["route", "--recent", "1", "--admin-url", http.url, *arguments]) == 0
    (asked,) = http.asked
    assert asked.path == "/decisions"
    assert asked.headers.get("authorization", "") == (f"Bearer {key}" if key else "")


def test_a_fleet_key_that_is_too_short(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ARGOSY_ROUTER_ADMIN_KEY", raising=False)
    monkeypatch.setenv("ARGOSY_FLEET_KEY", "short")
    for command in (["route", "--recent", "1"], ["dashboard"]):
        assert main([*command, "--admin-url", "http://127.0.0.1:1"]) == 2
        assert "ARGOSY_FLEET_KEY: fleet key must have at least 16 bytes" in capsys.readouterr().err


def test_a_refused_key_is_told_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ARGOSY_ROUTER_ADMIN_KEY", "wrong")
    with ScriptedHttp(lambda asked: Reply(401, b'{"error": {"message": "no"}}')) as http:
        assert main(["route", "--recent", "1", "--admin-url", http.url]) == 1
    assert "401 no; pass --admin-key KEY, or set ARGOSY_FLEET_KEY" in capsys.readouterr().err
