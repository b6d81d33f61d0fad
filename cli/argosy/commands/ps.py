"""`argosy ps`: list services and replicas.

Owns: the columns. A replica's reason tells why it is not ready, so that one need not look into its log.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import msgspec

from argosy.arguments import Parser, add_state_dir
from argosy.errors import OK
from argosy.local.control_client import current_status
from argosy.local.control_messages import BatchStatus, FleetStatus, RouterStatus, ServiceStatus
from argosy.local.state_dir import choose_state_dir
from argosy.terminal import age, table

_HEADER = ("REPLICA", "MODEL", "STATE", "REVISION", "RESTARTS", "INFLIGHT", "PID", "URL", "AGE", "REASON")


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="argosy ps", description="List services and replicas.")
    parser.add_argument(
        "-o", "--output", choices=("table", "json"), default="table", help="format (%(default)s)"
    )
    add_state_dir(parser)
    options = parser.parse_args(argv)
    status = current_status(
        choose_state_dir(options.state_dir), in_cluster="`kubectl argosy top -A` asks a cluster"
    )
    if options.output == "json":
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(status), indent=2) + b"\n")
    else:
        print(_render(status, time.time()))
    return OK


def _render(status: FleetStatus, now: float) -> str:
    router = status.router
    rows: list[tuple[str, ...]] = [
        (
            replica.name,
            service.model,
            replica.phase,
            replica.revision + ("" if replica.is_current else " (old)"),
            str(replica.restarts),
            str(replica.inflight),
            str(replica.pid or ""),
            replica.url,
            age(now - replica.started),
            replica.reason,
        )
        for service in status.services
        for replica in service.replicas
    ]
    rows += [_row_without_replica(service) for service in status.services if not service.replicas]
    rows.append(_row_of_program("router", "Ready" if router.is_ready else "Starting", router))
    if (batch := status.batch) is not None:
        rows.append(_row_of_program("batch", "Starting" if batch.pid is None else "Running", batch))
    notes = [f"{service.key}: {service.reason}" for service in status.services if service.reason]
    return "\n".join((table(_HEADER, rows), *notes))


def _row_of_program(name: str, state: str, program: RouterStatus | BatchStatus) -> tuple[str, ...]:
    pid = str(program.pid or "")
    return (name, "", state, "", str(program.restarts), "", pid, program.url, "", program.reason)


def _row_without_replica(service: ServiceStatus) -> tuple[str, ...]:
    reason = f"{service.key}: spec.replicas is 0" if service.desired == 0 and not service.reason else ""
    return ("-", service.model, "NoReplica", service.revision, "", "", "", "", "", reason)
