"""Source `oci://`: models in container registries, as artifacts and as images.

Owns the way from a reference to files: requests to one repository, manifests, and the conventions by which models are
packaged in layers. Invariants: what is listed belongs to one manifest, whose digest was checked and is the revision; an
index leads to one of its manifests first. A decoded document is either a manifest or an index, never both
(GHSA-77vh-xpmg-72qh). Every path that is listed is safe, and no two files have the same.

Protocol: https://github.com/opencontainers/distribution-spec/blob/main/spec.md. Packagings:

- ORAS: a layer with the annotation `org.opencontainers.image.title` is a file of that name, whatever its media type,
  and an archive if the name ends so; with `io.deis.oras.content.unpack` it is a packed folder of that name.
- ModelPack (modctl, KitOps): `application/vnd.cncf.model.KIND.v1.FORMAT`, once `vnd.cnai`, with the path in
  `org.cncf.model.filepath`: https://github.com/modelpack/model-spec.
- KitOps: `application/vnd.kitops.modelkit.KIND.v1.FORMAT`, with the same annotation.
- Docker Model Runner: `application/vnd.docker.ai.*`: https://github.com/docker/model-spec.
- Images: packed layers whose files are below `/models`, as in KServe's modelcars, or in the image's top folder, or in
  the folder that the manifest's annotation `dev.argosy.model.path` names.

Packed documentation, code and data sets are left out. Unpacked ones are listed: whether a file is served is told by its
name, and some tools call `merges.txt` documentation.
"""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Final, Literal

import httpx
from msgspec import Meta, Struct
from msgspec.structs import replace

