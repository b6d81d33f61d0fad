"""Serves one model from a hub and from a bucket on loopback, for measurements of clients.

    python bench/fetcher/loopback_servers.py DIRECTORY

Prints both addresses as a line of JSON, and serves until standard input ends. The hub is the look-alike of the tests.
The bucket answers what clients of S3 ask to list and read objects, checks no signature, and sends with sendfile, so
that it costs little beside the client that is measured. Its ETags are those of multipart uploads, as large objects
have them.
"""

from __future__ import annotations

import json
import sys
import threading
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "tests" / "support"))

from hub_repositories import files_under
from hub_server import HubServer

MODEL = "acme/bench"
BUCKET = "bench"
_MODIFIED = 1_760_000_000


class BucketServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, directory: Path) -> None:
        super().__init__(("127.0.0.1", 0), _BucketHandler)
        self.files = {path.name: path for path in sorted(directory.iterdir())}


class _BucketHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: BucketServer

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        _, _, key = unquote(url.path).strip("/").partition("/")
        query = parse_qs(url.query)
        if not key:
            self._list(query.get("prefix", [""])[0])
        elif (path := self.server.files.get(key.rpartition("/")[2])) is not None:
            self._send(path)
        else:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")

    def do_HEAD(self) -> None:
        self.do_GET()

    def _list(self, prefix: str) -> None:
        entries = [
            f"<Contents><Key>{escape(name)}</Key><LastModified>2025-10-09T08:53:20.000Z</LastModified>"
            f"<ETag>{escape(_etag(path))}</ETag><Size>{path.stat().st_size}</Size>"
            "<StorageClass>STANDARD</StorageClass></Contents>"
            for name, path in self.server.files.items()
            if name.startswith(prefix)
        ]
        self._answer(
            200,
            '<?xml version="1.0" encoding="UTF-8"?>'
            '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{BUCKET}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(entries)}</KeyCount>"
            f"<MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>{''.join(entries)}</ListBucketResult>".encode(),
        )

    def _send(self, path: Path) -> None:
        size = path.stat().st_size
        start, stop = 0, size
        wanted = self.headers.get("Range")
        if wanted:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, stop = int(first), min(int(last) + 1 if last else size, size)
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.send_header("Content-Length", str(stop - start))
        self.send_header("Content-Type", "binary/octet-stream")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", _etag(path))
        self.send_header("Last-Modified", formatdate(_MODIFIED, usegmt=True))
        self.end_headers()
        if self.command == "GET" and stop > start:
            with path.open("rb") as file:
                self.connection.sendfile(file, start, stop - start)

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def _etag(path: Path) -> str:
    return f'"{path.name.encode().hex():0<32.32}-2"'


def main() -> None:
    directory = Path(sys.argv[1])
    bucket = BucketServer(directory)
    threading.Thread(target=bucket.serve_forever, daemon=True).start()
    with HubServer() as hub:
        hub.add_model(MODEL, files_under(directory))
        addresses = {"hub": hub.endpoint, "bucket": f"http://127.0.0.1:{bucket.server_address[1]}"}
        print(json.dumps(addresses), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
