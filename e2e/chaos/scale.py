"""A large fleet on simulated nodes: how fast the operator reconciles, what it needs, and what it writes at rest.

    make scale                                         # 200 services of 5 replicas, ten minutes at rest
    make scale SCALE_SERVICES=20 SCALE_REST_S=30       # a sample
    make scale SCALE_ARGS='--steps 50,100,200,400,1000 --namespaces 50 --router' SCALE_REPLICAS=20 SCALE_REST_S=30
                                                       # grows until the control plane of this machine cannot follow
    make scale SCALE_ARGS='--steps 400,1000 --namespaces 50 --router --in-memory' SCALE_REPLICAS=20 SCALE_REST_S=30
                                                       # beyond that

The services of a step are created at once; then nothing happens; then one service after another is scaled. The
operator talks to the API server directly; its writes are counted by the API server's own audit log. With `--router` a
real router follows the fleet; its replicas are simulated, so it reaches none. With `--in-memory` operator and router
watch, instead of an API server, a Kubernetes in memory (`large_cluster.py`) that tells what a real one was seen to
tell: the time from there until the operator has acted is measured as well. Exit status: 0 all targets met by every
step that came up, 1 one was missed, or nothing could be measured.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from argosy_operator.names import DEPLOYMENTS, INFERENCE_SERVICES, Kind
from argosy_resource.engine_command import SERVICE_LABEL
from chaos.api import Object
from chaos.fault import Violation
from chaos.faults.load import create_many, edit_each, writes_at_rest
from chaos.plane import Plane, ending_cleanly
from chaos.rig import Rig, rehearsing, running
from chaos.router_process import Pauses, RouterProcess
from chaos.scale_figures import (
    Figures,
    api_requests,
    histogram_quantile,
    reconcile_buckets,
    samples,
    since,
)
from cluster.shell import ClusterError, say

P99_S = 0.2
LARGE_P99_S = 0.5
"""With more than `LARGE` replicas in all."""
MEMORY_MIB, LARGE_MEMORY_MIB = 256.0, 512.0
LARGE = 1000
HELD_S = 0.05
SATURATED = 10
"""Of what a reconcile may take, a request of the API server takes less than one part of so many: a reconcile makes
several of them, one after another."""
PODS_PER_NODE = 25
EDITS = 40


@dataclass(frozen=True)
class Measured:
    """Figures of one run."""

    services: int
    replicas: int
    converged_s: float
    """From the first creation to the last service's being Ready."""
    p50_s: float
    p99_s: float
    """Of all reconciles while the fleet came up."""
    edits: int
    edit_s: float
    """Mean time from an edit in the standing fleet to the service's having settled."""
    edit_p50_s: float
    edit_p99_s: float
    """Of all reconciles during the edits."""
    reconciles: float
    failed: float
    defects: float
    """Of the failed ones, those by a defect of the operator."""
    cpu_s: float
    """CPU of the operator while the fleet came up, its start left out."""
    request_s: float
    """Mean time that the API server took for a request of anybody while the fleet came up."""
    memory_mib: float
    """Most resident memory of the operator."""
    writes: int
    """Of the operator while the fleet came up."""
    writes_at_rest: int
    rest_s: float
    load_average: float
    """Of the machine at the end of the creation."""
    router_memory_mib: float = 0.0
    """Most resident memory of the real router; 0 without one."""
    pauses: Pauses | None = None
    """Of the real router while the fleet came up and was edited."""
    acted_p50_s: float | None = None
    acted_p99_s: float | None = None
    """Of the edits, from when a watch tells of one until the operator has changed the Deployment; in memory only."""

    @property
    def p99_limit_s(self) -> float:
        return LARGE_P99_S if self.services * self.replicas > LARGE else P99_S

    @property
    def memory_limit_mib(self) -> float:
        return LARGE_MEMORY_MIB if self.services * self.replicas > LARGE else MEMORY_MIB

    @property
    def is_saturated(self) -> bool:
        """Whether the API server, which may share this machine, was what reconciles waited for while all came up."""
        return self.request_s * SATURATED >= self.p99_limit_s

    def missed(self, *, judges_p99: bool = True) -> list[str]:
        """Targets that were missed. The p99 while all came up is not judged if it is that of a saturated API server."""
        found = []
        limit = self.p99_limit_s
        for what, value in (
            ("reconcile p99 while all came up", 0.0 if self.is_saturated else self.p99_s),
            ("reconcile p99 during edits", self.edit_p99_s),
            ("p99 from an edit until the Deployment is changed", self.acted_p99_s or 0.0),
        ):
            if judges_p99 and value >= limit:
                found.append(f"{what} is {value * 1000:.0f} ms, not below {limit * 1000:.0f} ms")
        if judges_p99 and self.pauses is not None and self.pauses.held_s >= HELD_S:
            found.append(
                f"the router's loop was held {self.pauses.held_s * 1000:.0f} ms, not below {HELD_S * 1000:.0f} ms"
            )
        if self.defects:
            found.append(f"{self.defects:.0f} reconciles failed by a defect")
        if self.memory_mib >= self.memory_limit_mib:
            found.append(
                f"the operator used {self.memory_mib:.0f} MiB, not below {self.memory_limit_mib:.0f} MiB"
            )
        if self.writes_at_rest:
            found.append(f"{self.writes_at_rest} writes at rest, not 0")
        return found

    def table(self) -> str:
        """The figures as a Markdown table, with their targets."""
        p99 = f"< {self.p99_limit_s * 1000:.0f} ms"
        acted, router = [], []
        if self.acted_p50_s is not None and self.acted_p99_s is not None:
            acted = [
                f"| edit until its Deployment is changed, p50 | {self.acted_p50_s * 1000:.0f} ms | |",
                f"| the same, p99 | {self.acted_p99_s * 1000:.0f} ms | {p99} |",
            ]
        if self.pauses is not None:
            router = [
                f"| router, most resident memory | {self.router_memory_mib:.0f} MiB | |",
                f"| router, longest answer to /health | {self.pauses.longest_s * 1000:.0f} ms | |",
                f"| router, most CPU time during one such answer | {self.pauses.held_s * 1000:.0f} ms | "
                f"< {HELD_S * 1000:.0f} ms |",
            ]
        return "\n".join(
            [
                "| what | measured | target |",
                "|---|---|---|",
                f"| all Ready after | {self.converged_s:.0f} s | |",
                f"| reconcile p50, while all came up | {self.p50_s * 1000:.0f} ms | |",
                f"| reconcile p99, while all came up | {self.p99_s * 1000:.0f} ms | {p99} |",
                *(
                    [
                        f"| API server, mean of all requests meanwhile | {self.request_s * 1000:.0f} ms | "
                        f"{'saturated: the p99 is not judged' if self.is_saturated else ''} |"
                    ]
                    if self.request_s
                    else []
                ),
                f"| operator, CPU meanwhile | {self.cpu_s:.1f} s | |",
                f"| reconcile p50, {self.edits} edits in the standing fleet | {self.edit_p50_s * 1000:.0f} ms | |",
                f"| reconcile p99, the same | {self.edit_p99_s * 1000:.0f} ms | {p99} |",
                *acted,
                f"| edit until settled, mean | {self.edit_s:.1f} s | |",
                f"| reconciles, failed ones | {self.reconciles:.0f}, {self.failed:.0f} | |",
                f"| operator, most resident memory | {self.memory_mib:.0f} MiB | < {self.memory_limit_mib:.0f} MiB |",
                f"| operator's writes until all Ready | {self.writes} | |",
                f"| operator's writes in {self.rest_s:.0f} s at rest, its lease aside | {self.writes_at_rest} | 0 |",
                *router,
            ]
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="chaos.scale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--services", type=int, default=200)
    parser.add_argument(
        "--steps", type=_numbers, help="numbers of services, growing, each measured, in place of --services"
    )
    parser.add_argument("--replicas", type=int, default=5)
    parser.add_argument("--namespaces", type=int, default=1, help="that the services are spread over")
    parser.add_argument("--rest-seconds", type=float, default=600.0)
    parser.add_argument(
        "--limit-seconds", type=float, default=1800.0, help="for all of a step to become Ready"
    )
    parser.add_argument(
        "--edits", type=int, default=None, help="services to scale, one after another (40, or all)"
    )
    parser.add_argument("--router", action="store_true", help="with a real router that follows the fleet")
    parser.add_argument(
        "--compiled", default="", metavar="FOLDER", help="an unpacked wheel of `make wheel`, for the router"
    )
    parser.add_argument(
        "--in-memory", action="store_true", help="on a Kubernetes in memory that only runs pods"
    )
    parser.add_argument(
        "--any-p99",
        action="store_true",
        help="do not judge latencies: for a sample on a machine that others use",
    )
    parser.add_argument(
        "-o", "--output", type=Path, help="the figures as JSON: a list, an item for each step"
    )
    arguments = parser.parse_args()
    steps = arguments.steps = arguments.steps or [arguments.services]
    if not (steps[0] >= 1 and steps[-1] <= 5000 and 1 <= arguments.replicas <= 100):
        parser.error("numbers of services are 1 to 5000, --replicas 1 to 100")
    if steps != sorted(set(steps)):
        parser.error("--steps must grow")
    if not 1 <= arguments.namespaces <= 1000:
        parser.error("--namespaces is 1 to 1000")
    if arguments.edits is None:
        arguments.edits = min(EDITS, steps[0])
    if not 0 <= arguments.edits <= steps[0]:
        parser.error("--edits is at most the number of services")
    folder = Path(tempfile.mkdtemp(prefix="argosy-scale-"))
    measured: list[Measured] = []
    with ending_cleanly():
        try:
            asyncio.run(_measure(folder, arguments, measured))
        except (ClusterError, Violation) as error:
            print(f"error: {error}; logs: {folder}", file=sys.stderr)
            if not measured:
                return 1
            print(f"more than {measured[-1].services} services did not come up", file=sys.stderr)
        except KeyboardInterrupt:
            return 130
    if arguments.output is not None:
        arguments.output.write_text(json.dumps([asdict(each) for each in measured], indent=1) + "\n")
    missed = [
        f"{each.services} services: {line}"
        for each in measured
        for line in each.missed(judges_p99=not arguments.any_p99)
    ]
    for line in missed:
        print(f"missed: {line}")
    if missed or len(measured) < len(steps):
        print(f"logs: {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if missed else 0


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


async def _measure(folder: Path, arguments: argparse.Namespace, measured: list[Measured]) -> None:
    """Append the figures of each step, and print them."""
    steps = arguments.steps
    nodes = max(2, -(-steps[-1] * arguments.replicas // PODS_PER_NODE))
    spaces = [f"scale-{number}" for number in range(arguments.namespaces)]
    services = [(spaces[number % len(spaces)], f"s{number}") for number in range(steps[-1])]
    if arguments.in_memory:
        rigged = rehearsing(folder, is_large=True, through_proxy=False)
    else:
        rigged = running(folder, nodes=nodes, notices_dead_nodes=False, through_proxy=False)
    async with rigged as rig, contextlib.AsyncExitStack() as stack:
        await asyncio.gather(*map(rig.namespace, spaces))
        router = None
        if arguments.router:
            router = RouterProcess(rig.plane, rig.api, folder, compiled=arguments.compiled)
            stack.push_async_callback(router.close)
            await router.start()
        say(f"{nodes} nodes, {len(spaces)} namespaces")
        present = 0
        for step in steps:
            found = await _measure_step(rig, router, services[:step], present, arguments)
            present = step
            measured.append(found)
            print(f"\n{found.services} services of {found.replicas} replicas\n\n{found.table()}")
            print(
                f"\nThe control plane shares the machine: load average {found.load_average:.1f} on "
                f"{os.cpu_count() or 1} cores.\n",
                flush=True,
            )


async def _measure_step(
    rig: Rig,
    router: RouterProcess | None,
    services: list[tuple[str, str]],
    present: int,
    arguments: argparse.Namespace,
) -> Measured:
    """Create those after the first `present`, and measure."""
    new = services[present:]
    say(f"creating {len(new)} services of {arguments.replicas} replicas beside {present}")
    if router is not None:
        await router.pauses()
    cpu, answered = rig.operator.cpu(), await _answered(rig)
    earlier, written = reconcile_buckets(await rig.operator.metrics()), len(rig.plane.operator_writes())
    took = await create_many(rig, new, arguments.replicas, arguments.limit_seconds, beside=present)
    load = os.getloadavg()[0]
    cpu = rig.operator.cpu() - cpu
    came_up = since(earlier, reconcile_buckets(await rig.operator.metrics()))
    count, seconds = await _answered(rig)
    writes = len(rig.plane.operator_writes()) - written
    say(f"all Ready after {took:.0f} s; {arguments.rest_seconds:.0f} s at rest")
    at_rest = await writes_at_rest(rig, arguments.rest_seconds)
    say(f"{arguments.edits} edits")
    acts = None
    if arguments.in_memory:
        acts = Acts((key[0], obj) for key, obj in rig.plane.cluster.objects.items())
        rig.plane.cluster.listeners.append(acts.note)
    before = reconcile_buckets(await rig.operator.metrics())
    edited = new[: arguments.edits]
    edit_s = await edit_each(rig, edited, arguments.replicas + 1, arguments.limit_seconds)
    metrics = await rig.operator.metrics()
    edits = since(before, reconcile_buckets(metrics))
    figures = Figures.of(metrics, rig.operator.memory())
    return Measured(
        services=len(services),
        replicas=arguments.replicas,
        converged_s=took,
        p50_s=histogram_quantile(came_up, 0.5),
        p99_s=histogram_quantile(came_up, 0.99),
        edits=len(edited),
        edit_s=edit_s,
        edit_p50_s=histogram_quantile(edits, 0.5),
        edit_p99_s=histogram_quantile(edits, 0.99),
        reconciles=figures.reconciles,
        failed=figures.errors + figures.defects,
        defects=figures.defects,
        cpu_s=cpu,
        request_s=(seconds - answered[1]) / max(1.0, count - answered[0]),
        memory_mib=figures.memory_mib,
        writes=writes,
        writes_at_rest=len(at_rest),
        rest_s=arguments.rest_seconds,
        load_average=load,
        router_memory_mib=router.memory_mib() if router is not None else 0.0,
        pauses=await router.pauses() if router is not None else None,
        acted_p50_s=_quantile(acts.seconds, 0.5) if acts is not None else None,
        acted_p99_s=_quantile(acts.seconds, 0.99) if acts is not None else None,
    )


def _named(kind: Kind, obj: Object) -> tuple[str, str, str]:
    return (kind.name, obj["metadata"]["namespace"], obj["metadata"]["name"])


def _quantile(values: list[float], share: float) -> float:
    """The smallest value that so large a share of them does not exceed; 0 without any."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else 0.0


async def _answered(rig: Rig) -> tuple[float, float]:
    """Requests that the API server has answered, and their seconds; none in memory."""
    return (
        api_requests(samples(await rig.api.text("metrics"))) if isinstance(rig.plane, Plane) else (0.0, 0.0)
    )


class Acts:
    """How long the operator takes from when a watch tells it of an edit until it changes the service's Deployment."""

    def __init__(self, objects: Iterable[tuple[Kind, Object]]) -> None:
        self._generations = {_named(kind, obj): obj["metadata"].get("generation", 0) for kind, obj in objects}
        self._edited: dict[tuple[str, str], float] = {}
        self.seconds: list[float] = []

    def note(self, kind: Kind, event: str, obj: Object) -> None:
        """Hear of an event as the watches do."""
        if kind not in (INFERENCE_SERVICES, DEPLOYMENTS):
            return
        metadata = obj["metadata"]
        generation = metadata["generation"]
        before = self._generations.get(_named(kind, obj), generation)
        self._generations[_named(kind, obj)] = generation
        if before == generation:
            return
        if kind is INFERENCE_SERVICES:
            self._edited[metadata["namespace"], metadata["name"]] = time.monotonic()
            return
        edited = self._edited.pop((metadata["namespace"], metadata["labels"][SERVICE_LABEL]), None)
        if edited is not None:
            self.seconds.append(time.monotonic() - edited)


if __name__ == "__main__":
    sys.exit(main())
