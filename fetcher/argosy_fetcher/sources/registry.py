"""Registry of sources: the class that reads a URI's scheme, what the store calls its model, and named credentials.

A source's module is imported only when a URI needs it, because the clients that it brings take long to import; the
store is searched by `name_in_store` before that. To add a source, write a module (see `argosy_fetcher.source`) and name
it here and in `source_uri`.

Credentials are named values, from the environment and from files. The names are those of the services' own tools
(`HF_TOKEN`, `AWS_ACCESS_KEY_ID`, ...); each source says which it reads. Files are how containers get them without an
environment that child processes inherit: `ARGOSY_CREDENTIALS_DIR` is a directory with one file per name, such as a
mounted Secret. Invariant: a value is never part of a message.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Final, cast
from urllib.parse import urlsplit

from argosy_fetcher.errors import AccessDenied, FetchError, InvalidSource
from argosy_fetcher.source import Source
from argosy_fetcher.source_uri import SourceUri, is_loopback

EXTRA: Final = ".[fetch]"
DIRECTORY_ENV: Final = "ARGOSY_CREDENTIALS_DIR"
MAX_CREDENTIAL_FILES: Final = 64
MAX_CREDENTIAL_BYTES: Final = 1 << 20
"""The largest Secret of Kubernetes."""
_CREDENTIAL_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,252}")
_ALIASES: Final = {".dockerconfigjson": "DOCKER_AUTH_CONFIG"}
"""Keys that a type of Secret prescribes -> the value's name."""
DEFAULT_ENDPOINT: Final = "https://huggingface.co"
PLAIN_HTTP_ENV: Final = "ARGOSY_OCI_PLAIN_HTTP"
"""Comma-separated HOST[:PORT] of registries, and of the stores that they redirect to, which are asked without TLS."""
DEFAULT_TAG: Final = "latest"

_DOCKER_HUB: Final = "docker.io"
_DOCKER_HUB_ALIASES: Final = (
    _DOCKER_HUB,
    "index.docker.io",
    "registry-1.docker.io",
    "registry.hub.docker.com",
)
_DOCKER_HUB_API: Final = "registry-1.docker.io"
_DIGEST: Final = re.compile(r"sha256[:-]([0-9a-f]{64})")

SOURCES: Final[dict[str, str]] = {
    "hf": "argosy_fetcher.sources.hub:HubSource",
    "s3": "argosy_fetcher.sources.object_store:ObjectStoreSource",
    "gs": "argosy_fetcher.sources.object_store:ObjectStoreSource",
    "oci": "argosy_fetcher.sources.oci:OciSource",
    "https": "argosy_fetcher.sources.web:WebSource",
    "http": "argosy_fetcher.sources.web:WebSource",
}
"""Scheme -> module:class."""


def open_source(uri: SourceUri, credentials: Mapping[str, str] | None = None) -> Source:
    """Make the source of a remote URI. No request is made. The caller closes it.

    Args:
        credentials: named values; those of the environment if left out (`load_credentials`).

    Raises:
        InvalidSource: the URI is local, or credentials cannot be read.
        FetchError: the scheme needs a package that is not installed.
    """
    target = SOURCES.get(uri.scheme)
    if target is None:
        raise InvalidSource(f"{uri} is not fetched: it names a place on this machine or in the cluster")
    module, _, name = target.partition(":")
    try:
        made = cast("Callable[[SourceUri, Mapping[str, str]], Source]", getattr(import_module(module), name))
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing.startswith("argosy"):
            raise
        raise FetchError(
            f"{uri.scheme}:// needs the package {missing!r}: `pip install '{EXTRA}'` in the checkout"
        ) from None
    return made(uri, load_credentials() if credentials is None else credentials)


