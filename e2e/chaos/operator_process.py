"""The operator as the chart starts it: its rights, its variables and its arguments, as a process of this machine.

Owns the process and its kubeconfig. The chart's objects are installed but for those that run pods: the operator's
Deployment is read for what it would start. Invariant: `kill` returns when the process is gone.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from chaos.api import Api, Object, until
from chaos.plane import Plane
from chaos.scale_figures import samples
from cluster.shell import run
from processes import free_port

ROOT = Path(__file__).parents[2]
SYSTEM = "argosy-system"
PARTS = ("protocol", "fetcher", "engine", "router", "operator", "batch", "cli")
"""Folders of the tree that hold packages."""
STARTED_WITHIN = 120.0
_NOT_INSTALLED = ("Deployment", "DaemonSet", "Service", "PodDisruptionBudget", "Pod")
_RESOURCES = {
    "ServiceAccount": "serviceaccounts",
    "ConfigMap": "configmaps",
    "Secret": "secrets",
    "ClusterRole": "clusterroles",
    "ClusterRoleBinding": "clusterrolebindings",
    "Role": "roles",
    "RoleBinding": "rolebindings",
    "CustomResourceDefinition": "customresourcedefinitions",
}


def rendered(plane: Plane, tree: Path, *values: str) -> list[Object]:
    """Objects of the chart of a source tree; each of `values` is an argument of `--set`."""
    words = [word for value in values for word in ("--set", value)]
    chart = tree / "charts" / "argosy"
    done = run(plane.helm, "template", "argosy", chart, "--namespace", SYSTEM, "--no-hooks", *words)
    return [each for each in yaml.safe_load_all(done.stdout) if each]


async def install(api: Api, objects: list[Object]) -> None:
    """Apply what the operator needs of the chart: accounts, rights, documents and the CRD, and wait for the latter."""
    await api.apply("namespaces", "", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SYSTEM}})
    for obj in objects:
        if obj["kind"] in _NOT_INSTALLED:
            continue
        await api.apply(_RESOURCES[obj["kind"]], obj["metadata"].get("namespace", ""), obj)

    async def is_served() -> bool:
        return await api.list("inferenceservices") is not None

    await until("InferenceServices to be served", is_served, 60)


class OperatorProcess:
    """One operator, which can be killed and started again any number of times."""

    def __init__(
        self, plane: Plane, api: Api, objects: list[Object], folder: Path, tree: Path = ROOT
    ) -> None:
        self._plane = plane
        self._api = api
        self._folder = folder
        self._tree = tree
        self._process: asyncio.subprocess.Process | None = None
        self._port = 0
        self.starts = 0
        (self._deployment,) = (
            each
            for each in objects
            if each["kind"] == "Deployment" and each["metadata"]["name"] == "argosy-operator"
        )

    @property
    def log(self) -> Path:
        return self._folder / "operator.log"

    @property
    def pid(self) -> int:
        assert self._process
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def use(self, objects: list[Object], tree: Path = ROOT) -> None:
        """From the next start on, be the operator of another chart and tree."""
        (self._deployment,) = (
            each
            for each in objects
            if each["kind"] == "Deployment" and each["metadata"]["name"] == "argosy-operator"
        )
        self._tree = tree

    async def start(self, url: str, *, wait: bool = True) -> None:
        """Start it, to speak to the API server at `url`, and wait until it has listed everything."""
        assert not self.is_running
        (container,) = self._deployment["spec"]["template"]["spec"]["containers"]
        self._port = free_port()
        environment = process_environment(self._tree)
        environment |= await self._variables(container["env"])
        environment |= await self._mounted_secrets(container)
        environment["KUBECONFIG"] = str(
            await kubeconfig(self._api, self._plane, self._folder, "argosy-operator", url)
        )
        self.starts += 1
        with open(self.log, "ab") as log:
            log.write(f"--- start {self.starts}\n".encode())
        words = [*container["args"], "--health-port", str(self._port)]
        self._process = await start_argosy(words, environment, self.log)
        if wait:
            await until("the operator to be ready", self.is_ready, STARTED_WITHIN)

    def kill_now(self) -> None:
        """SIGKILL, without waiting for the end."""
        if self.is_running:
            os.kill(self.pid, signal.SIGKILL)

    async def kill(self) -> None:
        self.kill_now()
        await self.ended()

    async def terminate(self) -> int:
        """SIGTERM; returns the exit status."""
        assert self._process
        self._process.terminate()
        return await self._process.wait()

    async def ended(self) -> int:
        """Wait for the end of the process; returns its exit status."""
        assert self._process
        return await self._process.wait()

    async def is_ready(self) -> bool:
        assert self._process
        require_running(self._process, "the operator", self.log)
        async with self._get("/readyz") as response:
            return response.status == 200

    async def queued(self) -> int:
        """Keys that wait to be reconciled."""
        async with self._get("/healthz") as response:
            return int((await response.json())["queuedKeys"])

    async def metrics(self) -> dict[str, float]:
        """Every sample of its metrics, by name and labels as they are written."""
        async with self._get("/metrics") as response:
            return samples(await response.text())

    def cpu(self) -> float:
        """Seconds of CPU so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self) -> tuple[int, int]:
        """Resident bytes now, and at most so far."""
        return resident(self.pid)

    def _get(self, path: str) -> Any:
        timeout = aiohttp.ClientTimeout(total=60)
        return aiohttp.request("GET", f"http://127.0.0.1:{self._port}{path}", timeout=timeout)

    async def _variables(self, env: list[Object]) -> dict[str, str]:
        """The container's variables, as a kubelet resolves them."""
        found = {}
        fields = {"metadata.namespace": SYSTEM, "metadata.name": "argosy-operator-0"}
        for each in env:
            if "value" in each:
                found[each["name"]] = str(each["value"])
                continue
            source = each.get("valueFrom", {})
            if "fieldRef" in source:
                found[each["name"]] = fields[source["fieldRef"]["fieldPath"]]
            elif "secretKeyRef" in source:
                secret = await self._api.find("secrets", SYSTEM, source["secretKeyRef"]["name"])
                value = (secret or {}).get("data", {}).get(source["secretKeyRef"]["key"])
                if value:
                    found[each["name"]] = base64.b64decode(value).decode()
        return found

    async def _mounted_secrets(self, container: Object) -> dict[str, str]:
        """Mount the container's Secrets as they are now; the variables that hold a mount's path, with the path here."""
        volumes = {
            each["name"]: each["secret"]["secretName"]
            for each in self._deployment["spec"]["template"]["spec"].get("volumes", ())
            if "secret" in each
        }
        paths = {}
        for mount in container.get("volumeMounts", ()):
            if mount["name"] in volumes:
                folder = self._folder / "mounts" / mount["name"]
                folder.mkdir(parents=True, exist_ok=True)
                for old in folder.iterdir():
                    old.unlink()
                secret = await self._api.find("secrets", SYSTEM, volumes[mount["name"]])
                for name, value in (secret or {}).get("data", {}).items():
                    (folder / name).write_bytes(base64.b64decode(value))
                paths[mount["mountPath"]] = str(folder)
        return {each["name"]: paths[each["value"]] for each in container["env"] if each.get("value") in paths}


