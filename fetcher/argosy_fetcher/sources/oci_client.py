"""Client of one repository of a container registry: manifests and ranges of blobs.

Owns requests, redirects and what is sent to whom. Must not know what manifests and layers mean. Invariant: an
Authorization header goes to the registry's own scheme, host and port only, never along a redirect to another.

Protocol: https://github.com/opencontainers/distribution-spec/blob/main/spec.md
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import httpx

from argosy_fetcher.errors import FetchError, HashMismatch, SourceChanged, TransientError
from argosy_fetcher.sources.oci_auth import RegistryAuthenticator
from argosy_fetcher.sources.oci_http import discard, error_of, http_client, read_document, translated
from argosy_fetcher.sources.oci_manifest import ACCEPT, MAX_MANIFEST_BYTES
from argosy_fetcher.sources.oci_reference import ImageReference, is_plain_http
from argosy_fetcher.sources.source import Chunk

MAX_REDIRECTS: Final = 5
MAX_LOCATION_CHARACTERS: Final = 8192
MANIFEST_ATTEMPTS: Final = 2
"""A manifest with a wrong digest is asked for once more: a cache on the way may have been cut off."""

_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
_CONTENT_RANGE: Final = re.compile(r"bytes ([0-9]{1,20})-[0-9]{1,20}/([0-9]{1,20}|\*)")


@dataclass(frozen=True)
class RegistryDocument:
    """A manifest or an index as the registry sent it, with a digest that was checked."""

    content: bytes
    media_type: str
    digest: str


class RegistryClient:
    """Reads one repository. Its methods may be called from several threads."""

    def __init__(self, reference: ImageReference, values: Mapping[str, str]) -> None:
        """
        Args:
            values: credentials and settings (`oci_credentials`, `oci_reference.PLAIN_HTTP_ENV`).
        """
        self._reference = reference
        self._values = values
        self._subject = str(reference)
        self._is_plain = is_plain_http(reference.api_host, values)
        scheme = "http" if self._is_plain else "https"
        self._base = httpx.URL(f"{scheme}://{reference.api_host}/v2/{reference.repository}/")
        self._http = http_client(values)
        self._auth = RegistryAuthenticator(reference, values, self._http, self._is_secure)

    def close(self) -> None:
        self._http.close()

    def manifest(self, selector: str) -> RegistryDocument:
        """Read a manifest or an index.

        Args:
            selector: a tag, or a digest, which the content is checked against. Under a tag it is checked against the
                digest that the registry announces.

        Raises:
            HashMismatch: the content has another digest, twice.
            UnsupportedModel: it is larger than MAX_MANIFEST_BYTES.
            ModelNotFound, AccessDenied, TransientError, FetchError: see `oci_http`.
        """
        for _ in range(MANIFEST_ATTEMPTS):
            with self._open(f"manifests/{selector}", {"Accept": ACCEPT}) as response:
                if response.status_code != 200:
                    raise self._error(response)
                content = read_document(response, MAX_MANIFEST_BYTES, self._subject)
                announced = response.headers.get("Docker-Content-Digest", "")
                media_type = response.headers.get("Content-Type", "")
            digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
            expected = selector if _DIGEST.fullmatch(selector) else announced
            if digest == expected or not _DIGEST.fullmatch(expected):
                return RegistryDocument(content, media_type, digest)
        raise HashMismatch(
            f"{self._subject}: the manifest {selector} has the digest {digest}, not {expected}; "
            "the registry or a cache before it is damaged"
        )

    def blob(self, digest: str, size: int, start: int, stop: int) -> Iterator[Chunk]:
        """Yield the bytes [start, stop) of a blob.

        Args:
            size: of the whole blob, as its descriptor has it.

        Raises:
            SourceChanged: the registry has the blob no longer, or with another size.
            AccessDenied, TransientError, FetchError: see `oci_http`.
        """
        if start >= stop:
            return
        headers = {"Range": f"bytes={start}-{stop - 1}"}
        with self._open(f"blobs/{digest}", headers) as response:
            skipped = self._bytes_before(response, digest, size, start)
            missing = stop - start
            for chunk in response.iter_raw():
                if (
                    not missing
                ):  # only now: a body that is read to its end leaves a connection that can be used again
                    return
                if skipped >= len(chunk):
                    skipped -= len(chunk)
                    continue
                wanted = memoryview(chunk)[skipped : skipped + missing]
                skipped = 0
                missing -= len(wanted)
                yield wanted

    def can_read_ranges(self, digest: str, size: int) -> bool:
        """Whether the content of a blob begins at the byte that is asked for.

        Raises:
            AccessDenied, TransientError, FetchError: see `oci_http`.
        """
        with self._open(f"blobs/{digest}", {"Range": f"bytes={size - 1}-{size - 1}"}) as response:
            if response.status_code != 200:
                discard(response, self._subject)
            return response.status_code != 200

    def _bytes_before(self, response: httpx.Response, digest: str, size: int, start: int) -> int:
        """Check the response for a range; return how many bytes of its body are before `start`."""
        if response.status_code == 206:
            found = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
            if found is None or int(found[1]) != start:
                raise FetchError(
                    f"{self._subject}: {response.url.host} answered with another range of {digest}"
                )
            total = size if found[2] == "*" else int(found[2])
        elif response.status_code == 200:  # the whole blob
            length = response.headers.get("Content-Length", "")
            total = int(length[:20]) if length.isdecimal() else size
        elif response.status_code == 416:
            total = -1
        elif response.status_code in (404, 410) and self._is_own(response.url):
            raise SourceChanged(
                f"{self._subject}: the registry has the layer {digest} no longer; fetch it again"
            )
        else:
            raise self._error(response)
        if total != size:
            raise SourceChanged(
                f"{self._subject}: the layer {digest} has not the {size} bytes of its manifest"
            )
        return start if response.status_code == 200 else 0

    @contextmanager
    def _open(self, path: str, headers: Mapping[str, str]) -> Iterator[httpx.Response]:
        """Send a GET and yield the response, which may have any status but a redirect's. Closes it."""
        response = None
        try:
            with translated(self._subject):
                response = self._get(path, headers)
                yield response
        finally:
            if response is not None:
                response.close()

    def _get(self, path: str, headers: Mapping[str, str]) -> httpx.Response:
        url = self._base.join(path)
        has_answered = False
        for _ in range(MAX_REDIRECTS + 2):
            is_own = self._is_own(url)
            authorization = self._auth.authorization if is_own else ""
            request = self._http.build_request("GET", url, headers=headers)
            if authorization:
                request.headers["Authorization"] = authorization
            response = self._http.send(request, stream=True)
            if response.status_code == 401 and is_own and not has_answered:
                discard(response, self._subject)
                self._auth.answer(response.headers.get_list("WWW-Authenticate"), authorization)
                has_answered = True
            elif response.has_redirect_location:
                discard(response, self._subject)
                url = self._redirected(url, response.headers["Location"])
            else:
                return response
        raise FetchError(f"{self._subject}: more than {MAX_REDIRECTS} redirects")

    def _redirected(self, url: httpx.URL, location: str) -> httpx.URL:
        if len(location) > MAX_LOCATION_CHARACTERS:
            raise FetchError(f"{self._subject}: {url.host} redirects to a URL that is too long")
        try:
            target = url.join(location)
        except (httpx.InvalidURL, ValueError):
            raise FetchError(f"{self._subject}: {url.host} redirects to a malformed URL") from None
        if target.userinfo or not target.host or not self._is_secure(target):
            raise FetchError(
                f"{self._subject}: {url.host} redirects to {target.host or 'no host'!r}, which is not followed: "
                "its URL is not https:// or has a user name in it"
            )
        return target

    def _error(self, response: httpx.Response) -> FetchError | TransientError:
        if self._is_own(response.url) or response.status_code == 429 or response.status_code >= 500:
            return error_of(response, self._subject, self._auth.remedy)
        # Storage behind the registry: its links expire, and a new attempt asks the registry for a new one.
        host, status = response.url.host, response.status_code
        return TransientError(f"{self._subject}: {host}, where the registry redirects to, answered {status}")

    def _is_own(self, url: httpx.URL) -> bool:
        """Whether a URL has the registry's origin."""
        return _origin(url) == _origin(self._base)

    def _is_secure(self, url: httpx.URL) -> bool:
        """Whether requests may go to a URL: over TLS, or without it if the registry and the host are so asked."""
        if url.scheme == "https":
            return True
        return url.scheme == "http" and self._is_plain and is_plain_http(_host(url), self._values)


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port or {"http": 80, "https": 443}.get(url.scheme)


def _host(url: httpx.URL) -> str:
    return url.netloc.decode("ascii", "replace")
