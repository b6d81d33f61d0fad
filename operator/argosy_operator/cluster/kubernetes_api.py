"""The Kubernetes client: implements `Api` over `kubernetes.aio`.

Owns the connection, deadlines, and the translation of the client's errors. Must not know what is written or why.
Invariant: every request has a deadline and raises nothing but `ApiError`.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator, Awaitable, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import aiohttp
import msgspec
from kubernetes.aio import client as kubernetes_client
from kubernetes.aio import config as kubernetes_config
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.dynamic.client import DynamicClient
from kubernetes.aio.dynamic.resource import Resource

from argosy_operator.cluster.api import ApiError, ObjectList
from argosy_operator.cluster.store import kept_fields
from argosy_operator.names import FIELD_MANAGER, Kind, Object, kind_of
from argosy_protocol import json_limits
from argosy_protocol.program.list_watch import PageSize, WatchError, list_pages, watch_events

DEADLINE: Final = 15.0
"""Seconds for one request. The API server answers in milliseconds; a slower request is retried."""
LIST_PAGE: Final = 10
"""Objects of the first answer to a list: a tenant's may have 4 MB of JSON each, and kopf lists all kinds at once."""
LIST_PAGE_MAX: Final = 500
"""Objects of any answer: as many as client-go asks for."""
_LIST_ATTEMPTS: Final = 3
"""Attempts of a list whose version the API server gives up before the last page (410)."""
WATCH_SECONDS: Final = 300
"""After so long the API server ends a watch; whoever watches lists again."""
_MAX_EVENT_BYTES: Final = 8 << 20
"""An object in etcd has at most 1.5 MiB."""
METADATA_ONLY: Final = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
"""Media type of an answer that leaves out everything but the metadata."""


