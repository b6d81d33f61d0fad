"""Attack a local fleet, and report how ordinary clients fared meanwhile.

    make attack                # an hour; ATTACK_S=120 for a sample
    PYTHONPATH=tests:tests/support python -P -m attack --seconds 600 --families grammars nesting -o result.json

The exit code is 1 if a request of the canary failed, got a different answer, or waited too long; or if bad input
ejected a replica, bad input got a server error, a gauge did not return to zero, a process kept growing, or one outlived
the process that started it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import uvloop

from moto_server import prepare

from .fleet import Fleet
from .rotation import FAMILIES, rotation
from .run import PHASE_S, Run


def main() -> int:
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    parser = argparse.ArgumentParser(
        prog="attack", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=3600.0, help="how long to attack (%(default)g)")
    parser.add_argument("--phase-seconds", type=float, default=PHASE_S, help="of one attack (%(default)g)")
    parser.add_argument(
        "--patience",
        type=float,
        default=0.0,
        help="seconds that clients may wait longer; for busy machines (%(default)g)",
    )
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--only", nargs="+", metavar="NAME", help="attacks by name")
    parser.add_argument(
        "--bucket",
        action="store_true",
        help="keep files, batches and responses in a bucket of a server that may stall, not in a directory",
    )
    parser.add_argument("--folder", type=Path, help="for logs (a temporary one, kept after findings)")
    parser.add_argument("-o", "--output", type=Path, help="JSON of the whole run")
    arguments = parser.parse_args()
    attacks = [
        attack
        for attack in rotation(arguments.families, has_bucket=arguments.bucket)
        if attack.name in (arguments.only or [attack.name])
    ]
    if not attacks:
        parser.error(
            "no attack of that name: "
            + ", ".join(a.name for a in rotation(list(FAMILIES), has_bucket=arguments.bucket))
        )
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="argosy-attack-"))
    fleet = Fleet(folder, bucket=prepare() if arguments.bucket else None)
    run = Run(fleet, attacks, arguments.seconds, arguments.phase_seconds, arguments.patience)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(run.run())
    print("\n" + result.report(folder))
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(asdict(result), indent=1) + "\n")
    return 1 if result.findings else 0


if __name__ == "__main__":
    sys.exit(main())
