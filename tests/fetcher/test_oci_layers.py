"""Layers: the files of a model in each packaging that is known."""

from __future__ import annotations

import pytest

from argosy_fetcher.errors import UnsupportedModel
from argosy_fetcher.source import Digest, RemoteFile
from argosy_fetcher.sources.oci import decode_manifest, files_of
from oci_artifacts import FILEPATH, OCI_LAYER, TITLE, Layer, files, manifest

SUBJECT = "oci://registry.example/model:v1"
MODELPACK = "application/vnd.cncf.model."
KIT = "application/vnd.kitops.modelkit."
DOCKER = "application/vnd.docker.ai."
ROOTFS = "application/vnd.docker.image.rootfs.diff.tar.gzip"


def read(*layers: Layer, **fields: object) -> tuple[RemoteFile, ...]:
    return files_of(decode_manifest(manifest(layers, **fields), "", SUBJECT), SUBJECT)


def layer(media_type: str, annotations: dict[str, str] | None = None, content: bytes = b"x") -> Layer:
    return Layer(content, media_type, annotations or {})


def paths(*layers: Layer, **fields: object) -> list[str]:
    return [file.path for file in read(*layers, **fields)]


def test_a_layer_with_a_title_is_a_file_with_the_layer_s_digest_and_size() -> None:
    one = Layer(b"hello", annotations={TITLE: "config.json"})
    expected = RemoteFile("config.json", 5, Digest("sha256", one.digest[7:]), version=one.digest)
    assert read(one) == (expected,)


def test_titles_keep_their_folders_and_their_order() -> None:
    contents = {"config.json": b"1", "sub/a.safetensors": b"2", "./tokenizer.json": b"3"}
    assert paths(*files(contents)) == ["config.json", "sub/a.safetensors", "tokenizer.json"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["m/config.json", "m/model.safetensors", "m/sub/x"], ["config.json", "model.safetensors", "sub/x"]),
        (["m/config.json", "README.md"], ["config.json"]),
        (["config.json", "m/config.json"], ["config.json", "m/config.json"]),
        (["a/config.json", "a/b/config.json"], ["config.json", "b/config.json"]),
        (["a/config.json", "b/config.json"], ["a/config.json", "b/config.json"]),
        (["a/adapter_config.json", "b"], ["a/adapter_config.json", "b"]),
    ],
)
def test_the_uppermost_folder_with_a_config_is_the_model_s(names: list[str], expected: list[str]) -> None:
    assert paths(*files({name: name.encode() for name in names})) == expected


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../x", "a/../../x", "a\\b", "a//b", "x\n", ".argosy-model.json", "a" * 600]
)
@pytest.mark.parametrize("media_type", [OCI_LAYER, MODELPACK + "weight.v1.raw", KIT + "model.v1.raw"])
def test_unsafe_names_are_refused(name: str, media_type: str) -> None:
    with pytest.raises(UnsupportedModel, match=SUBJECT):
        read(*files(), layer(media_type, {TITLE if media_type == OCI_LAYER else FILEPATH: name}))


def test_a_name_has_one_content() -> None:
    same = Layer(b"1", annotations={TITLE: "config.json"})
    assert paths(same, same) == ["config.json"]
    with pytest.raises(UnsupportedModel, match=r"'config\.json', with different content"):
        read(same, Layer(b"2", annotations={TITLE: "config.json"}))


@pytest.mark.parametrize(
    ("media_type", "annotations", "expected"),
    [
        (MODELPACK + "weight.v1.raw", {FILEPATH: "model.safetensors"}, "model.safetensors"),
        (MODELPACK + "weight.config.v1.raw", {FILEPATH: "config.json"}, "config.json"),
        (
            "application/vnd.cnai.model.weight.v1.raw",
            {"org.cnai.model.filepath": "model.safetensors"},
            "model.safetensors",
        ),
        (MODELPACK + "doc.v1.raw", {FILEPATH: "merges.txt"}, "merges.txt"),
        (MODELPACK + "weight.v1.raw", {FILEPATH: "sub/x.safetensors", TITLE: "x"}, "sub/x.safetensors"),
        (MODELPACK + "weight.v1.raw", {TITLE: "model.safetensors"}, "model.safetensors"),
        (KIT + "model.v1.raw", {FILEPATH: "model.safetensors"}, "model.safetensors"),
        (KIT + "modelpart.v1.raw", {FILEPATH: "tokenizer.json"}, "tokenizer.json"),
        (DOCKER + "safetensors", {FILEPATH: "part.safetensors"}, "part.safetensors"),
        (DOCKER + "model.file", {FILEPATH: "config.json"}, "config.json"),
        (DOCKER + "safetensors", {}, "model.safetensors"),
        (DOCKER + "chat.template.jinja", {}, "chat_template.jinja"),
        ("application/octet-stream", {FILEPATH: "config.json"}, "config.json"),
    ],
)
def test_files_of_models_packaged_by_other_tools(
    media_type: str, annotations: dict[str, str], expected: str
) -> None:
    (file,) = read(layer(media_type, annotations))
    assert (file.path, file.packing) == (expected, "none")