class KubernetesApi:
    """`Api` over `kubernetes.aio`'s dynamic client. An async context manager."""

    def __init__(self, client: kubernetes_client.ApiClient) -> None:
        self._client = client
        self._dynamic = DynamicClient(client)  # not awaited: that would discover every API group

    @classmethod
    async def connect(cls) -> Self:
        """Connect to the cluster that the process runs in, or else to the one of KUBECONFIG.

        Raises:
            ApiError: there is neither a service account nor a kubeconfig.
        """
        configuration = kubernetes_client.Configuration()
        try:
            if "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ:
                kubernetes_config.load_incluster_config(client_configuration=configuration)
            else:
                path = os.environ.get("KUBECONFIG")  # the client itself reads the variable only at import
                await kubernetes_config.load_kube_config(config_file=path, client_configuration=configuration)
        except kubernetes_config.ConfigException as error:
            home = Path("~/.kube/config")
            raise ApiError(f"find a cluster (service account, KUBECONFIG, {home})", 0, str(error)) from error
        return cls(kubernetes_client.ApiClient(configuration))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()

    async def serves(self, kind: Kind) -> bool:
        prefix = f"/apis/{kind.group}" if kind.group else "/api"
        try:
            if kind.group:  # the list of groups may lag behind the group itself
                groups = (await self._request("get", "/apis")).get("groups", ())
                if all(group["name"] != kind.group for group in groups):
                    return False
            offered = await self._request("get", f"{prefix}/{kind.version}")
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        return any(resource["name"] == kind.plural for resource in offered.get("resources", ()))

    async def list(self, kind: Kind, *, namespace: str | None, labels: str = "") -> ObjectList:
        for _ in range(_LIST_ATTEMPTS - 1):
            try:
                return await self._list(kind, namespace=namespace, labels=labels)
            except ApiError as error:
                if error.status != 410:
                    raise
        return await self._list(kind, namespace=namespace, labels=labels)

    async def _list(self, kind: Kind, *, namespace: str | None, labels: str) -> ObjectList:
        items: list[Object] = []
        version = ""
        size = PageSize(LIST_PAGE, LIST_PAGE_MAX)
        async with aclosing(self._pages(kind, namespace=namespace, labels=labels, size=size)) as pages:
            async for page in pages:
                with _translated(f"list {kind.plural}"):
                    items += [kept_fields(kind, item) for item in page.items]
                version = page.version
        return ObjectList(items, version, are_kept=True)

    def list_pages(
        self, kind: Kind, *, namespace: str | None, limit: int
    ) -> AsyncGenerator[ObjectList, None]:
        return self._pages(kind, namespace=namespace, labels="", size=PageSize(limit, limit))

    async def _pages(
        self, kind: Kind, *, namespace: str | None, labels: str, size: PageSize
    ) -> AsyncGenerator[ObjectList, None]:
        path = self._resource(kind).path(namespace=namespace)
        selector = {"labelSelector": labels} if labels else {}

        async def ask(query: dict[str, str]) -> aiohttp.ClientResponse:
            return await self._answer("get", path, query_params=[*selector.items(), *query.items()])

        async with aclosing(list_pages(ask, size)) as pages:
            with _translated(f"GET {path}"):
                async for page in pages:
                    yield ObjectList(_objects(f"GET {path}", page.items or ()), page.version)

    async def watch(
        self, kind: Kind, *, namespace: str | None, version: str
    ) -> AsyncGenerator[tuple[str, Object], None]:
        path = self._resource(kind).path(namespace=namespace)
        action = f"WATCH {path}"
        timeout = aiohttp.ClientTimeout(total=WATCH_SECONDS + DEADLINE, sock_connect=DEADLINE)
        with _translated(action):
            response = await self._dynamic.request(
                "get",
                path,
                serialize=False,
                watch="true",
                resource_version=version,
                timeout_seconds=WATCH_SECONDS,
                _request_timeout=timeout,
            )
        async with aclosing(watch_events(response, _MAX_EVENT_BYTES)) as events:
            try:
                with _translated(action):
                    async for event in events:
                        yield event.type, _object(json_limits.loads(bytes(event.object)))
            finally:
                response.close()

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        return await _found(self._request("get", self._path(kind, namespace, name)))

    async def has_namespace(self, name: str) -> bool | None:
        try:
            await self._request("get", f"/api/v1/namespaces/{name}")
        except ApiError as error:
            if error.status == 404 and f'namespaces "{name}" not found' in error.message:
                return False
            if error.status in (401, 403, 404):
                return None
            raise
        return True

    async def read_metadata(self, kind: Kind, namespace: str, name: str) -> Object | None:
        path = self._path(kind, namespace, name)
        # The dry run of a patch that changes nothing.
        headers = {"Accept": METADATA_ONLY}
        return await _found(self._patch("merge-patch+json", path, {}, dry_run="All", header_params=headers))

    async def create_only(self, manifest: Object) -> Object:
        path = self._resource(kind_of(manifest)).path(namespace=manifest["metadata"]["namespace"])
        return await self._request("post", path, body=manifest, field_manager=FIELD_MANAGER)

    async def replace(self, manifest: Object) -> Object:
        metadata = manifest["metadata"]
        path = self._path(kind_of(manifest), metadata["namespace"], metadata["name"])
        return await self._request("put", path, body=manifest, field_manager=FIELD_MANAGER)

    async def apply(self, manifest: Object) -> Object:
        metadata = manifest["metadata"]
        try:
            path = self._path(kind_of(manifest), metadata["namespace"], metadata["name"])
            return await self._patch("apply-patch+yaml", path, manifest, force_conflicts="true")
        except ApiError as error:
            if error.status == 422 and '"field":"metadata.uid"' in error.message:
                # The API server calls another object's UID an attempt to change an immutable field.
                raise ApiError(error.action, 409, "another object has this name") from error
            raise

    async def patch_status(
        self, kind: Kind, namespace: str, name: str, patch: Object, *, strategic: bool
    ) -> Object:
        style = "strategic-merge-patch" if strategic else "merge-patch"
        return await self._patch(f"{style}+json", f"{self._path(kind, namespace, name)}/status", patch)

    async def patch(self, kind: Kind, namespace: str, name: str, patch: Object) -> Object:
        return await self._patch("merge-patch+json", self._path(kind, namespace, name), patch)

    async def patch_by_steps(self, kind: Kind, namespace: str, name: str, steps: Sequence[Object]) -> Object:
        return await self._patch("json-patch+json", self._path(kind, namespace, name), list(steps))

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str) -> None:
        options = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        try:
            await self._request("delete", self._path(kind, namespace, name), body=options)
        except ApiError as error:
            if error.status not in (404, 409):  # gone, or replaced by another object
                raise

    def _resource(self, kind: Kind) -> Resource:
        return Resource(
            prefix="apis" if kind.group else "api",
            group=kind.group,
            api_version=kind.version,
            kind=kind.name,
            name=kind.plural,
            namespaced=True,
            client=self._dynamic,
        )

    def _path(self, kind: Kind, namespace: str, name: str) -> str:
        return self._resource(kind).path(name=name, namespace=namespace)

    async def _patch(self, style: str, path: str, body: object, **params: Any) -> Object:
        """Send a patch of media type `application/STYLE`."""
        named = {"content_type": f"application/{style}", "field_manager": FIELD_MANAGER}
        return await self._request("patch", path, body=body, **named, **params)

    async def _request(self, method: str, path: str, **params: Any) -> Object:
        response = await self._answer(method, path, **params)
        with _translated(f"{method.upper()} {path}"):
            found: Object = await response.json(loads=json_limits.loads)
        return found

    async def _answer(self, method: str, path: str, **params: Any) -> aiohttp.ClientResponse:
        timeout = aiohttp.ClientTimeout(total=DEADLINE)
        with _translated(f"{method.upper()} {path}"):
            response: aiohttp.ClientResponse = await self._dynamic.request(
                method, path, serialize=False, _request_timeout=timeout, **params
            )
        return response


async def _found(request: Awaitable[Object]) -> Object | None:
    """The answer; None if there is no such object."""
    try:
        return await request
    except ApiError as error:
        if error.status == 404:
            return None
        raise


def _object(value: Any) -> Object:
    """The value, if it is an object of Kubernetes.

    Raises:
        ValueError: it is none.
    """
    metadata = value.get("metadata") if isinstance(value, dict) else None
    if not isinstance(metadata, dict) or not metadata.get("name"):
        raise ValueError("an object without a name")
    found: Object = value
    return found


def _objects(action: str, items: Iterable[msgspec.Raw]) -> Iterator[Object]:
    """The items of a list, read while somebody takes them: values that are small take fifteen times as much memory as
    their JSON.

    Raises:
        ApiError: one of them is no object.
    """
    with _translated(action):
        for item in items:
            yield _object(json_limits.loads(bytes(item)))


@contextmanager
def _translated(action: str) -> Iterator[None]:
    """Raise the errors of the client, and of the network, as `ApiError`."""
    try:
        yield
    except ApiException as error:
        raise ApiError(action, error.status or 0, _message(error)) from error
    except WatchError as error:
        raise ApiError(action, error.code, str(error)) from error
    except (
        TimeoutError,
        aiohttp.ClientError,
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
    ) as error:
        raise ApiError(action, 0, f"{type(error).__name__}: {error}") from error


def _message(error: ApiException) -> str:
    """What the API server says: the message of its Status, or whatever else has answered."""
    text = str(error.body or error.reason)
    try:
        status = json.loads(text)
    except ValueError:
        return text
    message = status.get("message") if isinstance(status, dict) else None
    return message if isinstance(message, str) and message else text