from argosy_fetcher.errors import HashMismatch, SourceChanged, UnsupportedModel
from argosy_fetcher.source import MAX_FILE_BYTES, Chunk, Digest, Packing, RemoteFile, Snapshot, check_path
from argosy_fetcher.sources.http import MalformedDocument, decode_document
from argosy_fetcher.sources.oci_http import DOCUMENT_S, RegistryClient
from argosy_fetcher.sources.registry import parse_reference, revision_of

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
                `REGISTRY_AUTH_FILE`, `DOCKER_CONFIG` and `HOME` (see `oci_http`), `SSL_CERT_FILE`, and the
                setting `ARGOSY_OCI_PLAIN_HTTP`.
            architecture: which entry of an index is meant, such as amd64; this machine's if left out.

        Raises:
            InvalidSource: the URI names no registry.
        """
        self._reference = parse_reference(uri)
        self._architecture = architecture or machine_architecture()
        self._subject = str(self._reference)
        self._client = RegistryClient(self._reference, credentials)

    @property
    def name(self) -> str:
        return self._reference.name

    @property
    def requested_revision(self) -> str:
        """The tag, or a digest as `sha256-HEX`; empty if the reference has neither."""
        return self._reference.requested_revision

    def snapshot(self) -> Snapshot:
        """Follow the reference to a manifest, and list the files of its layers."""
        selector = self._reference.selector
        size: int | None = None
        for _ in range(MAX_INDEX_DEPTH):
            content, media_type, digest = self._document(selector)
            if size not in (None, len(content)):
                raise HashMismatch(
                    f"{self._subject}: {selector} has not the {size} bytes that its index says"
                )
            manifest = decode_manifest(content, media_type, self._subject)
            if manifest.manifests is None:
                return Snapshot(self.name, revision_of(digest), files_of(manifest, self._subject))
            entry = choose_entry(manifest, self._architecture, self._subject)
            selector, size = entry.digest, entry.size
        raise UnsupportedModel(
            f"{self._subject}: more than {MAX_INDEX_DEPTH - 1} indexes stand before a manifest"
        )

    def read(self, file: RemoteFile, start: int, stop: int) -> Iterator[Chunk]:
        if start >= stop:
            return
        response = self._open(file, start, stop)
        if response.status_code in (200, 206):
            yield from self._client.part(response, file.size, start, stop, f"{self._subject}: {file.path}")
            return
        if response.status_code == 416:
            response.close()
            raise SourceChanged(
                f"{self._subject}: the layer {file.version} has not the {file.size} bytes of its manifest"
            )
        if response.status_code in (404, 410) and self._client.is_own(response.url):
            response.close()
            raise SourceChanged(
                f"{self._subject}: the registry has the layer {file.version} no longer; fetch it again"
            )
        raise self._client.refusal(response)

    def can_read_ranges(self, file: RemoteFile) -> bool:
        return self._client.sends_ranges(lambda: self._open(file, file.size - 1, file.size))

    def close(self) -> None:
        self._client.close()

    def _open(self, file: RemoteFile, start: int, stop: int) -> httpx.Response:
        return self._client.answer(f"blobs/{file.version}", {"Range": f"bytes={start}-{stop - 1}"})

    def _document(self, selector: str) -> tuple[bytes, str, str]:
        """Read a manifest or an index. Returns its content, media type and digest.

        Args:
            selector: a tag, or a digest, which the content is checked against. Under a tag it is checked against the
                digest that the registry announces.

        Raises:
            HashMismatch: the content has another digest, twice.
            UnsupportedModel: it is larger than MAX_MANIFEST_BYTES.
            ModelNotFound, AccessDenied, TransientError, FetchError: see `oci_http`.
        """
        for _ in range(MANIFEST_ATTEMPTS):
            response = self._client.answer(f"manifests/{selector}", {"Accept": ACCEPT})
            if response.status_code != 200:
                raise self._client.refusal(response)
            what = f"{self._subject}: the manifest"
            content = self._client.document(response, MAX_MANIFEST_BYTES, what, DOCUMENT_S)
            announced = response.headers.get("Docker-Content-Digest", "")
            digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
            expected = selector if _DIGEST.fullmatch(selector) else announced
            if digest == expected or not _DIGEST.fullmatch(expected):
                return content, response.headers.get("Content-Type", ""), digest
        raise HashMismatch(
            f"{self._subject}: the manifest {selector} has the digest {digest}, not {expected}; "
            "the registry or a cache before it is damaged"
        )


MANIFEST_ATTEMPTS: Final = 2
"""A manifest with a wrong digest is asked for once more: a cache on the way may have been cut off."""
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")

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


TITLE: Final = "org.opencontainers.image.title"
UNPACK: Final = "io.deis.oras.content.unpack"
FILEPATHS: Final = ("org.cncf.model.filepath", "org.cnai.model.filepath")
MODEL_PATH: Final = "dev.argosy.model.path"
IMAGE_FOLDERS: Final = ("models", "")

_MODEL_LAYER: Final = re.compile(
    r"application/vnd\.(?:cncf|cnai)\.model\.(?P<kind>weight|weight\.config|doc|code|dataset)\.v[0-9]+\.(?P<format>.+)"
)
_KIT_LAYER: Final = re.compile(
    r"application/vnd\.kitops\.modelkit\.(?P<kind>[a-z]+)\.v[0-9]+\.(?P<format>.+)"
)
_MODEL_KINDS: Final = ("weight", "weight.config", "model", "modelpart")
_PACKINGS: Final[dict[str, Packing]] = {
    "tar": "tar",
    "tar+gzip": "tar+gzip",
    "tar.gzip": "tar+gzip",
    "tar+zstd": "tar+zstd",
    "tar.zstd": "tar+zstd",
}
_IMAGE_LAYERS: Final = ("application/vnd.oci.image.layer.v1.", "application/vnd.docker.image.rootfs.diff.")
_DOCKER_AI: Final = "application/vnd.docker.ai."
_DOCKER_AI_PACKED: Final = ("vllm.config.tar", "dir.tar")
_DOCKER_AI_SHARD: Final = _DOCKER_AI + "safetensors"
_ARCHIVES: Final[dict[str, Packing]] = {
    ".tar": "tar",
    ".tar.gz": "tar+gzip",
    ".tgz": "tar+gzip",
    ".tar.zst": "tar+zstd",
}
"""Ends of names of archives."""
_EXTENSIONS: Final[dict[Packing, str]] = {"tar": "tar", "tar+gzip": "tar.gz", "tar+zstd": "tar.zst"}


def files_of(manifest: OciManifest, subject: str) -> tuple[RemoteFile, ...]:
    """Return the files of a model, in the order of their layers.

    If no `config.json` is in the top folder, and one uppermost folder has one, that folder is the model's.

    Args:
        subject: the reference, for messages.

    Raises:
        UnsupportedModel: a path is unsafe or has two contents, or no layer is a file or an archive.
    """
    files: dict[str, RemoteFile] = {}
    for file in _Reader(manifest, subject).files():
        known = files.setdefault(file.path, file)
        if known.digest != file.digest:
            raise UnsupportedModel(
                f"{subject}: two layers are the file {file.path!r}, with different content"
            )
    if not files:
        found = {repr(layer.media_type[:100]) for layer in manifest.layers or ()}
        raise UnsupportedModel(
            f"{subject}: no layer is a file or an archive of a model (media types: "
            f"{', '.join(sorted(found)[:5]) or 'none'}); push it with `oras push`, as a ModelPack, or as an image "
            "with the files in /models"
        )
    return _below_config(tuple(files.values()))


class _Reader:
    """Reads the layers of one manifest."""

    def __init__(self, manifest: OciManifest, subject: str) -> None:
        self._layers = manifest.layers or ()
        self._subject = subject
        path = manifest.annotation(MODEL_PATH).strip("/")
        self._image_folders = (self._safe(path),) if path else IMAGE_FOLDERS
        self._shards = [layer.digest for layer in self._layers if layer.media_type == _DOCKER_AI_SHARD]

    def files(self) -> Iterator[RemoteFile]:
        for number, layer in enumerate(self._layers):
            file = self._file(number, layer)
            if file is not None:
                yield file

    def _file(self, number: int, layer: OciDescriptor) -> RemoteFile | None:
        """Return the file that a layer is; None if it has nothing that a model needs."""
        media_type = layer.media_type
        if layer.annotation(UNPACK) == "true":
            folder = layer.annotation(TITLE).strip("/")
            folders = (self._safe(folder),) if folder not in ("", ".") else ()
            return _packed(number, layer, _packing(media_type) or "tar+gzip", folders)
        if parts := _MODEL_LAYER.fullmatch(media_type) or _KIT_LAYER.fullmatch(media_type):
            return self._model_layer(number, layer, parts["kind"], parts["format"])
        if media_type.startswith(_DOCKER_AI):
            return self._docker_model_layer(number, layer, media_type.removeprefix(_DOCKER_AI))
        if media_type.startswith(_IMAGE_LAYERS) and not layer.annotation(TITLE):
            packing = _packing(media_type)
            if packing is None:
                raise UnsupportedModel(f"{self._subject}: layers of type {media_type!r} cannot be unpacked")
            return _packed(number, layer, packing, self._image_folders)
        name = layer.annotation(TITLE, *FILEPATHS)
        for ending, packing in _ARCHIVES.items():
            if name.endswith(ending):
                return _packed(number, layer, packing, ())
        return self._plain(name, layer) if name else None

    def _model_layer(self, number: int, layer: OciDescriptor, kind: str, form: str) -> RemoteFile | None:
        """A layer of a ModelPack or a ModelKit."""
        name = layer.annotation(*FILEPATHS, TITLE)
        if form == "raw" and name:
            return self._plain(name, layer)
        if kind not in _MODEL_KINDS:
            return None
        if form == "raw":
            raise UnsupportedModel(
                f"{self._subject}: a layer of type {layer.media_type!r} has no file name; "
                f"it needs the annotation {FILEPATHS[0]}"
            )
        if form not in _PACKINGS:
            raise UnsupportedModel(
                f"{self._subject}: layers of type {layer.media_type!r} cannot be unpacked; "
                "pack the model as `raw` or `tar`"
            )
        return _packed(number, layer, _PACKINGS[form], ())

    def _docker_model_layer(self, number: int, layer: OciDescriptor, kind: str) -> RemoteFile | None:
        """A layer of a model of Docker Model Runner. Versions differ in whether layers have names."""
        name = layer.annotation(*FILEPATHS, TITLE)
        if kind in _DOCKER_AI_PACKED:
            return _packed(number, layer, "tar", ())
        if not name and layer.media_type == _DOCKER_AI_SHARD:
            name = self._shard_name(layer)
        elif not name and kind.startswith("gguf"):
            name = f"model-{number:05d}.gguf"  # not served, which its name tells
        elif not name and kind == "chat.template.jinja":
            name = "chat_template.jinja"
        return self._plain(name, layer) if name else None

    def _shard_name(self, layer: OciDescriptor) -> str:
        """Return the name of a safetensors layer without one: shards stand in the manifest in their order."""
        if len(self._shards) == 1:
            return "model.safetensors"
        return f"model-{self._shards.index(layer.digest) + 1:05d}-of-{len(self._shards):05d}.safetensors"

    def _plain(self, name: str, layer: OciDescriptor) -> RemoteFile:
        path = self._safe(name.removeprefix("./"))
        return RemoteFile(path, layer.size, Digest("sha256", layer.hex), layer.digest)

    def _safe(self, path: str) -> str:
        try:
            return check_path(path)
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{self._subject}: {error}") from None


def _packing(media_type: str) -> Packing | None:
    return next((packing for suffix, packing in _PACKINGS.items() if media_type.endswith(f".{suffix}")), None)


def _packed(number: int, layer: OciDescriptor, packing: Packing, folders: tuple[str, ...]) -> RemoteFile:
    path = f"oci-layers/{number:04d}-{layer.hex[:12]}.{_EXTENSIONS[packing]}"
    return RemoteFile(path, layer.size, Digest("sha256", layer.hex), layer.digest, packing, folders)


def _below_config(files: tuple[RemoteFile, ...]) -> tuple[RemoteFile, ...]:
    """Return the files below the uppermost folder with a config.json, with paths relative to it; packed ones stay."""
    folders = [
        file.path.removesuffix("config.json")
        for file in files
        if file.packing == "none" and file.path.rpartition("/")[2] == "config.json"
    ]
    uppermost = min((folder.count("/") for folder in folders), default=0)
    chosen = [folder for folder in folders if folder.count("/") == uppermost]
    if len(chosen) != 1 or chosen == [""]:
        return files
    return tuple(
        file if file.packing != "none" else replace(file, path=file.path.removeprefix(chosen[0]))
        for file in files
        if file.packing != "none" or file.path.startswith(chosen[0])
    )