def test_shards_without_names_are_named_in_their_order() -> None:
    shards = [layer(DOCKER + "safetensors", content=bytes([number])) for number in range(3)]
    assert paths(shards[0], layer(DOCKER + "license"), *shards[1:]) == [
        f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)
    ]


def test_a_gguf_model_can_be_told_by_its_name() -> None:
    (path,) = paths(layer(DOCKER + "gguf.v3"))
    assert path.endswith(".gguf")


@pytest.mark.parametrize(
    ("media_type", "annotations", "packing", "folders"),
    [
        (OCI_LAYER, {}, "tar", ("models", "")),
        (OCI_LAYER + "+gzip", {}, "tar+gzip", ("models", "")),
        (OCI_LAYER + "+zstd", {}, "tar+zstd", ("models", "")),
        (ROOTFS, {}, "tar+gzip", ("models", "")),
        (OCI_LAYER + "+gzip", {TITLE: "qwen", "io.deis.oras.content.unpack": "true"}, "tar+gzip", ("qwen",)),
        (OCI_LAYER + "+gzip", {TITLE: ".", "io.deis.oras.content.unpack": "true"}, "tar+gzip", ()),
        ("application/x", {TITLE: "a/b/", "io.deis.oras.content.unpack": "true"}, "tar+gzip", ("a/b",)),
        (OCI_LAYER, {TITLE: "qwen.tar"}, "tar", ()),
        (OCI_LAYER, {TITLE: "qwen.tar.gz"}, "tar+gzip", ()),
        ("application/gzip", {TITLE: "qwen.tgz"}, "tar+gzip", ()),
        ("application/zstd", {TITLE: "qwen.tar.zst"}, "tar+zstd", ()),
        (MODELPACK + "weight.v1.tar", {FILEPATH: "model.safetensors"}, "tar", ()),
        (MODELPACK + "weight.config.v1.tar+zstd", {}, "tar+zstd", ()),
        ("application/vnd.cnai.model.weight.v1.tar+gzip", {}, "tar+gzip", ()),
        (KIT + "model.v1.tar", {}, "tar", ()),
        (KIT + "modelpart.v1.tar+gzip", {}, "tar+gzip", ()),
        (DOCKER + "vllm.config.tar", {}, "tar", ()),
        (DOCKER + "dir.tar", {}, "tar", ()),
    ],
)
def test_packed_layers_and_where_the_model_is_in_them(
    media_type: str, annotations: dict[str, str], packing: str, folders: tuple[str, ...]
) -> None:
    one = layer(media_type, annotations)
    (file,) = read(one)
    assert (file.packing, file.folders, file.version) == (packing, folders, one.digest)


def test_packed_layers_are_named_in_their_order() -> None:
    layers = [layer(OCI_LAYER, content=bytes([number])) for number in range(12)]
    found = paths(*layers)
    assert found == sorted(found)
    assert len(set(found)) == 12


def test_an_annotation_says_where_the_model_is_in_an_image() -> None:
    annotations = {"dev.argosy.model.path": "/opt/models/qwen/"}
    (file,) = read(layer(OCI_LAYER), annotations=annotations)
    assert file.folders == ("opt/models/qwen",)
    with pytest.raises(UnsupportedModel, match="unsafe name"):
        read(layer(OCI_LAYER), annotations={"dev.argosy.model.path": "/../etc"})


@pytest.mark.parametrize(
    "media_type",
    [
        MODELPACK + "doc.v1.tar",
        MODELPACK + "code.v1.tar+gzip",
        MODELPACK + "dataset.v1.tar+zstd",
        MODELPACK + "dataset.v1.raw",
        KIT + "code.v1.tar+gzip",
        KIT + "docs.v1.tar+lz4",
        DOCKER + "license",
        DOCKER + "mmproj",
        "application/vnd.oci.empty.v1+json",
        "application/vnd.in-toto+json",
        "",
    ],
)
def test_layers_that_no_model_needs_are_left_out(media_type: str) -> None:
    assert paths(*files(), layer(media_type)) == paths(*files())
    with pytest.raises(UnsupportedModel, match="no layer is a file or an archive"):
        read(layer(media_type))


@pytest.mark.parametrize(
    ("media_type", "said"),
    [
        (MODELPACK + "weight.v1.raw", "has no file name"),
        (KIT + "model.v1.raw", "has no file name"),
        (KIT + "model.v1.raw+gzip", "pack the model as `raw` or `tar`"),
        (MODELPACK + "weight.v1.tar+lz4", "pack the model as `raw` or `tar`"),
        (OCI_LAYER + "+lz4", "cannot be unpacked"),
    ],
)
def test_layers_that_cannot_be_read_are_refused_with_the_remedy(media_type: str, said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        read(*files(), layer(media_type))


def test_a_manifest_without_layers_has_no_model() -> None:
    with pytest.raises(UnsupportedModel, match="media types: none"):
        read()
