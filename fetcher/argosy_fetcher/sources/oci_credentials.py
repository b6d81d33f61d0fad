"""Credentials for container registries: environment and the auth files of docker and podman.

Owns where they are found and how they are matched to a repository. Must not know requests. Invariant: no value is part
of a message or of a `repr`.

Looked up in this order; the first that has an entry for the repository is used:

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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from msgspec import Struct

from argosy_fetcher.errors import InvalidSource
from argosy_fetcher.sources.documents import MalformedDocument, decode_document
from argosy_fetcher.sources.oci_reference import ImageReference, canonical_host

_log: Final = logging.getLogger(__name__)
MAX_AUTH_FILE_BYTES: Final = 1 << 20
"""The largest Secret of Kubernetes."""


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
        with path.open("rb") as file:
            content = file.read(MAX_AUTH_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidSource(f"{origin}: cannot read the auth file: {error.strerror}") from None
    except ValueError:  # a NUL in the path
        raise InvalidSource(f"{origin}: this is no path of a file") from None
    if len(content) > MAX_AUTH_FILE_BYTES:
        raise InvalidSource(f"{origin}: larger than {MAX_AUTH_FILE_BYTES} bytes, so it is no auth file")
    return content


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
