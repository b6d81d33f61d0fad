"""HubSource: models on a Hugging Face hub or a mirror of one, `hf://ORG/NAME[@REVISION]`.

Owns the list of a model's files at one commit, and reads of ranges of their content. Must not know stores, retries or
which files are served. Invariants: every read is of the commit that `snapshot` returned, and the token goes to the
hub's own origin only.

huggingface_hub resolves revisions and finds tokens; content is read with httpx, because that library reads whole files
only. The hub answers for a large file with the signed, short-lived address of another host. Such an address is kept for
the file's next ranges, and asked for once more when its host refuses it.
"""

from __future__ import annotations

import logging
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import httpx
import msgspec
from huggingface_hub import constants, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from argosy_fetcher.errors import FetchError, InvalidSource, Offline, SourceChanged, TransientError
from argosy_fetcher.snapshot import MAX_FILES, RemoteFile, Snapshot, check_path
from argosy_fetcher.sources import hub_environment
from argosy_fetcher.sources.hub_errors import HubModel, error_of, reason, storage_error, unreachable
from argosy_fetcher.sources.source import Chunk
from argosy_protocol import __version__

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo, RepoSibling

    from argosy_fetcher.source_uri import SourceUri

_TIMEOUT: Final = httpx.Timeout(30.0, connect=10.0)
"""Of a connection's set-up and of each wait for bytes. The whole of a slow transfer may take longer."""
_LIST_TIMEOUT_S: Final = 60.0
"""The hub takes seconds to list the sizes of thousands of files."""
_MAX_REDIRECTS: Final = 5
_UNSIGNED: Final = frozenset((400, 401, 403, 404, 410))
"""What storage answers to an address that is not valid any more. Amazon's says 403, Google's 400."""
_COMMIT: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_GIT_SHA1: Final = re.compile(r"[0-9a-f]{40}")
_CONTENT_RANGE: Final = re.compile(r"bytes (\d{1,15})-(\d{1,15})/(\d{1,15}|\*)")
_NO_ANSWER: Final = cast("tuple[type[Exception], ...]", (OSError, *HfHubHTTPError.__bases__))
"""Base of the errors of the library's HTTP client: requests, httpx or httpx2, depending on its release."""


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
        self._model = self._model_of(None)
        self._commit = ""
        self._client: httpx.Client | None = None
        self._addresses: dict[str, httpx.URL] = {}
        """Where the content of files was found, by path."""

    @property
    def name(self) -> str:
        return f"hf://{self._repo_id}"

    @property
    def requested_revision(self) -> str:
        return self._revision

    def snapshot(self) -> Snapshot:
        """Resolve the revision and list the files.

        Raises:
            Offline: offline mode forbids to ask the hub.
            ModelNotFound: there is no such repository or revision, or it is hidden from the token.
            AccessDenied: the hub refuses the token, or does not give the model to its account.
            FetchError: the answer is not that of a hub.
            TransientError: the hub does not answer, limits the rate of requests, or fails.
        """
        if hub_environment.is_offline(self._credentials):
            raise self._offline()
        self._model = self._model_of(hub_environment.find_token(self._credentials))
        snapshot = self._snapshot_of(self._ask())
        self._commit = snapshot.revision
        self._addresses.clear()
        if self._client is None:
            self._client = _make_client()
        return snapshot

    def read(self, file: RemoteFile, start: int, stop: int) -> Iterator[Chunk]:
        """Yield the bytes [start, stop) of a file of the snapshot.

        Raises:
            SourceChanged: the hub has another content or none for the file now.
            AccessDenied: the model is gated, which some hubs say only now.
            FetchError, TransientError: as `snapshot`.
        """
        assert self._client is not None, "read before snapshot"
        if start >= stop:
            return
        try:
            with closing(self._open(file, start, stop)) as response:
                skipped = self._bytes_before(response, file, start)
                yield from _cut(response, skipped, stop - start)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            host = error.request.url
            raise unreachable(self._model, error, "" if self._is_hub(host) else host.host) from error
        except httpx.HTTPError as error:
            raise TransientError(f"{self.name}: {file.path}: connection lost: {reason(error)}") from error

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

    def _ask(self) -> ModelInfo:
        from huggingface_hub import HfApi  # takes half a second, which a model in the store need not wait for

        # Else release 2 also asks huggingface.co, whatever HF_ENDPOINT says, for a list of programs to look for.
        constants.HF_HUB_DISABLE_TELEMETRY = True
        api = HfApi(
            endpoint=str(self._endpoint),
            token=self._model.token or False,
            library_name="argosy",
            library_version=__version__,
        )
        try:
            return api.model_info(
                self._repo_id,
                revision=self._revision or None,
                files_metadata=True,
                timeout=_LIST_TIMEOUT_S,
            )
        except HfHubHTTPError as error:
            raise error_of(self._model, error.response.status_code, error.response.headers) from error
        except OfflineModeIsEnabled as error:
            raise self._offline() from error
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise self._malformed(f"it describes no model ({type(error).__name__})") from error
        except _NO_ANSWER as error:
            raise unreachable(self._model, error) from error

    def _snapshot_of(self, info: ModelInfo) -> Snapshot:
        commit, siblings = info.sha, info.siblings or []
        if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
            raise self._malformed("it names no commit")
        if _COMMIT.fullmatch(self._revision) and self._revision != commit:
            raise self._malformed(f"it is for commit {commit}")
        if len(siblings) > MAX_FILES:
            raise self._malformed(f"it lists {len(siblings)} files; the limit is {MAX_FILES}")
        try:
            files = tuple(_remote_file(sibling) for sibling in siblings)
        except msgspec.ValidationError as error:
            raise self._malformed(f"it lists a file with a strange size or digest ({error})") from None
        if len({file.path for file in files}) != len(files):
            raise self._malformed("it lists a file twice")
        return Snapshot(self.name, commit, files)

    # The content of files

    def _open(self, file: RemoteFile, start: int, stop: int, *, may_ask_again: bool = True) -> httpx.Response:
        """Return a successful response with the file's content at or before `start`; the caller closes it."""
        url = httpx.URL(
            hf_hub_url(self._repo_id, file.path, revision=self._commit, endpoint=str(self._endpoint))
        )
        known = self._addresses.get(file.path)
        response = self._follow(known or url, file, start, stop)
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

    def _follow(self, url: httpx.URL, file: RemoteFile, start: int, stop: int) -> httpx.Response:
        """Ask for a range, and follow redirects. The token goes to the hub's own origin only."""
        assert self._client is not None
        for _ in range(_MAX_REDIRECTS):
            headers = {"Range": f"bytes={start}-{stop - 1}"}
            if self._model.token and self._is_hub(url):
                headers["Authorization"] = f"Bearer {self._model.token}"
            response = self._client.send(self._client.build_request("GET", url, headers=headers), stream=True)
            if self._is_hub(url) and response.status_code < 400 and not self._is_same(response.headers, file):
                response.close()
                raise SourceChanged(
                    f"{self._model.name}: {self._endpoint} has another {file.path} now than when it listed the files; "
                    "fetch the model anew"
                )
            if not response.has_redirect_location:
                return response
            response.close()
            url = self._target(response, file)
        raise TransientError(f"{self._model.name}: {file.path}: more than {_MAX_REDIRECTS} redirects")

    def _target(self, response: httpx.Response, file: RemoteFile) -> httpx.URL:
        assert response.next_request is not None
        target = response.next_request.url
        if target.scheme not in ("https", "http") or not target.host or target.userinfo:
            raise self._malformed(f"{file.path}: the redirect leads to no web server")
        if response.url.scheme == "https" and target.scheme != "https":
            raise self._malformed(f"{file.path}: the redirect leaves https:// for {target.host}")
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


def _make_client() -> httpx.Client:
    # They log every address and redirect, and signed addresses are credentials.
    for name in ("httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.WARNING)
    headers = {"User-Agent": f"argosy/{__version__}", "Accept-Encoding": "identity"}
    return httpx.Client(timeout=_TIMEOUT, headers=headers)


def _remote_file(sibling: RepoSibling) -> RemoteFile:
    """
    Raises:
        msgspec.ValidationError: a size or a digest is missing or malformed.
        UnsupportedModel: the path is unsafe.
    """
    fields: dict[str, Any] = {"path": sibling.rfilename, "size": sibling.size}
    if sibling.lfs is not None:
        fields |= {"size": sibling.lfs.size, "version": sibling.lfs.sha256}
        fields["digest"] = {"algorithm": "sha256", "hex": sibling.lfs.sha256}
    elif isinstance(sibling.blob_id, str) and _GIT_SHA1.fullmatch(sibling.blob_id):
        fields |= {"version": sibling.blob_id, "digest": {"algorithm": "git-sha1", "hex": sibling.blob_id}}
    file = msgspec.convert(fields, RemoteFile)
    check_path(file.path)
    return file


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
