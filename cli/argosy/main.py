"""Entry points of `argosy` and of `kubectl-argosy`, which kubectl runs as `kubectl argosy`: tables of commands.

Must not know: what a command does. It must not import what a command needs, because `argosy --help` has to answer at
once, and extras need not be installed; so commands are named by strings, and imported when they are called.

Exit codes: `argosy.errors.EXIT_CODES`.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, NamedTuple

from argosy.errors import EXIT_CODES, FAILURE, INTERRUPTED, OK, USAGE, CommandError, ends_at_sigterm


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
        "argosy.commands.up:up",
        "start the fleet of a manifest on this machine, or change a running one",
    ),
    Command("down", "argosy.commands.up:down", "stop the fleet on this machine"),
    Command("ps", "argosy.commands.ps:ps", "list services and replicas: state, reason, restarts"),
    Command("why", "argosy.commands.cluster:why", "show why a service does not answer, here or in a cluster"),
    Command("logs", "argosy.commands.ps:logs", "print or follow the logs of replicas and router"),
    Command("chat", "argosy.commands.chat:main", "talk to a model through the router"),
    Command("route", "argosy.commands.admin:route", "show which replica a prompt would get, and why"),
    Command(
        "dashboard", "argosy.commands.admin:dashboard", "print the address of the router's page, with its key"
    ),
    Command(
        "bench",
        "argosy.main:bench",
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
    Command("crd", "argosy.commands.cluster:crd", "print the CustomResourceDefinition of InferenceService"),
)

KUBECTL_COMMANDS: Final = (
    Command("why", "argosy.commands.cluster:why_in_cluster", "show why a service does not answer"),
    Command("top", "argosy.commands.cluster:top", "list services: readiness, replicas, restarts, reason"),
    Command("logs", "argosy.commands.cluster:logs", "print or follow the logs of a service's pods"),
    Command("route", "argosy.commands.cluster:explain", "show which replica a prompt would get, and why"),
)
"""Those of `kubectl argosy`."""

BENCHMARKS: Final = (
    Command(
        "serve",
        "argosy_engine.benchmarks.bench_serve:main",
        "load an OpenAI endpoint: time to first token, time per token, throughput, goodput",
    ),
    Command(
        "throughput",
        "argosy_engine.benchmarks.bench_offline:bench_throughput",
        "generate from many prompts in this process",
    ),
    Command(
        "latency", "argosy_engine.benchmarks.bench_offline:bench_latency", "time one batch in this process"
    ),
    Command(
        "router",
        "argosy.commands.bench_router:main",
        "compare routing policies on a trace, in simulated time",
    ),
)
"""Those of `argosy bench`. The ones of the engine need packages that the command line does not."""

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
    try:
        code = _function(command.target)(arguments)
        return OK if code is None else int(code)
    except CommandError as error:
        if error.details:
            sys.stderr.write(error.details.rstrip() + "\n")
        from argosy.terminal import state_dir_in, with_state_dir

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


def kubectl_main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the process's exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if name in ("-h", "--help", "help"):
        sys.stdout.write(_kubectl_help())
        return OK
    target = next((command.target for command in KUBECTL_COMMANDS if command.name == name), None)
    if target is None:
        sys.stderr.write(
            f"kubectl argosy: {name!r} is not a command\n{_kubectl_help()}" if name else _kubectl_help()
        )
        return USAGE
    try:
        return int(_function(target)(rest))
    except CommandError as error:
        sys.stderr.write(f"kubectl argosy {name}: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED


def _kubectl_help() -> str:
    lines = [f"  {command.name:<6} {command.help}" for command in KUBECTL_COMMANDS]
    return "usage: kubectl argosy COMMAND [ARGUMENTS]\n\ncommands:\n" + "\n".join(lines) + "\n"


def bench(argv: Sequence[str]) -> int:
    import argparse

    table = "\n".join(f"  {benchmark.name:<10}  {benchmark.help}" for benchmark in BENCHMARKS)
    parser = argparse.ArgumentParser(
        prog="argosy bench",
        usage="argosy bench [-h] BENCHMARK ...",
        description=f"benchmarks:\n{table}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    targets = {benchmark.name: benchmark.target for benchmark in BENCHMARKS}
    parser.add_argument("benchmark", nargs="?", choices=targets, metavar="BENCHMARK")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="`argosy bench BENCHMARK --help` lists them"
    )
    options = parser.parse_args(argv)
    if options.benchmark is None:
        parser.error(f"choose a benchmark: {', '.join(targets)}; `argosy bench --help` describes them")
    return int(_function(targets[options.benchmark])(options.arguments))


def _function(target: str) -> Callable[[Sequence[str]], Any]:
    """Import what a table names."""
    module, _, function = target.partition(":")
    found: Callable[[Sequence[str]], Any] = getattr(importlib.import_module(module), function)
    return found
