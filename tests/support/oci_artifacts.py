"""Artifacts and images as tests push them to registries: layers, manifests, indexes."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_INDEX = "application/vnd.oci.image.index.v1+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_INDEX = "application/vnd.docker.distribution.manifest.list.v2+json"
OCI_LAYER = "application/vnd.oci.image.layer.v1.tar"
TITLE = "org.opencontainers.image.title"
FILEPATH = "org.cncf.model.filepath"

MODEL = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "tokenizer.json": b'{"version": "1.0"}',
    "model.safetensors": bytes(range(256)) * 400,
}
"""Name -> content. No loadable model: sources do not look into files."""


@dataclass(frozen=True)
class Layer:
    """A blob, and how a manifest describes it."""

    content: bytes
    media_type: str = OCI_LAYER
    annotations: Mapping[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        return digest_of(self.content)

    @property
    def descriptor(self) -> dict[str, Any]:
        found = {"mediaType": self.media_type, "digest": self.digest, "size": len(self.content)}
        return {**found, "annotations": dict(self.annotations)} if self.annotations else found


class Registry(Protocol):
    """Where blobs and manifests are pushed to."""

    def add_blob(self, repository: str, content: bytes) -> None: ...

    def add_manifest(self, repository: str, reference: str, media_type: str, content: bytes) -> None: ...


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def files(contents: Mapping[str, bytes] = MODEL) -> list[Layer]:
    """Layers as `oras push` makes them of files."""
    return [Layer(content, annotations={TITLE: name}) for name, content in contents.items()]


def archive(contents: Mapping[str, bytes], compressed: bool = False) -> bytes:
    """A tar archive, or one compressed with gzip."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return gzip.compress(out.getvalue(), mtime=0) if compressed else out.getvalue()


def manifest(layers: Sequence[Layer], media_type: str = OCI_MANIFEST, **fields: Any) -> bytes:
    """A manifest of layers, or of `raw_layers` as they are. Fields that are None are left out."""
    document = {
        "schemaVersion": 2,
        "mediaType": media_type,
        "config": Layer(b"{}", "application/vnd.oci.empty.v1+json").descriptor,
        "layers": [layer.descriptor for layer in layers],
        **{"layers" if key == "raw_layers" else key: value for key, value in fields.items()},
    }
    return json.dumps({key: value for key, value in document.items() if value is not None}).encode()


def entry(
    content: bytes, platform: str = "", media_type: str = OCI_MANIFEST, **fields: Any
) -> dict[str, Any]:
    """An index's entry for a manifest. A platform is written OS/ARCHITECTURE."""
    found = {"mediaType": media_type, "digest": digest_of(content), "size": len(content), **fields}
    os, _, architecture = platform.partition("/")
    return {**found, "platform": {"os": os, "architecture": architecture}} if platform else found


def index(entries: Sequence[Mapping[str, Any]], media_type: str = OCI_INDEX, **fields: Any) -> bytes:
    document = {"schemaVersion": 2, "mediaType": media_type, "manifests": list(entries), **fields}
    return json.dumps(document).encode()


def push(registry: Registry, repository: str, tag: str, layers: Sequence[Layer], **fields: Any) -> str:
    """Push layers and a manifest of them under a tag; return the manifest's digest."""
    content = manifest(layers, **fields)
    for layer in (Layer(b"{}"), *layers):
        registry.add_blob(repository, layer.content)
    registry.add_manifest(repository, tag, fields.get("media_type") or OCI_MANIFEST, content)
    return digest_of(content)
