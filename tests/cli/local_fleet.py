"""A local fleet as a test holds it: its manifest, its commands, its events."""

from __future__ import annotations

import os
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import yaml

from argosy.local import control
from argosy.local.control import ControlClient, FleetStatus, ReplicaStatus, StateDir, Stop, Watch, connect
from argosy.main import main
from processes import free_port

FAKE_SUPERVISOR = (sys.executable, str(Path(__file__).with_name("fake_supervisor.py")))
QUICK_SUPERVISOR = (sys.executable, str(Path(__file__).with_name("quick_supervisor.py")))
DEADLINE_S = 120.0
"""For a machine that has other work; nothing waits this long when all is well."""


class LocalFleet:
    """One state directory and port. `argosy` runs in this process, the supervisor in its own."""

    def __init__(self, root: Path, supervisor: tuple[str, ...] = FAKE_SUPERVISOR) -> None:
        self.root = root
        self.state = StateDir(root / "state")
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.supervisor = supervisor
        self.file = root / "fleet.yaml"
        self.service = "tiny"
        """The name of the service in the manifest, and of its model."""

    def manifest(self, **spec: object) -> None:
        """Writes the file; `spec` adds to the service's spec."""
        document = {
            "apiVersion": "inference.argosy.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": self.service},
            "spec": {"model": {"source": "builtin://tiny"}, **spec},
        }
        self.file.write_text(yaml.safe_dump(document), encoding="utf-8")

    def replica_name(self, number: int) -> str:
        """The name of one of the service's replicas, which are counted from its first."""
        return f"{self.service}-{number}"

    def named(self, command: str) -> str:
        """A command as messages name it."""
        return f"argosy {command} --state-dir {shlex.quote(str(self.state.root))}"

    def argosy(self, command: str, *arguments: str) -> int:
        program, control.SUPERVISOR = control.SUPERVISOR, self.supervisor
        try:
            return main([command, *arguments, "--state-dir", str(self.state.root)])
        finally:
            control.SUPERVISOR = program

    def up(self, *arguments: str) -> int:
        return self.argosy("up", "-f", str(self.file), "--detach", "--timeout", str(DEADLINE_S), *arguments)

    def start(self) -> int:
        return self.up("--port", str(self.port))

    def status(self) -> FleetStatus:
        return self.wait_for(lambda _: True)

    def replicas(self) -> tuple[ReplicaStatus, ...]:
        return self.status().services[0].replicas

    def wait_for(self, predicate: Callable[[FleetStatus], bool]) -> FleetStatus:
        """The first status that fulfils `predicate`."""
        with self.following() as first:
            return first(predicate)

    @contextmanager
    def following(self) -> Iterator[Callable[[Callable[[FleetStatus], bool]], FleetStatus]]:
        """Yields `wait_for` over every status since now: what lasts for a moment only is seen as well."""
        watch = ControlClient(connect(self.state), Watch())
        try:
            status = watch.next_status(DEADLINE_S)

            def first(predicate: Callable[[FleetStatus], bool]) -> FleetStatus:
                nonlocal status
                deadline = time.monotonic() + DEADLINE_S
                while status is not None:
                    if predicate(status):
                        return status
                    status = watch.next_status(deadline - time.monotonic())
                raise AssertionError("the fleet ended")

            yield first
        finally:
            watch.close()

    def close(self) -> None:
        """Ends what a test left running."""
        connection = self.state.connect()
        if connection is not None:
            watch = ControlClient(connection, Stop(grace_s=0.0))
            while watch.next_status(DEADLINE_S) is not None:
                pass
            watch.close()


class Load:
    """Chat requests one after the other, from several threads, with their outcomes."""

    def __init__(self, fleet: LocalFleet, workers: int = 3) -> None:
        self.failures: list[str] = []
        self.answers: list[str] = []
        self.replicas: set[str] = set()
        self._fleet = fleet
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(index,)) for index in range(workers)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _work(self, index: int) -> None:
        with httpx.Client(timeout=DEADLINE_S) as http:
            turn = 0
            while not self._stop.is_set():
                turn += 1
                try:
                    self._ask(http, f"worker {index}, turn {turn}", stream=turn % 2 == 0)
                except httpx.HTTPError as error:
                    self.failures.append(repr(error))

    def _ask(self, http: httpx.Client, prompt: str, *, stream: bool) -> None:
        body = {
            "model": self._fleet.service,
            "messages": [{"role": "user", "content": prompt}],
            "stream": stream,
            "max_tokens": 8,
        }
        answer = http.post(f"{self._fleet.url}/v1/chat/completions", json=body)
        is_whole = "[DONE]" in answer.text and '"error"' not in answer.text if stream else True
        if answer.status_code != 200 or not is_whole:
            self.failures.append(f"{answer.status_code} {answer.text[-300:]}")
            return
        self.replicas.add(answer.headers["x-argosy-replica"])
        if not stream:
            self.answers.append(answer.json()["choices"][0]["message"]["content"])


@contextmanager
def watched(pids: list[int]) -> Iterator[Callable[[], list[int]]]:
    """Yields a function that waits for the end of these processes and returns those that did not end."""
    descriptors = {os.pidfd_open(pid): pid for pid in pids}

    def survivors() -> list[int]:
        deadline = time.monotonic() + DEADLINE_S
        waiting = dict(descriptors)
        while waiting and time.monotonic() < deadline:
            ended, _, _ = select.select(list(waiting), [], [], deadline - time.monotonic())
            for descriptor in ended:
                del waiting[descriptor]
        return list(waiting.values())

    try:
        yield survivors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def descendants(pid: int) -> list[int]:
    """Every process below `pid`."""
    done = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True)
    parents = {int(child): int(parent) for child, parent in map(str.split, done.stdout.splitlines())}
    found = [pid]
    for ancestor in found:
        found += [child for child, parent in parents.items() if parent == ancestor]
    return found[1:]


def kill(pid: int | None) -> None:
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
