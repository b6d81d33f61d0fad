"""HubSource: models on a Hugging Face hub or a mirror of one, `hf://ORG/NAME[@REVISION]`.

Owns the list of a model's files at one commit, reads of ranges of their content, and what a hub's refusals mean. Must
not know stores, retries or which files are served. Invariants: every read is of the commit that `snapshot` returned;
the token goes to the hub's own origin only, and is in no message and in no `repr`, even if a server sends it back; no
message holds a query, which may be a signature.

huggingface_hub finds tokens; lists and content are read with httpx, because that library reads lists of any length and
only whole files. The hub answers for a large file with the signed, short-lived address of another host. Such an address
is kept for the file's next ranges until one of them fails, and asked for once more at once when its host refuses it.

    HF_ENDPOINT                         the hub; https://huggingface.co if not set
    HF_TOKEN, HF_TOKEN_PATH, HF_HOME    the token, or where `hf auth login` has left it
    HF_HUB_DISABLE_IMPLICIT_TOKEN       send no token
    HF_HUB_CACHE, HF_HOME               Hugging Face's own cache
    HF_HUB_OFFLINE, ARGOSY_OFFLINE      make no request
"""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import closing
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import quote, urlsplit

import httpx
from huggingface_hub import constants, get_token, hf_hub_url
from huggingface_hub.errors import HFValidationError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from msgspec import Meta, Struct, field

from argosy_fetcher.errors import (
    AccessDenied,
    FetchError,
    InvalidSource,
    ModelHidden,
    ModelNotFound,
    Offline,
    SourceChanged,
    TransientError,
)
from argosy_fetcher.source import MAX_FILE_BYTES, MAX_FILES, Chunk, Digest, RemoteFile, Snapshot, check_path
from argosy_fetcher.source_uri import is_loopback
from argosy_fetcher.sources.http import (
    MalformedDocument,
    cut,
    decode_document,
    is_transient,
    is_unknown_host,
    is_untrusted,
    origin,
    read_bounded,
    trusted,
    unknown_host,
    untrusted,
)
from argosy_fetcher.sources.registry import hub_address, hub_source_name, is_true
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
    """A repository of models on a hub.

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
        self._endpoint = endpoint(credentials)
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
        if is_offline(self._credentials):
            raise self._offline()
        token = find_token(self._credentials)
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
                for chunk in cut(response.iter_raw(), skipped, left):
                    left -= len(chunk)
                    yield chunk
                    if not left and response.status_code != 206:
                        return  # the rest of the file is not waited for
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
        blob = hub_cache(self._credentials) / folder / "blobs" / file.version
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
        return origin(url) == origin(self._endpoint)

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


MAX_LISTING_BYTES: Final = 32 << 20
"""Ten times what the hub says about `MAX_FILES` files."""

_COMMIT: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_GIT_SHA1: Final = re.compile(r"[0-9a-f]{40}")

FileSize = Annotated[int, Meta(ge=0, le=MAX_FILE_BYTES)]


class LfsFile(Struct, frozen=True):
    """Content that is kept outside of git."""

    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    size: FileSize


class ListedFile(Struct, frozen=True):
    """One file of a repository; mirrors do not give all of them a blob id."""

    rfilename: str
    size: FileSize | None = None
    blob_id: Any = field(name="blobId", default=None)
    lfs: LfsFile | None = None


class HubListing(Struct, frozen=True):
    """The fields of the answer that are read."""

    id: str
    sha: str | None = None
    siblings: list[ListedFile] | None = None


def decode_listing(content: bytes, revision: str) -> tuple[str, tuple[RemoteFile, ...]]:
    """Return the commit and its files. Digests are the SHA-256 of files in LFS and git's blob id of others.

    Args:
        revision: the one that was asked for; empty if none.

    Raises:
        MalformedDocument: the content is no listing, of another commit, or exceeds a bound.
        UnsupportedModel: a path is unsafe.
    """
    listing = decode_document(content, HubListing)
    commit, siblings = listing.sha or "", listing.siblings or []
    if not _COMMIT.fullmatch(commit):
        raise MalformedDocument("it names no commit")
    if _COMMIT.fullmatch(revision) and revision != commit:
        raise MalformedDocument(f"it is for commit {commit}")
    if len(siblings) > MAX_FILES:
        raise MalformedDocument(f"it lists {len(siblings)} files; the limit is {MAX_FILES}")
    files = tuple(_remote_file(sibling) for sibling in siblings)
    if len({file.path for file in files}) != len(files):
        raise MalformedDocument("it lists a file twice")
    return commit, files


def _remote_file(listed: ListedFile) -> RemoteFile:
    path = check_path(listed.rfilename)
    if listed.lfs is not None:
        sha256 = listed.lfs.sha256
        return RemoteFile(path, listed.lfs.size, Digest("sha256", sha256), sha256)
    if listed.size is None:
        raise MalformedDocument(f"it does not say how large {path[:200]!r} is")
    if isinstance(listed.blob_id, str) and _GIT_SHA1.fullmatch(listed.blob_id):
        return RemoteFile(path, listed.size, Digest("git-sha1", listed.blob_id), listed.blob_id)
    return RemoteFile(path, listed.size)


MAX_TOKEN_BYTES: Final = 16 << 10
"""Tokens of the hub have 37 characters, but those that stand for a workload's identity are JWTs."""

