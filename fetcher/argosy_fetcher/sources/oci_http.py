"""HTTP as registries and token servers speak it: bounded documents, failures as the fetcher's errors, authentication.

Owns what a status, an error code and a broken connection mean; challenges, tokens and where credentials may be sent: to
the registry itself, and to its token server over TLS (or without it, if the registry is asked without TLS and the
server's host may be); where credentials are found, and how they are matched to a repository. Must not know manifests.
Invariants: a message names hosts, statuses and codes, never a URL (it may be signed), a header or a body; no credential
is part of a message or of a `repr`.

    TransientError    429 and TOOMANYREQUESTS, 408, 5xx, timeouts, cut connections
    AccessDenied      401, 403, DENIED, UNAUTHORIZED
    UnknownHost       a host that does not exist
    ModelNotFound     404, NAME_UNKNOWN, MANIFEST_UNKNOWN
    InvalidSource     NAME_INVALID, TAG_INVALID, DIGEST_INVALID
    UnsupportedModel  406, 415, a document that is too large
    FetchError        everything else: TLS, other statuses

Authentication is Basic, or Bearer tokens from the token server that the registry names:
https://distribution.github.io/distribution/spec/auth/token/ and .../oauth/. Credentials are looked up in this order;
the first that has an entry for the repository is used:

1. `OCI_USERNAME` and `OCI_PASSWORD`, if `OCI_REGISTRY` names the source's registry: whoever writes a model's source
   does not decide who gets the password;
2. `DOCKER_AUTH_CONFIG`, an auth file's content;
3. `REGISTRY_AUTH_FILE`, an auth file's path;
4. `$DOCKER_CONFIG/config.json` or `~/.docker/config.json`.

Credential helpers are programs, and none is ever run: an entry that needs one counts as missing, and the reason is kept
for the error message, because much can be read without credentials.
"""

from __future__ import annotations

import base64
import binascii
import logging
import re
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import httpx
from msgspec import Meta, Struct

from argosy_fetcher.errors import (
    AccessDenied,
    FetchError,
    InvalidSource,
    ModelNotFound,
    TransientError,
    UnsupportedModel,
)
from argosy_fetcher.sources.http import (
    MalformedDocument,
    SourceClient,
    causes,
    decode_document,
    request_url,
    retry_after_s,
)
from argosy_fetcher.sources.registry import (
    PLAIN_HTTP_ENV,
    ImageReference,
    canonical_host,
    is_plain_http,
    read_text,
)

DOCUMENT_S: Final = 60.0
"""For all bytes of a document."""
MAX_ERROR_BYTES: Final = 64 << 10

_NO_TLS: Final = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")
"""OpenSSL's reasons if the other side speaks something else."""
_CODE: Final = re.compile(r"[A-Z][A-Z0-9_]{0,63}")


class RegistryError(Struct, frozen=True):
    code: str = ""


class RegistryErrors(Struct, frozen=True):
    """The body of an error response (OCI distribution specification)."""

    errors: Annotated[tuple[RegistryError, ...], Meta(max_length=64)] = ()


