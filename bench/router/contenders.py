"""The routers compared, each with its best fair settings, over engines of their own.

Owns command lines and the processes of one measurement. Must not know workloads or figures.

sglang-router's `cache_aware` takes part in two settings, and figures are compared with the better of the two: with its
defaults, where it leaves a prefix's worker only for a difference of 64 requests, and with thresholds small enough to
balance fleets of this size. Both have health checks and a circuit breaker that detect a dead worker, and its return,
within seconds; with the defaults this takes a minute.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from overhead import HERE, KEY, free_ports, process, wait_until_answering

OURS = "cost"
BASELINES = ("round-robin", "least-load")
SGLANG = {
    "sglang-router": (),
    "sglang-router, balancing": ("--balance-abs-threshold", "24", "--balance-rel-threshold", "1.5"),
}
"""Maps sglang-router's settings to their flags beyond the common ones."""
_SGLANG_COMMON = (
    *("--policy", "cache_aware", "--log-level", "error"),
    *("--health-check-interval-secs", "2", "--health-check-timeout-secs", "1"),
    *("--health-failure-threshold", "1", "--health-success-threshold", "1"),
    *("--cb-timeout-duration-secs", "2"),
)


@dataclass
class RunningFleet:
    """A router over engines. Engines with a process of their own can be killed and restarted."""

    port: int
    engine_ports: Sequence[int]
    engine_commands: Sequence[Sequence[str]]
    engines: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def kill(self, number: int) -> None:
        """Kill an engine with SIGKILL."""
        self.engines[number].send_signal(signal.SIGKILL)
        self.engines[number].wait()

    def restart(self, number: int) -> None:
        """Start an engine again on the same port, with an empty cache."""
        self.engines[number] = subprocess.Popen(
            self.engine_commands[number],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )

    def stop_restarted(self) -> None:
        """Stop the engines that `restart` started."""
        for engine in self.engines:
            if engine.poll() is None:
                engine.kill()
                engine.wait()


def names(sglang: str) -> list[str]:
    """Return the names of all contenders, including sglang-router's if there is an interpreter for it."""
    return [OURS, *BASELINES, *(SGLANG if sglang else ())]


def router_command(contender: str, sglang: str, port: int, engines: Sequence[int]) -> list[str]:
    """Return the command that starts a contender's router.

    Args:
        sglang: interpreter of an environment with sglang-router.
    """
    urls = [f"http://127.0.0.1:{engine}" for engine in engines]
    if contender in SGLANG:
        return [
            *(sglang, "-m", "sglang_router.launch_router", "--port", str(port), "--worker-urls", *urls),
            *_SGLANG_COMMON,
            *SGLANG[contender],
        ]
    return [
        *(sys.executable, "-m", "argosy_router.main", "--port", str(port), "--admin-port", "-1"),
        *("--api-key", KEY, "--policy", contender),
        *(part for url in urls for part in ("--replica", url)),
    ]


def clocked(ports: Sequence[int], kv_cache_tokens: int) -> list[list[str]]:
    """Return the commands of clocked engines, one process each."""
    script = str(HERE / "simulated_engine_server.py")
    return [[sys.executable, script, str(port), "--kv-cache-tokens", str(kv_cache_tokens)] for port in ports]


@contextmanager
def running(
    contender: str, sglang: str, ports: Sequence[int], engine_commands: Sequence[Sequence[str]]
) -> Iterator[RunningFleet]:
    """Run the engines and the router over them until the block ends.

    Args:
        ports: the engines' ports; one command may serve several.
    """
    (port,) = free_ports(1)
    fleet = RunningFleet(port, ports, engine_commands)
    with ExitStack() as stack:
        stack.callback(fleet.stop_restarted)
        for command in engine_commands:
            fleet.engines.append(stack.enter_context(process(*command)))
        for engine in ports:
            wait_until_answering(engine)
        stack.enter_context(process(*router_command(contender, sglang, port, ports)))
        wait_until_answering(port)
        yield fleet


def shown(arguments: Sequence[str], sglang: str) -> list[str]:
    """Return a command line without the paths of this machine."""
    return ["SGLANG_VENV/bin/python" if word == sglang else os.path.basename(word) for word in arguments]
