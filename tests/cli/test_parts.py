"""The small parts of the local fleet: logs, state directory, GPUs, back-off, tables."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from argosy.commands.up import _summary
from argosy.local.control import FleetStatus, RouterStatus, ServiceStatus
from argosy.local.gpus import choose_gpus, gpu_env, local_gpus
from argosy.local.process import LogFile, tail
from argosy.local.settings import Settings, backoff_s, free_port, is_port_free
from argosy.local.state import StateDir, choose_state_dir
from argosy.terminal import table


def test_a_log_never_takes_more_than_twice_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    log = LogFile(path, limit=100)
    for number in range(50):
        log.write(b"%08d\n" % number)
    log.close()
    kept = (tmp_path / "a.log.1").read_bytes() + path.read_bytes()
    assert len(kept) <= 200
    assert kept.splitlines()[-1] == b"00000049"
    assert path.stat().st_size <= 100
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_tail_gives_the_last_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("".join(f"line {number}\n" for number in range(1000)))
    assert tail(path, 2) == "line 998\nline 999"
    assert tail(tmp_path / "none.log", 2) == ""


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


def test_where_the_state_directory_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ARGOSY_STATE_DIR", raising=False)
    assert choose_state_dir(None).root == tmp_path / ".argosy"
    monkeypatch.setenv("ARGOSY_STATE_DIR", "/run/fleet")
    assert choose_state_dir(None).root == Path("/run/fleet")
    assert choose_state_dir("here").root == tmp_path / "here"


@pytest.mark.parametrize(
    ("env", "expected"),
    [({}, (0, 2)), ({"CUDA_VISIBLE_DEVICES": "3,1"}, (3, 1)), ({"CUDA_VISIBLE_DEVICES": ""}, ())],
)
def test_gpus_of_this_machine(env: dict[str, str], expected: tuple[int, ...], tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert local_gpus(env, tmp_path) == expected


def test_a_gpu_belongs_to_one_replica() -> None:
    assert choose_gpus((0, 1, 2, 3), (1,), 2) == (0, 2)
    assert choose_gpus((0, 1), (1,), 2) is None
    assert gpu_env((0, 2)) == {"CUDA_VISIBLE_DEVICES": "0,2"}
    assert gpu_env(()) == {"CUDA_VISIBLE_DEVICES": ""}


def test_back_off_doubles_up_to_its_cap() -> None:
    settings = Settings(first_backoff_s=0.5, most_backoff_s=30.0)
    delays = [backoff_s(settings, failures) for failures in (1, 2, 3, 7, 8, 10_000)]
    assert delays == [0.5, 1.0, 2.0, 30.0, 30.0, 30.0]


def test_a_free_port_is_free() -> None:
    assert is_port_free(free_port())


def test_a_table_has_aligned_columns() -> None:
    assert table(("A", "LONG"), [("value", "1")]) == "A      LONG\nvalue  1"


def test_services_of_one_model_are_told_apart() -> None:
    router = RouterStatus(url="http://127.0.0.1:8080", is_ready=True)
    services = tuple(
        ServiceStatus(key=key, model="chat", desired=1, revision="r")
        for key in ("default/chat", "default/next")
    )
    lines = _summary(FleetStatus(pid=1, router=router, services=services)).splitlines()
    assert lines[1:] == ["  chat  0/1 replicas", "  chat (next)  0/1 replicas"]
