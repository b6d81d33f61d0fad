"""A rehearsal: the operator's process and every fault, on the tests' Kubernetes in memory.

It takes no Go and no minutes of compiling, so that a fault, or what judges it, can be tried while it is written. It is
no proof: controllers, fields and validation are those of `tests/operator/fake_kubernetes.py`. Owns the HTTP of that
cluster for administrators, and watches that begin at a resource version, as the real ones do.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import ssl
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import msgspec
from aiohttp import web
from fake_http import FakeApiServer
from fake_kubernetes import FakeKubernetes, selects

from argosy_operator.names import DEPLOYMENTS, INFERENCE_SERVICES, KINDS, PODS, Kind
from chaos.api import Api, Object
from chaos.large_cluster import LargeCluster
from chaos.simulated_nodes import ADDRESS_ANNOTATION
from processes import free_port

TOKEN: Final = "operator"
STEP_S: Final = 0.2
"""Seconds between two acts of the controllers."""


class Rehearsal:
    """Has the methods of `Plane`."""

    def __init__(self, folder: Path, *, is_large: bool = False) -> None:
        """
        Args:
            is_large: its controllers act at once, and only run pods (`LargeCluster`).
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._is_large = is_large
        self.cluster = LargeCluster() if is_large else FakeKubernetes()
        self._server = FakeApiServer(self.cluster)
        self._namespaces: dict[str, Object] = {}
        self._events: dict[Kind, list[tuple[int, Object, bytes]]] = {kind: [] for kind in KINDS.values()}
        """All that watches of a kind tell: version, namespace and labels of the object, the line."""
        self._told = {kind: asyncio.Event() for kind in KINDS.values()}
        self._writes: list[dict[str, str]] = []
        self._port = free_port()
        self._runner: web.AppRunner | None = None
        self._stepping: asyncio.Task[None] | None = None
        self.cluster.listeners.append(self._remember)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def start(self) -> None:
        app = self._server.app()
        app.middlewares.append(self._route)
        app.router.add_route("*", "/{path:.*}", _unrouted)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        self._stepping = asyncio.create_task(self._step(), name="controllers")

    def connect(self) -> Api:
        return Api(self.url, ssl.create_default_context())

    def tls(self) -> None:
        return None

    def operator_writes(self) -> list[dict[str, str]]:
        return list(self._writes)

    def close(self, *, keep: bool) -> None:
        if self._stepping is not None:
            if self._stepping.done():
                self._stepping.result()
            self._stepping.cancel()

    async def end(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _step(self) -> None:
        while True:
            has_acted = self.cluster.step()
            if self._is_large:
                await asyncio.sleep(0 if has_acted else STEP_S)
            else:
                self._collect_garbage()
                await asyncio.sleep(STEP_S)

    def _collect_garbage(self) -> None:
        """Remove what was made for an owner that was gone by then."""
        living = {obj["metadata"]["uid"] for obj in self.cluster.objects.values()}
        for key, obj in list(self.cluster.objects.items()):
            owners = [each["uid"] for each in obj["metadata"].get("ownerReferences", ())]
            if owners and living.isdisjoint(owners):
                self.cluster.remove(key)

    def _remember(self, kind: Kind, event: str, obj: Object) -> None:
        metadata = {name: obj["metadata"].get(name) or {} for name in ("namespace", "labels")}
        line = msgspec.json.encode({"type": event, "object": obj}) + b"\n"
        self._events[kind].append((int(obj["metadata"]["resourceVersion"]), {"metadata": metadata}, line))
        self._told[kind].set()
        self._told[kind] = asyncio.Event()

    @web.middleware
    async def _route(self, request: web.Request, handler: Any) -> web.StreamResponse:
        target = _target(request.path)
        if request.query.get("watch") in ("1", "true"):
            return await self._watch(request, target)
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return await self._administer(request, target)
        response = await handler(request)
        if request.method != "GET" and "dryRun" not in request.query:
            verb = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}[request.method]
            resource = "/".join(part for part in (target["resource"], target["sub"]) if part)
            self._writes.append(
                {
                    "verb": verb,
                    "resource": resource,
                    "namespace": target["namespace"],
                    "name": target["name"],
                    "status": str(response.status),
                }
            )
        return response

    async def _watch(self, request: web.Request, target: dict[str, str]) -> web.StreamResponse:
        kind = _kind(target["resource"])
        labels, namespace = request.query.get("labelSelector", ""), target["namespace"]
        since = int(request.query.get("resourceVersion") or 0)
        events = self._events[kind]
        position = bisect.bisect(events, since, key=lambda each: each[0])
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                told = self._told[kind]
                for _, obj, line in events[position:]:
                    position += 1
                    if namespace in ("", obj["metadata"]["namespace"]) and selects(labels, obj):
                        await response.write(line)
                await told.wait()
        return response

    async def _administer(self, request: web.Request, target: dict[str, str]) -> web.Response:
        resource, namespace, name = target["resource"], target["namespace"], target["name"]
        if target["sub"] == "token":
            return web.json_response({"status": {"token": TOKEN}})
        body = await request.json() if request.can_read_body else {}
        if resource == "namespaces":
            return self._namespace(request.method, target["name"] or target["namespace"], body)
        if resource == "replicasets":
            return web.json_response({"items": self._templates(namespace)})
        if resource not in {kind.plural for kind in KINDS.values()}:
            return web.json_response({"metadata": {}, "items": []})
        kind = _kind(resource)
        if request.method == "GET" and not name:
            found = await self.cluster.list(
                kind, namespace=namespace or None, labels=request.query.get("labelSelector", "")
            )
            return web.json_response({"items": found.items, "metadata": {"resourceVersion": found.version}})
        key = (kind, namespace, name)
        live = self.cluster.objects.get(key)
        if request.method == "PATCH" and "apply" in request.content_type:
            body["metadata"] |= {"namespace": namespace}
            if live is None:
                if address := body["metadata"].get("annotations", {}).get(ADDRESS_ANNOTATION):
                    body["status"] = {"phase": "Running", "podIP": address}
                self.cluster.create(body)
            else:
                self._change(key, live, {"spec": body.get("spec", {})})
        elif live is None:
            return web.json_response({"code": 404, "message": f"{resource} {name} not found"}, status=404)
        elif request.method == "PATCH":
            self._change(key, live, body)
        elif request.method == "DELETE":
            self.cluster.remove(key)
            return web.json_response({})
        return web.json_response(self.cluster.objects[key])

    def _change(self, key: tuple[Kind, str, str], live: Object, patch: Object) -> None:
        """A merge patch."""
        if key[0] is INFERENCE_SERVICES:
            self.cluster.edit(key[2], lambda spec: _merge(spec, patch["spec"]), namespace=key[1])
        else:
            changed = {**live}
            _merge(changed, patch)
            self.cluster.overwrite(key, changed)

    def _namespace(self, method: str, name: str, body: Object) -> web.Response:
        if method == "PATCH":
            self._namespaces[name] = body
        if method == "DELETE":
            self._namespaces.pop(name, None)
            for key in [key for key in self.cluster.objects if key[1] == name]:
                self.cluster.remove(key)
        found = self._namespaces.get(name)
        return web.json_response(found or {"code": 404}, status=200 if found or method == "DELETE" else 404)

    def _templates(self, namespace: str) -> list[Object]:
        """One item for each pod template that the Deployments of a namespace have had and have pods of."""
        owners = {
            obj["metadata"]["uid"]
            for (kind, where, _), obj in self.cluster.objects.items()
            if kind is DEPLOYMENTS and where == namespace
        }
        digests = {
            pod["metadata"]["annotations"]["template"]
            for (kind, _, _), pod in self.cluster.objects.items()
            if kind is PODS and any(o["uid"] in owners for o in pod["metadata"].get("ownerReferences", ()))
        }
        return [{"metadata": {"uid": digest}} for digest in digests]