class RegistryClient(SourceClient):
    """Requests to one repository, and to the stores to which the registry redirects."""

    NAMED_BY = "its name"

    def __init__(self, reference: ImageReference, values: Mapping[str, str]) -> None:
        """
        Args:
            values: credentials and settings.
        """
        self._is_plain = is_plain_http(reference.api_host, values)
        self._values = values
        self._subject = str(reference)
        scheme = "http" if self._is_plain else "https"
        super().__init__(httpx.URL(f"{scheme}://{reference.api_host}/v2/{reference.repository}/"), values)
        self._auth = RegistryAuthenticator(reference, values, self)

    def answer(self, path: str, headers: Mapping[str, str]) -> httpx.Response:
        """Return the response to a GET of a path below the repository, of any status but a redirect's. A challenge of
        the registry is answered once."""
        url = self.server.join(path)
        response = self.get(url, self._subject, headers)
        if response.status_code != 401 or not self.is_own(response.url):
            return response
        self.discard(response)
        refused = response.request.headers.get("Authorization", "")
        self._auth.answer(response.headers.get_list("WWW-Authenticate"), refused)
        return self.get(url, self._subject, headers)

    def is_secure(self, url: httpx.URL) -> bool:
        """Whether requests may go to a URL: over TLS, or without it if the registry and the host are so asked."""
        is_plain = url.scheme == "http" and self._is_plain
        return url.scheme == "https" or (is_plain and is_plain_http(netloc(url), self._values))

    def may_be_plain(self, url: httpx.URL, target: httpx.URL) -> bool:
        return self.is_secure(target)

    def failure(self, error: httpx.HTTPError | httpx.InvalidURL, where: str) -> FetchError | TransientError:
        reasons = {getattr(cause, "reason", "") for cause in causes(error) if isinstance(cause, ssl.SSLError)}
        if reasons.isdisjoint(_NO_TLS) or isinstance(error, httpx.InvalidURL):
            return super().failure(error, where)
        url = request_url(error)
        host = netloc(url) if url else "the registry"
        return FetchError(
            f"{where}: {host} does not speak TLS; if its network is trusted, set {PLAIN_HTTP_ENV}={host}"
        )

    def refusal(self, response: httpx.Response, subject: str = "") -> FetchError | TransientError:
        """Return the error that a response stands for, which was not read yet, and close it.

        Args:
            subject: what was asked for, for messages; the reference if left out.
        """
        subject = subject or self._subject
        status, code = response.status_code, self._error_code(response)
        if (
            not self.is_own(response.url)
            and subject == self._subject
            and not (status == 429 or status >= 500)
        ):
            # Storage behind the registry: its links expire, and a new attempt asks the registry for a new one.
            return TransientError(
                f"{subject}: {response.url.host}, where the registry redirects to, answered {status}"
            )
        said = f"{status} {code}".strip()
        host = netloc(response.url)
        if status == 429 or code == "TOOMANYREQUESTS":
            return TransientError(
                f"{subject}: {host} limits the rate of requests ({said}); credentials often raise the limit",
                retry_after_s(response.headers),
            )
        if status >= 500 or status == 408:
            return TransientError(f"{subject}: {host} failed ({said})", retry_after_s(response.headers))
        if status in (401, 403) or code in ("UNAUTHORIZED", "DENIED"):
            return AccessDenied(
                f"{subject}: {host} denies access ({said}), or the repository does not exist; {self._auth.remedy()}"
            )
        if code == "NAME_UNKNOWN":
            return ModelNotFound(f"{subject}: {host} has no such repository ({said})")
        if code == "MANIFEST_UNKNOWN":
            return ModelNotFound(f"{subject}: the repository has no such tag or digest ({said})")
        if status == 404:
            return ModelNotFound(
                f"{subject}: {host} has no such repository, tag or digest, or is no registry ({said})"
            )
        if code in ("NAME_INVALID", "TAG_INVALID", "DIGEST_INVALID"):
            return InvalidSource(f"{subject}: {host} refuses the name ({said})")
        if status in (406, 415) or code == "UNSUPPORTED":
            return UnsupportedModel(f"{subject}: {host} has it in no form that is supported ({said})")
        return FetchError(f"{subject}: {host} answered unexpectedly ({said})")

    def _error_code(self, response: httpx.Response) -> str:
        """Return the first error code in a body; empty if there is none."""
        try:
            content = self.document(response, MAX_ERROR_BYTES, self._subject, DOCUMENT_S)
            errors = decode_document(content, RegistryErrors).errors
        except (FetchError, TransientError, MalformedDocument):
            return ""
        return next((error.code for error in errors if _CODE.fullmatch(error.code)), "")


def netloc(url: httpx.URL) -> str:
    """Return HOST[:PORT] of a URL."""
    return url.netloc.decode("ascii", "replace")


MAX_CHALLENGE_CHARACTERS: Final = 4096
MAX_TOKEN_CHARACTERS: Final = 16 << 10
"""Longer headers are refused by common servers anyway."""
MAX_TOKEN_RESPONSE_BYTES: Final = 64 << 10
CLIENT_ID: Final = "argosy-fetcher"

