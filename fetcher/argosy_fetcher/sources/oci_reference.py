"""References to images and artifacts in container registries.

Owns what a host, a repository, a tag and a digest mean to a registry, and which hosts are asked without TLS. Must not
know requests and credentials. The grammar of references is `source_uri`'s.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from argosy_fetcher.errors import InvalidSource

if TYPE_CHECKING:
    from argosy_fetcher.source_uri import SourceUri

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
    return port != "443" and _is_loopback(hostname.strip("[]"))


def _is_loopback(hostname: str) -> bool:
    if hostname == "localhost":
        return True
    try:
        return ipaddress.ip_address(hostname).is_loopback
    except ValueError:
        return False


def _split_port(host: str) -> tuple[str, str]:
    """Split HOST[:PORT], where HOST may be `[IPv6]`."""
    head, separator, port = host.rpartition(":")
    return (head, port) if separator and port.isdigit() else (host, "")
