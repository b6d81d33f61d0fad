"""Entry point of `argosy`: a table of commands, each imported when it is called.

Owns: the table, the help, the exit codes. Must not know: what a command does. It must not import what a command needs,
because `argosy --help` has to answer at once; so commands are named by strings.

Exit codes: `argosy.errors.EXIT_CODES`.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from argosy.errors import EXIT_CODES, FAILURE, INTERRUPTED, OK, USAGE, CommandError
from argosy.sigterm import ends_at_sigterm


class Command(NamedTuple):
    """One line of the table."""

    name: str
    target: str
    """`module:function`; the function takes the arguments after the command and returns an exit code or None."""
    help: str
    extra: str = ""
    """The optional dependency group (extra) that the command needs."""


COMMANDS: tuple[Command, ...] = (
    Command(
        "up",
        "argosy.commands.up:main",
        "start the fleet of a manifest on this machine, or change a running one",
    ),
    Command("down", "argosy.commands.down:main", "stop the fleet on this machine"),
    Command("ps", "argosy.commands.ps:main", "list services and replicas: state, reason, restarts"),
    Command("why", "argosy.commands.why:main", "show why a service does not answer, here or in a cluster"),
    Command("logs", "argosy.commands.logs:main", "print or follow the logs of replicas and router"),
    Command("chat", "argosy.commands.chat:main", "talk to a model through the router"),
    Command("route", "argosy.commands.route:main", "show which replica a prompt would get, and why"),
    Command(
        "dashboard", "argosy.commands.dashboard:main", "print the address of the router's page, with its key"
    ),
    Command(
        "bench",
        "argosy.commands.bench:main",
        "measure: any OpenAI endpoint, an engine offline, routing policies on a trace",
        "engine",
    ),
    Command(
        "serve", "argosy_engine.api.serve:main", "run one engine: an OpenAI server for one model", "engine"
    ),
    Command("models", "argosy.commands.models:main", "list, fetch and remove the models of this machine"),
    Command(
        "doctor",
        "argosy_engine.api.doctor:main",
        "print device, memory and the KV cache's size for a model, before a load",
        "engine",
    ),
    Command("router", "argosy_router.main:main", "run the router: one endpoint for every model", "router"),
    Command(
        "batch",
        "argosy_batch.main:main",
        "keep files, batches and responses for routers, and run the batches",
        "batch",
    ),
    Command("operator", "argosy_operator.main:main", "run the Kubernetes operator", "operator"),
    Command("crd", "argosy.commands.crd:main", "print the CustomResourceDefinition of InferenceService"),
)

_USAGE = "usage: argosy COMMAND [ARGUMENTS]\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the process's exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        sys.stderr.write(_help())
        return USAGE
    name, *rest = arguments
    if name in ("-h", "--help", "help"):
        sys.stdout.write(_help())
        return OK
    if name in ("-V", "--version", "version"):
        sys.stdout.write(f"argosy {_version()}\n")
        return OK
    command = next((command for command in COMMANDS if command.name == name), None)
    if command is None:
        return _unknown(name)
    with _ends_while_it_starts():
        return _run(command, rest)


def _ends_while_it_starts() -> AbstractContextManager[None]:
    """Let SIGTERM end a container's first process until the command has a handler of its own: the kernel would drop the
    signal, and imports take seconds, in which a pod that is deleted would keep its GPU until it is killed."""
    return ends_at_sigterm("stopped by SIGTERM during its start") if os.getpid() == 1 else nullcontext()


def _run(command: Command, arguments: list[str]) -> int:
    module, _, function = command.target.partition(":")
    try:
        code = getattr(importlib.import_module(module), function)(arguments)
        return OK if code is None else int(code)
    except CommandError as error:
        if error.details:
            sys.stderr.write(error.details.rstrip() + "\n")
        from argosy.arguments import state_dir_in, with_state_dir

        message = with_state_dir(str(error), state_dir_in(arguments))
        sys.stderr.write(f"argosy {command.name}: {message}\n")
        return error.exit_code
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if not command.extra or missing.startswith("argosy"):
            raise
        sys.stderr.write(
            f"argosy {command.name}: needs the package {missing!r}: "
            f"`pip install '.[{command.extra}]'` in the checkout\n"
        )
        return FAILURE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output is gone, for example `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILURE


def _unknown(name: str) -> int:
    import difflib

    close = difflib.get_close_matches(name, [command.name for command in COMMANDS], n=1)
    hint = f"did you mean {close[0]!r}?" if close else "`argosy --help` lists the commands"
    sys.stderr.write(f"argosy: {name!r} is not a command; {hint}\n")
    return USAGE


def _help() -> str:
    width = max(len(command.name) for command in COMMANDS)
    lines = [f"  {command.name:<{width}}  {command.help}" for command in COMMANDS]
    codes = [f"  {code:>3}  {meaning}" for code, meaning in EXIT_CODES.items()]
    return (
        f"{_USAGE}\nFleets of inference engines behind one OpenAI endpoint.\n\ncommands:\n"
        + "\n".join(lines)
        + "\n\n`argosy COMMAND --help` shows a command's arguments; `argosy --version` the version."
        + "\n\nexit codes:\n"
        + "\n".join(codes)
        + "\n"
    )


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("argosy")
    except metadata.PackageNotFoundError:
        return "(not installed)"
