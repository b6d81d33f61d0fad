"""Cause faults, one after another, and print what held.

    make chaos                                  # all of them
    make chaos CHAOS_FAULTS='R8,R10 stale'      # those whose names begin so
    make chaos CHAOS_ARGS=--list                # their names
    make chaos CHAOS_ARGS=--rehearse            # on a Kubernetes in memory, without building one

Exit status: 0 every promise held, 1 one was broken or could not be tried, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from chaos.fault import Fault, Violation, bystanders, create_bystanders, differences, foreign_writes
from chaos.faults import api_server, deletions, load, nodes, operator_dies, rollouts, scaling
from chaos.operator_process import SYSTEM
from chaos.plane import ending_cleanly
from chaos.rig import PATIENCE, Rig, rehearsing, running
from cluster.shell import ClusterError, say

FAULTS: tuple[Fault, ...] = (
    *rollouts.FAULTS,
    *operator_dies.FAULTS,
    *api_server.FAULTS,
    *deletions.FAULTS,
    *load.FAULTS,
    *nodes.FAULTS,
    *scaling.FAULTS,
)
NODES = 6
NEEDS_KUBERNETES = ("R8 API server killed", "R11 CRD", "R23", "R25", "pods of every kind")
"""Beginnings of the names of faults that cannot be rehearsed."""


@dataclass(frozen=True)
class Result:
    """What became of one fault."""

    fault: Fault
    held: bool
    seen: str
    seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", default="", help="beginnings of names, separated by commas; all if empty")
    parser.add_argument("--list", action="store_true", help="print the names and end")
    parser.add_argument("--rehearse", action="store_true", help="on a Kubernetes in memory")
    parser.add_argument(
        "--folder", type=Path, help="for logs (a temporary one, kept if a promise was broken)"
    )
    parser.add_argument("-o", "--output", type=Path, help="the table as Markdown")
    arguments = parser.parse_args()
    wanted = [each.strip() for each in arguments.faults.split(",") if each.strip()]
    for each in wanted:
        if not any(fault.name.startswith(each) for fault in FAULTS):
            parser.error(f"no fault's name begins with {each!r}: see --list")
    chosen = [fault for fault in FAULTS if not wanted or fault.name.startswith(tuple(wanted))]
    if arguments.rehearse:
        chosen = [fault for fault in chosen if not fault.name.startswith(NEEDS_KUBERNETES)]
    if arguments.list:
        print("\n".join(fault.name for fault in chosen))
        return 0
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="argosy-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    with ending_cleanly():
        try:
            results = asyncio.run(_run(chosen, folder, rehearse=arguments.rehearse))
        except ClusterError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
    print("\n" + _table(results))
    if arguments.output is not None:
        arguments.output.write_text(_table(results) + "\n")
    broken = [each for each in results if not each.held]
    print(f"\n{len(results) - len(broken)} of {len(results)} held" + (f"; logs: {folder}" if broken else ""))
    if arguments.folder is None and not broken:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if broken else 0


async def _run(faults: list[Fault], folder: Path, *, rehearse: bool) -> list[Result]:
    context = rehearsing(folder) if rehearse else running(folder, nodes=NODES, notices_dead_nodes=True)
    async with context as rig:
        untouched = await create_bystanders(rig)
        results = []
        for number, fault in enumerate(faults):
            say(fault.name)
            result = await _try(rig, fault, f"chaos-{number}", untouched)
            say(f"  {'held' if result.held else 'BROKEN'} after {result.seconds:.1f} s: {result.seen}")
            results.append(result)
        return results


async def _try(rig: Rig, fault: Fault, namespace: str, untouched: object) -> Result:
    """Cause one fault and judge it; mend everything afterwards, whatever happened."""
    began = time.monotonic()
    limit = asyncio.timeout(None)
    try:
        await rig.mend()
        await rig.namespace(namespace)
        async with asyncio.timeout(fault.seconds) as limit:
            seen, held = await fault.cause(rig, namespace), True
        if rig.operator.is_running:
            await rig.idle()
        if changed := differences(untouched, await bystanders(rig)):
            raise Violation(f"a user's objects were changed: {'; '.join(changed[:3])}")
        if foreign := foreign_writes(rig, {namespace, "no-fault", SYSTEM, *_namespaces(namespace)}):
            raise Violation(f"writes that are none of its business: {'; '.join(foreign[:3])}")
    except TimeoutError:
        reason = (
            f"no end within {fault.seconds:.0f} s" if limit.expired() else "a request had no answer in time"
        )
        seen, held = reason, False
    except Violation as violation:
        seen, held = str(violation), False
    except Exception as error:  # the next faults are tried all the same
        traceback.print_exc()
        seen, held = f"{type(error).__name__}: {error}", False
    took = time.monotonic() - began
    try:
        if not held and rig.operator.is_running:
            await rig.operator.kill()  # the next fault meets an operator that has suffered nothing
        await rig.mend()
        await rig.delete_namespace(namespace, PATIENCE)
    except Exception as error:
        seen, held = f"{seen}; and could not be cleaned up: {error}", False
    return Result(fault, held, seen, took)


def _namespaces(last: str) -> set[str]:
    """The namespaces of the faults so far."""
    return {f"chaos-{number}" for number in range(int(last.rpartition("-")[2]) + 1)}


def _table(results: list[Result]) -> str:
    busy = os.getloadavg()[0]
    lines = ["| fault | what holds | seen |", "|---|---|---|"]
    lines += [
        f"| {each.fault.name} | {each.fault.promise} | {'' if each.held else '**BROKEN** '}{each.seen} |"
        for each in results
    ]
    return "\n".join(lines) + f"\n\nLoad average at the end: {busy:.1f}."


if __name__ == "__main__":
    sys.exit(main())
