"""kubectl and helm as functions: one object that knows the binary and the kubeconfig."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.shell import ClusterError, poll, run


@dataclass(frozen=True)
class Kubectl:
    binary: str | Path
    kubeconfig: Path

    def __call__(
        self, *words: str, stdin: str | None = None, check: bool = True, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run `kubectl WORDS`; raises ClusterError when it fails and `check` is set."""
        return run(*self.argv(*words), stdin=stdin, check=check, timeout=timeout)

    def argv(self, *words: str) -> list[str]:
        """The command line, for processes that outlive a call (logs -f, port-forward)."""
        return [str(self.binary), f"--kubeconfig={self.kubeconfig}", *words]

    def get(self, *words: str) -> dict[str, Any]:
        """`kubectl get WORDS -o json`, parsed."""
        return json.loads(self("get", *words, "-o", "json").stdout)

    def find(self, *words: str) -> dict[str, Any] | None:
        """Like `get`, but None when the object does not exist."""
        text = self("get", *words, "-o", "json", "--ignore-not-found").stdout
        return json.loads(text) if text.strip() else None

    def apply(self, *documents: Mapping[str, Any] | str) -> str:
        """Server-side apply objects, or YAML text, in order; returns kubectl's lines."""
        return self("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=_stream(documents)).stdout

    def wait(self, target: str, condition: str, *words: str, timeout: float = 120) -> None:
        """`kubectl wait`, which needs the object to exist: condition like `condition=Ready` or `delete`."""
        self("wait", target, f"--for={condition}", f"--timeout={timeout:.0f}s", *words, timeout=timeout + 10)

    def poll(
        self, what: str, words: Iterable[str], accept: Callable[[dict[str, Any]], bool], timeout: float = 120
    ) -> dict[str, Any]:
        """Read an object until `accept` holds, and return it. Absence and API errors count as not yet."""
        words = tuple(words)

        def probe() -> dict[str, Any] | None:
            found = self.find(*words)
            return found if found is not None and accept(found) else None

        return poll(what, probe, timeout, interval=0.25)

    def events(self, namespace: str, name: str) -> list[dict[str, Any]]:
        """The events of the object of this name."""
        found = self.get("events", "-n", namespace)["items"]
        return [each for each in found if each["involvedObject"]["name"] == name]

    def wait_for_event(
        self, namespace: str, name: str, reason: str = "", text: str = "", timeout: float = 60
    ) -> None:
        """Wait for an event with this reason, or any, whose message has this text. The operator writes events after the
        status that they tell of."""

        def is_there() -> bool:
            return any(
                reason in ("", each["reason"]) and text in each["message"]
                for each in self.events(namespace, name)
            )

        poll(f"an event {reason} {text}", is_there, timeout, interval=0.5)

    def pods(self, namespace: str, selector: str = "") -> list[dict[str, Any]]:
        chosen = (f"--selector={selector}",) if selector else ()
        return self.get("pods", "-n", namespace, *chosen)["items"]

    @contextmanager
    def proxy(self) -> Iterator[str]:
        """`kubectl proxy`: an address of the API server that needs no credentials, while the block runs."""
        with subprocess.Popen(self.argv("proxy", "--port=0"), stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout
                told = process.stdout.readline()  # Starting to serve on 127.0.0.1:PORT
                if not told:
                    raise ClusterError(f"kubectl proxy does not start: exit status {process.wait(10)}")
                yield f"http://{told.split()[-1]}"
            finally:
                process.kill()

    def namespace(self, name: str, labels: Mapping[str, str] | None = None) -> None:
        """Create a namespace (or bring its labels up to date)."""
        metadata = {"name": name, "labels": dict(labels or {})}
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})

    def delete_namespace(self, name: str, timeout: float = 180) -> None:
        self(
            "delete",
            "namespace",
            name,
            "--ignore-not-found",
            f"--timeout={timeout:.0f}s",
            timeout=timeout + 10,
        )


RESTRICTED = {
    "pod-security.kubernetes.io/enforce": "restricted",
    "pod-security.kubernetes.io/warn": "restricted",
}
"""Labels of a namespace that admits only pods of the restricted Pod Security level."""

RESTRICTED_POD = {
    "runAsNonRoot": True,
    "runAsUser": 1000,
    "runAsGroup": 1000,
    "fsGroup": 1000,
    "seccompProfile": {"type": "RuntimeDefault"},
}
RESTRICTED_CONTAINER = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
"""Security contexts of a pod and a container at that level, for pods that tests make themselves."""


@dataclass(frozen=True)
class Helm:
    """helm with its configuration in a folder of its own, not in the user's home."""

    binary: str | Path
    kubeconfig: Path
    home: Path

    def __call__(
        self, *words: str, check: bool = True, timeout: float = 180
    ) -> subprocess.CompletedProcess[str]:
        env = {f"HELM_{kind}_HOME": str(self.home / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")}
        return run(
            self.binary, *words, env={**env, "KUBECONFIG": str(self.kubeconfig)}, check=check, timeout=timeout
        )


def _stream(documents: Iterable[Mapping[str, Any] | str]) -> str:
    parts = [text if isinstance(text, str) else json.dumps(text) for text in documents]
    if not parts:
        raise ClusterError("nothing to apply")
    return "\n---\n".join(parts)
