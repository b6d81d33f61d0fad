"""Measures where the time goes from `kubectl apply` to the first token through the router, by phase.

`make start-phases` (as root) brings up the cluster of the end-to-end tests, installs the chart and starts RUNS
services, one after another, each from an image that is on the node. Every time is this machine's clock, when the event
reached a watch, or the start of the engine's process as the kernel has it: off by milliseconds, not by the whole
seconds of Kubernetes' own time stamps.

    ours         apply until the operator has created the Deployment
    Kubernetes   until the engine's process runs: ReplicaSet, scheduler, kubelet, containerd
    engine       until it answers /ready: Python, torch, the model, warm-up
    ours         until Kubernetes' probe has seen it, the router has connected, and the first token has come
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import ssl
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import aiohttp

from chaos.api import Api
from conftest import ROUTER_KEY, TENANT, Stack
from test_chart_rights import named

RUNS: Final = int(os.environ.get("START_PHASES_RUNS", "5"))
ASK_EVERY_S: Final = 0.02
"""Seconds between two questions of this measurement, to engine and router."""
DEADLINE_S: Final = 300
PHASES: Final = (
    ("accepted", "the API server has accepted the resource", "ours"),
    ("deployment", "the operator has created the Deployment", "ours"),
    ("pod", "its controllers have created the pod", "Kubernetes"),
    ("scheduled", "the pod has a node", "Kubernetes"),
    ("process", "the container's process runs", "Kubernetes"),
    ("engine_ready", "the engine answers /ready", "engine"),
    ("containers_ready", "Kubernetes has noticed (startup probe)", "ours"),
    ("first_token", "the router has connected, and the client has the first token", "ours"),
)
"""In their order, and whose time it is."""
AFTERWARDS: Final = (
    ("routable", "the pod's readiness gate is open (before it, if negative)"),
    ("ready", "the resource is Ready"),
)


class Marks:
    """When what happened first, in seconds of the monotonic clock."""

    def __init__(self) -> None:
        self.at: dict[str, float] = {}
        self._changed = asyncio.Condition()

    async def note(self, name: str, when: float | None = None) -> None:
        if name not in self.at:
            self.at[name] = time.monotonic() if when is None else when
            async with self._changed:
                self._changed.notify_all()

    async def wait(self, name: str) -> float:
        async with self._changed:
            await self._changed.wait_for(lambda: name in self.at)
        return self.at[name]


def test_phases_of_a_start(stack: Stack) -> None:
    runs = [asyncio.run(_measure(stack, f"start-{number}")) for number in range(RUNS)]
    print(f"\n{_report(runs, stack)}")
    for times in runs:
        assert times["deployment"] < times["process"] < times["engine_ready"] < times["first_token"]
        assert times["first_token"] == max(times[name] for name, _, _ in PHASES)


async def _measure(stack: Stack, name: str) -> dict[str, float]:
    """Seconds since the apply of one service, by phase; the service is deleted again."""
    settings = stack.cluster.settings
    context = ssl.create_default_context(cafile=str(settings.pki / "ca.crt"))
    context.load_cert_chain(settings.pki / "admin.crt", settings.pki / "admin.key")
    server = stack.cluster.kubectl("config", "view", "-o", "jsonpath={.clusters[0].cluster.server}").stdout
    marks = Marks()
    async with Api(server, context) as api, aiohttp.ClientSession() as session:
        watches = [
            asyncio.create_task(_watch_services(api, name, marks)),
            asyncio.create_task(_watch_deployments(api, name, marks)),
            asyncio.create_task(_watch_pods(api, name, marks, session)),
        ]
        await asyncio.sleep(1)  # what is watched already came before
        resource = named(name)
        await marks.note("apply")
        await api.create("inferenceservices", TENANT, resource)
        await marks.note("accepted")
        try:
            async with asyncio.timeout(DEADLINE_S):
                await _first_token(stack.url, name, session, marks)
                for last, _ in AFTERWARDS:
                    await marks.wait(last)
        finally:
            await api.delete("inferenceservices", TENANT, name)
            for task in watches:
                task.cancel()
            await asyncio.gather(*watches, return_exceptions=True)
        while await api.list("pods", TENANT, f"inference.argosy.dev/service={name}"):
            await asyncio.sleep(0.5)
    began = marks.at["apply"]
    return {key: when - began for key, when in marks.at.items()}


async def _watch_services(api: Api, name: str, marks: Marks) -> None:
    async for _, obj in api.watch("inferenceservices", TENANT):
        if obj["metadata"]["name"] == name and _has(obj, "Ready"):
            await marks.note("ready")


async def _watch_deployments(api: Api, name: str, marks: Marks) -> None:
    async for _, obj in api.watch("deployments", TENANT):
        if obj["metadata"]["name"] == f"{name}-engine":
            await marks.note("deployment")


async def _watch_pods(api: Api, name: str, marks: Marks, session: aiohttp.ClientSession) -> None:
    async with asyncio.TaskGroup() as tasks:
        async for _, obj in api.watch("pods", TENANT):
            if obj["metadata"].get("labels", {}).get("inference.argosy.dev/service") != name:
                continue
            if "pod" not in marks.at:
                tasks.create_task(_find_process(obj["metadata"]["name"], marks))
            await marks.note("pod")
            if obj["spec"].get("nodeName"):
                await marks.note("scheduled")
            if obj["status"].get("podIP") and "address" not in marks.at:
                await marks.note("address")
                tasks.create_task(_ask_engine(obj["status"]["podIP"], marks, session))
            if _has(obj, "ContainersReady"):
                await marks.note("containers_ready")
            if _has(obj, "inference.argosy.dev/routable"):
                await marks.note("routable")


def _has(obj: Mapping[str, Any], condition: str) -> bool:
    found = obj.get("status", {}).get("conditions", ())
    return any(each["type"] == condition and each["status"] == "True" for each in found)


async def _find_process(pod: str, marks: Marks) -> None:
    """Find the first process of the pod's container, which is one of this machine, and when it started."""
    wanted = f"POD_NAME={pod}".encode()
    while True:
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and (started := _started(folder, wanted)) is not None:
                await marks.note("process", started)
                return
        await asyncio.sleep(5 * ASK_EVERY_S)


