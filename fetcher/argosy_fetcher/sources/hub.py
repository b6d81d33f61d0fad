"""HubSource: models on a Hugging Face hub or a mirror of one, `hf://ORG/NAME[@REVISION]`.

Owns the list of a model's files at one commit, and reads of ranges of their content. Must not know stores, retries or
which files are served. Invariants: every read is of the commit that `snapshot` returned, and the token goes to the
hub's own origin only.

huggingface_hub finds tokens; lists and content are read with httpx, because that library reads lists of any length and
only whole files. The hub answers for a large file with the signed, short-lived address of another host. Such an address
is kept for the file's next ranges until one of them fails, and asked for once more at once when its host refuses it.
"""

from __future__ import annotations

import logging
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

import httpx
from huggingface_hub import hf_hub_url
from huggingface_hub.errors import HFValidationError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from argosy_fetcher.errors import (
    AccessDenied,
    FetchError,
    InvalidSource,
    Offline,
    SourceChanged,
    TransientError,
)
from argosy_fetcher.loopback import is_loopback
from argosy_fetcher.snapshot import RemoteFile, Snapshot
from argosy_fetcher.sources import hub_environment
from argosy_fetcher.sources.documents import MalformedDocument, read_bounded
from argosy_fetcher.sources.hub_endpoint import hub_source_name
from argosy_fetcher.sources.hub_errors import HubModel, error_of, reason, storage_error, unreachable
from argosy_fetcher.sources.hub_listing import MAX_LISTING_BYTES, decode_listing
from argosy_fetcher.sources.source import Chunk
from argosy_fetcher.sources.tls import is_untrusted, trusted, untrusted
from argosy_protocol import __version__

if TYPE_CHECKING:
    from argosy_fetcher.source_uri import SourceUri

_TIMEOUT: Final = httpx.Timeout(30.0, connect=10.0)
"""Of a connection's set-up and of each wait for bytes. The whole of a slow transfer may take longer."""
_LIST_TIMEOUT: Final = httpx.Timeout(60.0, connect=10.0)
"""The hub takes seconds to list the sizes of thousands of files."""
_MAX_REDIRECTS: Final = 5
_MAX_PROBE_BYTES: Final = 4096
"""Of the answer to a request for one byte."""
_UNSIGNED: Final = frozenset((400, 401, 403, 404, 410))
"""What storage answers to an address that is not valid any more. Amazon's says 403, Google's 400."""
_CONTENT_RANGE: Final = re.compile(r"bytes (\d{1,15})-(\d{1,15})/(\d{1,15}|\*)")