_WORD: Final = re.compile(r"[\s,]*([A-Za-z][A-Za-z0-9_-]*)")
_VALUE: Final = re.compile(r'\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]+))')
_TOKEN: Final = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True)
class AuthChallenge:
    """One challenge of a WWW-Authenticate header."""

    scheme: str
    """In lower case."""
    parameters: Mapping[str, str]


class TokenResponse(Struct, frozen=True):
    """What a token server answers; the names are those of two generations of the protocol."""

    token: str | None = None
    access_token: str | None = None


class RegistryAuthenticator:
    """Authorization of requests for one repository. Thread-safe: of several requests that a registry refuses at once,
    one gets a new token and the others use it."""

    def __init__(self, reference: ImageReference, values: Mapping[str, str], client: RegistryClient) -> None:
        """
        Args:
            values: where credentials are looked for, at the first challenge.
            client: its `authorization` is kept here; empty before the first challenge.
        """
        self._reference = reference
        self._values = values
        self._client = client
        self._lock = threading.Lock()
        self._lookup: CredentialLookup | None = None

    def remedy(self) -> str:
        """Return what to do if access is denied.

        Raises:
            InvalidSource: the credentials are malformed.
        """
        return self._found().remedy

    def answer(self, headers: Sequence[str], refused: str) -> None:
        """Renew the authorization after a 401.

        Args:
            headers: WWW-Authenticate of the response.
            refused: the authorization that the refused request had.

        Raises:
            AccessDenied: there is nothing to answer with, or the token server refuses.
            TransientError: the token server cannot be reached or has failed.
        """
        with self._lock:
            if self._client.authorization != refused:
                return  # another thread was refused too, and has renewed it
            self._client.authorization = self._answer(parse_challenges(headers), refused)

    def _answer(self, challenges: Sequence[AuthChallenge], refused: str) -> str:
        found = self._found()
        for challenge in challenges:
            if challenge.scheme == "bearer" and challenge.parameters.get("realm"):
                return f"Bearer {self._token(challenge, found.credential)}"
        basic = found.credential.basic if found.credential else ""
        if any(challenge.scheme == "basic" for challenge in challenges) and basic not in ("", refused):
            return basic
        schemes = ", ".join(sorted({challenge.scheme[:32] for challenge in challenges})) or "nothing"
        raise AccessDenied(
            f"{self._reference}: {self._reference.host} requires authentication ({schemes}); {found.remedy}"
        )

    def _token(self, challenge: AuthChallenge, credential: RegistryCredential | None) -> str:
        subject = f"{self._reference}: token"
        with self._client.translated(subject):
            realm = httpx.URL(challenge.parameters["realm"])
            request = self._token_request(realm, challenge, credential)
        if realm.userinfo or not realm.host or not self._client.is_secure(realm):
            raise AccessDenied(
                f"{self._reference}: the registry names a token server that is not asked, because its URL is "
                "not https:// or has a user name in it"
            )
        response = self._client.send(request, subject)
        if response.status_code != 200:
            raise self._refusal(response, subject)
        content = self._client.document(response, MAX_TOKEN_RESPONSE_BYTES, subject, DOCUMENT_S)
        try:
            answer = decode_document(content, TokenResponse)
        except MalformedDocument as error:
            raise AccessDenied(f"{subject}: {realm.host} sent no token: {error}") from None
        token = answer.token or answer.access_token or ""
        if len(token) > MAX_TOKEN_CHARACTERS or not _TOKEN.fullmatch(token):
            raise AccessDenied(f"{subject}: {realm.host} sent no token that can be used")
        return token

    def _refusal(self, response: httpx.Response, subject: str) -> FetchError | TransientError:
        error = self._client.refusal(response, subject)
        if isinstance(error, (TransientError, AccessDenied)):
            return error
        host, status = response.url.host, response.status_code
        return AccessDenied(f"{subject}: the token server {host} refuses ({status}); {self.remedy()}")

    def _token_request(
        self, realm: httpx.URL, challenge: AuthChallenge, credential: RegistryCredential | None
    ) -> httpx.Request:
        scope = challenge.parameters.get("scope") or f"repository:{self._reference.repository}:pull"
        fields = {"scope": scope}
        if service := challenge.parameters.get("service"):
            fields["service"] = service
        if credential and credential.identity_token:
            fields |= {
                "grant_type": "refresh_token",
                "client_id": CLIENT_ID,
                "refresh_token": credential.identity_token,
            }
            return self._client.http.build_request("POST", realm, data=fields)
        headers = {"Authorization": credential.basic} if credential and credential.basic else {}
        return self._client.http.build_request("GET", realm.copy_merge_params(fields), headers=headers)

    def _found(self) -> CredentialLookup:
        if self._lookup is None:
            self._lookup = find_credential(self._reference, self._values)
        return self._lookup


