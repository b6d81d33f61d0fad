"""Web servers: models behind `https://`, as one archive or as a folder with a list of digests.

`https://HOST/PATH/NAME.tar[.gz|.zst]` (or `.tgz`, `.zip`), optionally with `#sha256=HEX`, is a packed model;
`https://HOST/PATH/SHA256SUMS` lists the files of the folder that it lies in. Owns these two forms, reads of ranges, and
GET requests with their redirects, credentials and statuses.

A server has no revisions. That of an archive is its SHA-256 where the URI names it, else a hash over its size and its
ETag (or date); that of a folder is a hash over the digests. Reads compare size and ETag with what they were at first,
so that a file that changes on the way is noticed before its digest is wrong.

A list of digests has no sizes, so a server is asked for the size of each file that a model can have by the end of its
name. Other files of a folder are listed, which errors need, but with a size of 0.

Credentials (ARGOSY_HTTPS_TOKEN as a bearer token if ARGOSY_HTTPS_HOST names the server, else its entry in netrc) go to
the server of the source alone, never to where it redirects: whoever writes a model's source does not decide who gets
the token. Unencrypted HTTP is spoken with loopback addresses only, and never after HTTPS. Messages have no URLs, whose
queries may be signatures.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import logging
import netrc
import re
import time
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
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
from argosy_fetcher.source import MAX_FILE_BYTES, Chunk, Digest, Packing, RemoteFile, Snapshot, check_path
from argosy_fetcher.source_uri import SourceUri, is_loopback
from argosy_fetcher.sources.http import (
    MAX_SUMS_BYTES,
    SUMS_FILE,
    cut,
    is_transient,
    is_unknown_host,
    is_untrusted,
    origin,
    parse_sha256sums,
    read_bounded,
    retry_after_s,
    trusted,
    unknown_host,
    untrusted,
)
from argosy_fetcher.sources.registry import header_value
from argosy_protocol import __version__

MAX_PROBES = 8
"""Files of a folder whose sizes are asked for at once."""
MAX_PROBED_FILES = 2000
"""Several times the files of the largest models."""
MODEL_SUFFIXES = (".json", ".safetensors", ".jinja", ".model", ".txt")

_PACKINGS: dict[str, Packing] = {
    ".tar": "tar",
    ".tar.gz": "tar+gzip",
    ".tgz": "tar+gzip",
    ".tar.zst": "tar+zstd",
    ".zip": "zip",
}
_SHA256 = re.compile(r"sha256:([0-9a-f]{64})")
_CONTENT_RANGE = re.compile(r"bytes (?:(\d{1,20})-(\d{1,20})|\*)/(\d{1,20}|\*)")
_ETAG = re.compile(r'(?:W/)?"[!#-~]{0,256}"')
_DATE = re.compile(r"[A-Z][a-z]{2}, [0-9A-Za-z: ]{10,40}")
_FORMS = "give the URL of a .tar, .tar.gz, .tgz, .tar.zst or .zip archive, or of a folder's SHA256SUMS"


class _Probed(NamedTuple):
    """What a server says about a file."""

    size: int
    validator: str


class WebSource:
    """`Source` of one archive, or of one folder.

    Raises:
        InvalidSource: the URI is malformed, unencrypted, or has credentials in it.
    """

    def __init__(self, uri: SourceUri, credentials: Mapping[str, str]) -> None:
        self._url, self._sha256 = _parsed(uri)
        self._name = uri.name
        file_name = self._url.path.rpartition("/")[2]
        suffix = next((suffix for suffix in _PACKINGS if file_name.lower().endswith(suffix)), "")
        if file_name != SUMS_FILE and (not suffix or len(file_name) == len(suffix)):
            raise InvalidSource(f"{self._name}: {_FORMS}")
        if file_name == SUMS_FILE and (self._url.query or self._sha256):
            raise InvalidSource(f"{self._name}: the URL of {SUMS_FILE} has no query and no fragment")
        self._archive = file_name if suffix else ""
        self._packing = _PACKINGS.get(suffix, "none")
        self._credentials = credentials
        self._without_ranges: set[str] = set()
        self._probed: dict[str, _Probed] = {}
        """Kept when a probe fails, so that another attempt asks for what is missing only."""

    @property
    def name(self) -> str:
        return self._name

    @property
    def requested_revision(self) -> str:
        return self._sha256

    def snapshot(self) -> Snapshot:
        return self._archive_snapshot() if self._archive else self._folder_snapshot()

    def read(self, file: RemoteFile, start: int, stop: int) -> Iterator[Chunk]:
        if start >= stop:
            return
        headers = {"range": f"bytes={start}-{stop - 1}"}
        if file.version and not file.version.startswith("W/"):
            headers["if-range"] = file.version
        response = self._requested(file, headers)
        where = self._where(file.path)
        is_part = response.status_code == 206
        if is_part and not _is_within(response, start, stop):
            response.close()
            raise FetchError(f"{where}: the server sends another range than was asked for")
        with contextlib.closing(self._client.chunks(response, where)) as chunks:
            yield from cut(chunks, 0 if is_part else start, stop - start)

    def can_read_ranges(self, file: RemoteFile) -> bool:
        """Whether the server begins anywhere but at the beginning of a file."""
        return file.path not in self._without_ranges

    def close(self) -> None:
        if (client := self.__dict__.pop("_client", None)) is not None:
            client.close()

    @functools.cached_property
    def _client(self) -> WebClient:
        return WebClient(self.name, self._url, self._credentials)

    def _archive_snapshot(self) -> Snapshot:
        probed = self._probe(self._archive)
        if self._sha256:
            revision, digest = self._sha256, Digest("sha256", self._sha256)
        elif probed.validator:
            revision, digest = _hashed(f"{probed.size}\0{probed.validator}"), None
        else:
            raise FetchError(
                f"{self.name}: the server sends neither an ETag nor a date, so that a change would go unnoticed; "
                "append #sha256=HEX to the URL"
            )
        file = RemoteFile(self._archive, probed.size, digest, probed.validator, self._packing)
        return Snapshot(self.name, revision, (file,))

    def _folder_snapshot(self) -> Snapshot:
        digests = sorted(parse_sha256sums(self._sums(), self.name).items())
        if not digests:
            raise ModelNotFound(f"{self.name}: the list names no files")
        self._probe_all([path for path, _ in digests if path.endswith(MODEL_SUFFIXES)])
        unknown = _Probed(0, "")
        files = tuple(
            RemoteFile(path, probed.size, digest, probed.validator)
            for path, digest, probed in (
                (path, digest, self._probed.get(path, unknown)) for path, digest in digests
            )
        )
        revision = _hashed("".join(f"{digest.hex}  {path}\n" for path, digest in digests))
        return Snapshot(self.name, revision, files)

    def _sums(self) -> bytes:
        response = self._client.get(self._url, self.name, {}, accepted=(200,))
        with contextlib.closing(self._client.chunks(response, self.name)) as chunks:
            return read_bounded(chunks, MAX_SUMS_BYTES, f"{self.name}: the list")

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

    def _probe(self, path: str) -> _Probed:
        """Ask for one byte rather than for HEAD, which signed URLs and some servers refuse."""
        where = self._where(path)
        response = self._client.get(
            self._file_url(path), where, {"range": "bytes=0-0"}, accepted=(200, 206, 416)
        )
        self._client.discard(response)
        _check_encoding(response, path, where)
        size = _size(response)
        if response.status_code == 416 and size != 0:
            raise FetchError(f"{where}: the server cannot give the first byte of the file (HTTP 416)")
        if size is None:
            raise FetchError(f"{where}: the server does not say how large the file is (no Content-Length)")
        if size > MAX_FILE_BYTES:
            raise UnsupportedModel(f"{where}: too large: {size} bytes")
        if response.status_code == 200:
            self._without_ranges.add(path)
        self._probed[path] = probed = _Probed(size, _validator(response))
        return probed

    def _requested(self, file: RemoteFile, headers: Mapping[str, str]) -> httpx.Response:
        """A response, after checking that it is about the file of the snapshot."""
        where = self._where(file.path)
        try:
            response = self._client.get(self._file_url(file.path), where, headers)
        except ModelNotFound:
            raise SourceChanged(f"{where}: the server does not have the file any more") from None
        if _size(response) not in (None, file.size) or _is_other(response, file.version):
            response.close()
            raise SourceChanged(f"{where}: the file has changed since it was listed; fetch again")
        try:
            _check_encoding(response, file.path, where)
        except FetchError:
            response.close()
            raise
        return response

    def _file_url(self, path: str) -> httpx.URL:
        return self._url if self._archive else self._url.join(quote(path))

    def _where(self, path: str) -> str:
        return self.name if self._archive else f"{self.name}: {path}"


def _parsed(uri: SourceUri) -> tuple[httpx.URL, str]:
    """URL, and the SHA-256 in hex that the URI names; empty if none."""
    try:
        url = httpx.URL(f"{uri.scheme}://{uri.location}")
        check_path(url.path.strip("/"))
    except (httpx.InvalidURL, UnicodeError, ValueError, UnsupportedModel):
        raise InvalidSource(f"{uri}: the URL is malformed; {_FORMS}") from None
    if not url.host or url.userinfo or url.fragment:
        raise InvalidSource(f"{uri.scheme}://{url.host}: the URL is malformed; {_FORMS}")
    digest = _SHA256.fullmatch(uri.revision)
    if uri.revision and digest is None:
        raise InvalidSource(f"{uri}: a URL's revision is #sha256= and 64 hexadecimal digits")
    return url, digest[1] if digest else ""


def _is_within(response: httpx.Response, start: int, stop: int) -> bool:
    """Whether a response with a part begins where it should, and ends there or before."""
    match = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
    return match is not None and match[1] is not None and int(match[1]) == start and int(match[2]) < stop


def _size(response: httpx.Response) -> int | None:
    """Size of the whole file; None if the server does not say."""
    if response.status_code == 200:
        text = response.headers.get("content-length", "")
    else:
        match = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
        text = match[3] if match else ""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 20 else None


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


def _check_encoding(response: httpx.Response, path: str, where: str) -> None:
    """Refuse content that is compressed for the transfer: its size is not the file's.

    Servers also label gzip archives so, by their suffix, and send them as they are.
    """
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    is_label = encoding in ("gzip", "x-gzip") and path.lower().endswith("gz")
    if encoding != "identity" and not is_label:
        raise FetchError(
            f"{where}: the server compresses the file ({encoding[:20]}) although it was asked not to"
        )


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:40]


MAX_REDIRECTS = 5
TIMEOUT = httpx.Timeout(30, connect=10, pool=None)
"""Seconds of silence, not of a whole response."""
MAX_DISCARDED_BYTES = 4096
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=16)

_log = logging.getLogger(__name__)
_REDIRECTS = {301, 302, 303, 307, 308}


class WebClient:
    """GET requests to one server and to where it redirects. Thread-safe. Must not know files, ranges or retries.

    Args:
        server: any URL of the source's server.

    Raises:
        AccessDenied: the credentials are malformed.
        InvalidSource: the server is not on loopback and its URL not https://, or the file of trusted certificates is
            unusable.
    """

    def __init__(self, source: str, server: httpx.URL, credentials: Mapping[str, str]) -> None:
        if server.scheme != "https" and not is_loopback(server.host):
            raise InvalidSource(
                f"{source}: only loopback addresses are read without encryption; use https://"
            )
        self._origin = origin(server)
        self._authorization = _authorization(source, server, credentials)
        self._remedy = _remedy(server, credentials, self._authorization)
        self._client = httpx.Client(
            verify=trusted(credentials),
            # a proxy could not reach this machine's own servers
            trust_env=not is_loopback(server.host),
            headers={
                "user-agent": f"argosy-fetcher/{__version__}",
                "accept": "*/*",
                "accept-encoding": "identity",
            },
            timeout=TIMEOUT,
            limits=LIMITS,
        )

    def get(
        self, url: httpx.URL, where: str, headers: Mapping[str, str], accepted: Collection[int] = (200, 206)
    ) -> httpx.Response:
        """Return a response whose body was not read yet; the caller closes it, or reads it by `chunks`.

        Args:
            where: names the model and the file in errors.
            accepted: statuses that are returned.

        Raises:
            FetchError, TransientError: another status, no connection, or a redirect that is not followed.
        """
        for _ in range(MAX_REDIRECTS + 1):
            response = self._send(url, where, headers)
            if response.status_code not in _REDIRECTS:
                break
            self.discard(response)
            url = _redirected(url, response.headers.get("location", ""), where)
        else:
            raise FetchError(f"{where}: more than {MAX_REDIRECTS} redirects")
        if response.status_code in accepted:
            return response
        self.discard(response)
        raise self._refusal(response, where)

    def chunks(self, response: httpx.Response, where: str) -> Generator[bytes, None, None]:
        """Yield a response's body as it comes, and close the response.

        Raises:
            TransientError: the connection was cut.
        """
        try:
            yield from response.iter_raw()
        except httpx.TransportError as error:
            raise TransientError(f"{where}: the connection was cut ({type(error).__name__})") from None
        finally:
            response.close()

    def discard(self, response: httpx.Response) -> None:
        """Close a response; read it before if it is short, so that its connection can be used again."""
        length = response.headers.get("content-length", "")
        if length.isascii() and length.isdigit() and int(length[:20]) <= MAX_DISCARDED_BYTES:
            with contextlib.suppress(httpx.TransportError):
                for _ in response.iter_raw():
                    pass
        response.close()

    def close(self) -> None:
        self._client.close()

    def _send(self, url: httpx.URL, where: str, headers: Mapping[str, str]) -> httpx.Response:
        request = self._client.build_request("GET", url, headers=headers)
        if self._authorization and origin(url) == self._origin:
            request.headers["authorization"] = self._authorization
        try:
            return self._client.send(request, stream=True, auth=None)
        except (httpx.UnsupportedProtocol, httpx.LocalProtocolError) as error:
            raise FetchError(f"{where}: the request cannot be sent ({type(error).__name__})") from None
        except httpx.TransportError as error:
            if "in location header" in str(error):  # httpx reads it even if it is not to follow it
                raise FetchError(f"{where}: the server redirects to something that is not a URL") from None
            if is_untrusted(error):
                raise untrusted(where, url.host) from None
            if is_unknown_host(error):
                raise unknown_host(where, url.host, "the URL") from None
            reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise TransientError(f"{where}: no answer from {url.host} ({reason})") from None

    def _refusal(self, response: httpx.Response, where: str) -> FetchError | TransientError:
        status = response.status_code
        if is_transient(status):
            wait_s = retry_after_s(response.headers.get("retry-after", ""), time.time())
            return TransientError(f"{where}: the server is busy or out of order (HTTP {status})", wait_s)
        if status in (401, 403):
            return AccessDenied(f"{where}: access denied (HTTP {status}){self._remedy}")
        if status in (404, 410):
            return ModelNotFound(f"{where}: the server has no such file (HTTP {status}); check the URL")
        if status in (412, 416):
            return SourceChanged(f"{where}: the file has changed since it was listed; fetch again")
        return FetchError(f"{where}: the server answers HTTP {status}")


def _redirected(url: httpx.URL, location: str, where: str) -> httpx.URL:
    try:
        target = url.join(location)
    except (httpx.InvalidURL, ValueError):
        raise FetchError(f"{where}: the server redirects to something that is not a URL") from None
    if not location or not target.host or target.userinfo or target.scheme not in ("http", "https"):
        raise FetchError(f"{where}: the server redirects to a URL that is not followed")
    if target.scheme == "http" and not (url.scheme == "http" and is_loopback(target.host)):
        raise FetchError(f"{where}: the server redirects to {target.host} without encryption")
    return target


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