def name_in_store(uri: SourceUri, environment: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Return a source's canonical name and its requested revision, by which the store knows a model. Makes no request,
    and imports no client: that takes longer than to find a model, and a stored one needs none.

    Raises:
        FetchError: as `find_model`.
    """
    if uri.scheme == "hf":
        credentials = load_credentials(environment)
        return hub_source_name(uri.name, credentials), uri.revision
    if uri.scheme in ("https", "http"):
        return uri.name, ""
    if uri.scheme == "oci":
        reference = parse_reference(uri)
        return reference.name, reference.requested_revision
    if uri.scheme in ("s3", "gs"):
        return bucket_name(uri, load_credentials(environment)), ""
    raise InvalidSource(f"{uri} is not fetched: it names a place on this machine or in the cluster")


def load_credentials(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment's variables, overridden by the files of `ARGOSY_CREDENTIALS_DIR` if it is set.

    Args:
        environment: os.environ if left out.

    Raises:
        InvalidSource: the directory or a file in it cannot be read, is too large, or is not text, or there is no file.
    """
    values = dict(os.environ if environment is None else environment)
    if directory := values.get(DIRECTORY_ENV):
        values |= read_directory(Path(directory))
    return values


def read_directory(directory: Path) -> dict[str, str]:
    """Read a directory of credentials: a file's name is a value's name. Surrounding white space is not part of values.

    Other names that begin with a dot, some of which are Kubernetes' own in a mounted Secret, are left out.

    Raises:
        InvalidSource: as `load_credentials`.
    """
    values: dict[str, str] = {}
    try:
        files = {_ALIASES.get(path.name, path.name): path for path in sorted(directory.iterdir())}
        named = {
            name: path for name, path in files.items() if _CREDENTIAL_NAME.fullmatch(name) and path.is_file()
        }
        if not named:
            raise InvalidSource(
                f"{DIRECTORY_ENV}: {directory} has no files; in a cluster, the Secret of spec.model.secretRef is "
                "missing or empty: create it, with keys named like the source's variables"
            )
        if len(named) > MAX_CREDENTIAL_FILES:
            raise InvalidSource(f"{DIRECTORY_ENV}: {directory} has more than {MAX_CREDENTIAL_FILES} files")
        for name, path in named.items():
            values[name] = _read_credential(path)
    except OSError as error:
        raise InvalidSource(f"{DIRECTORY_ENV}: cannot read {directory}: {error.strerror}") from None
    return values


def _read_credential(file: Path) -> str:
    try:
        return read_text(file).strip()
    except UnicodeDecodeError:
        raise InvalidSource(f"{DIRECTORY_ENV}: {file} is not UTF-8 text") from None
    except ValueError:
        raise InvalidSource(f"{DIRECTORY_ENV}: {file} is larger than {MAX_CREDENTIAL_BYTES} bytes") from None


def header_value(source: str, name: str, value: str) -> str:
    """Return a value without blanks around it.

    Args:
        source: name of the model's source, for errors.
        name: what the value is called.

    Raises:
        AccessDenied: a header cannot carry it.
    """
    value = value.strip()
    if not (value.isascii() and value.isprintable()):
        raise AccessDenied(
            f"{source}: {name} has characters that a header cannot carry; check where it is set"
        )
    return value


def is_true(credentials: Mapping[str, str], name: str) -> bool:
    """Return whether a switch is set."""
    return credentials.get(name, "").strip().lower() in ("1", "true", "yes", "on")


def read_text(path: Path) -> str:
    """Return the content of a file of credentials.

    Raises:
        OSError: it cannot be read.
        ValueError: it is too long, or not UTF-8.
    """
    with path.open("rb") as file:
        content = file.read(MAX_CREDENTIAL_BYTES + 1)
    if len(content) > MAX_CREDENTIAL_BYTES:
        raise ValueError(f"more than {MAX_CREDENTIAL_BYTES} bytes")
    return content.decode()


def hub_address(credentials: Mapping[str, str]) -> str:
    """Return the hub's address, without a slash at its end.

    Raises:
        InvalidSource: HF_ENDPOINT is not the address of a web server.
    """
    text = (credentials.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).strip().rstrip("/")
    try:
        url = urlsplit(text)
        host, _ = url.hostname, url.port  # the port is checked when it is read
    except ValueError as error:
        raise InvalidSource(f"HF_ENDPOINT is not a URL: {error}") from None
    if url.scheme not in ("https", "http") or not host or not text.isprintable():
        raise InvalidSource(f"HF_ENDPOINT must be a URL such as {DEFAULT_ENDPOINT}")
    if "@" in url.netloc or url.query or url.fragment:
        raise InvalidSource(
            f"HF_ENDPOINT must be the address of {host} alone, without credentials, query or fragment; "
            "credentials belong in HF_TOKEN"
        )
    return f"{url.scheme}://{url.netloc.lower()}{url.path}"


def hub_source_name(name: str, credentials: Mapping[str, str]) -> str:
    """Return the name of a repository's source. Repositories of one name on two hubs are two sources.

    Args:
        name: `SourceUri.name`.

    Raises:
        InvalidSource: as `hub_address`.
    """
    address = hub_address(credentials)
    return name + ("" if address == DEFAULT_ENDPOINT else f"?endpoint={address}")


def bucket_name(uri: SourceUri, credentials: Mapping[str, str]) -> str:
    """Return the canonical name of a folder of a bucket. Buckets of one name at two endpoints are two sources.

    Raises:
        InvalidSource: the endpoint is malformed.
    """
    endpoint = custom_endpoint(uri.scheme, credentials)
    return uri.name + (f"?endpoint={endpoint}" if endpoint else "")


def custom_endpoint(provider: str, credentials: Mapping[str, str]) -> str:
    """Return the base URL that replaces the provider's own, without a slash at its end; empty if none.

    Raises:
        InvalidSource: it is not a URL of a server, or has credentials in it.
    """
    if provider == "s3":
        names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    else:
        names = ("STORAGE_EMULATOR_HOST", "GOOGLE_BASE_URL")
    name = next((name for name in names if credentials.get(name)), "")
    if not name:
        return ""
    text = credentials[name].strip()
    if name == "STORAGE_EMULATOR_HOST" and "://" not in text:
        text = f"http://{text}"
    try:
        url = urlsplit(text)
        is_server = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        is_server = False
    if not is_server or not text.isprintable() or any(mark in text for mark in "@?#"):
        raise InvalidSource(f"{name} must be a URL such as https://HOST:PORT, without credentials and query")
    return url.geturl().rstrip("/")


@dataclass(frozen=True)
class ImageReference:
    """A repository of a registry, and a tag or a digest in it."""

    host: str
    """HOST[:PORT] in lower case; `docker.io` under each of its names."""
    repository: str
    tag: str = ""
    digest: str = ""
    """`sha256:` and 64 hex digits, or empty."""

    @property
    def name(self) -> str:
        """Canonical URI without tag and digest."""
        return f"oci://{self.host}/{self.repository}"

    @property
    def api_host(self) -> str:
        """HOST[:PORT] that answers requests."""
        return _DOCKER_HUB_API if self.host == _DOCKER_HUB else self.host

    @property
    def selector(self) -> str:
        """The tag or digest to ask for."""
        return self.digest or self.tag or DEFAULT_TAG

    @property
    def requested_revision(self) -> str:
        """The revision in the form of `Snapshot.revision`; empty if the reference has neither tag nor digest."""
        return revision_of(self.digest) if self.digest else self.tag

    def __str__(self) -> str:
        return f"{self.name}@{self.digest}" if self.digest else f"{self.name}:{self.tag or DEFAULT_TAG}"


def parse_reference(uri: SourceUri) -> ImageReference:
    """Return the reference that an `oci://` URI names.

    A revision of the form `sha256-HEX`, which is how a snapshot writes a digest, is that digest.

    Raises:
        InvalidSource: the first part is no host, or its port is out of range.
    """
    host, _, repository = uri.location.partition("/")
    host = canonical_host(host)
    hostname, port = _split_port(host)
    if not ("." in hostname or port or hostname == "localhost" or hostname.startswith("[")):
        raise InvalidSource(
            f"{uri}: {host!r} is no registry's host; write it out, such as oci://docker.io/{uri.location}"
        )
    if not repository or (port and not 0 < int(port) < 65536):
        raise InvalidSource(f"{uri}: must be oci://HOST[:PORT]/REPOSITORY[:TAG][@sha256:DIGEST]")
    if host == _DOCKER_HUB and "/" not in repository:
        repository = f"library/{repository}"
    digest = _DIGEST.fullmatch(uri.revision)
    if digest:
        return ImageReference(host, repository, digest=f"sha256:{digest[1]}")
    return ImageReference(host, repository, tag=uri.revision)


def revision_of(digest: str) -> str:
    """Return a digest in the form of `Snapshot.revision`, which has no colon."""
    return digest.replace(":", "-", 1)


def canonical_host(host: str) -> str:
    """Return HOST[:PORT] in lower case, and Docker Hub under one name."""
    host = host.lower()
    return _DOCKER_HUB if host in _DOCKER_HUB_ALIASES else host


def is_plain_http(host: str, values: Mapping[str, str]) -> bool:
    """Whether HOST[:PORT] is asked without TLS: loopback addresses, unless the port is 443, and hosts that
    `ARGOSY_OCI_PLAIN_HTTP` lists.
    """
    host = host.lower().removesuffix(":80")
    if host in (
        entry.strip().lower().removesuffix(":80") for entry in values.get(PLAIN_HTTP_ENV, "").split(",")
    ):
        return True
    hostname, port = _split_port(host)
    return port != "443" and is_loopback(hostname.strip("[]"))


def _split_port(host: str) -> tuple[str, str]:
    """Split HOST[:PORT], where HOST may be `[IPv6]`."""
    head, separator, port = host.rpartition(":")
    return (head, port) if separator and port.isdigit() else (host, "")
