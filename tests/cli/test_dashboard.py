"""`argosy dashboard`."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy.main import main
from argosy_protocol.headers import internal_key
from argosy_protocol.reports import ADMIN_KEY_UID

URL = "http://127.0.0.1:8081"


def test_the_address_holds_the_key_behind_the_hash(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ARGOSY_FLEET_KEY", "0123456789abcdef")
    assert main(["dashboard", "--admin-url", URL + "/"]) == 0
    assert capsys.readouterr().out == f"{URL}/#key={internal_key(b'0123456789abcdef', ADMIN_KEY_UID)}\n"
    monkeypatch.delenv("ARGOSY_FLEET_KEY")
    assert main(["dashboard", "--admin-url", URL]) == 0
    assert capsys.readouterr().out == f"{URL}/\n"


def test_without_a_fleet_there_is_nothing_to_see(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboard", "--state-dir", str(tmp_path)]) == 1
    assert "argosy dashboard: " in capsys.readouterr().err
