"""Manifests and indexes: what is accepted, its bounds, and which entry of an index is meant."""

from __future__ import annotations

import json
from typing import Any

import pytest

from argosy_fetcher.errors import UnsupportedModel
from argosy_fetcher.sources.oci import (
    MAX_INDEX_ENTRIES,
    MAX_LAYERS,
    OciManifest,
    choose_entry,
    decode_manifest,
)
from oci_artifacts import (
    DOCKER_INDEX,
    DOCKER_MANIFEST,
    OCI_INDEX,
    OCI_MANIFEST,
    Layer,
    digest_of,
    entry,
    files,
    index,
    manifest,
)

SUBJECT = "oci://registry.example/model:v1"
LAYER = Layer(b"x").descriptor


def decode(content: bytes, content_type: str = "") -> OciManifest:
    return decode_manifest(content, content_type, SUBJECT)


@pytest.mark.parametrize("media_type", [OCI_MANIFEST, DOCKER_MANIFEST])
@pytest.mark.parametrize("content_type", ["same", "", "application/json", "text/plain; charset=utf-8"])
def test_manifests_of_both_kinds(media_type: str, content_type: str) -> None:
    content = manifest(files(), media_type)
    found = decode(content, f"{media_type}; charset=utf-8" if content_type == "same" else content_type)
    assert [layer.digest for layer in found.layers or ()] == [layer.digest for layer in files()]
    assert found.manifests is None


def test_a_manifest_without_a_media_type_has_that_of_the_response() -> None:
    assert decode(manifest(files(), mediaType=None), OCI_MANIFEST).layers
    assert decode(manifest(files(), mediaType=None)).layers
    with pytest.raises(UnsupportedModel, match="not clearly"):
        decode(manifest(files(), mediaType=None), OCI_INDEX)


@pytest.mark.parametrize(
    ("content", "content_type"),
    [
        (manifest(files(), manifests=[]), ""),
        (manifest(files(), raw_layers=None), ""),
        (manifest(files()), OCI_INDEX),
        (manifest(files()), DOCKER_MANIFEST),
        (manifest(files(), OCI_INDEX), ""),
        (index([], OCI_MANIFEST), ""),
        (index([], layers=[]), OCI_INDEX),
    ],
)
def test_a_document_that_may_be_both_is_refused(content: bytes, content_type: str) -> None:
    with pytest.raises(UnsupportedModel, match="not clearly a manifest or an index"):
        decode(content, content_type)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"<html>",
        b"[]",
        b"[" * 1_000_000,
        b'{"schemaVersion": 2, "layers": [], "x": ' + b"[" * 1_000_000,
        b'{"schemaVersion": 1, "fsLayers": []}',
        manifest([], raw_layers=[{**LAYER, "digest": "sha512:" + "0" * 128}]),
        manifest([], raw_layers=[{**LAYER, "digest": "sha256:" + "0" * 63}]),
        manifest([], raw_layers=[{**LAYER, "digest": "sha256:" + "0" * 64 + "\n"}]),
        manifest([], raw_layers=[{**LAYER, "size": -1}]),
        manifest([], raw_layers=[{**LAYER, "size": 1 << 45}]),
        manifest([], raw_layers=[{**LAYER, "size": 1.5}]),
        manifest([], raw_layers=[{**LAYER, "mediaType": "x" * 1000}]),
        manifest([], raw_layers=[{**LAYER, "annotations": {"a": 1}}]),
        manifest([], raw_layers=[LAYER] * (MAX_LAYERS + 1)),
        index([entry(b"x")] * (MAX_INDEX_ENTRIES + 1)),
        index([{**entry(b"x"), "platform": {"os": "linux\n"}}]),
    ],
    ids=lambda content: f"{len(content)}-bytes",
)
def test_malformed_documents_and_those_over_a_bound_are_refused(content: bytes) -> None:
    with pytest.raises(UnsupportedModel, match=SUBJECT):
        decode(content)


def test_other_media_types_are_named() -> None:
    with pytest.raises(UnsupportedModel, match=r"application/vnd\.example\+json"):
        decode(manifest(files(), "application/vnd.example+json"))


AMD64, ARM64, GENERAL = b"amd64", b"arm64", b"general"
ATTESTATION = entry(
    b"a", "unknown/unknown", annotations={"vnd.docker.reference.type": "attestation-manifest"}
)


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([entry(ARM64, "linux/arm64"), entry(AMD64, "linux/amd64")], AMD64),
        ([entry(b"w", "windows/amd64"), entry(AMD64, "linux/amd64")], AMD64),
        ([entry(GENERAL), entry(AMD64, "linux/amd64")], AMD64),
        ([entry(GENERAL), entry(ARM64, "linux/arm64")], GENERAL),
        ([entry(AMD64, "linux/amd64"), entry(b"second", "linux/amd64")], AMD64),
        ([entry(ARM64, "linux/arm64")], ARM64),
        ([entry(ARM64, "linux/arm64"), ATTESTATION], ARM64),
        ([entry(ARM64, "linux/arm64"), entry(b"a", "unknown/unknown")], ARM64),
        ([entry(b"blob", media_type="application/json"), entry(GENERAL)], GENERAL),
        ([entry(b"index", "linux/amd64", DOCKER_INDEX)], b"index"),
    ],
)
def test_the_entry_for_linux_and_the_machine_is_chosen_or_the_only_one(
    entries: list[dict[str, Any]], expected: bytes
) -> None:
    chosen = choose_entry(decode(index(entries)), "amd64", SUBJECT)
    assert chosen.digest == digest_of(expected)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([], "nothing that can be fetched"),
        ([ATTESTATION], "nothing that can be fetched"),
        ([entry(ARM64, "linux/arm64"), entry(b"s", "linux/s390x")], "linux/arm64, linux/s390x"),
        ([entry(b"1"), entry(b"2")], "an entry without a platform"),
    ],
)
def test_an_index_without_a_fitting_entry_says_what_it_has(entries: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(UnsupportedModel, match="name one by its digest") as caught:
        choose_entry(decode(index(entries)), "amd64", SUBJECT)
    assert said in str(caught.value)


def test_unknown_fields_and_nulls_of_optional_ones_are_accepted() -> None:
    document = json.loads(manifest(files()))
    document |= {"annotations": None, "subject": None, "x": [1, {"y": None}]}
    document["layers"][0] |= {"annotations": None, "platform": None, "urls": []}
    assert decode(json.dumps(document).encode()).layers
