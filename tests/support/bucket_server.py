"""A bucket on this machine, in what S3's and Google's XML interfaces share: listings in pages, and reads of ranges.

For behaviour that a real store shows only in trouble; signatures are not checked.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qs, unquote
from xml.sax.saxutils import escape

import pytest

from scripted_http import Asked, Reply, ScriptedHttp, file_reply

BUCKET = "models"
DATE = {"Last-Modified": "Sat, 21 Nov 2026 10:00:00 GMT"}


def refusal(status: int, code: str = "", more: str = "") -> Reply:
    """An answer with the error document of an object store."""
    document = f"<Error><Code>{code}</Code><Message>no</Message>{more}</Error>" if code else ""
    return Reply(status, document.encode(), {"Content-Type": "application/xml"})


class BucketServer(ScriptedHttp):
    """Serves `objects`."""

    def __init__(
        self,
        objects: dict[str, bytes] | None = None,
        page_size: int = 1000,
        tls: tuple[Path, Path] | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self.objects = dict(objects or {})
        self.etags: dict[str, str] = {}
        """ETags other than MD5 sums, without quotes."""
        self.sizes: dict[str, int] = {}
        """Sizes that the listing gives instead of the true ones."""
        self.knows_conditions = True
        self.on_list: Callable[[Asked], Reply | None] = lambda _: None
        self.on_read: Callable[[Asked], Reply | None] = lambda _: None
        self._page_size = page_size
        super().__init__(self._respond, tls, host)

    def num_listings(self) -> int:
        return sum("list-type" in asked.query for asked in self.asked)

    def etag(self, key: str) -> str:
        etag = self.etags.get(key, hashlib.md5(self.objects[key]).hexdigest())
        return etag if etag.startswith("W/") else f'"{etag}"'

    def _size(self, key: str) -> int:
        return self.sizes.get(key, len(self.objects[key]))

    def _respond(self, asked: Asked) -> Reply:
        bucket, _, key = unquote(asked.path).removeprefix("/").partition("/")
        if "list-type" in asked.query:
            return self.on_list(asked) or (
                self._page(asked) if bucket == BUCKET else refusal(404, "NoSuchBucket")
            )
        if (reply := self.on_read(asked)) is not None:
            return reply
        if key not in self.objects:
            return refusal(404, "NoSuchKey")
        headers = {
            name: value
            for name, value in asked.headers.items()
            if self.knows_conditions or name != "if-match"
        }
        reply = file_reply(
            Asked(asked.method, asked.path, asked.query, headers),
            self.objects[key],
            {"ETag": self.etag(key), **DATE},
        )
        return refusal(412, "PreconditionFailed") if reply.status == 412 else reply

    def _page(self, asked: Asked) -> Reply:
        query = parse_qs(asked.query)
        prefix, token = query.get("prefix", [""])[0], query.get("continuation-token", [""])[0]
        keys = sorted(key for key in self.objects if key.startswith(prefix) and key > token)
        page, is_truncated = keys[: self._page_size], len(keys) > self._page_size
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-11-21T10:00:00.000Z</LastModified>"
            f"<ETag>{escape(self.etag(key))}</ETag><Size>{self._size(key)}</Size></Contents>"
            for key in page
        )
        more = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if is_truncated else ""
        document = (
            f'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult>{contents}{more}</ListBucketResult>'
        )
        return Reply(200, document.encode(), {"Content-Type": "application/xml"})


def credentials_for(provider: str, server: ScriptedHttp) -> dict[str, str]:
    """Named values that send a provider's requests to a server, without credentials."""
    if provider == "s3":
        return {"AWS_ENDPOINT_URL": server.url, "AWS_SKIP_SIGNATURE": "true"}
    return {"STORAGE_EMULATOR_HOST": server.url}


def forget_cloud(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove what this machine's environment says about clouds, which obstore reads by itself."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "GCE_", "STORAGE_EMULATOR")):
            monkeypatch.delenv(name)