async def start_argosy(
    words: Sequence[str], environment: dict[str, str], log: Path
) -> asyncio.subprocess.Process:
    """Start `argosy WORDS` as a container's process, which writes to the end of a log."""
    with open(log, "ab") as output:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "argosy", *words),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            cwd="/",
            start_new_session=True,
        )


def require_running(process: asyncio.subprocess.Process, name: str, log: Path) -> None:
    """Raises RuntimeError, with the end of its log, if the process has ended."""
    if process.returncode is not None:
        tail = log.read_text(errors="replace").splitlines()[-15:]
        raise RuntimeError(f"{name} ended with {process.returncode}:\n" + "\n".join(tail))


def process_environment(tree: Path = ROOT) -> dict[str, str]:
    """The variables of a process that runs a source tree, beside those of its container."""
    kept = ("PATH", "LANG", "HOME", "TMPDIR", "LD_LIBRARY_PATH")
    environment = {key: value for key, value in os.environ.items() if key in kept}
    return environment | {"PYTHONPATH": os.pathsep.join(str(tree / part) for part in PARTS)}


def resident(pid: int) -> tuple[int, int]:
    """Resident bytes of a process now, and at most so far."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    sizes = {line.split(":")[0]: line.split()[1] for line in status if line.startswith(("VmRSS", "VmHWM"))}
    return int(sizes["VmRSS"]) * 1024, int(sizes["VmHWM"]) * 1024


async def kubeconfig(api: Api, plane: Plane, folder: Path, account: str, url: str) -> Path:
    """A kubeconfig with a token of an account of the chart."""
    token = await api.request(
        "POST",
        f"api/v1/namespaces/{SYSTEM}/serviceaccounts/{account}/token",
        {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": 7200},
        },
    )
    cluster: Object = {"server": url}
    if url.startswith("https"):
        cluster["certificate-authority"] = str(plane.settings.pki / "ca.crt")
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "plane", "cluster": cluster}],
        "users": [{"name": account, "user": {"token": token["status"]["token"]}}],
        "contexts": [{"name": "plane", "context": {"cluster": "plane", "user": account}}],
        "current-context": "plane",
    }
    path = folder / f"{account}.kubeconfig"
    path.write_text(json.dumps(document))
    path.chmod(0o600)
    return path