class RehearsedNodes:
    """Has what faults use of `SimulatedNodes`; the cluster runs its pods itself."""

    def __init__(self, cluster: FakeKubernetes) -> None:
        self._cluster = cluster
        self.names = ["node-a"]
        self.changed = asyncio.Event()
        cluster.listeners.append(self._tell)

    @property
    def pods(self) -> Iterable[Object]:
        return [obj for (kind, _, _), obj in list(self._cluster.objects.items()) if kind is PODS]

    async def start(self) -> None:
        return None

    async def close(self) -> None:
        return None

    async def revive(self, *names: str) -> None:
        return None

    def _tell(self, kind: Kind, event: str, obj: Object) -> None:
        if kind is PODS:
            self.changed.set()


def chart(image: str = "argosy-engine:n") -> list[Object]:
    """What the chart's Deployment says of the operator, without Helm."""
    values = {
        "ARGOSY_LEASE": "argosy-operator",
        "ARGOSY_FLEET_KEY_SECRET": "argosy-fleet-key",
        "ARGOSY_ENGINE_IMAGE": image,
        "ARGOSY_ENGINE_UPGRADE_POLICY": "OnSpecChange",
        "ARGOSY_ROUTER_URL": "http://argosy-router",
    }
    secret = {"secretKeyRef": {"name": "argosy-fleet-key", "key": "key"}}
    env = [
        *({"name": name, "value": value} for name, value in values.items()),
        {"name": "POD_NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}},
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "ARGOSY_FLEET_KEY", "valueFrom": secret},
    ]
    container = {"name": "operator", "args": ["operator", "--log-level", "INFO"], "env": env}
    spec = {"template": {"spec": {"containers": [container]}}}
    return [{"kind": "Deployment", "metadata": {"name": "argosy-operator"}, "spec": spec}]


async def _unrouted(request: web.Request) -> web.Response:
    raise web.HTTPNotFound


def _kind(resource: str) -> Kind:
    return next(kind for kind in KINDS.values() if kind.plural == resource)


def _target(path: str) -> dict[str, str]:
    """What a path names."""
    parts = path.strip("/").split("/")
    parts = parts[2:] if parts[0] == "api" else parts[3:]
    namespace = ""
    if len(parts) > 2 and parts[0] == "namespaces":
        namespace, parts = parts[1], parts[2:]
    parts += [""] * 3
    return {"namespace": namespace, "resource": parts[0], "name": parts[1], "sub": parts[2]}


def _merge(live: Object, patch: Object) -> None:
    for name, value in patch.items():
        if value is None:
            live.pop(name, None)
        elif isinstance(value, dict) and isinstance(live.get(name), dict):
            live[name] = {**live[name]}
            _merge(live[name], value)
        else:
            live[name] = value