def parse_challenges(headers: Sequence[str]) -> list[AuthChallenge]:
    """Parse WWW-Authenticate headers, each of which may have several challenges (RFC 9110, section 11.6.1).

    What cannot be parsed is left out.
    """
    challenges: list[AuthChallenge] = []
    for header in headers:
        if len(header) > MAX_CHALLENGE_CHARACTERS:
            continue
        position = 0
        parameters: dict[str, str] | None = None
        while word := _WORD.match(header, position):
            value = _VALUE.match(header, word.end())
            if value is None:
                parameters = {}
                challenges.append(AuthChallenge(word[1].lower(), parameters))
            elif parameters is not None:
                quoted = value[1]
                text = value[2] if quoted is None else re.sub(r"\\(.)", r"\1", quoted)
                parameters.setdefault(word[1].lower(), text)
            position = word.end() if value is None else value.end()
    return challenges


_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True)
class RegistryCredential:
    """A user name with a password, or an identity token, which a token server exchanges for access."""

    origin: str
    """Where it comes from, for messages."""
    username: str
    password: str = field(repr=False)
    identity_token: str = field(default="", repr=False)

    @property
    def basic(self) -> str:
        """Value of an Authorization header; empty without a password."""
        if not self.password:
            return ""
        pair = f"{self.username}:{self.password}".encode("utf-8", "surrogateescape")
        return f"Basic {base64.b64encode(pair).decode()}"


@dataclass(frozen=True)
class CredentialLookup:
    """What was found for a repository."""

    credential: RegistryCredential | None
    remedy: str
    """What to do if the registry refuses: the end of an error message."""


class AuthEntry(Struct, frozen=True):
    """An entry of an auth file. All of it may be empty: then a credential helper has it."""

    auth: str | None = None
    """base64 of USERNAME:PASSWORD."""
    username: str | None = None
    password: str | None = None
    identitytoken: str | None = None


class AuthFile(Struct, frozen=True, rename="camel"):
    """An auth file, as `docker login` and `podman login` write it."""

    auths: dict[str, AuthEntry | None] | None = None
    cred_helpers: dict[str, str] | None = None
    creds_store: str | None = None


def find_credential(reference: ImageReference, values: Mapping[str, str]) -> CredentialLookup:
    """Return the credential for a repository.

    Args:
        values: named values, such as those of the environment. `HOME` is only used if it is among them.

    Raises:
        InvalidSource: only one of OCI_USERNAME and OCI_PASSWORD is set, or an auth file is unreadable or malformed.
    """
    username, password = values.get("OCI_USERNAME", ""), values.get("OCI_PASSWORD", "")
    if bool(username) != bool(password):
        missing = "OCI_PASSWORD" if username else "OCI_USERNAME"
        raise InvalidSource(f"{reference}: {missing} is not set, but the other half of the credentials is")
    if username and _scope(values.get("OCI_REGISTRY", "").strip()) == reference.host:
        return _found(RegistryCredential("OCI_USERNAME and OCI_PASSWORD", username, password))
    remedy = _remedy(reference.host, bool(username))
    for origin, is_named, read in _auth_files(values):
        try:
            file = _decoded(origin, read())
            credential = _credential(origin, file, reference)
        except InvalidSource as error:
            if is_named:
                raise
            _log.warning("%s; it is not used", error)
            continue
        if credential is not None:
            return _found(credential)
        if helper := _helper(file, reference.host):
            remedy = (
                f"{origin} leaves the credentials of {reference.host} to the helper {helper[:100]!r}, and helpers "
                f"are not run; set OCI_USERNAME and OCI_PASSWORD with OCI_REGISTRY={reference.host} instead"
            )
    return CredentialLookup(None, remedy)


