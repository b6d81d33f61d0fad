"""Two routers behind one Service: a planned end costs no request, a death only those in flight."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from cluster.shell import poll
from conftest import ROUTER_KEY, SYSTEM, TENANT, Stack
from test_whole_path import NAME, load, manifest, wait_ready

ROUTER = "app.kubernetes.io/component=router"
TIMEOUT_S = 60.0
"""The clients' timeout: how long a request lasts that is neither answered nor refused."""
HANG_S = 40
"""A request that takes longer hung. On a machine that is busy otherwise, an answer may take seconds."""


def routers(stack: Stack) -> list[dict[str, Any]]:
    pods = stack.cluster.kubectl.pods(SYSTEM, ROUTER)
    return [pod for pod in pods if not pod["metadata"].get("deletionTimestamp")]


def ready_routers(stack: Stack) -> list[dict[str, Any]]:
    return [
        pod
        for pod in routers(stack)
        if any(
            each["type"] == "Ready" and each["status"] == "True"
            for each in pod["status"].get("conditions", ())
        )
    ]


def wait_for_both(stack: Stack) -> None:
    poll("two ready routers", lambda: len(ready_routers(stack)) == 2 or None, 180, interval=0.5)


@pytest.fixture(scope="module")
def service(stack: Stack) -> Iterator[None]:
    stack.cluster.kubectl.apply(manifest())
    wait_ready(stack, "the service to be Ready")
    wait_for_both(stack)
    yield
    stack.cluster.kubectl("delete", "isvc", NAME, "-n", TENANT)


@pytest.mark.core
@pytest.mark.usefixtures("service")
def test_no_two_routers_are_disrupted_together(stack: Stack) -> None:
    budget = stack.cluster.kubectl.poll(
        "a budget that counts both",
        ("pdb", "argosy-router", "-n", SYSTEM),
        lambda found: found.get("status", {}).get("currentHealthy") == 2,
    )
    assert budget["status"]["disruptionsAllowed"] == 1


@pytest.mark.core
@pytest.mark.usefixtures("service")
def test_the_planned_end_of_a_router_costs_no_request(stack: Stack) -> None:
    leaving = ready_routers(stack)[0]["metadata"]["name"]
    with load(stack):
        stack.cluster.kubectl("delete", "pod", leaving, "-n", SYSTEM, "--timeout=120s")
        wait_for_both(stack)


def restarts(stack: Stack) -> int:
    statuses = [each for pod in routers(stack) for each in pod["status"].get("containerStatuses", ())]
    return sum(each["restartCount"] for each in statuses)


def processes(stack: Stack) -> set[tuple[str, int]]:
    """The router pods, each with the number of its restarts."""
    return {
        (pod["metadata"]["uid"], status["restartCount"])
        for pod in routers(stack)
        for status in pod["status"].get("containerStatuses", ())
    }


def delete_router(stack: Stack) -> None:
    """The pod's end without a grace period: its address goes, too."""
    name = ready_routers(stack)[0]["metadata"]["name"]
    stack.cluster.kubectl("delete", "pod", name, "-n", SYSTEM, "--grace-period=0", "--force")


def kill_router(stack: Stack) -> None:
    """SIGKILL to a router's process, from outside of its container."""
    if stack.cluster.external:
        delete_router(stack)
        return
    pod = ready_routers(stack)[0]["metadata"]
    before = restarts(stack)
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            is_router = b"--fleet-configmap" in (folder / "cmdline").read_bytes()
            if is_router and pod["uid"] in (folder / "cgroup").read_text():
                os.kill(int(folder.name), signal.SIGKILL)
                break
        except OSError:  # a process that has just ended
            continue
    poll("the killed router to be started again", lambda: restarts(stack) > before or None, 120, interval=0.2)


@pytest.mark.usefixtures("service")
@pytest.mark.parametrize("end", [kill_router, delete_router])
def test_a_router_that_dies_makes_no_client_wait(stack: Stack, end: Callable[[Stack], None]) -> None:
    """Its requests end with it, at once: clients see their connection close, retry, and are answered."""
    stop, lock = threading.Event(), threading.Lock()
    took: list[float] = []
    failures: list[str] = []

    def ask(number: int) -> None:
        """One client, which asks again until it is answered."""
        with openai.OpenAI(
            base_url=f"{stack.url}/v1", api_key=ROUTER_KEY, max_retries=0, timeout=TIMEOUT_S
        ) as client:
            while not stop.is_set():
                began = time.monotonic()
                while True:
                    try:
                        client.chat.completions.create(
                            model=NAME,
                            messages=[{"role": "user", "content": f"Hello from {number}"}],
                            max_tokens=32,
                        )
                        break
                    except openai.OpenAIError as error:
                        with lock:
                            failures.append(f"{time.monotonic() - began:.2f} s: {error.__cause__ or error}")
                        if time.monotonic() - began > TIMEOUT_S:
                            break
                        time.sleep(0.2)
                with lock:
                    took.append(time.monotonic() - began)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(2):
            poll("requests", lambda: len(took) > 50 or None, 60)
            before = processes(stack)
            end(stack)
            wait_for_both(stack)
            assert processes(stack) != before, "no router ended"
            took_before, took[:] = max(took), []
            assert took_before < HANG_S, failures
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    print(f"{len(failures)} attempts failed: {failures[:20]}; longest until an answer {took_before:.2f} s")
    assert max(took) < HANG_S, failures
