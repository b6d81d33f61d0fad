"""Observation of the fleet: gauges, ejections, memory.

Owns reading /metrics and /proc. Must not know the limits.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from .fleet import Fleet
from .wire import ask

ROUTER_GAUGES = ("inflight_requests", "queued_tokens", "queued_requests", "inflight_body_bytes")
ENGINE_GAUGES = ("num_requests_running", "num_requests_waiting")
ANSWER_S = 60.0
"""Longest wait for a process's metrics. That they are late while it is attacked is no finding; clients' waits are."""
Samples = dict[str, float]
"""Maps a series, with its labels, to its value."""


def parse(text: str) -> Samples:
    samples = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            samples[series] = float(value)
    return samples


def total(samples: Samples, names: Iterable[str]) -> dict[str, float]:
    """Return the sum over all labels of each metric that exists."""
    found: dict[str, float] = {}
    for series, value in samples.items():
        name = series.partition("{")[0]
        if name in names:
            found[name] = found.get(name, 0.0) + value
    return found


async def router_samples(fleet: Fleet) -> Samples:
    return parse((await ask(fleet.admin_port, "/metrics", timeout_s=ANSWER_S)).body.decode())


async def ejections(fleet: Fleet) -> float:
    return sum(total(await router_samples(fleet), ("argosy_router_ejections_total",)).values())


async def gauges(fleet: Fleet) -> dict[str, float]:
    """Return all gauges that must be zero when there are no requests, by process."""
    router = total(await router_samples(fleet), [f"argosy_router_{name}" for name in ROUTER_GAUGES])
    found = {f"router: {name}": value for name, value in router.items()}
    clients = total(await router_samples(fleet), ("argosy_router_client_connections",))
    found |= {f"router: {name}": value for name, value in clients.items()}
    for engine in fleet.engines:
        text = (await ask(engine.port, "/metrics", key="", timeout_s=ANSWER_S)).body.decode()
        own = total(parse(text), [f"vllm:{name}" for name in ENGINE_GAUGES])
        found |= {f"{engine.name}: {name}": value for name, value in own.items()}
    return found


def anonymous_bytes(pid: int) -> int:
    """Return the anonymous memory (not backed by files) of a process; 0 if it has exited."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return 0
