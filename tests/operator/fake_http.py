"""The fake cluster over HTTP, for tests of kopf and `kubernetes.aio`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler
from fake_kubernetes import FakeKubernetes, Object, selects

from argosy_operator.cluster.api import ApiError, ObjectList
from argosy_operator.names import KINDS, NAMESPACES, PODS, Kind
from argosy_operator.reconcile.controller import WATCHED

Authorize = Callable[[str, Kind, str, str | None, str | None], bool]
"""Whether a request is allowed: verb, kind, resource with subresource, namespace, name."""


class FakeApiServer:
    """Discovery, list, watch, get, apply, status patches and delete of the known kinds."""

    def __init__(self, cluster: FakeKubernetes) -> None:
        self.cluster = cluster
        self.requests: list[tuple[str, str, str, str]] = []
        """Method, path, query and content type of every request."""
        self.authorize: Authorize = lambda *_: True
        self.forbidden: list[str] = []
        """Requests that were answered with 403."""
        self.expired_tokens = 0
        """Number of further pages that are answered with 410, as their token has expired."""
        self.missing_namespaces: set[str] = set()
        self.watch_errors: list[int] = []
        """HTTP statuses with which the next watches are answered."""
        self.watch_began = asyncio.Event()
        """Set once a watch was begun."""
        self._unread: dict[str, ObjectList] = {}
        """What is left of lists of which a page was read, by the token for the next one."""
        self.deep = 0
        """Levels of what stands for the text `deep` in answers."""
        self._watchers: list[web.Request] = []
        self._watches: list[tuple[Kind, str | None, str, asyncio.Queue[tuple[str, Object]]]] = []
        cluster.listeners.append(self._tell)

    @property
    def watches(self) -> int:
        """Watches that clients have open now of the kinds that kopf watches; those beside it begin at any time.

        They tell of what happens from now on, whatever version they ask for.
        """
        watched = {kind.plural for kind in WATCHED}
        transports = (each.transport for each in self._watchers if each.match_info["plural"] in watched)
        return sum(transport is not None and not transport.is_closing() for transport in transports)

    def cut_watches(self) -> None:
        """End every connection on which a watch is open."""
        for request in self._watchers:
            if request.transport is not None:
                request.transport.close()

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._deepen])
        app.router.add_get("/api", self._json({"versions": ["v1"]}))
        app.router.add_get("/apis", self._json({"groups": self._groups()}))
        app.router.add_get("/api/v1/namespaces/{name}", self._namespace)
        for prefix, kinds in self._versions().items():
            resources = [
                {
                    "name": kind.plural,
                    "singularName": "",
                    "kind": kind.name,
                    "namespaced": True,
                    "verbs": VERBS,
                }
                for kind in kinds
            ]
            app.router.add_get(prefix, self._json({"resources": resources}))
            app.router.add_route("*", prefix + "/{plural}", self._handle)
            app.router.add_route("*", prefix + "/namespaces/{namespace}/{plural}", self._handle)
            app.router.add_route("*", prefix + "/namespaces/{namespace}/{plural}/{name}", self._handle)
            app.router.add_route("*", prefix + "/namespaces/{namespace}/{plural}/{name}/{sub}", self._handle)
        return app

    @web.middleware
    async def _deepen(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await handler(request)
        if isinstance(response, web.Response) and response.text:
            response.text = self._deepened(response.text)
        return response

    def _deepened(self, text: str) -> str:
        levels = '{"f:a":' * self.deep + "{}" + "}" * self.deep
        return text.replace('"deep"', levels) if self.deep else text

    def _groups(self) -> list[Object]:
        groups = {kind.group: kind for kind in (*KINDS.values(), *KNOWN_TO_KOPF) if kind.group}
        return [
            {
                "name": name,
                "preferredVersion": {"version": kind.version},
                "versions": [{"version": kind.version}],
            }
            for name, kind in groups.items()
        ]

    def _versions(self) -> dict[str, list[Kind]]:
        versions: dict[str, list[Kind]] = {}
        for kind in (*KINDS.values(), *KNOWN_TO_KOPF):
            versions.setdefault(f"/apis/{kind.api_version}" if kind.group else "/api/v1", []).append(kind)
        return versions

    def _json(self, body: Any) -> Any:
        async def handler(request: web.Request) -> web.Response:
            return web.json_response(body)

        return handler

    async def _namespace(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if not self.authorize("get", NAMESPACES, "namespaces", name, name):
            return web.json_response({"code": 403, "message": "forbidden"}, status=403)
        if name in self.missing_namespaces:
            return web.json_response({"code": 404, "message": f'namespaces "{name}" not found'}, status=404)
        return web.json_response({"metadata": {"name": name}})

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((request.method, request.path, request.query_string, request.content_type))
        info = request.match_info
        kind = next(kind for kind in KINDS.values() if kind.plural == info["plural"])
        namespace, name = info.get("namespace"), info.get("name")
        try:
            verb, sub = _verb(request), info.get("sub")
            resource = f"{info['plural']}/{sub}" if sub else info["plural"]
            if not self.authorize(verb, kind, resource, namespace, name):
                self.forbidden.append(f"{verb} {resource} in {namespace or 'all namespaces'}")
                raise ApiError(verb, 403, self.forbidden[-1])
            if name is None:
                labels = request.query.get("labelSelector", "")
                if request.query.get("watch") == "true":
                    if self.watch_errors:
                        raise ApiError("WATCH", self.watch_errors.pop(0), "told to fail")
                    return await self._watch(request, kind, namespace, labels)
                if request.method == "POST":
                    assert request.query["fieldManager"] == "argosy-operator"
                    return web.json_response(await self.cluster.create_only(await request.json()), status=201)
                if "continue" in request.query and self.expired_tokens:
                    self.expired_tokens -= 1
                    raise ApiError("LIST", 410, "the provided continue parameter is too old")
                found = self._unread.get(request.query.get("continue", ""))
                found = found or await self.cluster.list(kind, namespace=namespace, labels=labels)
                limit = int(request.query.get("limit", 500))
                metadata = {"resourceVersion": found.version}
                if rest := found.items[limit:]:  # what follows is as old as the first page
                    metadata["continue"] = token = f"{found.version}-{len(rest)}"
                    self._unread[token] = ObjectList(rest, found.version)
                return web.json_response({"items": found.items[:limit], "metadata": metadata})
            assert namespace is not None
            return await self._one(request, kind, namespace, name, sub)
        except ApiError as error:
            return web.json_response({"code": error.status, "message": error.message}, status=error.status)

    async def _one(
        self, request: web.Request, kind: Kind, namespace: str, name: str, sub: str | None
    ) -> web.StreamResponse:
        body = json.loads(await request.text() or "{}")
        if request.method == "GET":
            found = await self.cluster.get(kind, namespace, name)
            if found is None:
                raise ApiError("GET", 404, f"{name} not found")
            return web.json_response(found)
        if request.method == "DELETE":
            await self.cluster.delete(kind, namespace, name, uid=body["preconditions"]["uid"])
            return web.json_response({})
        if request.method == "PUT":
            return web.json_response(await self.cluster.replace(body))
        assert request.method == "PATCH"
        if request.query.get("dryRun") == "All":
            assert body == {}, "a dry run of the operator changes nothing"
            assert "as=PartialObjectMetadata" in request.headers["Accept"]
            found = await self.cluster.read_metadata(kind, namespace, name)
            if found is None:
                raise ApiError("PATCH", 404, f"{name} not found")
            return web.json_response(found)
        if request.content_type == "application/apply-patch+yaml":
            assert request.query["fieldManager"] == "argosy-operator"
            assert request.query["force"] == "true"
            return web.json_response(await self.cluster.apply(body))
        if sub is None:
            assert kind is PODS, "of other kinds the operator patches nothing but status"
            assert request.content_type == "application/merge-patch+json"
            return web.json_response(await self.cluster.patch(kind, namespace, name, body))
        assert sub == "status"
        strategic = request.content_type == "application/strategic-merge-patch+json"
        return web.json_response(
            await self.cluster.patch_status(kind, namespace, name, body, strategic=strategic)
        )

    async def _watch(
        self, request: web.Request, kind: Kind, namespace: str | None, labels: str
    ) -> web.StreamResponse:
        events: asyncio.Queue[tuple[str, Object]] = asyncio.Queue()
        watch = (kind, namespace, labels, events)
        self._watches.append(watch)
        self._watchers.append(request)
        self.watch_began.set()
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        try:
            while True:
                event, obj = await events.get()
                line = self._deepened(json.dumps({"type": event, "object": obj}))
                await response.write(line.encode() + b"\n")
        finally:
            self._watches.remove(watch)
            self._watchers.remove(request)

    def _tell(self, kind: Kind, event: str, obj: Object) -> None:
        for each, namespace, labels, events in self._watches:
            if (
                each == kind
                and namespace in (None, obj["metadata"].get("namespace"))
                and selects(labels, obj)
            ):
                events.put_nowait((event, obj))


def _verb(request: web.Request) -> str:
    """RBAC's name for what a request does."""
    if request.method == "GET" and "name" not in request.match_info:
        return "watch" if request.query.get("watch") == "true" else "list"
    return {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}[
        request.method
    ]


VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]
KNOWN_TO_KOPF = (
    Kind("", "v1", "Event", "events"),
    Kind("apiextensions.k8s.io", "v1", "CustomResourceDefinition", "customresourcedefinitions"),
)
"""kopf waits until discovery offers these, even if it never asks for them."""
