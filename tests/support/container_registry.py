"""A container registry on loopback, with scripted faults, a token server, and a record of every request."""

from __future__ import annotations

import json
import re
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from oci_artifacts import digest_of

TOKEN_PATH = "/token"


@dataclass(frozen=True)
class RegistryRequest:
    """A request as it was received."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    """Names in lower case."""
    form: Mapping[str, str]
    client_port: int
    """Tells connections apart."""

    @property
    def authorization(self) -> str:
        return self.headers.get("authorization", "")


@dataclass(frozen=True)
class RegistryReply:
    """A response."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    cut_after: int | None = None
    """Bytes of the body after which the connection is closed."""
    has_length: bool = True
    """Whether the body's length is announced; else it ends with the connection."""


def error_reply(status: int, code: str = "", **headers: str) -> RegistryReply:
    """An error as registries describe it, or one of another server if it has no code."""
    body = json.dumps({"errors": [{"code": code, "message": "secret text"}]}).encode() if code else b"<html>"
    return RegistryReply(status, body, {name.replace("_", "-"): value for name, value in headers.items()})


class ContainerRegistry:
    """Serves the reading half of the OCI distribution API, and tokens below `/token`.

    Set its attributes before or between requests:

    - `challenge`: WWW-Authenticate of a 401 that requests get without one of the `accepted` authorizations;
    - `token`: answers requests for tokens; by default each issues a new token, which is accepted;
    - `redirect_blobs`: URL before the path of blobs, which are then redirected to;
    - `has_ranges`: whether ranges of blobs are served.
    """

    def __init__(self) -> None:
        self.requests: list[RegistryRequest] = []
        self.challenge = ""
        self.accepted: set[str] = set()
        self.token: Callable[[RegistryRequest], RegistryReply] = self._issue_token
        self.redirect_blobs = ""
        self.has_ranges = True
        self._blobs: dict[str, bytes] = {}
        self._manifests: dict[tuple[str, str], tuple[str, bytes]] = {}
        self._script: list[tuple[re.Pattern[str], RegistryReply]] = []
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self._server.server_address[1]}"

    @property
    def url(self) -> str:
        return f"http://{self.host}"

    def add_blob(self, repository: str, content: bytes) -> None:
        self._blobs[digest_of(content)] = content

    def remove_blob(self, digest: str) -> None:
        del self._blobs[digest]

    def replace_blob(self, digest: str, content: bytes) -> None:
        """Serve other content under a digest, as a damaged registry does."""
        self._blobs[digest] = content

    def add_manifest(self, repository: str, reference: str, media_type: str, content: bytes) -> None:
        """Add a manifest or an index under a tag (or none, if empty) and its digest."""
        for name in (reference, digest_of(content)):
            self._manifests[repository, name] = (media_type, content)

    def script(self, path: str, *replies: RegistryReply) -> None:
        """Answer the next requests whose path has a match of a regular expression with these replies, in order."""
        with self._lock:
            self._script += [(re.compile(path), reply) for reply in replies]

    def require_tokens(self, **parameters: str) -> None:
        """Require Bearer tokens, from this server unless `realm` says otherwise."""
        given = {"realm": self.url + TOKEN_PATH, "service": "test-registry", **parameters}
        self.challenge = "Bearer " + ",".join(f'{name}="{value}"' for name, value in given.items() if value)

    def requests_for(self, path: str) -> list[RegistryRequest]:
        """The requests whose path has a match of a regular expression."""
        return [request for request in self.requests if re.search(path, request.path)]

    @contextmanager
    def running(self) -> Iterator[ContainerRegistry]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.002,))
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()

    def reply_to(self, request: RegistryRequest) -> RegistryReply:
        with self._lock:
            self.requests.append(request)
            for position, (path, reply) in enumerate(self._script):
                if path.search(request.path):
                    del self._script[position]
                    return reply
        if request.path == TOKEN_PATH:
            return self.token(request)
        if self.challenge and request.authorization not in self.accepted:
            return error_reply(401, "UNAUTHORIZED", WWW_Authenticate=self.challenge)
        found = re.fullmatch(r"/v2/(.+)/(manifests|blobs)/([^/]+)", request.path)
        if found is None:
            return error_reply(404)
        repository, kind, reference = found.groups()
        if kind == "manifests":
            return self._manifest(repository, reference)
        return self._blob(request, reference)

    def _manifest(self, repository: str, reference: str) -> RegistryReply:
        if repository not in {name for name, _ in self._manifests}:
            return error_reply(404, "NAME_UNKNOWN")
        found = self._manifests.get((repository, reference))
        if found is None:
            return error_reply(404, "MANIFEST_UNKNOWN")
        media_type, content = found
        headers = {"Content-Type": media_type, "Docker-Content-Digest": digest_of(content)}
        return RegistryReply(200, content, headers)

    def _blob(self, request: RegistryRequest, digest: str) -> RegistryReply:
        content = self._blobs.get(digest)
        if content is None:
            return error_reply(404, "BLOB_UNKNOWN")
        if self.redirect_blobs:
            return RegistryReply(307, b"moved", {"Location": self.redirect_blobs + request.path})
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("range", ""))
        if wanted is None or not self.has_ranges:
            return RegistryReply(200, content)
        start, last = int(wanted[1]), min(int(wanted[2]), len(content) - 1)
        if start > last:
            return error_reply(416)
        content_range = f"bytes {start}-{last}/{len(content)}"
        return RegistryReply(206, content[start : last + 1], {"Content-Range": content_range})

    def _issue_token(self, request: RegistryRequest) -> RegistryReply:
        token = f"token-{len(self.requests_for(f'^{TOKEN_PATH}$'))}"
        self.accepted.add(f"Bearer {token}")
        return RegistryReply(200, json.dumps({"token": token, "expires_in": 300}).encode())


def _handler(registry: ContainerRegistry) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 30

        def handle(self) -> None:
            with suppress(ConnectionError):  # clients may leave before they have read everything
                super().handle()

        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            length = int(self.headers.get("Content-Length", 0))
            request = RegistryRequest(
                self.command,
                urllib.parse.unquote(path),
                dict(urllib.parse.parse_qsl(query)),
                {name.lower(): value for name, value in self.headers.items()},
                dict(urllib.parse.parse_qsl(self.rfile.read(length).decode())),
                self.client_address[1],
            )
            self._send(registry.reply_to(request))

        do_POST = do_GET

        def _send(self, reply: RegistryReply) -> None:
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            if reply.has_length:
                self.send_header("Content-Length", str(len(reply.body)))
            if not reply.has_length or reply.cut_after is not None:
                self.send_header("Connection", "close")  # which closes it after this response
            self.end_headers()
            try:
                self.wfile.write(reply.body[: reply.cut_after])
            except OSError:  # the client has read what it wanted
                self.close_connection = True

        def log_message(self, *arguments: object) -> None: ...

    return Handler


@contextmanager
def running_registry() -> Iterator[ContainerRegistry]:
    with ContainerRegistry().running() as registry:
        yield registry