_TOKEN: Final = re.compile(r"[!-~]+")
_LOGIN: Final = (
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "HF_TOKEN_PATH",
    "HF_HOME",
    "XDG_CACHE_HOME",
    "HF_OIDC_RESOURCE",
)
"""What decides which token huggingface_hub finds."""


def endpoint(credentials: Mapping[str, str]) -> httpx.URL:
    """Return the hub's address, whose path has no slash at its end.

    Raises:
        InvalidSource: HF_ENDPOINT is not the address of a web server.
    """
    try:
        return httpx.URL(hub_address(credentials))
    except httpx.InvalidURL as error:
        raise InvalidSource(f"HF_ENDPOINT is not a URL: {error}") from None


def find_token(credentials: Mapping[str, str]) -> str | None:
    """Return the token to send, or None.

    Where the credentials are those of this process's environment, huggingface_hub finds it, which also renews the
    tokens of logins in a browser.

    Raises:
        AccessDenied: there is a token that cannot be read or sent.
    """
    if is_true(credentials, "HF_HUB_DISABLE_IMPLICIT_TOKEN"):
        return None
    given = credentials.get("HF_TOKEN") or credentials.get("HUGGING_FACE_HUB_TOKEN") or ""
    if given.strip():
        return _checked(given, "HF_TOKEN")
    if all(credentials.get(name) == os.environ.get(name) for name in _LOGIN):
        try:
            found = get_token()
        except Exception as error:  # files and the exchange of identities fail in many ways
            raise AccessDenied(f"the hub's token cannot be read: {error}") from None
        return _checked(found, "the hub's token") if found else None
    if path := credentials.get("HF_TOKEN_PATH"):
        return _read(_expand(path))
    if home := credentials.get("HF_HOME"):
        return _read(_expand(home) / "token")
    return None


def hub_cache(credentials: Mapping[str, str]) -> Path:
    """Return the directory of Hugging Face's own cache, which need not exist."""
    if path := credentials.get("HF_HUB_CACHE") or credentials.get("HUGGINGFACE_HUB_CACHE"):
        return _expand(path)
    if home := credentials.get("HF_HOME"):
        return _expand(home) / "hub"
    return Path(constants.HF_HUB_CACHE)


def is_offline(credentials: Mapping[str, str]) -> bool:
    return is_true(credentials, "HF_HUB_OFFLINE") or is_true(credentials, "ARGOSY_OFFLINE")


