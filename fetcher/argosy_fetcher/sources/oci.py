"""Source `oci://`: models in container registries, as artifacts and as images.

Owns the way from a reference to files. Invariant: what is listed belongs to one manifest, whose digest was checked and
is the revision; an index leads to one of its manifests first. See `oci_layers` for the packagings that are known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from argosy_fetcher.errors import FetchError, HashMismatch, TransientError, UnsupportedModel
from argosy_fetcher.snapshot import RemoteFile, Snapshot
from argosy_fetcher.sources.oci_client import RegistryClient
from argosy_fetcher.sources.oci_layers import files_of
from argosy_fetcher.sources.oci_manifest import (
    MAX_INDEX_DEPTH,
    OciManifest,
    choose_entry,
    decode_manifest,
    machine_architecture,
)
from argosy_fetcher.sources.oci_reference import parse_reference, revision_of
from argosy_fetcher.sources.source import Chunk

if TYPE_CHECKING:
    from argosy_fetcher.source_uri import SourceUri


class OciSource:
    """A model in a repository of a container registry."""

    def __init__(
        self, uri: SourceUri, credentials: Mapping[str, str], *, architecture: str | None = None
    ) -> None:
        """
        Args:
            credentials: `OCI_REGISTRY`, `OCI_USERNAME` and `OCI_PASSWORD`, `DOCKER_AUTH_CONFIG`,
                `REGISTRY_AUTH_FILE`, `DOCKER_CONFIG` and `HOME` (see `oci_credentials`), `SSL_CERT_FILE`, and the
                setting `ARGOSY_OCI_PLAIN_HTTP`.
            architecture: which entry of an index is meant, such as amd64; this machine's if left out.

        Raises:
            InvalidSource: the URI names no registry.
        """
        self._reference = parse_reference(uri)
        self._architecture = architecture or machine_architecture()
        self._client = RegistryClient(self._reference, credentials)
        self._reads_ranges: bool | None = None
        """Whether the registry sends parts of blobs; None if it was not asked yet."""

    @property
    def name(self) -> str:
        return self._reference.name

    @property
    def requested_revision(self) -> str:
        """The tag, or a digest as `sha256-HEX`; empty if the reference has neither."""
        return self._reference.requested_revision

    def snapshot(self) -> Snapshot:
        manifest, digest = self._manifest()
        return Snapshot(self.name, revision_of(digest), files_of(manifest, str(self._reference)))

    def read(self, file: RemoteFile, start: int, stop: int) -> Iterator[Chunk]:
        yield from self._client.blob(file.version, file.size, start, stop)

    def can_read_ranges(self, file: RemoteFile) -> bool:
        """Whether content begins at the byte that is asked for. Asks once: one registry has all blobs.

        If it does not answer, that is left to reads to find out.
        """
        if self._reads_ranges is None:
            try:
                self._reads_ranges = self._client.can_read_ranges(file.version, file.size)
            except (FetchError, TransientError):
                self._reads_ranges = True
        return self._reads_ranges

    def close(self) -> None:
        self._client.close()

    def _manifest(self) -> tuple[OciManifest, str]:
        """Return the manifest that the reference leads to, and its digest."""
        subject = str(self._reference)
        selector = self._reference.selector
        size: int | None = None
        for _ in range(MAX_INDEX_DEPTH):
            document = self._client.manifest(selector)
            if size not in (None, len(document.content)):
                raise HashMismatch(f"{subject}: {selector} has not the {size} bytes that its index says")
            manifest = decode_manifest(document.content, document.media_type, subject)
            if manifest.manifests is None:
                return manifest, document.digest
            entry = choose_entry(manifest, self._architecture, subject)
            selector, size = entry.digest, entry.size
        raise UnsupportedModel(f"{subject}: more than {MAX_INDEX_DEPTH - 1} indexes stand before a manifest")
