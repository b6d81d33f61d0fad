"""HubSource: models on a Hugging Face hub or a mirror of one, `hf://ORG/NAME[:QUANT][@REVISION]`.

Owns the list of a model's files at one commit, reads of ranges of their content, and what a hub's refusals mean. Must
not know stores, retries or which files are served. Invariants: every read is of the commit that `snapshot` returned;
the token is in no message and in no `repr`, even if a server sends it back.

huggingface_hub finds tokens, addresses and names. Lists and content are read with `SourceClient`: that library reads a
list of any length, and downloads whole files in one stream each, whose digest it does not check. The hub answers for a
large file with the signed, short-lived address of another host. Such an address is kept for the file's next ranges
until one of them fails, and asked for once more at once when its host refuses it.

    HF_ENDPOINT                         the hub; https://huggingface.co if not set
    HF_TOKEN, HF_TOKEN_PATH, HF_HOME    the token, or where `hf auth login` has left it
    HF_HUB_DISABLE_IMPLICIT_TOKEN       send no token
    HF_HUB_CACHE, HF_HOME               Hugging Face's own cache
    HF_HUB_OFFLINE, ARGOSY_OFFLINE      make no request
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import quote, urlsplit

import httpx
from huggingface_hub import constants, get_token, hf_hub_url
from huggingface_hub.errors import HFValidationError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from msgspec import Meta, Struct, field
from msgspec.structs import replace

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
    SourceClient,
    decode_document,
    is_transient,
    is_unknown_host,
    is_untrusted,
    retry_after_s,
    unknown_host,
)
from argosy_fetcher.sources.registry import hub_address, hub_source_name, is_true, read_text

if TYPE_CHECKING:
    from argosy_fetcher.source_uri import SourceUri

_UNSIGNED: Final = frozenset((400, 401, 403, 404, 410))
"""What storage answers to an address that is not valid any more. Amazon's says 403, Google's 400."""


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
        self._name = hub_source_name(uri.name, credentials)
        self._model = HubModel(str(self._endpoint), self._repo_id, self._revision, None)
        self._commit = ""
        self._client: HubClient | None = None
        self._addresses: dict[str, httpx.URL] = {}
        """Where the content of files was found, by path."""

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
            raise Offline(
                f"{self._model.name} is not in the store, and offline mode (HF_HUB_OFFLINE or ARGOSY_OFFLINE) forbids "
                "to ask the hub; fetch it once with offline mode off"
            )
        token = find_token(self._credentials)
        if token and self._endpoint.scheme == "http" and not is_loopback(self._endpoint.host):
            raise AccessDenied(
                f"{self._model.name}: {self._endpoint} is not encrypted and would show the token to the network; let "
                "HF_ENDPOINT begin with https://, or set HF_HUB_DISABLE_IMPLICIT_TOKEN=1 to send no token"
            )
        self._model = replace(self._model, token=token)
        if self._client is None:
            self._client = HubClient(self._endpoint, self._credentials)
        self._client.use(self._model)
        try:
            self._commit, files = decode_listing(self._list(self._client), self._revision)
        except MalformedDocument as error:
            raise FetchError(
                f"{self._model.name}: the answer of {self._endpoint} cannot be used: {error}{HubClient.ADVICE}"
            ) from None
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
        where = f"{self._model.name}: {file.path}"
        try:
            response = self._open(self._client, file, start, stop)
            for chunk in self._client.part(response, file.size, start, stop, where):
                left -= len(chunk)
                yield chunk
        finally:
            if left > 0:  # the next attempt asks the hub, which may know a host that is well
                self._addresses.pop(file.path, None)

    def can_read_ranges(self, file: RemoteFile) -> bool:
        client = self._client
        assert client is not None, "read before snapshot"
        return client.sends_ranges(lambda: self._open(client, file, file.size - 1, file.size))

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

    def _list(self, client: HubClient) -> bytes:
        url = f"{self._endpoint}/api/models/{self._repo_id}"
        if self._revision:
            url += f"/revision/{quote(self._revision, safe='')}"
        what = f"{self._model.name}: the list of files"
        response = client.get(httpx.URL(f"{url}?blobs=true"), what, {})
        if not response.is_success:
            response.close()
            raise error_of(self._model, response.status_code, response.headers)
        return client.document(response, MAX_LISTING_BYTES, what)

    def _open(
        self, client: HubClient, file: RemoteFile, start: int, stop: int, *, may_ask_again: bool = True
    ) -> httpx.Response:
        """Return a successful response with the file's content at or before `start`; the caller closes it."""

        def check(response: httpx.Response) -> None:
            if client.is_own(response.url) and response.status_code < 400:
                self._check_same(response.headers, file)

        url = httpx.URL(
            hf_hub_url(self._repo_id, file.path, revision=self._commit, endpoint=str(self._endpoint))
        )
        known = self._addresses.get(file.path)
        headers = {"Range": f"bytes={start}-{stop - 1}"}
        response = client.get(known or url, f"{self._model.name}: {file.path}", headers, check)
        if response.is_success:
            if response.url != url:
                self._addresses[file.path] = response.url
            return response
        response.close()
        is_hub = client.is_own(response.url)
        if (known is not None or not is_hub) and may_ask_again and response.status_code in _UNSIGNED:
            if self._addresses.get(file.path) is known:  # another thread may have a newer address already
                self._addresses.pop(file.path, None)
            return self._open(client, file, start, stop, may_ask_again=False)
        if is_hub:
            raise error_of(self._model, response.status_code, response.headers, file.path)
        raise storage_error(self._model, response.url.host, response.status_code, response.headers, file.path)

    def _check_same(self, headers: httpx.Headers, file: RemoteFile) -> None:
        """Check that the hub's headers are those of the snapshot. Mirrors may lack some, or have ETags of another kind.

        Raises:
            SourceChanged: they are not.
        """
        etag = (headers.get("x-linked-etag") or headers.get("etag") or "").removeprefix("W/").strip('"')
        is_same = (
            headers.get("x-repo-commit", self._commit) == self._commit
            and (etag == file.version or len(etag) != len(file.version))
            and (headers.get("x-linked-size") or str(file.size)) == str(file.size)
        )
        if not is_same:
            raise SourceChanged(
                f"{self._model.name}: {self._endpoint} has another {file.path} now than when it listed the files; "
                "fetch the model anew"
            )


