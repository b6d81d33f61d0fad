"""HubServer: a Hugging Face hub on this machine, which huggingface_hub accepts through HF_ENDPOINT.

It has repositories with revisions, private and gated ones, and answers with the statuses and headers of the real hub.
Large files come from a second port, with signed addresses that expire; small ones by a relative redirect. Every request
is recorded, and a script of faults spoils single answers.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import re
import socket
import socketserver
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from hub_faults import Fault, FaultScript, Kind
from hub_repositories import Commit, Content, HubFile, Repository

_KEY = b"the storage's secret"
_PIECE_BYTES = 1 << 20
_HOLD_LIMIT_S = 60.0


@dataclass(frozen=True)
class SeenRequest:
    """A request that the look-alike answered. Names of headers are in lower case."""

    kind: Kind
    method: str
    path: str
    """The file's path; of lists the repository's name; of other requests the URL's path."""
    target: str
    headers: Mapping[str, str]
    status: int
    """0 if the connection was closed without an answer."""
    client_port: int

    @property
    def is_authorized(self) -> bool:
        return "authorization" in self.headers


class _Empty(Exception):
    """An answer without content: a redirect, or a refusal as the hub words it."""

    def __init__(self, status: int, message: str, code: str = "", **headers: str) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {"X-Error-Message": message, **headers} | ({"X-Error-Code": code} if code else {})