def _started(folder: Path, variable: bytes) -> float | None:
    """When a process with this variable in its environment started; None if it has none, or is gone."""
    try:
        if variable not in (folder / "environ").read_bytes().split(b"\0"):
            return None
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return since_boot - time.clock_gettime(time.CLOCK_BOOTTIME) + time.monotonic()


async def _ask_engine(address: str, marks: Marks, session: aiohttp.ClientSession) -> None:
    timeout = aiohttp.ClientTimeout(total=1)
    while "engine_ready" not in marks.at:
        try:
            async with session.get(f"http://{address}:8000/ready", timeout=timeout) as response:
                if response.status == 200:
                    await marks.note("engine_ready")
        except (aiohttp.ClientError, TimeoutError, OSError):
            pass
        await asyncio.sleep(ASK_EVERY_S)


async def _first_token(url: str, name: str, session: aiohttp.ClientSession, marks: Marks) -> None:
    """Ask for a completion until the router has a replica, and read the first event of the answer."""
    body = {"model": name, "prompt": "Hello!", "max_tokens": 4, "stream": True}
    headers = {"Authorization": f"Bearer {ROUTER_KEY}"}
    while True:
        async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
            if response.status == 200:
                await response.content.readuntil(b"\n\n")
                await marks.note("first_token")
                return
        await asyncio.sleep(ASK_EVERY_S)


def _report(runs: list[dict[str, float]], stack: Stack) -> str:
    """The table, in Markdown: medians and the range over all runs."""
    version = json.loads(stack.cluster.kubectl("version", "-o", "json").stdout)["serverVersion"]["gitVersion"]
    lines = [
        f"{len(runs)} starts, {_processor()}, {os.cpu_count()} CPUs, Kubernetes {version}, "
        f"Python {platform.python_version()}",
        "",
        "| until | whose | median s | from - to |",
        "|---|---|---|---|",
    ]
    before = "apply"
    shares: list[dict[str, float]] = [dict.fromkeys(("ours", "Kubernetes", "engine"), 0.0) for _ in runs]
    for name, meaning, whose in PHASES:
        lasted = [times[name] - times[before] for times in runs]
        for share, seconds in zip(shares, lasted, strict=True):
            share[whose] += seconds
        lines.append(f"| {meaning} | {whose} | {_row(lasted)} |")
        before = name
    lines.append(f"| **first token, from the apply** | | {_row([times['first_token'] for times in runs])} |")
    for whose, title in (("Kubernetes", "pod start"), ("engine", "engine start"), ("ours", "our overhead")):
        lines.append(f"| **{title}** | {whose} | {_row([share[whose] for share in shares])} |")
    for name, meaning in AFTERWARDS:
        lasted = [times[name] - times["first_token"] for times in runs]
        lines.append(f"| {meaning}, from the first token | | {_row(lasted)} |")
    return "\n".join(lines)


def _row(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} | {min(seconds):.2f} - {max(seconds):.2f}"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
