"""The state directory: lock, control socket, fleet key, location."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from argosy.local.control import StateDir, choose_state_dir


def test_one_supervisor_per_state_directory(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state")
    state.create()
    lock = state.lock()
    assert lock is not None
    assert state.lock() is None
    assert state.connect() is None
    with state.listen():  # in place of a dead supervisor's socket
        connection = state.connect()
        assert connection is not None
        connection.close()


def test_the_fleet_key_is_made_once(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state")
    state.create()
    assert state.fleet_key() == StateDir(state.root).fleet_key()
    assert stat.S_IMODE((state.root / "fleet.key").stat().st_mode) == 0o600


def test_location_of_the_state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ARGOSY_STATE_DIR", raising=False)
    assert choose_state_dir(None).root == tmp_path / ".argosy"
    monkeypatch.setenv("ARGOSY_STATE_DIR", "/run/fleet")
    assert choose_state_dir(None).root == Path("/run/fleet")
    assert choose_state_dir("here").root == tmp_path / "here"