def _read(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_TOKEN_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise AccessDenied(f"the hub's token cannot be read: {path}: {error.strerror}") from None
    text = content.decode("utf-8", "replace")
    return _checked(text, str(path)) if text.strip() else None


def _checked(token: str, where: str) -> str:
    """Return a token that fits in a header. HTTP libraries would show another one in their errors."""
    token = token.strip()
    if len(token) > MAX_TOKEN_BYTES or not _TOKEN.fullmatch(token):
        raise AccessDenied(f"{where} is not a token: it has spaces, line breaks or other odd characters")
    return token


def _expand(path: str) -> Path:
    return Path(os.path.expandvars(path)).expanduser()


_RATE_LIMIT: Final = re.compile(r'"\w+"\s*;\s*r\s*=\s*0\s*;\s*t\s*=\s*(\d{1,6})')
"""The hub's own header, after draft-ietf-httpapi-ratelimit-headers: nothing remains for so many seconds."""
_MAX_MESSAGE_CHARACTERS: Final = 200


class HubModel(Struct, frozen=True):
    """The model that a hub was asked for, as messages name it."""

    endpoint: str
    repo_id: str
    revision: str
    token: str | None

    def __repr__(self) -> str:
        return f"HubModel({self.name!r} at {self.endpoint!r})"

    @property
    def name(self) -> str:
        return f"hf://{self.repo_id}" + (f"@{self.revision}" if self.revision else "")

    @property
    def page(self) -> str:
        return f"{self.endpoint}/{self.repo_id}"


def error_of(
    model: HubModel, status: int, headers: Mapping[str, str], path: str = ""
) -> FetchError | TransientError:
    """Return the error for a hub's answer.

    The hub names its refusals in `X-Error-Code` and explains them in `X-Error-Message`. Without a token it answers 401
    for a repository that does not exist, for one that is private, and for a gated one.

    Args:
        path: the file that was asked for; empty if it was the list of files.
    """
    code, told = headers.get("x-error-code", ""), _told(model, headers)
    if is_transient(status):
        return _transient(model, status, headers)
    if code == "GatedRepo":
        return AccessDenied(_gated(model))
    if headers.get("x-error-message") == "Access to this resource is disabled.":
        return AccessDenied(f"{model.name} is disabled on {model.endpoint}; see {model.page}")
    if status == 401 and model.token:
        return AccessDenied(
            f"{model.name}: {model.endpoint} does not accept the token: it is wrong, expired or revoked{told}; "
            f"set HF_TOKEN to one from {model.endpoint}/settings/tokens, or unset it for a public model"
        )
    if status == 401:
        return ModelHidden(
            f"{model.name} does not exist on {model.endpoint}, or it is private and no token was sent; "
            "check its name, or set HF_TOKEN (or run `hf auth login`)"
        )
    if code == "RevisionNotFound":
        if path:
            return _vanished(model, "the revision")
        return ModelNotFound(
            f"{model.name}: the repository has no revision {model.revision or 'main'!r}; "
            f"{model.page}/tree/main lists its branches and tags"
        )
    if code == "EntryNotFound" or (path and status in (404, 410, 416)):
        return _vanished(model, path)
    if status == 404:
        who = "the token's account may not see it" if model.token else "it is private and no token was sent"
        return ModelHidden(
            f"{model.name} does not exist on {model.endpoint}, or {who}; check its name and HF_TOKEN"
        )
    if status == 403:
        return AccessDenied(
            f"{model.name}: {model.endpoint} refuses access{told}; "
            + ("check what the token may read" if model.token else "set HF_TOKEN")
            + f" at {model.endpoint}/settings/tokens"
        )
    return FetchError(
        f"{model.name}: {model.endpoint} answers with status {status}{told}; check HF_ENDPOINT, which must be a hub"
    )


def storage_error(
    model: HubModel, host: str, status: int, headers: Mapping[str, str], path: str
) -> FetchError | TransientError:
    """Return the error for the answer of a host to which the hub sent us for a file's content."""
    if is_transient(status):
        return TransientError(
            f"{model.name}: {path}: {host} answers with status {status}", retry_after_s(headers)
        )
    if status in (404, 410, 416):
        return _vanished(model, path)
    return AccessDenied(
        f"{model.name}: {path}: {host}, where the hub keeps the file, answers with status {status} to an address that "
        "the hub has just signed; a proxy or firewall may block that host"
    )


def unreachable(model: HubModel, error: Exception, storage_host: str = "") -> TransientError:
    """Return the error for a request that got no answer, from the hub or from the host of a file's content."""
    if is_unknown_host(error):
        host = storage_host or urlsplit(model.endpoint).netloc
        return unknown_host(model.name, host, "HF_ENDPOINT")
    if storage_host:
        return TransientError(
            f"{model.name}: {storage_host}, where {model.endpoint} keeps its files, does not answer ({reason(error)}); "
            "a proxy or firewall may block it"
        )
    return TransientError(
        f"{model.name}: {model.endpoint} does not answer ({reason(error)}); check the network and HF_ENDPOINT, or, "
        "outside a cluster, set HF_HUB_OFFLINE=1 to use only what is stored here"
    )


def reason(error: Exception) -> str:
    """Return an error of a transport as text, which may be empty in some libraries."""
    return _line(str(error)) or type(error).__name__


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return how many seconds a server asks to wait, from `Retry-After` or the hub's `RateLimit`; None if neither.

    A date counts from the server's own `Date`, so that clocks need not agree.
    """
    value = headers.get("retry-after", "").strip()
    if re.fullmatch(r"\d{1,9}", value):
        return float(value)
    try:
        until, now = parsedate_to_datetime(value), parsedate_to_datetime(headers.get("date", ""))
        return max((until - now).total_seconds(), 0.0)
    except (TypeError, ValueError):
        pass
    found = _RATE_LIMIT.search(headers.get("ratelimit", ""))
    return float(found[1]) if found else None


def _transient(model: HubModel, status: int, headers: Mapping[str, str]) -> TransientError:
    if status == 429:
        hint = "" if model.token else "; with a token (HF_TOKEN) the limit is higher"
        text = f"{model.name}: {model.endpoint} limits the rate of requests{hint}"
    else:
        text = f"{model.name}: {model.endpoint} answers with status {status}"
    return TransientError(text, retry_after_s(headers))


def _gated(model: HubModel) -> str:
    if model.token:
        return (
            f"{model.name} is gated, and the token's account has not been given access; accept the terms at "
            f"{model.page} (some authors answer by hand) and let the token read gated repositories"
        )
    return f"{model.name} is gated; accept the terms at {model.page}, then set HF_TOKEN to a token of that account"


def _vanished(model: HubModel, what: str) -> SourceChanged:
    return SourceChanged(
        f"{model.name}: {what} is not on {model.endpoint} any more, or has changed; fetch the model anew"
    )


def _told(model: HubModel, headers: Mapping[str, str]) -> str:
    text = headers.get("x-error-message", "")
    if model.token:
        text = text.replace(model.token, "***")
    text = _line(text).rstrip(".")
    return f" ({text})" if text else ""


def _line(text: str) -> str:
    """Return foreign text in one bounded line of printable characters."""
    text = "".join(character if character.isprintable() else " " for character in text)
    return " ".join(text.split())[:_MAX_MESSAGE_CHARACTERS]
