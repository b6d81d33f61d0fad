"""A large fleet on simulated nodes: how fast the operator reconciles, what it needs, and what it writes at rest.

    make scale                                         # 200 services of 5 replicas, ten minutes at rest
    make scale SCALE_SERVICES=20 SCALE_REST_S=30       # a sample

All services are created at once; then nothing happens; then one service after another is scaled. The operator talks to
the API server directly; its writes are counted by the API server's own audit log. Exit status: 0 all targets met, 1 one
was missed or could not be measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from chaos.fault import Violation
from chaos.faults.load import create_many, edit_each, writes_at_rest
from chaos.plane import ending_cleanly
from chaos.rig import running
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
MEMORY_MIB = 256.0
PODS_PER_NODE = 25
EDITS = 40
NAMESPACE = "scale"


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

    def missed(self, *, judges_p99: bool = True) -> list[str]:
        """Targets that were missed."""
        found = []
        for when, value in (("while all came up", self.p99_s), ("during edits", self.edit_p99_s)):
            if judges_p99 and value >= P99_S:
                found.append(
                    f"reconcile p99 {when} is {value * 1000:.0f} ms, not below {P99_S * 1000:.0f} ms"
                )
        if self.defects:
            found.append(f"{self.defects:.0f} reconciles failed by a defect")
        if self.memory_mib >= MEMORY_MIB:
            found.append(f"the operator used {self.memory_mib:.0f} MiB, not below {MEMORY_MIB:.0f} MiB")
        if self.writes_at_rest:
            found.append(f"{self.writes_at_rest} writes at rest, not 0")
        return found

    def table(self) -> str:
        """The figures as a Markdown table, with their targets."""
        return "\n".join(
            [
                "| what | measured | target |",
                "|---|---|---|",
                f"| all Ready after | {self.converged_s:.0f} s | |",
                f"| reconcile p50, while all came up | {self.p50_s * 1000:.0f} ms | |",
                f"| reconcile p99, while all came up | {self.p99_s * 1000:.0f} ms | < {P99_S * 1000:.0f} ms |",
                f"| API server, mean of all requests meanwhile | {self.request_s * 1000:.0f} ms | |",
                f"| operator, CPU meanwhile | {self.cpu_s:.1f} s | |",
                f"| reconcile p50, {self.edits} edits in the standing fleet | {self.edit_p50_s * 1000:.0f} ms | |",
                f"| reconcile p99, the same | {self.edit_p99_s * 1000:.0f} ms | < {P99_S * 1000:.0f} ms |",
                f"| edit until settled, mean | {self.edit_s:.1f} s | |",
                f"| reconciles, failed ones | {self.reconciles:.0f}, {self.failed:.0f} | |",
                f"| operator, most resident memory | {self.memory_mib:.0f} MiB | < {MEMORY_MIB:.0f} MiB |",
                f"| operator's writes until all Ready | {self.writes} | |",
                f"| operator's writes in {self.rest_s:.0f} s at rest, its lease aside | {self.writes_at_rest} | 0 |",
            ]
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="chaos.scale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--services", type=int, default=200)
    parser.add_argument("--replicas", type=int, default=5)
    parser.add_argument("--rest-seconds", type=float, default=600.0)
    parser.add_argument("--limit-seconds", type=float, default=1800.0, help="for all to become Ready")
    parser.add_argument(
        "--edits", type=int, default=None, help="services to scale, one after another (40, or all)"
    )
    parser.add_argument(
        "--any-p99",
        action="store_true",
        help="do not judge latencies: for a sample on a machine that others use",
    )
    parser.add_argument("-o", "--output", type=Path, help="the figures as JSON")
    arguments = parser.parse_args()
    if not (1 <= arguments.services <= 5000 and 1 <= arguments.replicas <= 100):
        parser.error("--services is 1 to 5000, --replicas 1 to 100")
    if arguments.edits is None:
        arguments.edits = min(EDITS, arguments.services)
    if not 0 <= arguments.edits <= arguments.services:
        parser.error("--edits is at most --services")
    folder = Path(tempfile.mkdtemp(prefix="argosy-scale-"))
    with ending_cleanly():
        try:
            measured = asyncio.run(_measure(folder, arguments))
        except (ClusterError, Violation) as error:
            print(f"error: {error}; logs: {folder}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
    print(f"\n{measured.services} services of {measured.replicas} replicas\n\n{measured.table()}")
    cores = os.cpu_count() or 1
    print(
        f"\nThe control plane shares the machine: load average {measured.load_average:.1f} on {cores} cores."
    )
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(asdict(measured), indent=1) + "\n")
    missed = measured.missed(judges_p99=not arguments.any_p99)
    for line in missed:
        print(f"missed: {line}")
    if missed:
        print(f"logs: {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if missed else 0


async def _measure(folder: Path, arguments: argparse.Namespace) -> Measured:
    nodes = max(2, -(-arguments.services * arguments.replicas // PODS_PER_NODE))
    async with running(folder, nodes=nodes, notices_dead_nodes=False, through_proxy=False) as rig:
        await rig.namespace(NAMESPACE)
        say(f"{nodes} nodes; creating {arguments.services} services of {arguments.replicas} replicas")
        cpu, answered = rig.operator.cpu(), api_requests(samples(await rig.api.text("metrics")))
        took = await create_many(
            rig, NAMESPACE, arguments.services, arguments.replicas, arguments.limit_seconds
        )
        load = os.getloadavg()[0]
        cpu = rig.operator.cpu() - cpu
        came_up = reconcile_buckets(await rig.operator.metrics())
        count, seconds = api_requests(samples(await rig.api.text("metrics")))
        writes = len(rig.plane.operator_writes())
        say(f"all Ready after {took:.0f} s; {arguments.rest_seconds:.0f} s at rest")
        at_rest = await writes_at_rest(rig, arguments.rest_seconds)
        say(f"{arguments.edits} edits")
        before = reconcile_buckets(await rig.operator.metrics())
        names = [f"s{number}" for number in range(arguments.edits)]
        edit_s = await edit_each(rig, NAMESPACE, names, arguments.replicas + 1, arguments.limit_seconds)
        metrics = await rig.operator.metrics()
        edited = since(before, reconcile_buckets(metrics))
        figures = Figures.of(metrics, rig.operator.memory())
        return Measured(
            services=arguments.services,
            replicas=arguments.replicas,
            converged_s=took,
            p50_s=histogram_quantile(came_up, 0.5),
            p99_s=histogram_quantile(came_up, 0.99),
            edits=arguments.edits,
            edit_s=edit_s,
            edit_p50_s=histogram_quantile(edited, 0.5),
            edit_p99_s=histogram_quantile(edited, 0.99),
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
        )


if __name__ == "__main__":
    sys.exit(main())