def _remedy(host: str, has_password: bool) -> str:
    if has_password:
        return (
            "OCI_USERNAME and OCI_PASSWORD are sent to one registry only: "
            f"set OCI_REGISTRY={host} if it is meant"
        )
    return (
        f"set OCI_USERNAME and OCI_PASSWORD with OCI_REGISTRY={host}, or let REGISTRY_AUTH_FILE name a file that "
        f"`docker login {host}` has written"
    )


def _found(credential: RegistryCredential) -> CredentialLookup:
    return CredentialLookup(
        credential, f"check the credentials from {credential.origin} and what they may read"
    )


def _auth_files(values: Mapping[str, str]) -> Iterator[tuple[str, bool, Callable[[], bytes]]]:
    """Yield each auth file that exists: its origin, whether the user named it, and what reads it."""
    if content := values.get("DOCKER_AUTH_CONFIG"):
        yield "DOCKER_AUTH_CONFIG", True, partial(content.encode, "utf-8", "surrogateescape")
    if path := values.get("REGISTRY_AUTH_FILE"):
        origin = f"REGISTRY_AUTH_FILE ({path})"
        yield origin, True, partial(_read, Path(path), origin)
    if folder := values.get("DOCKER_CONFIG"):
        default = Path(folder) / "config.json"
    elif home := values.get("HOME"):
        default = Path(home) / ".docker" / "config.json"
    else:
        return
    try:
        exists = default.is_file()
    except (OSError, ValueError):  # a home directory of somebody else, or no path
        exists = False
    if exists:
        yield str(default), bool(folder), partial(_read, default, str(default))


def _read(path: Path, origin: str) -> bytes:
    try:
        return read_text(path).encode()
    except OSError as error:
        raise InvalidSource(f"{origin}: cannot read the auth file: {error.strerror}") from None
    except ValueError as error:  # also a NUL in the path
        raise InvalidSource(f"{origin}: it is no auth file: {error}") from None


def _decoded(origin: str, content: bytes) -> AuthFile:
    try:
        return decode_document(content, AuthFile)
    except MalformedDocument as error:
        raise InvalidSource(f"{origin}: malformed auth file: {error}") from None


def _credential(origin: str, file: AuthFile, reference: ImageReference) -> RegistryCredential | None:
    """Return the credential of the entry that names most of the repository's path."""
    found: dict[str, RegistryCredential] = {}
    for key, entry in (file.auths or {}).items():
        if entry is not None and (credential := _from_entry(origin, entry)):
            found.setdefault(_scope(key), credential)
    parts = reference.repository.split("/")
    scopes = ["/".join([reference.host, *parts[:count]]) for count in range(len(parts), -1, -1)]
    return next((found[scope] for scope in scopes if scope in found), None)


def _from_entry(origin: str, entry: AuthEntry) -> RegistryCredential | None:
    username, password = entry.username or "", entry.password or ""
    if entry.auth:
        try:
            pair = base64.b64decode(entry.auth, validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            raise InvalidSource(f"{origin}: an `auth` is not base64 of USERNAME:PASSWORD") from None
        username, _, password = pair.partition(":")
        password = password.rstrip("\0")  # old versions of docker pad it
    if not entry.identitytoken and not (username and password):
        return None
    return RegistryCredential(origin, username, password, entry.identitytoken or "")


def _scope(key: str) -> str:
    """Return HOST or HOST/PATH of a key such as `ghcr.io`, `quay.io/org` or `https://index.docker.io/v1/`."""
    host, _, path = key.removeprefix("https://").removeprefix("http://").partition("/")
    path = path.strip("/")
    host = canonical_host(host)
    return host if path in ("", "v1", "v2") else f"{host}/{path}"


def _helper(file: AuthFile, host: str) -> str:
    """Return the credential helper that has an entry for a host; empty if there is none."""
    for key, helper in (file.cred_helpers or {}).items():
        if _scope(key) == host:
            return helper
    # `docker login` with a store leaves an empty entry behind.
    has_entry = any(_scope(key) == host for key in file.auths or {})
    return (file.creds_store or "") if has_entry else ""
