"""Reads of a cluster through kubectl, with the contexts and logins that its user has.

Owns running kubectl. Must not know what is read. Invariant: nothing is written, and a read ends by its deadline.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from argosy.errors import CommandError
from argosy_fetcher.progress_display import printable

_FORWARDED: Final = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+) ")
DEADLINE: Final = 30.0
"""Seconds for one run, logins with a browser excepted, which should be done before."""


_NO_CLUSTER: Final = "the server could not find the requested resource"
"""What kubectl says of an HTTP server that answers 404 to everything."""


class NotFound(CommandError):
    """The object, or its kind, does not exist."""


class NoSuchKind(NotFound):
    """The cluster has no objects of this kind: their definition is not installed."""


class Kubectl:
    """kubectl with the options that choose cluster and namespace."""

    def __init__(self, options: Sequence[str] = (), *, program: str = "kubectl") -> None:
        self._options = tuple(options)
        self._program = program

    def get(self, *words: str) -> Any:
        """The object, or the list, as JSON.

        Raises:
            NotFound: it does not exist.
            CommandError: kubectl failed; the message is its own.
        """
        return msgspec.json.decode(self._run("get", *words, "-o", "json"))

    def lines(self, *words: str) -> list[str]:
        """The lines that a command writes; none if it fails."""
        try:
            return self._run(*words).decode(errors="replace").splitlines()
        except CommandError:
            return []

    def run(self, *words: str) -> int:
        """Run a command on our own standard output, for as long as it takes; return its exit code."""
        self._require()
        command = [self._program, *self._options, *words]
        return subprocess.run(command, check=False).returncode  # noqa: S603 - as in `_run`

    @contextmanager
    def forwarded(self, target: str, port: int) -> Iterator[int]:
        """Forward a free port of this machine to a port of a pod, and yield it.

        Raises:
            CommandError: kubectl cannot.
        """
        self._require()
        command = [self._program, *self._options, "port-forward", "--address=127.0.0.1", target, f":{port}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:  # noqa: S603
            assert process.stdout is not None
            assert process.stderr is not None
            try:
                line = process.stdout.readline().decode(errors="replace")
                found = _FORWARDED.match(line)
                if found is None:
                    process.terminate()
                    said = process.stderr.read().decode(errors="replace").strip() or "it said nothing"
                    raise CommandError(f"cannot reach port {port} of {target}: {said}")
                yield int(found[1])
            finally:
                process.terminate()

    def _require(self) -> None:
        if shutil.which(self._program) is None:
            raise CommandError(f"{self._program} is not installed; it reads the cluster")

    def _run(self, *words: str) -> bytes:
        self._require()
        try:
            done = subprocess.run(  # noqa: S603 - the words are ours, and a name that argparse accepts
                [self._program, *self._options, *words], capture_output=True, timeout=DEADLINE, check=False
            )
        except subprocess.TimeoutExpired:
            raise CommandError(f"the cluster does not answer within {DEADLINE:.0f} s") from None
        if done.returncode == 0:
            return done.stdout
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["kubectl failed"]
        message = printable(said[-1])
        if _NO_CLUSTER in message:
            raise CommandError(
                "what kubectl asks is not a cluster. Without a kubeconfig it asks localhost:8080, where a local fleet "
                "may listen; `kubectl config view --minify` shows the address that it was given"
            )
        if "doesn't have a resource type" in message:
            raise NoSuchKind(message.removeprefix("error: "))
        raise (NotFound if "(NotFound)" in message else CommandError)(message.removeprefix("error: "))
