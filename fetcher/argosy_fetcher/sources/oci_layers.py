"""Layers: which files of a model a manifest's layers are.

Owns the conventions by which models are packaged. Must not know requests. Invariant: every path that it returns is safe
and no two files have the same.

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

import re
from collections.abc import Iterator
from typing import Final

from msgspec.structs import replace

from argosy_fetcher.errors import UnsupportedModel
from argosy_fetcher.snapshot import Digest, Packing, RemoteFile, check_path
from argosy_fetcher.sources.oci_manifest import OciDescriptor, OciManifest

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