class HubServer:
    """The look-alike; a context manager.

    Args:
        host: address to listen on.
        tls: files of a certificate and its key, for both ports.

    Attributes:
        tokens: each token that the hub knows, and the private and gated repositories that its account may read.
        uses_per_signature: how often a signed address works; None: until `expire_signatures`.
        bytes_per_s: speed of each connection; None: as fast as it goes.
        redirects_small_files: whether files in git come by a redirect too, as the real hub does it.
        clients: what is closed before the server is.
    """

    def __init__(self, host: str = "127.0.0.1", tls: tuple[Path, Path] | None = None) -> None:
        self.repositories: dict[str, Repository] = {}
        self.renamed: dict[str, str] = {}
        self.tokens: dict[str, set[str]] = {}
        self.faults = FaultScript()
        self.uses_per_signature: int | None = None
        self.bytes_per_s: float | None = None
        self.redirects_small_files = True
        self.clients = contextlib.ExitStack()
        self.sent_bytes = 0
        """Bytes of files that went out, whether or not they arrived."""
        self._requests: list[SeenRequest] = []
        self._lock = threading.Lock()
        self._serial = 0
        self._first_valid = 1
        self._uses: Counter[int] = Counter()
        self._hub = _Origin(host, tls, lambda handler: self._answer(handler, self._answer_as_hub))
        self._storage = _Origin(host, tls, lambda handler: self._answer(handler, self._answer_as_storage))

    def __enter__(self) -> HubServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.clients.close()
        self._hub.close()
        self._storage.close()

    @property
    def endpoint(self) -> str:
        return self._hub.url

    @property
    def storage_host(self) -> str:
        return urlsplit(self._storage.url).netloc

    def add_model(self, name: str, files: Mapping[str, Content], **attributes: Any) -> Repository:
        """Add a repository with one commit on `main`."""
        repository = self.repositories[name] = Repository(name, **attributes)
        repository.add(files)
        return repository

    def requests(self, kind: Kind | None = None, path: str | None = None) -> list[SeenRequest]:
        with self._lock:
            return [
                seen for seen in self._requests if kind in (None, seen.kind) and path in (None, seen.path)
            ]

    def forget_requests(self) -> None:
        with self._lock:
            self._requests.clear()
            self.sent_bytes = 0

    def expire_signatures(self) -> None:
        """Let the storage refuse every address that was signed so far."""
        with self._lock:
            self._first_valid = self._serial + 1

    # Answers

    def _answer(self, handler: _Handler, route: Callable[[_Handler], None]) -> None:
        try:
            route(handler)
        except _Empty as answer:
            handler.send_empty(answer.status, answer.headers)
        except (ConnectionError, TimeoutError):
            handler.close_connection = True

    def _answer_as_hub(self, handler: _Handler) -> None:
        url = urlsplit(handler.path)
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        if parts[:2] == ["api", "models"] and len(parts) >= 4:
            self._list(handler, "/".join(parts[2:4]), parts[4:], has_blobs="blobs" in parse_qs(url.query))
        elif parts[:3] == ["api", "resolve-cache", "models"] and len(parts) >= 7:
            self._cached(handler, "/".join(parts[3:5]), parts[5], "/".join(parts[6:]))
        elif len(parts) >= 5 and parts[2] == "resolve":
            self._resolve(handler, "/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self._see(handler, "other", url.path)
            raise _Empty(404, "Sorry, we can't find the page you are looking for.")

    def _list(self, handler: _Handler, name: str, rest: list[str], *, has_blobs: bool) -> None:
        fault = self._see(handler, "list", name)
        repository = self._repository(handler, name)
        if repository.gate == "list":
            self._check_gate(handler, repository)
        what, revision = (rest[0], rest[1]) if len(rest) >= 2 else ("revision", "main")
        commit = self._commit(repository, revision)
        if what == "tree":
            handler.send_json([_tree_entry(path, file) for path, file in commit.files.items()], fault)
        elif what == "revision":
            handler.send_json(_model_info(repository, commit, has_blobs=has_blobs), fault)
        else:
            raise _Empty(404, "Not found")

    def _resolve(self, handler: _Handler, name: str, revision: str, path: str) -> None:
        fault = self._see(handler, "resolve", path)
        commit, file = self._file(handler, name, revision, path)
        headers = _file_headers(commit, file)
        if file.sha256 is not None:
            headers["Location"] = self._signed(file.sha256, path)
            handler.send_empty(302, _merged(headers, fault))
        elif self.redirects_small_files:
            target = f"/api/resolve-cache/models/{name}/{commit.sha}/{quote(path)}"
            headers["Location"] = f"{target}?etag={quote(headers['ETag'])}"
            handler.send_empty(307, _merged(headers, fault))
        else:
            self._send_file(handler, file, headers, fault)

    def _cached(self, handler: _Handler, name: str, revision: str, path: str) -> None:
        fault = self._see(handler, "content", path)
        commit, file = self._file(handler, name, revision, path)
        self._send_file(handler, file, _file_headers(commit, file), fault)

    def _answer_as_storage(self, handler: _Handler) -> None:
        url = urlsplit(handler.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        sha256 = url.path.rpartition("/")[2]
        fault = self._see(handler, "content", query.get("name", ""))
        if "Authorization" in handler.headers:
            raise _Empty(400, "Only one auth mechanism allowed")
        if not self._is_valid(sha256, query):
            raise _Empty(403, "Request has expired")
        file = next(
            file
            for repository in self.repositories.values()
            for commit in repository.commits.values()
            for file in commit.files.values()
            if file.sha256 == sha256
        )
        self._send_file(handler, file, {"ETag": '"of-the-storage"', "Accept-Ranges": "bytes"}, fault)

    def _see(self, handler: _Handler, kind: Kind, path: str) -> Fault:
        """Note a request, and return what else is wrong with its answer, unless it is refused because of a fault."""

        def note(status: int) -> None:
            headers = {name.lower(): value for name, value in handler.headers.items()}
            port = handler.client_address[1]
            seen = SeenRequest(kind, handler.command, path, handler.path, headers, status, port)
            with self._lock:
                self._requests.append(seen)

        handler.on_status = note
        fault = self.faults.next(kind, path)
        if fault.drops:
            note(0)
            handler.drop()
            raise ConnectionAbortedError
        if fault.status:
            raise _Empty(fault.status, "", **fault.headers)
        return fault

    # Access

    def _repository(self, handler: _Handler, name: str) -> Repository:
        token = handler.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in self.tokens:
            raise _Empty(401, "Invalid credentials in Authorization header")
        if (new := self.renamed.get(name)) is not None:
            location = handler.path.replace(quote(name), quote(new), 1)
            raise _Empty(307, "Temporary Redirect", Location=location)
        repository = self.repositories.get(name)
        is_hidden = (
            repository is not None and repository.is_private and name not in self.tokens.get(token, ())
        )
        if repository is None or is_hidden:
            if token:
                raise _Empty(404, "Repository not found", "RepoNotFound")
            raise _Empty(401, "Invalid username or password.", "RepoNotFound")
        if repository.is_disabled:
            raise _Empty(403, "Access to this resource is disabled.")
        return repository

    def _file(self, handler: _Handler, name: str, revision: str, path: str) -> tuple[Commit, HubFile]:
        repository = self._repository(handler, name)
        if repository.gate != "none":
            self._check_gate(handler, repository)
        commit = self._commit(repository, revision)
        if (file := commit.files.get(path)) is None:
            raise _Empty(404, "Entry not found", "EntryNotFound", **{"X-Repo-Commit": commit.sha})
        return commit, file

    def _check_gate(self, handler: _Handler, repository: Repository) -> None:
        token = handler.headers.get("Authorization", "").removeprefix("Bearer ")
        if repository.name not in self.tokens.get(token, ()):
            message = f"Access to model {repository.name} is restricted."
            raise _Empty(403 if token else 401, message, "GatedRepo")

    def _commit(self, repository: Repository, revision: str) -> Commit:
        commit = repository.at(revision)
        if commit is None:
            raise _Empty(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit

    # Signed addresses

    def _signed(self, sha256: str, path: str) -> str:
        with self._lock:
            self._serial += 1
            serial = self._serial
        return (
            f"{self._storage.url}/objects/{sha256}?name={quote(path, safe='')}&serial={serial}"
            f"&Signature={_signature(sha256, serial)}"
        )

    def _is_valid(self, sha256: str, query: Mapping[str, str]) -> bool:
        serial = int(query.get("serial", "0"))
        with self._lock:
            self._uses[serial] += 1
            is_worn = self.uses_per_signature is not None and self._uses[serial] > self.uses_per_signature
            is_expired = serial < self._first_valid
        is_genuine = hmac.compare_digest(query.get("Signature", ""), _signature(sha256, serial))
        return is_genuine and not is_worn and not is_expired

    # Bodies

    def _send_file(self, handler: _Handler, file: HubFile, headers: dict[str, str], fault: Fault) -> None:
        start, stop = 0, file.size
        status = 200
        if (wanted := handler.headers.get("Range")) and not fault.ignores_range:
            start, stop = _range(wanted, file.size)
            start = min(start + fault.moves_range_by, stop)
            status = 206
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{file.size}"
        body = fault.body
        headers["Content-Length"] = str(stop - start if body is None else len(body))
        handler.send_head(status, _merged(headers, fault))
        if handler.command == "HEAD":
            return
        pieces = (
            _pieces(file.content, start, stop, fault.pieces_of or _PIECE_BYTES) if body is None else [body]
        )
        left = fault.cut_after
        position = start
        for piece in pieces:
            if fault.flip_at is not None and position <= fault.flip_at < position + len(piece):
                changed = bytearray(piece)
                changed[fault.flip_at - position] ^= 1
                piece = bytes(changed)
            if left is not None and len(piece) >= left:
                self._send(handler, piece[:left])
                handler.drop()
                return
            if fault.hold is not None and position + len(piece) - start > fault.hold.after_bytes:
                first = max(fault.hold.after_bytes - (position - start), 0)
                self._send(handler, piece[:first])
                fault.hold.reached.set()
                fault.hold.release.wait(_HOLD_LIMIT_S)
                piece, position = piece[first:], position + first
            self._send(handler, piece)
            position += len(piece)
            left = None if left is None else left - len(piece)

    def _send(self, handler: _Handler, piece: bytes) -> None:
        with self._lock:
            self.sent_bytes += len(piece)  # before they go out: whoever has received them may look at once
        handler.connection.sendall(piece)
        if self.bytes_per_s is not None:
            time.sleep(len(piece) / self.bytes_per_s)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    on_status: Callable[[int], None] | None = None

    def do_GET(self) -> None:
        self.on_status = None
        self.server.answer(self)

    do_HEAD = do_GET

    def setup(self) -> None:
        super().setup()
        self.server.connections.add(self.connection)

    def finish(self) -> None:
        self.server.connections.discard(self.connection)
        with contextlib.suppress(OSError):
            super().finish()

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # the client has gone, or the server is closed
            super().handle()

    def log_message(self, *_: object) -> None:
        pass

    def send_head(self, status: int, headers: Mapping[str, str]) -> None:
        if self.on_status is not None:
            self.on_status(status)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def send_empty(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_head(status, {"Content-Length": "0", **headers})

    def send_json(self, value: object, fault: Fault) -> None:
        body = json.dumps(value).encode() if fault.body is None else fault.body
        headers = {"Content-Type": "application/json; charset=utf-8", "Content-Length": str(len(body))}
        self.send_head(200, _merged(headers, fault))
        if fault.cut_after is not None:
            body = body[: fault.cut_after]
        if self.command != "HEAD":
            self.connection.sendall(body)
        if fault.cut_after is not None:
            self.drop()

    def drop(self) -> None:
        """Close the connection once what was sent has arrived."""
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, answer: Callable[[_Handler], None]) -> None:
        super().__init__((host, 0), _Handler)
        self.answer = answer
        self.connections: set[socket.socket] = set()

    def server_bind(self) -> None:
        """Bind without HTTPServer's search for a name, which asks a name server about addresses other than loopback."""
        socketserver.TCPServer.server_bind(self)


class _Origin:
    """One listening port with its threads."""

    def __init__(self, host: str, tls: tuple[Path, Path] | None, answer: Callable[[_Handler], None]) -> None:
        self._server = _Server(host, answer)
        self._scheme = "http"
        if tls is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(*tls)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
            self._scheme = "https"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.002,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        host, port = self._server.server_address[:2]
        return f"{self._scheme}://{host}:{port}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        for connection in list(self._server.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def _model_info(repository: Repository, commit: Commit, *, has_blobs: bool) -> dict[str, Any]:
    return {
        "id": repository.name,
        "modelId": repository.name,
        "sha": commit.sha,
        "private": repository.is_private,
        "gated": "auto" if repository.gate != "none" else False,
        "disabled": repository.is_disabled,
        "lastModified": "2025-04-28T08:12:00.000Z",
        "createdAt": "2025-04-27T03:40:08.000Z",
        "downloads": 1,
        "likes": 0,
        "tags": ["safetensors"],
        "siblings": [
            {"rfilename": path} | (_blob(file) if has_blobs else {}) for path, file in commit.files.items()
        ],
    }


def _file_headers(commit: Commit, file: HubFile) -> dict[str, str]:
    headers = {"X-Repo-Commit": commit.sha, "ETag": f'"{file.etag}"', "Accept-Ranges": "bytes"}
    if file.sha256 is not None:
        headers |= {"X-Linked-ETag": f'"{file.sha256}"', "X-Linked-Size": str(file.size)}
    return headers


def _blob(file: HubFile) -> dict[str, Any]:
    blob: dict[str, Any] = {"size": file.size, "blobId": file.blob_id}
    if file.sha256 is not None:
        blob["lfs"] = {"sha256": file.sha256, "size": file.size, "pointerSize": file.pointer_size}
    return blob


def _tree_entry(path: str, file: HubFile) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "oid": file.blob_id, "size": file.size, "path": path}
    if file.sha256 is not None:
        entry["lfs"] = {"oid": file.sha256, "size": file.size, "pointerSize": file.pointer_size}
    return entry


def _merged(headers: Mapping[str, str], fault: Fault) -> dict[str, str]:
    return {name: value for name, value in {**headers, **fault.headers}.items() if value}


def _signature(sha256: str, serial: int) -> str:
    return hmac.new(_KEY, f"{sha256} {serial}".encode(), hashlib.sha256).hexdigest()


def _range(header: str, size: int) -> tuple[int, int]:
    """Return [start, stop) of a `Range` header with one range."""
    found = re.fullmatch(r"bytes=(\d*)-(\d*)", header)
    if found is None or not any(found.groups()):
        raise _Empty(400, "malformed range")
    first, last = found.groups()
    start = int(first) if first else max(size - int(last), 0)
    stop = min(int(last) + 1, size) if first and last else size
    if start >= stop:
        raise _Empty(416, "Range Not Satisfiable", **{"Content-Range": f"bytes */{size}"})
    return start, stop


def _pieces(content: Content, start: int, stop: int, piece_bytes: int) -> Iterator[bytes]:
    if isinstance(content, Path):
        with content.open("rb") as file:
            file.seek(start)
            for position in range(start, stop, piece_bytes):
                yield file.read(min(piece_bytes, stop - position))
    else:
        for position in range(start, stop, piece_bytes):
            yield content[position : min(position + piece_bytes, stop)]