class HubClient(SourceClient):
    """Requests to a hub, and to the hosts of files' content."""

    FAULT = TransientError
    ADVICE = "; check HF_ENDPOINT, which must be a Hugging Face hub or a mirror of one"

    def use(self, model: HubModel) -> None:
        """Ask for this model from now on, with its token."""
        self._model = model
        self.authorization = f"Bearer {model.token}" if model.token else ""

    def may_be_plain(self, url: httpx.URL, target: httpx.URL) -> bool:
        return url.scheme == "http"

    def failure(self, error: httpx.HTTPError | httpx.InvalidURL, where: str) -> FetchError | TransientError:
        if isinstance(error, httpx.InvalidURL) or is_untrusted(error):
            return super().failure(error, self._model.name)
        url = error.request.url
        is_list = "Range" not in error.request.headers
        if is_list or isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
            return unreachable(self._model, error, "" if self.is_own(url) else url.host)
        return TransientError(f"{where}: connection lost: {reason(error)}")


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
        text = read_text(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise AccessDenied(f"the hub's token cannot be read: {path}: {error.strerror}") from None
    except ValueError as error:
        raise AccessDenied(f"{path} is not a token: {error}") from None
    return _checked(text, str(path)) if text.strip() else None


def _checked(token: str, where: str) -> str:
    """Return a token that fits in a header. HTTP libraries would show another one in their errors."""
    token = token.strip()
    if len(token) > MAX_TOKEN_BYTES or not _TOKEN.fullmatch(token):
        raise AccessDenied(f"{where} is not a token: it has spaces, line breaks or other odd characters")
    return token


def _expand(path: str) -> Path:
    return Path(os.path.expandvars(path)).expanduser()


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
