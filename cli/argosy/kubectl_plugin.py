"""Entry point of `kubectl-argosy`, which kubectl runs as `kubectl argosy`.

Owns: its table of commands. Must not know: what a command does.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Final

from argosy.errors import INTERRUPTED, OK, USAGE, CommandError

COMMANDS: Final = {
    "why": ("argosy.commands.why:in_cluster_main", "show why a service does not answer"),
    "top": ("argosy.commands.cluster:top", "list services: readiness, replicas, restarts, reason"),
    "logs": ("argosy.commands.cluster:logs", "print or follow the logs of a service's pods"),
    "route": ("argosy.commands.cluster:explain", "show which replica a prompt would get, and why"),
}
"""Name -> function, which takes the arguments behind the command and returns an exit code; and its help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the process's exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if name in ("-h", "--help", "help"):
        sys.stdout.write(_help())
        return OK
    if name not in COMMANDS:
        sys.stderr.write(f"kubectl argosy: {name!r} is not a command\n{_help()}" if name else _help())
        return USAGE
    module, _, function = COMMANDS[name][0].partition(":")
    command: Callable[[Sequence[str]], int] = getattr(importlib.import_module(module), function)
    try:
        return command(rest)
    except CommandError as error:
        sys.stderr.write(f"kubectl argosy {name}: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED


def _help() -> str:
    lines = [f"  {name:<6} {text}" for name, (_, text) in COMMANDS.items()]
    return "usage: kubectl argosy COMMAND [ARGUMENTS]\n\ncommands:\n" + "\n".join(lines) + "\n"
