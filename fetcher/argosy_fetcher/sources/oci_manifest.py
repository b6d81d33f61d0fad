"""Manifests and indexes of the OCI image specification and of Docker's schema 2.

Owns their types, their bounds and the choice of an index's entry. Must not know requests and what layers mean.
Invariant: a decoded document is either a manifest or an index, never both (GHSA-77vh-xpmg-72qh).
"""

from __future__ import annotations

import platform
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from argosy_fetcher.errors import UnsupportedModel
from argosy_fetcher.snapshot import MAX_FILE_BYTES
from argosy_fetcher.sources.documents import MalformedDocument, decode_document

MAX_MANIFEST_BYTES: Final = 4 << 20
"""What registries must accept at least, and the bound that most set (OCI distribution specification)."""
MAX_LAYERS: Final = 2_000
"""Several times the shards of the largest models. Images have at most 127."""
MAX_INDEX_ENTRIES: Final = 1_000
MAX_INDEX_DEPTH: Final = 3
"""Documents from a tag to a manifest; an index in an index is allowed, and rare."""

MANIFEST_TYPES: Final = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
INDEX_TYPES: Final = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_KNOWN_TYPES: Final = (*MANIFEST_TYPES, *INDEX_TYPES)
ACCEPT: Final = ", ".join(_KNOWN_TYPES)

_REFERENCE_TYPE: Final = "vnd.docker.reference.type"
"""Annotation of BuildKit's attestations, which stand beside images in an index."""
_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64", "i686": "386", "armv7l": "arm"}
"""Kernel's name of a machine -> Go's, which platforms are named by, where they differ."""

MediaType = Annotated[str, Meta(max_length=256)]
PlatformName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{0,64}\Z")]


class OciPlatform(Struct, frozen=True):
    """What an image of an index runs on."""

    os: PlatformName = ""
    architecture: PlatformName = ""


_UNKNOWN_PLATFORM: Final = OciPlatform("unknown", "unknown")
"""What attestations are said to run on."""


class OciDescriptor(Struct, frozen=True, rename="camel"):
    """A reference to content by its digest."""

    digest: Annotated[str, Meta(pattern=r"^sha256:[0-9a-f]{64}\Z")]
    size: Annotated[int, Meta(ge=0, le=MAX_FILE_BYTES)]
    media_type: MediaType = ""
    annotations: dict[str, str] | None = None
    platform: OciPlatform | None = None

    @property
    def hex(self) -> str:
        """The digest without its algorithm."""
        return self.digest.partition(":")[2]

    def annotation(self, *keys: str) -> str:
        """Return the value of the first of these annotations that is set; empty if none is."""
        found = self.annotations or {}
        return next((found[key] for key in keys if found.get(key)), "")


class OciManifest(Struct, frozen=True, rename="camel"):
    """A manifest with `layers`, or an index with `manifests`."""

    schema_version: Literal[2]
    media_type: MediaType = ""
    layers: Annotated[tuple[OciDescriptor, ...], Meta(max_length=MAX_LAYERS)] | None = None
    manifests: Annotated[tuple[OciDescriptor, ...], Meta(max_length=MAX_INDEX_ENTRIES)] | None = None
    annotations: dict[str, str] | None = None

    def annotation(self, key: str) -> str:
        """Return the value of an annotation; empty if it is not set."""
        return (self.annotations or {}).get(key, "")


def decode_manifest(content: bytes, content_type: str, subject: str) -> OciManifest:
    """Decode a manifest or an index.

    Args:
        content_type: the response's media type; may be empty or a general one.
        subject: the reference, for messages.

    Raises:
        UnsupportedModel: it is malformed, of another type, or says to be both.
    """
    try:
        manifest = decode_document(content, OciManifest)
    except MalformedDocument as error:
        raise UnsupportedModel(f"{subject}: unsupported or malformed manifest: {error}") from None
    declared = content_type.partition(";")[0].strip().lower()
    media_type = manifest.media_type or (declared if declared in _KNOWN_TYPES else "")
    if media_type not in (*_KNOWN_TYPES, ""):
        raise UnsupportedModel(
            f"{subject}: the media type {media_type[:100]!r} is not supported; supported are image manifests and "
            "indexes of OCI and of Docker's schema 2"
        )
    is_index = manifest.manifests is not None
    is_unclear = (
        is_index == (manifest.layers is not None)
        or (media_type != "" and is_index != (media_type in INDEX_TYPES))
        or (declared in _KNOWN_TYPES and declared != media_type)
    )
    if is_unclear:
        raise UnsupportedModel(
            f"{subject}: the document is not clearly a manifest or an index; push the model again"
        )
    return manifest


def machine_architecture() -> str:
    """Return this machine's architecture in the names that platforms have, such as amd64."""
    machine = platform.machine().lower()
    return _ARCHITECTURES.get(machine, machine)


def choose_entry(index: OciManifest, architecture: str, subject: str) -> OciDescriptor:
    """Return the entry of an index for Linux and an architecture, or the only one.

    Attestations are no entries. If several fit, the first is meant, as for container runtimes.

    Raises:
        UnsupportedModel: there is none.
    """
    entries = [
        entry
        for entry in index.manifests or ()
        if entry.media_type in (*_KNOWN_TYPES, "")
        and entry.platform != _UNKNOWN_PLATFORM
        and not entry.annotation(_REFERENCE_TYPE)
    ]
    for entry in entries:
        if entry.platform is not None and entry.platform == OciPlatform("linux", architecture):
            return entry
    if len(entries) == 1:
        return entries[0]
    general = [entry for entry in entries if entry.platform is None]
    if len(general) == 1:
        return general[0]
    present = ", ".join(sorted({_platform_text(entry) for entry in entries})) or "nothing that can be fetched"
    raise UnsupportedModel(
        f"{subject}: the index has {present[:200]}, and no one entry for linux/{architecture}; "
        "name one by its digest"
    )


def _platform_text(entry: OciDescriptor) -> str:
    if entry.platform is None:
        return "an entry without a platform"
    return f"{entry.platform.os}/{entry.platform.architecture}"
