"""A small client of the API server, for the administrator of a run.

Owns paths, patches and watches. Must not know what any object means.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any, Self, TypeVar

import aiohttp

Object = dict[str, Any]
T = TypeVar("T")

GROUPS = {
    "deployments": "apis/apps/v1",
    "replicasets": "apis/apps/v1",
    "poddisruptionbudgets": "apis/policy/v1",
    "leases": "apis/coordination.k8s.io/v1",
    "clusterroles": "apis/rbac.authorization.k8s.io/v1",
    "clusterrolebindings": "apis/rbac.authorization.k8s.io/v1",
    "roles": "apis/rbac.authorization.k8s.io/v1",
    "rolebindings": "apis/rbac.authorization.k8s.io/v1",
    "customresourcedefinitions": "apis/apiextensions.k8s.io/v1",
    "inferenceservices": "apis/inference.argosy.dev/v1alpha1",
}
"""Resource -> API path; those of the core group are left out."""


class Refused(Exception):
    """The API server refused a request."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class TooLate(Exception):
    """Something did not come true in time."""


class Api:
    """An async context manager."""

    def __init__(self, url: str, context: ssl.SSLContext) -> None:
        self._url = url
        self._context = context
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(ssl=self._context, limit=64)
        self._session = aiohttp.ClientSession(connector=connector, read_bufsize=1 << 22)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session
        await self._session.close()

    async def request(self, method: str, path: str, body: Any = None, *, content: str = "json") -> Object:
        """Send a request; `content` is a patch's style.

        Raises:
            Refused: the answer is an error.
            aiohttp.ClientError, TimeoutError: there is no answer.
        """
        assert self._session
        headers = {"Content-Type": f"application/{content}"}
        async with self._session.request(
            method,
            f"{self._url}/{path}",
            data=None if body is None else json.dumps(body),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=30),
        ) as response:
            answer = await response.json()
            if response.status >= 400:
                raise Refused(response.status, answer.get("message", ""))
            return answer

    async def text(self, path: str) -> str:
        """What the API server says of itself as plain text, its metrics for instance."""
        assert self._session
        timeout = aiohttp.ClientTimeout(total=30)
        async with self._session.get(f"{self._url}/{path}", timeout=timeout) as response:
            answer = await response.text()
            if response.status >= 400:
                raise Refused(response.status, answer)
            return answer

    async def list(self, resource: str, namespace: str = "", labels: str = "") -> list[Object]:
        query = f"?labelSelector={labels}" if labels else ""
        return (await self.request("GET", path_of(resource, namespace) + query))["items"]

    async def get(self, resource: str, namespace: str, name: str) -> Object:
        return await self.request("GET", path_of(resource, namespace, name))

    async def find(self, resource: str, namespace: str, name: str) -> Object | None:
        """Like `get`, but None if the object does not exist."""
        try:
            return await self.get(resource, namespace, name)
        except Refused as error:
            if error.status == 404:
                return None
            raise

    async def create(self, resource: str, namespace: str, obj: Object) -> Object:
        return await self.request("POST", path_of(resource, namespace), obj)

    async def apply(self, resource: str, namespace: str, obj: Object) -> Object:
        path = path_of(resource, namespace, obj["metadata"]["name"])
        return await self.request(
            "PATCH", f"{path}?fieldManager=admin&force=true", obj, content="apply-patch+yaml"
        )

    async def merge(
        self, resource: str, namespace: str, name: str, patch: Object, *, sub: str = ""
    ) -> Object:
        """Merge patch of an object or of one of its subresources."""
        path = path_of(resource, namespace, name) + (f"/{sub}" if sub else "")
        return await self.request("PATCH", path, patch, content="merge-patch+json")

    async def delete(self, resource: str, namespace: str, name: str, options: Object | None = None) -> None:
        """Delete an object; it may be gone already."""
        try:
            await self.request("DELETE", path_of(resource, namespace, name), options or {})
        except Refused as error:
            if error.status not in (404, 409):
                raise

    async def watch(self, resource: str, namespace: str = "") -> AsyncIterator[tuple[str, Object]]:
        """Events for as long as the caller wants them: at first `ADDED` for everything there is, and after an
        interruption again."""
        assert self._session
        while True:
            try:
                listed = await self.request("GET", path_of(resource, namespace))
                for obj in listed["items"]:
                    yield "ADDED", obj
                version = listed["metadata"]["resourceVersion"]
                url = f"{self._url}/{path_of(resource, namespace)}?watch=1&resourceVersion={version}"
                async with self._session.get(url, timeout=aiohttp.ClientTimeout(total=None)) as response:
                    response.raise_for_status()
                    async for line in response.content:
                        event = json.loads(line)
                        if event["type"] == "ERROR":
                            break
                        yield event["type"], event["object"]
            except (aiohttp.ClientError, TimeoutError, OSError, Refused, ValueError):
                await asyncio.sleep(0.2)


def path_of(resource: str, namespace: str = "", name: str = "") -> str:
    """The path of a collection, or of an object of it."""
    prefix = GROUPS.get(resource, "api/v1")
    middle = f"/namespaces/{namespace}" if namespace else ""
    return f"{prefix}{middle}/{resource}" + (f"/{name}" if name else "")


async def until(
    what: str, probe: Callable[[], Awaitable[T | None]], seconds: float, interval: float = 0.2
) -> T:
    """Ask until the answer is true.

    Raises:
        TooLate: it was not within `seconds`; the text says what was waited for, and the last answer or error.
    """
    deadline = time.monotonic() + seconds
    last = ""
    while True:
        try:
            answer = await probe()
            if answer:
                return answer
            last = repr(answer)
        except (Refused, aiohttp.ClientError, TimeoutError, OSError) as error:
            last = f"{type(error).__name__}: {error}"
        if time.monotonic() > deadline:
            raise TooLate(f"{what}: not within {seconds:.0f} s; last: {last[:500]}")
        await asyncio.sleep(interval)