class HubSource:
    """A repository of models on a hub. `hub_environment` lists the credentials that it reads.

    Raises (from the constructor):
        InvalidSource: the name or HF_ENDPOINT is malformed.
    """

    def __init__(self, uri: SourceUri, credentials: Mapping[str, str]) -> None:
        try:
            validate_repo_id(uri.location)
        except HFValidationError as error:
            raise InvalidSource(f"hf://{uri.location} is not the name of a model: {error}") from None
        self._repo_id = uri.location
        self._revision = uri.revision
        self._credentials = credentials
        self._endpoint = hub_environment.endpoint(credentials)
        self._name = hub_source_name(uri.location, credentials)
        self._model = self._model_of(None)
        self._commit = ""
        self._client: httpx.Client | None = None
        self._addresses: dict[str, httpx.URL] = {}
        """Where the content of files was found, by path."""
        self._reads_ranges: bool | None = None
        """Whether the host of the files' content sends parts of them; None if it was not asked yet."""

    @property
    def name(self) -> str:
        return self._name

    @property
    def requested_revision(self) -> str:
        return self._revision

    def snapshot(self) -> Snapshot:
        """Resolve the revision and list the files.

        Raises:
            Offline: offline mode forbids to ask the hub.
            ModelNotFound: there is no such repository or revision, or it is hidden from the token.
            AccessDenied: the hub refuses the token, does not give the model to its account, or would be sent the token
                without encryption.
            FetchError: the answer is not that of a hub.
            TransientError: the hub does not answer, limits the rate of requests, or fails.
        """
        if hub_environment.is_offline(self._credentials):
            raise self._offline()
        token = hub_environment.find_token(self._credentials)
        if token and self._endpoint.scheme == "http" and not is_loopback(self._endpoint.host):
            raise AccessDenied(
                f"{self._model.name}: {self._endpoint} is not encrypted and would show the token to the network; let "
                "HF_ENDPOINT begin with https://, or set HF_HUB_DISABLE_IMPLICIT_TOKEN=1 to send no token"
            )
        self._model = self._model_of(token)
        if self._client is None:
            self._client = _make_client(self._credentials)
        try:
            self._commit, files = decode_listing(self._list(), self._revision)
        except MalformedDocument as error:
            raise self._malformed(str(error)) from None
        self._addresses.clear()
        return Snapshot(self.name, self._commit, files)

    def read(self, file: RemoteFile, start: int, stop: int) -> Iterator[Chunk]:
        """Yield the bytes [start, stop) of a file of the snapshot.

        Raises:
            SourceChanged: the hub has another content or none for the file now.
            AccessDenied: the model is gated, which some hubs say only now.
            FetchError, TransientError: as `snapshot`.
        """
        assert self._client is not None, "read before snapshot"
        left = stop - start
        if left <= 0:
            return
        try:
            with closing(self._open(file, start, stop)) as response:
                skipped = self._bytes_before(response, file, start)
                for chunk in _cut(response, skipped, left):
                    left -= len(chunk)
                    yield chunk
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            host = error.request.url
            raise unreachable(self._model, error, "" if self._is_hub(host) else host.host) from error
        except httpx.HTTPError as error:
            raise TransientError(
                f"{self._model.name}: {file.path}: connection lost: {reason(error)}"
            ) from error
        finally:
            if left > 0:  # the next attempt asks the hub, which may know a host that is well
                self._addresses.pop(file.path, None)

    def can_read_ranges(self, file: RemoteFile) -> bool:
        """Whether content begins at the byte that is asked for. Asks once: one host has all of a repository's content.

        If it does not answer, that is left to reads to find out.
        """
        if self._reads_ranges is None:
            try:
                with closing(self._open(file, file.size - 1, file.size)) as response:
                    self._reads_ranges = response.status_code == 206
                    if self._reads_ranges:  # a body that was read leaves a connection that can be used again
                        read_bounded(response.iter_raw(), _MAX_PROBE_BYTES, file.path)
            except (FetchError, TransientError, httpx.HTTPError):
                self._reads_ranges = True
        return self._reads_ranges

    def local_copy(self, file: RemoteFile) -> Path | None:
        """Return the file in Hugging Face's own cache, if it is there with the right size; the caller checks its hash.

        The cache names content by its ETag: the SHA-256 of large files, the blob id of the others.
        """
        if not file.version:
            return None
        folder = repo_folder_name(repo_id=self._repo_id, repo_type="model")
        blob = hub_environment.hub_cache(self._credentials) / folder / "blobs" / file.version
        try:
            path = blob.resolve(strict=True)  # it may be a link to a file that several models share
            found = path.stat()
        except (OSError, RuntimeError):
            return None
        return path if stat.S_ISREG(found.st_mode) and found.st_size == file.size else None

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    # The list of files

    def _list(self) -> bytes:
        url = f"{self._endpoint}/api/models/{self._repo_id}"
        if self._revision:
            url += f"/revision/{quote(self._revision, safe='')}"
        try:
            response = self._follow(httpx.URL(f"{url}?blobs=true"), {}, _LIST_TIMEOUT)
            with closing(response):
                if not response.is_success:
                    raise error_of(self._model, response.status_code, response.headers)
                what = f"{self._model.name}: the list of files"
                return read_bounded(response.iter_raw(), MAX_LISTING_BYTES, what)
        except httpx.HTTPError as error:
            raise unreachable(self._model, error) from error

    # The content of files

    def _open(self, file: RemoteFile, start: int, stop: int, *, may_ask_again: bool = True) -> httpx.Response:
        """Return a successful response with the file's content at or before `start`; the caller closes it."""
        url = httpx.URL(
            hf_hub_url(self._repo_id, file.path, revision=self._commit, endpoint=str(self._endpoint))
        )
        known = self._addresses.get(file.path)
        response = self._follow(known or url, {"Range": f"bytes={start}-{stop - 1}"}, _TIMEOUT, file)
        if response.is_success:
            if response.url != url:
                self._addresses[file.path] = response.url
            return response
        response.close()
        is_signed = known is not None or not self._is_hub(response.url)
        if is_signed and may_ask_again and response.status_code in _UNSIGNED:
            if self._addresses.get(file.path) is known:  # another thread may have a newer address already
                self._addresses.pop(file.path, None)
            return self._open(file, start, stop, may_ask_again=False)
        if self._is_hub(response.url):
            raise error_of(self._model, response.status_code, response.headers, file.path)
        raise storage_error(self._model, response.url.host, response.status_code, response.headers, file.path)

    def _follow(
        self,
        url: httpx.URL,
        headers: Mapping[str, str],
        timeout: httpx.Timeout,
        file: RemoteFile | None = None,
    ) -> httpx.Response:
        """Send a GET, and follow redirects. The token goes to the hub's own origin only.

        Args:
            file: what the answer must be about.
        """
        for _ in range(_MAX_REDIRECTS):
            response = self._send(url, headers, timeout)
            is_answer = file is not None and self._is_hub(url) and response.status_code < 400
            if file is not None and is_answer and not self._is_same(response.headers, file):
                response.close()
                raise SourceChanged(
                    f"{self._model.name}: {self._endpoint} has another {file.path} now than when it listed the files; "
                    "fetch the model anew"
                )
            if not response.has_redirect_location:
                return response
            response.close()
            url = self._target(response, "the list of files" if file is None else file.path)
        where = "" if file is None else f"{file.path}: "
        raise TransientError(f"{self._model.name}: {where}more than {_MAX_REDIRECTS} redirects")

    def _send(self, url: httpx.URL, headers: Mapping[str, str], timeout: httpx.Timeout) -> httpx.Response:
        assert self._client is not None
        request = self._client.build_request("GET", url, headers=headers, timeout=timeout)
        if self._model.token and self._is_hub(url):
            request.headers["Authorization"] = f"Bearer {self._model.token}"
        try:
            return self._client.send(request, stream=True)
        except httpx.ConnectError as error:
            if is_untrusted(error):
                raise untrusted(self._model.name, url.host) from None
            raise

    def _target(self, response: httpx.Response, what: str) -> httpx.URL:
        assert response.next_request is not None
        target = response.next_request.url
        if target.scheme not in ("https", "http") or not target.host or target.userinfo:
            raise self._malformed(f"{what}: the redirect leads to no web server")
        if response.url.scheme == "https" and target.scheme != "https":
            raise self._malformed(f"{what}: the redirect leaves https:// for {target.host}")
        return target

    def _is_same(self, headers: httpx.Headers, file: RemoteFile) -> bool:
        """Whether the hub's headers are those of the snapshot. Mirrors may lack some, or have ETags of another kind."""
        etag = (headers.get("x-linked-etag") or headers.get("etag") or "").removeprefix("W/").strip('"')
        size = headers.get("x-linked-size") or str(file.size)
        return (
            headers.get("x-repo-commit", self._commit) == self._commit
            and (etag == file.version or len(etag) != len(file.version))
            and size == str(file.size)
        )

    def _bytes_before(self, response: httpx.Response, file: RemoteFile, start: int) -> int:
        """Return how many bytes of the response come before `start`: none, unless the server ignores ranges."""
        where = f"{self._model.name}: {file.path}: {response.url.host}"
        if response.headers.get("content-encoding", "identity") != "identity":
            raise TransientError(f"{where} compresses the file, although it was asked not to")
        if response.status_code == 200:
            length = response.headers.get("content-length", str(file.size))
            if length != str(file.size):
                raise SourceChanged(
                    f"{where} has a file of {length[:20]} bytes instead of {file.size}; fetch the model anew"
                )
            return start
        found = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
        if response.status_code != 206 or found is None or int(found[1]) != start:
            raise TransientError(f"{where} answers with another range than the one that it was asked for")
        if found[3] not in ("*", str(file.size)):
            raise SourceChanged(
                f"{where} has a file of {found[3]} bytes instead of {file.size}; fetch the model anew"
            )
        return 0

    def _is_hub(self, url: httpx.URL) -> bool:
        hub = self._endpoint
        return (url.scheme, url.host, url.port) == (hub.scheme, hub.host, hub.port)

    # Messages

    def _model_of(self, token: str | None) -> HubModel:
        return HubModel(str(self._endpoint), self._repo_id, self._revision, token)

    def _offline(self) -> Offline:
        return Offline(
            f"{self._model.name} is not in the store, and offline mode (HF_HUB_OFFLINE or ARGOSY_OFFLINE) forbids to "
            "ask the hub; fetch it once with offline mode off"
        )

    def _malformed(self, what: str) -> FetchError:
        return FetchError(
            f"{self._model.name}: the answer of {self._endpoint} cannot be used: {what}; check HF_ENDPOINT, which must "
            "be a Hugging Face hub or a mirror of one"
        )


def _make_client(credentials: Mapping[str, str]) -> httpx.Client:
    # They log every address and redirect, and signed addresses are credentials.
    for name in ("httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.WARNING)
    headers = {"User-Agent": f"argosy/{__version__}", "Accept-Encoding": "identity"}
    return httpx.Client(timeout=_TIMEOUT, headers=headers, verify=trusted(credentials))


def _cut(response: httpx.Response, skipped: int, count: int) -> Iterator[Chunk]:
    """Yield `count` bytes of a body after the first `skipped`, or fewer if it ends.

    A range is read to its end, beyond its last byte, because only then its connection serves the next one.
    """
    for chunk in response.iter_raw():
        if skipped >= len(chunk):
            skipped -= len(chunk)
            continue
        part = memoryview(chunk)[skipped : skipped + count] if skipped or count < len(chunk) else chunk
        skipped = 0
        count -= len(part)
        if part:
            yield part
        if count <= 0 and (response.status_code != 206 or not part):
            return
