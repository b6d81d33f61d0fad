"""Web servers: models behind `https://HOST/PATH/SHA256SUMS`, which lists the files of the folder that it lies in.

Owns this form, and credentials and statuses of web servers. A server has no revisions: a folder's is a hash over the
digests. The list has no sizes, so the server is asked for the size of each file that a model can have by the end of its
name. Other files are listed, which errors need, but with a size of 0. Reads compare size and ETag (or date) with what
they were at first, so that a file that changes on the way is noticed before its digest is wrong.

Credentials are ARGOSY_HTTPS_TOKEN as a bearer token if ARGOSY_HTTPS_HOST names the server, else its entry in netrc:
whoever writes a model's source does not decide who gets the token. Unencrypted HTTP is spoken with loopback addresses
only, and never after HTTPS.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import logging
import netrc
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import httpx

from argosy_fetcher.errors import (
    AccessDenied,
    FetchError,
    InvalidSource,
    ModelNotFound,
    SourceChanged,
    TransientError,
    UnsupportedModel,
)
from argosy_fetcher.source import MAX_FILE_BYTES, Chunk, RemoteFile, Snapshot, check_path
from argosy_fetcher.source_uri import SourceUri, is_loopback
from argosy_fetcher.sources.http import (
    MAX_SUMS_BYTES,
    SourceClient,
    content_range,
    is_transient,
    parse_sha256sums,
    retry_after_s,
)
from argosy_fetcher.sources.registry import header_value

MAX_PROBES = 8
"""Files of a folder whose sizes are asked for at once."""
MAX_PROBED_FILES = 2000
"""Several times the files of the largest models."""
MODEL_SUFFIXES = (".json", ".safetensors", ".jinja", ".model", ".txt")

_ETAG = re.compile(r'(?:W/)?"[!#-~]{0,256}"')
_DATE = re.compile(r"[A-Z][a-z]{2}, [0-9A-Za-z: ]{10,40}")

_log = logging.getLogger(__name__)


class _Probed(NamedTuple):
    """What a server says about a file."""

    size: int
    validator: str


class WebSource:
    """`Source` of one folder.

    Raises:
        InvalidSource: the URI is malformed.
    """

    def __init__(self, uri: SourceUri, credentials: Mapping[str, str]) -> None:
        try:
            self._url = httpx.URL(uri.name)
            check_path(self._url.path.strip("/"))
        except (httpx.InvalidURL, UnicodeError, ValueError, UnsupportedModel):
            raise InvalidSource(f"{uri}: the URL is malformed") from None
        self._name = uri.name
        self._credentials = credentials
        self._without_ranges: set[str] = set()
        self._probed: dict[str, _Probed] = {}
        """Kept when a probe fails, so that another attempt asks for what is missing only."""

    @property
    def name(self) -> str:
        return self._name

    @property
    def requested_revision(self) -> str:
        return ""

    def snapshot(self) -> Snapshot:
        response = self._client.answer(self._url, self.name, {}, accepted=(200,))
        sums = self._client.document(response, MAX_SUMS_BYTES, f"{self.name}: the list")
        digests = sorted(parse_sha256sums(sums, self.name).items())
        if not digests:
            raise ModelNotFound(f"{self.name}: the list names no files")
        self._probe_all([path for path, _ in digests if path.endswith(MODEL_SUFFIXES)])
        probed = [self._probed.get(path, _Probed(0, "")) for path, _ in digests]
        files = tuple(
            RemoteFile(path, found.size, digest, found.validator)
            for (path, digest), found in zip(digests, probed, strict=True)
        )
        listed = "".join(f"{digest.hex}  {path}\n" for path, digest in digests)
        return Snapshot(self.name, hashlib.sha256(listed.encode()).hexdigest()[:40], files)

    def read(self, file: RemoteFile, start: int, stop: int) -> Iterator[Chunk]:
        if start >= stop:
            return
        headers = {"range": f"bytes={start}-{stop - 1}"}
        if file.version and not file.version.startswith("W/"):
            headers["if-range"] = file.version
        where = self._where(file.path)
        try:
            response = self._client.answer(self._file_url(file.path), where, headers)
        except ModelNotFound:
            raise SourceChanged(f"{where}: the server does not have the file any more") from None
        if _is_other(response, file.version):
            response.close()
            raise SourceChanged(f"{where}: the file has changed since it was listed; fetch again")
        yield from self._client.part(response, file.size, start, stop, where)

    def can_read_ranges(self, file: RemoteFile) -> bool:
        """Whether the server begins anywhere but at the beginning of a file."""
        return file.path not in self._without_ranges

    def close(self) -> None:
        if (client := self.__dict__.pop("_client", None)) is not None:
            client.close()

    @functools.cached_property
    def _client(self) -> WebClient:
        return WebClient(self.name, self._url, self._credentials)

    def _probe_all(self, paths: Sequence[str]) -> None:
        """Fill `_probed`, with several requests at once."""
        if len(paths) > MAX_PROBED_FILES:
            raise UnsupportedModel(
                f"{self.name}: the list names {len(paths)} files that may belong to a model; the limit is "
                f"{MAX_PROBED_FILES}"
            )
        pool = ThreadPoolExecutor(MAX_PROBES, thread_name_prefix="web-probe")
        try:
            for _ in pool.map(self._probe, [path for path in paths if path not in self._probed]):
                pass
        finally:  # the first error, or an interrupt, ends all
            pool.shutdown(wait=False, cancel_futures=True)

    def _probe(self, path: str) -> None:
        """Ask for one byte rather than for HEAD, which signed URLs and some servers refuse."""
        where = self._where(path)
        response = self._client.answer(
            self._file_url(path), where, {"range": "bytes=0-0"}, accepted=(200, 206, 416)
        )
        self._client.discard(response)
        self._client.check_encoding(response, where)
        _, _, size = content_range(response)
        if response.status_code == 416 and size != 0:
            raise FetchError(f"{where}: the server cannot give the first byte of the file (HTTP 416)")
        if size is None:
            raise FetchError(f"{where}: the server does not say how large the file is (no Content-Length)")
        if size > MAX_FILE_BYTES:
            raise UnsupportedModel(f"{where}: too large: {size} bytes")
        if response.status_code == 200:
            self._without_ranges.add(path)
        self._probed[path] = _Probed(size, _validator(response))

    def _file_url(self, path: str) -> httpx.URL:
        return self._url.join(quote(path))

    def _where(self, path: str) -> str:
        return f"{self.name}: {path}"


def _validator(response: httpx.Response) -> str:
    """The ETag, else the date, else an empty string."""
    etag, date = response.headers.get("etag", ""), response.headers.get("last-modified", "")
    if _ETAG.fullmatch(etag):
        return etag
    return date if _DATE.fullmatch(date) else ""


def _is_other(response: httpx.Response, version: str) -> bool:
    """Whether a response is not about the content that had this validator. A response may leave its own out."""
    now = response.headers.get("etag" if version.endswith('"') else "last-modified", "")
    return bool(now and version) and now.removeprefix("W/") != version.removeprefix("W/")


class WebClient(SourceClient):
    """Requests to a web server.

    Args:
        source: name of the model's source, for messages.
        server: any URL of the source's server.

    Raises:
        AccessDenied: the credentials are malformed.
        InvalidSource: the server is not on loopback and its URL not https://, or the file of trusted certificates is
            unusable.
    """

    IS_EXACT = True

    def __init__(self, source: str, server: httpx.URL, credentials: Mapping[str, str]) -> None:
        if server.scheme != "https" and not is_loopback(server.host):
            raise InvalidSource(
                f"{source}: only loopback addresses are read without encryption; use https://"
            )
        authorization = _authorization(source, server, credentials)
        # a proxy could not reach this machine's own servers
        super().__init__(server, credentials, trust_env=not is_loopback(server.host))
        self.authorization = authorization
        self._remedy = _remedy(server, credentials, authorization)

    def may_be_plain(self, url: httpx.URL, target: httpx.URL) -> bool:
        return url.scheme == "http" and is_loopback(target.host)

    def answer(
        self, url: httpx.URL, where: str, headers: Mapping[str, str], accepted: Collection[int] = (200, 206)
    ) -> httpx.Response:
        """Return a response of an accepted status, as `get`.

        Raises:
            FetchError, TransientError: another status, no connection, or a redirect that is not followed.
        """
        response = self.get(url, where, headers)
        if response.status_code in accepted:
            return response
        self.discard(response)
        raise self._refusal(response, where)

    def _refusal(self, response: httpx.Response, where: str) -> FetchError | TransientError:
        status = response.status_code
        if is_transient(status):
            wait_s = retry_after_s(response.headers)
            return TransientError(f"{where}: the server is busy or out of order (HTTP {status})", wait_s)
        if status in (401, 403):
            return AccessDenied(f"{where}: access denied (HTTP {status}){self._remedy}")
        if status in (404, 410):
            return ModelNotFound(f"{where}: the server has no such file (HTTP {status}); check the URL")
        if status in (412, 416):
            return SourceChanged(f"{where}: the file has changed since it was listed; fetch again")
        return FetchError(f"{where}: the server answers HTTP {status}")


def _authorization(source: str, server: httpx.URL, credentials: Mapping[str, str]) -> str:
    """Return the value of the header for the source's server; empty if there are no credentials."""
    token = credentials.get("ARGOSY_HTTPS_TOKEN", "").strip()
    if token and _token_host(credentials) == _authority(server):
        return f"Bearer {header_value(source, 'ARGOSY_HTTPS_TOKEN', token)}"
    named = credentials.get("NETRC")
    path = Path(named).expanduser() if named else Path(credentials.get("HOME", "/nonexistent"), ".netrc")
    try:
        # a `default` entry is not taken: it would give a password to any server
        entry = netrc.netrc(str(path)).hosts.get(server.host)
    except OSError as error:
        if named:
            raise AccessDenied(f"{source}: {path} cannot be read: {error.strerror}") from None
        return ""
    except (netrc.NetrcParseError, ValueError):
        # not the parser's text, which quotes words
        if named:
            raise AccessDenied(f"{source}: {path} is malformed") from None
        _log.warning("%s is malformed; its entries are not used", path)
        return ""
    if entry is None:
        return ""
    login, _, password = entry
    pair = f"{login}:{password or ''}"
    return f"Basic {base64.b64encode(pair.encode()).decode()}"


def _remedy(server: httpx.URL, credentials: Mapping[str, str], authorization: str) -> str:
    """What to do if access is denied: the end of a message."""
    if authorization.startswith("Bearer "):
        return "; check ARGOSY_HTTPS_TOKEN"
    if authorization:
        return "; check the host's entry in netrc"
    host = f"ARGOSY_HTTPS_HOST={_authority(server)}"
    if credentials.get("ARGOSY_HTTPS_TOKEN", "").strip():
        return f" without credentials; ARGOSY_HTTPS_TOKEN is sent to one host only: set {host} if it is meant"
    return f" without credentials; set ARGOSY_HTTPS_TOKEN and {host}, or add the host to ~/.netrc"


def _token_host(credentials: Mapping[str, str]) -> str:
    """Return HOST[:PORT] that the token is for."""
    host = credentials.get("ARGOSY_HTTPS_HOST", "").strip().lower()
    return host.removeprefix("https://").rstrip("/").removesuffix(":443")


def _authority(url: httpx.URL) -> str:
    """Return HOST[:PORT] without the port that the scheme implies."""
    return url.netloc.decode("ascii", "replace").lower()
