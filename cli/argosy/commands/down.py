"""`argosy down`: stop the fleet on this machine.

Owns: waiting for the fleet's end. Invariant: when it returns 0, no process of the fleet is left, even if none was
running before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from argosy.arguments import Parser, add_state_dir, positive_seconds
from argosy.errors import OK
from argosy.local.control_client import ControlClient
from argosy.local.control_messages import Stop
from argosy.local.state_dir import StateDir, choose_state_dir
from argosy.terminal import progress

GRACE_S: Final = 10.0


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="argosy down", description="Stop the fleet on this machine.")
    parser.add_argument(
        "--grace",
        type=positive_seconds,
        default=GRACE_S,
        metavar="S",
        help="how long running requests may take to finish (%(default)s)",
    )
    add_state_dir(parser)
    options = parser.parse_args(argv)
    state = choose_state_dir(options.state_dir)
    if not stop_fleet(state, options.grace):
        print(f"no fleet is running in {state.root}")
    return OK


def stop_fleet(state: StateDir, grace_s: float) -> bool:
    """Stop the fleet and wait until it is gone; False if there was none."""
    connection = state.connect()
    if connection is None:
        return False
    client = ControlClient(connection, Stop(grace_s=grace_s))
    shown = progress()
    try:
        while (status := client.next_status()) is not None:
            shown.show(status)
    finally:
        shown.close()
        client.close()
    print("the fleet is stopped", flush=True)
    return True
