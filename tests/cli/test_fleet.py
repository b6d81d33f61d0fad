"""The local fleet with the real supervisor and router; the engines have no model."""

from __future__ import annotations

import json
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import openai
import pytest
from local_fleet import DEADLINE_S, FAKE_SUPERVISOR, Load, LocalFleet, descendants, kill, watched

from argosy.local import control
from argosy.local.control import FleetStatus
from processes import free_port, wait_until

pytestmark = pytest.mark.timeout(400)
UP = (
    "import signal, sys; from argosy.local import control; from argosy.main import main; "
    "signal.signal(signal.SIGINT, signal.default_int_handler); "  # a shell ignores it in the background
    f"control.SUPERVISOR = {FAKE_SUPERVISOR!r}; sys.exit(main())"
)
"""A program that runs a command with the fake supervisor."""


def names(status: FleetStatus) -> list[str]:
    return [replica.name for replica in status.services[0].replicas]


def test_a_fleet_from_up_to_down(own_fleet: LocalFleet, capfd: pytest.CaptureFixture[str]) -> None:
    own_fleet.manifest(replicas=2)
    assert own_fleet.start() == 0
    out = capfd.readouterr().out
    assert f"ready: {own_fleet.url}/v1\n  tiny  2/2 replicas\n" in out

    assert own_fleet.argosy("ps") == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[1:3]] == [
        ["tiny-0", "tiny", "Routable"],
        ["tiny-1", "tiny", "Routable"],
    ]
    assert lines[3].split()[:2] == ["router", "Ready"]
    assert lines[4].split()[0] == "batch"
    assert own_fleet.argosy("ps", "-o", "json") == 0
    shown = json.loads(capfd.readouterr().out)
    assert [replica["phase"] for replica in shown["services"][0]["replicas"]] == ["Routable", "Routable"]
    assert own_fleet.argosy("why", "tiny") == 0
    assert f"ready     {own_fleet.url}" in capfd.readouterr().out

    assert own_fleet.argosy("chat", "tiny", "hi") == 0
    assert capfd.readouterr().out == "hello \n"
    assert own_fleet.argosy("chat", "huge", "hi") == 1
    assert capfd.readouterr().err == "argosy chat: 404 the model `huge` does not exist; models: 'tiny'\n"

    with openai.OpenAI(base_url=f"{own_fleet.url}/v1", api_key="none") as client:
        line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}
        line["body"] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        file = client.files.create(file=("a.jsonl", json.dumps(line).encode()), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", "the batch", DEADLINE_S)
        results = client.files.content(client.batches.retrieve(batch.id).output_file_id or "").text
        assert json.loads(results)["response"]["body"]["choices"][0]["message"]["content"] == "hello"

    assert own_fleet.argosy("logs", "tiny-1") == 0
    assert "fake engine listens" in capfd.readouterr().out
    assert own_fleet.argosy("logs", "tiny-9") == 1
    assert "there are: batch, router, supervisor, tiny-0, tiny-1" in capfd.readouterr().err

    for path in (own_fleet.state.root, *own_fleet.state.root.rglob("*")):
        with suppress(FileNotFoundError):  # a file of the batch that goes once it has ended
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    assert own_fleet.up("--port", str(own_fleet.port % 60000 + 1024)) == 2
    assert f"`{own_fleet.named('down')}` first to change the port" in capfd.readouterr().err

    with watched([status_pid := own_fleet.status().pid, *descendants(status_pid)]) as survivors:
        assert own_fleet.argosy("down") == 0
        assert capfd.readouterr().out.endswith("the fleet is stopped\n")
        assert survivors() == []
    assert own_fleet.argosy("down") == 0
    assert "no fleet is running" in capfd.readouterr().out
    assert own_fleet.argosy("ps") == 1
    assert f"start one with `{own_fleet.named('up')} -f FILE`" in capfd.readouterr().err


def test_editing_and_applying_scales_and_rolls_without_a_failed_request(fleet: LocalFleet) -> None:
    fleet.manifest(replicas=1)
    assert fleet.start() == 0
    with Load(fleet) as load:
        fleet.manifest(replicas=3)
        assert fleet.up() == 0
        assert names(fleet.status()) == [fleet.replica_name(0), fleet.replica_name(1), fleet.replica_name(2)]
        fleet.manifest(
            replicas=2, engine={"maxNumSeqs": 4, "env": [{"name": "FAKE_ANSWER", "value": "changed"}]}
        )
        assert fleet.up() == 0
        assert names(fleet.status()) == [fleet.replica_name(3), fleet.replica_name(4)]
    assert load.failures == []
    assert {fleet.replica_name(0), fleet.replica_name(3)} <= load.replicas
    assert set(load.answers) == {"hello ".strip(), "changed"}


def test_edits_that_concern_no_process_restart_nothing(fleet: LocalFleet) -> None:
    fleet.manifest(replicas=1)
    assert fleet.start() == 0
    (before,) = fleet.replicas()
    fleet.manifest(
        replicas=1, router={"policy": "round-robin"}, rollout={"maxSurge": 2}, resources={"cpu": "1"}
    )
    assert fleet.up() == 0
    assert "round-robin" in fleet.state.fleet_file.read_text()
    fleet.manifest(
        replicas=1, model={"source": "builtin://tiny", "servedName": "org/Tiny", "aliases": ["tiny-chat"]}
    )
    assert fleet.up() == 0
    assert "org/Tiny" in fleet.state.fleet_file.read_text()
    fleet.manifest(replicas=3, engine={"threads": 1}, paused=True)
    assert fleet.up() == 0
    assert fleet.status().services[0].reason == "paused"
    (after,) = fleet.replicas()
    assert (before.name, before.pid) == (after.name, after.pid)

    fleet.manifest(replicas=0)
    assert fleet.up() == 0
    assert fleet.replicas() == ()


def test_a_killed_replica_is_restarted_and_ps_says_why(
    fleet: LocalFleet, capfd: pytest.CaptureFixture[str]
) -> None:
    fleet.manifest(replicas=2)
    assert fleet.start() == 0
    victim = fleet.replicas()[0]
    with Load(fleet, workers=1) as load, fleet.following() as first:
        kill(victim.pid)
        status = first(lambda status: status.services[0].replicas[0].phase == "BackOff")
        assert status.services[0].replicas[0].reason.startswith("killed by SIGKILL; next start after")
        status = first(lambda status: status.is_settled and status.services[0].replicas[0].restarts == 1)
    assert status.services[0].replicas[0].name == victim.name
    assert status.services[0].replicas[0].pid != victim.pid
    assert status.services[0].replicas[0].reason == "started again after this end: killed by SIGKILL"
    assert len(load.failures) <= 1  # at most the one that was under way on it


def test_a_killed_router_is_restarted(fleet: LocalFleet, capfd: pytest.CaptureFixture[str]) -> None:
    fleet.manifest()
    assert fleet.start() == 0
    before = fleet.status().router
    with fleet.following() as first:
        kill(before.pid)
        first(lambda status: not status.router.is_ready)
        status = first(lambda status: status.is_settled)
    assert status.router.restarts == before.restarts + 1
    assert fleet.argosy("chat", fleet.service, "hi") == 0
    assert [replica.restarts for replica in fleet.replicas()] == [0]


def test_nothing_outlives_a_killed_supervisor(own_fleet: LocalFleet) -> None:
    own_fleet.manifest(replicas=2)
    assert own_fleet.start() == 0
    supervisor = own_fleet.status().pid
    below = descendants(supervisor)
    assert len(below) >= 3
    with watched(below) as survivors:
        kill(supervisor)
        assert survivors() == []
    assert own_fleet.argosy("down") == 0
    assert own_fleet.start() == 0  # what it left behind stops nobody


@pytest.mark.skipif(sys.platform != "linux", reason="Linux chooses by oom_score_adj")
def test_when_memory_runs_out_a_replica_that_is_not_ready_is_killed_before_one_that_serves(
    fleet: LocalFleet,
) -> None:
    own = int(Path("/proc/self/oom_score_adj").read_text())
    fleet.manifest(replicas=1)
    assert fleet.start() == 0
    fleet.manifest(replicas=2, engine={"env": [{"name": "FAKE_LOADS", "value": "1"}]})
    fleet.up("--timeout", "1")
    replicas = fleet.wait_for(
        lambda status: any(replica.reason == "loading" for replica in status.services[0].replicas)
    )
    scores = {
        replica.phase: int(Path(f"/proc/{replica.pid}/oom_score_adj").read_text())
        for replica in replicas.services[0].replicas
    }
    assert scores == {"Routable": own, "Starting": min(1000, own + 500)}


def test_without_a_surge_an_edit_replaces_the_only_replica_in_place(
    own_fleet: LocalFleet, capfd: pytest.CaptureFixture[str]
) -> None:
    own_fleet.manifest(replicas=1, rollout={"maxSurge": 0})
    assert own_fleet.start() == 0
    own_fleet.manifest(
        replicas=1, rollout={"maxSurge": 0}, engine={"env": [{"name": "FAKE_ANSWER", "value": "changed"}]}
    )
    assert own_fleet.up() == 0
    assert names(own_fleet.status()) == ["tiny-1"]
    capfd.readouterr()
    for name in ((), ("tiny",)):
        assert own_fleet.argosy("logs", *name) == 0
        captured = capfd.readouterr()
        assert "tiny-0  " not in captured.out
        assert captured.err == "left out: replicas that are gone, tiny-0\n"
    assert own_fleet.argosy("logs", "tiny-0") == 0
    assert "fake engine listens" in capfd.readouterr().out


def test_a_replica_that_cannot_start_is_shown_with_the_end_of_its_log(
    fleet: LocalFleet, capfd: pytest.CaptureFixture[str]
) -> None:
    fleet.manifest(replicas=1)
    assert fleet.start() == 0
    fleet.manifest(replicas=1, engine={"env": [{"name": "FAKE_EXIT", "value": "1"}]})
    with Load(fleet, workers=1) as load:
        assert fleet.up() == 1
    captured = capfd.readouterr()
    assert "fake engine: told to fail" in captured.err
    last = captured.err.splitlines()[-1]
    assert last.startswith(
        f"argosy up: {fleet.replica_name(1)} does not start: exited with code 1 while starting"
    )
    assert f"the fleet keeps trying: `{fleet.named('up')}` with a corrected manifest changes it" in last
    assert load.failures == []  # the old replica still serves
    replicas = {replica.name: replica for replica in fleet.replicas()}
    assert replicas[fleet.replica_name(0)].phase == "Routable"
    capfd.readouterr()
    assert fleet.argosy("why", fleet.service, "-o", "json") == 0, "the old replica serves"
    shown = json.loads(capfd.readouterr().out)
    told = (shown["service"], shown["links"][-1]["state"], shown["serving"])
    assert told == (f"default/{fleet.service}", "failed", 1)
    assert fleet.argosy("why", "huge") == 1
    assert f"the fleet has no service 'huge'; there are: {fleet.service}" in capfd.readouterr().err

    fleet.manifest(replicas=1, engine={"env": [{"name": "FAKE_ANSWER", "value": "mended"}]})
    assert fleet.up() == 0
    assert [replica.name for replica in fleet.replicas()] == [fleet.replica_name(2)]


def test_a_model_that_an_engine_refuses_is_wrong_usage_and_names_the_field(
    fleet: LocalFleet, capfd: pytest.CaptureFixture[str]
) -> None:
    env = [
        {"name": "FAKE_EXIT", "value": "2"},
        {"name": "FAKE_TEXT", "value": "argosy serve: --max-model-len 9 is too much"},
    ]
    fleet.manifest(replicas=1, engine={"env": env})
    assert fleet.start() == 2
    last = capfd.readouterr().err.splitlines()[-1]
    assert (
        "exited with code 2 while starting (in the manifest --max-model-len is spec.engine.maxModelLen)"
        in last
    )
    assert last.endswith(f"`{fleet.named('down')}` stops it")


def test_an_engine_that_refuses_its_arguments_is_started_again_by_up_only(
    fleet: LocalFleet, capfd: pytest.CaptureFixture[str]
) -> None:
    log = fleet.state.log_file(fleet.replica_name(0))
    fleet.manifest(engine={"env": [{"name": "FAKE_EXIT", "value": "2"}]})
    for attempt in (1, 2):
        assert (fleet.start() if attempt == 1 else fleet.up()) == 2
        last = capfd.readouterr().err.splitlines()[-1]
        assert f"; the fleet does not try it again: `{fleet.named('up')}` with" in last
        (replica,) = fleet.replicas()
        assert (replica.phase, replica.restarts) == ("BackOff", attempt - 1)
        assert replica.reason == "exited with code 2 while starting; the next `argosy up` starts it again"
        assert log.read_text().count("arguments [") == attempt

    fleet.manifest()
    assert fleet.up() == 0
    assert [replica.name for replica in fleet.replicas()] == [fleet.replica_name(1)]


def test_a_replica_that_dies_soon_after_it_was_ready_does_not_take_an_update_on(
    own_fleet: LocalFleet, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_MIN_READY_S", "2")
    own_fleet.manifest(replicas=2)
    assert own_fleet.start() == 0
    with Load(own_fleet, workers=1):
        own_fleet.manifest(replicas=2, engine={"env": [{"name": "FAKE_LIFE_S", "value": "0.6"}]})
        own_fleet.up()
        status = own_fleet.wait_for(
            lambda status: any(replica.restarts >= 3 for replica in status.services[0].replicas)
        )
    replicas = {replica.name: replica for replica in status.services[0].replicas}
    old = [own_fleet.replica_name(number) for number in (0, 1)]
    assert set(old) <= replicas.keys()
    assert [replicas[name].phase for name in old] == ["Routable", "Routable"]
    assert "exited with code 3" in capfd.readouterr().err


def test_a_broken_edit_replaces_one_replica_whatever_may_be_unavailable(
    fleet: LocalFleet, capfd: pytest.CaptureFixture[str]
) -> None:
    rollout = {"maxSurge": 0, "maxUnavailable": 3}
    fleet.manifest(replicas=3, rollout=rollout)
    assert fleet.start() == 0
    fleet.manifest(replicas=3, rollout=rollout, engine={"env": [{"name": "FAKE_EXIT", "value": "1"}]})
    with Load(fleet, workers=1) as load:
        assert fleet.up() == 1
    assert load.failures == []
    status = fleet.status()
    assert names(status) == [fleet.replica_name(number) for number in (1, 2, 3)]
    assert [replica.phase for replica in status.services[0].replicas[:2]] == ["Routable", "Routable"]
    capfd.readouterr()
    assert fleet.argosy("ps") == 0
    assert capfd.readouterr().out.splitlines()[-1] == (
        f"default/{fleet.service}: RolloutHalted: {fleet.replica_name(3)} does not become ready (exited with code 1 "
        "while starting); no further replica is replaced until it is ready, or the manifest's model source, engine "
        "settings or GPUs change"
    )

    fleet.manifest(replicas=3, rollout=rollout, engine={"env": [{"name": "FAKE_ANSWER", "value": "mended"}]})
    assert fleet.up() == 0
    assert {replica.phase for replica in fleet.replicas()} == {"Routable"}


def test_a_bad_manifest_changes_nothing(own_fleet: LocalFleet, capfd: pytest.CaptureFixture[str]) -> None:
    own_fleet.manifest(replica=2)
    assert own_fleet.start() == 2
    assert "did you mean 'replicas'?" in capfd.readouterr().err
    assert not own_fleet.state.root.exists()


def test_a_taken_port_is_refused_with_the_remedy(
    own_fleet: LocalFleet, capfd: pytest.CaptureFixture[str]
) -> None:
    own_fleet.manifest()
    with socket.create_server(("127.0.0.1", own_fleet.port)):
        assert own_fleet.start() == 1
    assert (
        f"port {own_fleet.port} of 127.0.0.1 is taken; choose another with --port" in capfd.readouterr().err
    )


@contextmanager
def foreground(fleet: LocalFleet) -> Iterator[subprocess.Popen[str]]:
    """`argosy up` without --detach, once everything is ready."""
    fleet.manifest()
    command = ["up", "-f", str(fleet.file), "--port", str(fleet.port), "--state-dir", str(fleet.state.root)]
    with subprocess.Popen(
        [sys.executable, "-P", "-c", UP, *command], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("Ctrl-C"):
                break
        yield process


def test_ctrl_c_ends_a_fleet_in_the_foreground(own_fleet: LocalFleet) -> None:
    with foreground(own_fleet) as process:
        supervisor = own_fleet.status().pid
        with watched([supervisor, *descendants(supervisor)]) as survivors:
            process.send_signal(signal.SIGINT)
            assert survivors() == []
        assert process.stdout is not None
        assert "the fleet is stopped" in process.stdout.read()
        assert process.wait() == 130


def test_a_fleet_in_the_foreground_ends_with_its_command(own_fleet: LocalFleet) -> None:
    with foreground(own_fleet) as process:
        supervisor = own_fleet.status().pid
        with watched([supervisor, *descendants(supervisor)]) as survivors:
            process.kill()
            assert survivors() == []


def check_refusal_of_another_key(
    fleet: LocalFleet, present: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a fleet with one replica."""
    monkeypatch.setenv("ARGOSY_ROUTER_API_KEY", "changed")
    fleet.manifest(replicas=2)
    capfd.readouterr()
    assert fleet.up() == 2
    error = capfd.readouterr().err
    assert f"requires {present} of clients" in error
    assert f"`{fleet.named('down')}` first to change the key, or unset ARGOSY_ROUTER_API_KEY" in error
    assert "changed" not in error
    assert len(fleet.replicas()) == 1
    monkeypatch.delenv("ARGOSY_ROUTER_API_KEY")  # which asks for no change
    assert fleet.up() == 0
    assert len(fleet.replicas()) == 2


def test_a_key_guards_the_router_and_a_long_path_is_no_obstacle(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / ("long" * 30)
    root.mkdir()
    guarded = LocalFleet(root)
    guarded.manifest()
    monkeypatch.setenv("ARGOSY_ROUTER_API_KEY", "sesame")
    try:
        assert guarded.start() == 0
        assert guarded.up() == 0  # the same key
        assert guarded.argosy("chat", "tiny", "hi") == 0
        monkeypatch.delenv("ARGOSY_ROUTER_API_KEY")
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        capfd.readouterr()
        assert guarded.argosy("chat", "tiny", "hi") == 1
        assert "pass --api-key KEY" in capfd.readouterr().err
        check_refusal_of_another_key(guarded, "another key", capfd, monkeypatch)
    finally:
        guarded.close()


def test_a_running_fleet_without_a_key_refuses_one(
    fleet: LocalFleet, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.manifest()
    monkeypatch.setenv("ARGOSY_ROUTER_API_KEY", "")
    assert fleet.start() == 0
    assert fleet.up() == 0  # the same key
    check_refusal_of_another_key(fleet, "no key", capfd, monkeypatch)


def test_keys_of_a_file_have_their_terms_and_follow_it(
    own_fleet: LocalFleet, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ARGOSY_ROUTER_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    own_fleet.manifest()
    keys = own_fleet.root / "keys"
    assert own_fleet.up("--port", str(own_fleet.port), "--api-keys-file", str(keys)) == 2
    assert f"{keys}: No such file or directory" in capfd.readouterr().err
    keys.write_text("sk-of-the-shop name=shop requests_per_minute=2\n")
    assert own_fleet.up("--port", str(own_fleet.port), "--api-keys-file", str(keys)) == 0

    def chat(key: str) -> int:
        return own_fleet.argosy("chat", "tiny", "hi", *(["--api-key", key] if key else []))

    assert [chat("") for _ in range(2)] == [1, 1]
    assert [chat("sk-of-the-shop") for _ in range(2)] == [0, 0]
    capfd.readouterr()
    assert chat("sk-of-the-shop") == 1
    assert "429" in capfd.readouterr().err

    with keys.open("a") as file:
        file.write("sk-new name=new\n")
    wait_until(lambda: chat("sk-new") == 0, "the router's next look at the file", DEADLINE_S)

    assert own_fleet.up("--api-keys-file", str(keys)) == 0
    assert own_fleet.up() == 0  # which asks for no change
    other = own_fleet.root / "other"
    other.touch()
    capfd.readouterr()
    assert own_fleet.up("--api-keys-file", str(other)) == 2
    assert f"the fleet already runs with the keys of {keys}, not those of {other}" in capfd.readouterr().err


def test_ps_tells_that_router_and_batch_were_started_again(
    fleet: LocalFleet, capfd: pytest.CaptureFixture[str]
) -> None:
    fleet.manifest()
    assert fleet.start() == 0
    status = fleet.wait_for(lambda status: status.batch is not None and status.batch.pid is not None)
    assert status.batch is not None
    for pid in (status.router.pid, status.batch.pid):
        assert pid is not None
        kill(pid)
    with fleet.following() as first:
        status = first(
            lambda now: bool(
                now.router.is_ready
                and now.router.restarts
                and now.batch
                and now.batch.restarts
                and now.batch.pid
            )
        )
    capfd.readouterr()
    assert fleet.argosy("ps") == 0
    rows = {line.split()[0]: line for line in capfd.readouterr().out.splitlines()}
    for name in ("router", "batch"):
        assert "started again after this end: killed by" in rows[name]


def test_a_second_up_waits_and_is_refused_another_port(
    own_fleet: LocalFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_fleet.manifest()
    own_fleet.state.create()
    command = ["up", "-f", str(own_fleet.file), "--detach", "--state-dir", str(own_fleet.state.root)]
    with own_fleet.state.changing(lambda: pytest.fail("nobody else holds the lock")):
        second = subprocess.Popen(
            [sys.executable, "-P", "-c", UP, *command, "--port", str(free_port())],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert second.stderr is not None
        assert second.stderr.readline().startswith("another `argosy up` starts or changes this fleet")
        monkeypatch.setattr(control, "SUPERVISOR", FAKE_SUPERVISOR)
        control.start_supervisor(own_fleet.state, ("--port", str(own_fleet.port)), {})
    with second:
        first = f"`{own_fleet.named('down')}` first"
        assert f"the fleet already listens on {own_fleet.url}; {first}" in second.stderr.read()
    assert second.returncode == 2
    assert own_fleet.status().services == ()


def test_a_service_without_replicas_is_listed(fleet: LocalFleet, capfd: pytest.CaptureFixture[str]) -> None:
    fleet.manifest(replicas=0)
    assert fleet.start() == 0
    capfd.readouterr()
    assert fleet.argosy("ps") == 0
    rows = [line.split(maxsplit=4) for line in capfd.readouterr().out.splitlines()]
    revision = fleet.status().services[0].revision
    reason = f"default/{fleet.service}: spec.replicas is 0"
    assert rows[1] == ["-", fleet.service, "NoReplica", revision, reason]
    for name in (fleet.service, f"default/{fleet.service}"):
        assert fleet.argosy("logs", name) == 1
        error = capfd.readouterr().err
        assert error == f"argosy logs: default/{fleet.service} has no replica: its spec.replicas is 0\n"
    assert fleet.argosy("logs", "router") == 0
    capfd.readouterr()
    assert fleet.argosy("logs", "huge") == 1
    assert "no log of huge in " in capfd.readouterr().err

    fleet.manifest(replicas=1)
    assert fleet.up() == 0
    fleet.manifest(replicas=0)
    assert fleet.up() == 0
    capfd.readouterr()
    assert fleet.argosy("logs", fleet.service) == 0
    captured = capfd.readouterr()
    assert "fake engine listens" in captured.out
    assert captured.err == (
        f"default/{fleet.service} has no replica: its spec.replicas is 0; these are logs of earlier ones\n"
    )
