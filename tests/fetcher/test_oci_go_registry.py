"""Models in a registry that others wrote: go-containerregistry's, over its own HTTP interface."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from argosy_fetcher.errors import AccessDenied, ModelNotFound
from argosy_fetcher.source_uri import parse
from argosy_fetcher.sources.oci import OciSource
from go_programs import BUILD_TIMEOUT, find_go
from go_registry import GoRegistry, built_registry, running_go_registry
from oci_artifacts import (
    DOCKER_INDEX,
    DOCKER_MANIFEST,
    MODEL,
    OCI_INDEX,
    OCI_LAYER,
    OCI_MANIFEST,
    Layer,
    archive,
    entry,
    files,
    index,
    manifest,
    push,
)

pytestmark = [
    pytest.mark.skipif(find_go() is None, reason="builds a registry from its Go module: needs Go"),
    pytest.mark.timeout(BUILD_TIMEOUT + 60),
]

LOGIN = ("ada", "s3cret")


@pytest.fixture(scope="module")
def binary() -> Path:
    go = find_go()
    assert go is not None
    return built_registry(go)


@pytest.fixture(scope="module")
def registry(binary: Path) -> Iterator[GoRegistry]:
    with running_go_registry(binary) as running:
        yield running


def open_model(registry: GoRegistry, reference: str, **values: str) -> closing[OciSource]:
    uri = parse(f"oci://{registry.host}/{reference}")
    values = {"OCI_REGISTRY": registry.host, **values}
    return closing(OciSource(uri, values, architecture="amd64"))


def contents(source: OciSource) -> dict[str, bytes]:
    return {file.path: b"".join(source.read(file, 0, file.size)) for file in source.snapshot().files}


@pytest.mark.parametrize("media_type", [OCI_MANIFEST, DOCKER_MANIFEST])
def test_an_artifact_by_tag_and_by_digest(registry: GoRegistry, media_type: str) -> None:
    repository = f"team/{'oci' if media_type == OCI_MANIFEST else 'docker'}"
    digest = push(registry, repository, "v1", files(), media_type=media_type)
    with open_model(registry, f"{repository}:v1") as by_tag:
        assert contents(by_tag) == MODEL
        assert by_tag.snapshot().revision == digest.replace(":", "-")
    with open_model(registry, f"{repository}@{digest}") as by_digest:
        assert by_digest.snapshot().revision == by_digest.requested_revision == digest.replace(":", "-")


def test_ranges(registry: GoRegistry) -> None:
    push(registry, "team/ranges", "v1", files())
    weights = MODEL["model.safetensors"]
    with open_model(registry, "team/ranges:v1") as source:
        file = source.snapshot().file("model.safetensors")
        assert file is not None
        for start, stop in ((0, 1), (1000, 70_000), (len(weights) - 1, len(weights))):
            assert b"".join(source.read(file, start, stop)) == weights[start:stop]


@pytest.mark.parametrize(
    ("index_type", "manifest_type"), [(OCI_INDEX, OCI_MANIFEST), (DOCKER_INDEX, DOCKER_MANIFEST)]
)
def test_an_index(registry: GoRegistry, index_type: str, manifest_type: str) -> None:
    repository = f"team/index-{'oci' if index_type == OCI_INDEX else 'docker'}"
    entries = []
    for name in ("arm64", "amd64"):
        layers = files({"config.json": name.encode()})
        push(registry, repository, name, layers, media_type=manifest_type)
        entries.append(entry(manifest(layers, manifest_type), f"linux/{name}", manifest_type))
    registry.add_manifest(repository, "v1", index_type, index(entries, index_type))
    with open_model(registry, f"{repository}:v1") as source:
        assert contents(source) == {"config.json": b"amd64"}


def test_an_image(registry: GoRegistry) -> None:
    layer = Layer(archive({"models/config.json": b"{}"}, compressed=True), OCI_LAYER + "+gzip")
    push(registry, "team/image", "v1", [layer])
    with open_model(registry, "team/image:v1") as source:
        (file,) = source.snapshot().files
        assert (file.packing, file.folders) == ("tar+gzip", ("models", ""))
        assert list(contents(source).values()) == [layer.content]


def test_missing_repositories_and_tags(registry: GoRegistry) -> None:
    push(registry, "team/present", "v1", files())
    with open_model(registry, "team/absent:v1") as source, pytest.raises(ModelNotFound, match="repository"):
        source.snapshot()
    with (
        open_model(registry, "team/present:v2") as source,
        pytest.raises(ModelNotFound, match="tag or digest"),
    ):
        source.snapshot()


def test_a_registry_that_requires_a_login(binary: Path) -> None:
    with running_go_registry(binary, LOGIN) as registry:
        push(registry, "team/private", "v1", files())
        with open_model(registry, "team/private:v1", OCI_USERNAME="ada", OCI_PASSWORD="s3cret") as source:
            assert contents(source) == MODEL
        for values in ({}, {"OCI_USERNAME": "ada", "OCI_PASSWORD": "wr0ng"}):
            with open_model(registry, "team/private:v1", **values) as source:
                with pytest.raises(AccessDenied, match="OCI_USERNAME and OCI_PASSWORD") as caught:
                    source.snapshot()
                assert "wr0ng" not in str(caught.value)
