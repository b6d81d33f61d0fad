"""Models in container registries: snapshots, ranges of layers, redirects, and what a damaged registry leads to."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

import pytest

from argosy_fetcher.errors import (
    FetchError,
    HashMismatch,
    InvalidSource,
    ModelNotFound,
    SourceChanged,
    TransientError,
    UnsupportedModel,
)
from argosy_fetcher.progress import Progress
from argosy_fetcher.source import RemoteFile
from argosy_fetcher.source_uri import parse
from argosy_fetcher.sources.oci import MAX_MANIFEST_BYTES, OciSource
from argosy_fetcher.transfer import Transfer, TransferSettings
from container_registry import ContainerRegistry, RegistryReply, error_reply, running_registry
from oci_artifacts import (
    DOCKER_INDEX,
    DOCKER_MANIFEST,
    MODEL,
    OCI_INDEX,
    OCI_LAYER,
    OCI_MANIFEST,
    Layer,
    archive,
    digest_of,
    entry,
    files,
    index,
    manifest,
    push,
)

OpenModel: TypeAlias = Callable[..., OciSource]

REPOSITORY = "team/qwen"
WEIGHTS = MODEL["model.safetensors"]


@pytest.fixture
def registry() -> Iterator[ContainerRegistry]:
    with running_registry() as running:
        yield running


@pytest.fixture
def storage() -> Iterator[ContainerRegistry]:
    """Where a registry redirects requests for blobs to."""
    with running_registry() as running:
        yield running


@pytest.fixture
def sources() -> Iterator[list[OciSource]]:
    """Sources that are closed after the test."""
    opened: list[OciSource] = []
    yield opened
    for source in opened:
        source.close()


@pytest.fixture
def open_model(registry: ContainerRegistry, sources: list[OciSource]):
    def open_at(revision: str = ":v1", architecture: str = "amd64", **values: str) -> OciSource:
        uri = parse(f"oci://{registry.host}/{REPOSITORY}{revision}")
        values = {"OCI_REGISTRY": registry.host, **values}
        sources.append(OciSource(uri, values, architecture=architecture))
        return sources[-1]

    return open_at


def content_of(source: OciSource, file: RemoteFile, start: int = 0, stop: int | None = None) -> bytes:
    return b"".join(source.read(file, start, file.size if stop is None else stop))


def weights_of(source: OciSource) -> RemoteFile:
    file = source.snapshot().file("model.safetensors")
    assert file is not None
    return file


def test_an_artifact_is_listed_and_read(registry: ContainerRegistry, open_model: OpenModel) -> None:
    digest = push(registry, REPOSITORY, "v1", files())
    source = open_model()
    snapshot = source.snapshot()
    assert snapshot.source == source.name == f"oci://{registry.host}/{REPOSITORY}"
    assert snapshot.revision == digest.replace(":", "-")
    assert {file.path: content_of(source, file) for file in snapshot.files} == MODEL
    for file in snapshot.files:
        assert file.digest is not None
        assert (file.digest.algorithm, file.digest.hex) == (
            "sha256",
            hashlib.sha256(MODEL[file.path]).hexdigest(),
        )


def test_an_image_is_listed_as_packed_files(registry: ContainerRegistry, open_model: OpenModel) -> None:
    layer = Layer(
        archive({f"models/{name}": content for name, content in MODEL.items()}, True), OCI_LAYER + "+gzip"
    )
    push(registry, REPOSITORY, "v1", [layer], media_type=OCI_MANIFEST)
    source = open_model()
    (file,) = source.snapshot().files
    assert (file.packing, file.folders) == ("tar+gzip", ("models", ""))
    assert content_of(source, file) == layer.content


def test_the_tag_is_latest_if_none_is_given(registry: ContainerRegistry, open_model: OpenModel) -> None:
    push(registry, REPOSITORY, "latest", files())
    source = open_model("")
    assert source.requested_revision == ""
    assert source.snapshot().files


def test_a_digest_is_asked_for_and_is_the_revision(
    registry: ContainerRegistry, open_model: OpenModel
) -> None:
    digest = push(registry, REPOSITORY, "v1", files())
    push(registry, REPOSITORY, "v1", files({"config.json": b"newer"}))
    source = open_model(f":v1@{digest}")
    assert source.requested_revision == source.snapshot().revision == digest.replace(":", "-")
    assert {file.path for file in source.snapshot().files} == set(MODEL)


def test_no_request_is_made_before_the_snapshot(registry: ContainerRegistry, open_model: OpenModel) -> None:
    assert open_model().name
    assert registry.requests == []


@pytest.mark.parametrize(
    ("index_type", "manifest_type"), [(OCI_INDEX, OCI_MANIFEST), (DOCKER_INDEX, DOCKER_MANIFEST)]
)
@pytest.mark.parametrize("architecture", ["amd64", "arm64"])
def test_an_index_leads_to_the_manifest_of_the_architecture(
    registry: ContainerRegistry, open_model: OpenModel, index_type: str, manifest_type: str, architecture: str
) -> None:
    entries = []
    for name in ("arm64", "amd64"):
        layers = files({"config.json": name.encode()})
        push(registry, REPOSITORY, name, layers, media_type=manifest_type)
        entries.append(entry(manifest(layers, manifest_type), f"linux/{name}", manifest_type))
    registry.add_manifest(REPOSITORY, "v1", index_type, index(entries, index_type))
    source = open_model(architecture=architecture)
    (file,) = source.snapshot().files
    assert content_of(source, file) == architecture.encode()
    assert source.snapshot().revision == next(
        found["digest"] for found in entries if found["platform"]["architecture"] == architecture
    ).replace(":", "-")


def nested(registry: ContainerRegistry, depth: int) -> None:
    """Push a model below `depth` indexes."""
    content, media_type = manifest(files()), OCI_MANIFEST
    push(registry, REPOSITORY, "inner", files())
    for _ in range(depth):
        content, media_type = index([entry(content, media_type=media_type)]), OCI_INDEX
        registry.add_manifest(REPOSITORY, "v1", media_type, content)


def test_an_index_may_lead_to_an_index_but_not_without_end(
    registry: ContainerRegistry, open_model: OpenModel
) -> None:
    nested(registry, 2)
    assert open_model().snapshot().files
    nested(registry, 3)
    with pytest.raises(UnsupportedModel, match="indexes stand before a manifest"):
        open_model().snapshot()


def test_an_entry_with_another_size_than_its_manifest_is_refused(
    registry: ContainerRegistry, open_model: OpenModel
) -> None:
    push(registry, REPOSITORY, "inner", files())
    wrong = {**entry(manifest(files())), "size": 17}
    registry.add_manifest(REPOSITORY, "v1", OCI_INDEX, index([wrong]))
    with pytest.raises(HashMismatch, match="17 bytes"):
        open_model().snapshot()


def damaged(digest: str) -> RegistryReply:
    headers = {"Content-Type": OCI_MANIFEST, "Docker-Content-Digest": digest}
    return RegistryReply(200, manifest(files({"config.json": b"x"})), headers)


@pytest.mark.parametrize("by_digest", [True, False])
def test_a_manifest_with_a_wrong_digest_is_asked_for_once_more(
    registry: ContainerRegistry, open_model: OpenModel, by_digest: bool
) -> None:
    digest = push(registry, REPOSITORY, "v1", files())
    source = open_model(f"@{digest}" if by_digest else ":v1")
    registry.script("/manifests/", damaged(digest))
    assert {file.path for file in source.snapshot().files} == set(MODEL)
    registry.script("/manifests/", damaged(digest), damaged(digest))
    with pytest.raises(HashMismatch, match=digest):
        source.snapshot()


def test_a_registry_need_not_announce_digests(registry: ContainerRegistry, open_model: OpenModel) -> None:
    content = manifest(files())
    registry.script("/manifests/", RegistryReply(200, content, {"Content-Type": OCI_MANIFEST}))
    assert open_model().snapshot().revision == digest_of(content).replace(":", "-")


@pytest.mark.parametrize("has_length", [True, False])
def test_manifests_are_bounded(registry: ContainerRegistry, open_model: OpenModel, has_length: bool) -> None:
    reply = RegistryReply(200, b" " * (MAX_MANIFEST_BYTES + 1), has_length=has_length)
    registry.script("/manifests/", reply)
    with pytest.raises(UnsupportedModel, match=f"more than {MAX_MANIFEST_BYTES} bytes"):
        open_model().snapshot()


def test_missing_repositories_and_tags_are_told_apart(
    registry: ContainerRegistry, open_model: OpenModel
) -> None:
    with pytest.raises(ModelNotFound, match="no such repository"):
        open_model().snapshot()
    push(registry, REPOSITORY, "v1", files())
    with pytest.raises(ModelNotFound, match="no such tag or digest"):
        open_model(":v2").snapshot()
    with pytest.raises(ModelNotFound, match="no such tag or digest"):
        open_model(f"@sha256:{'0' * 64}").snapshot()


def test_a_source_without_a_registry_is_refused() -> None:
    with pytest.raises(InvalidSource, match=r"oci://docker\.io/ai/qwen"):
        OciSource(parse("oci://ai/qwen"), {})


@pytest.mark.parametrize("has_ranges", [True, False])
@pytest.mark.parametrize(
    ("start", "stop"), [(0, 1), (0, len(WEIGHTS)), (1000, 70_000), (len(WEIGHTS) - 1, len(WEIGHTS)), (5, 5)]
)
def test_ranges_are_read_with_and_without_the_registry_s_help(
    registry: ContainerRegistry, open_model: OpenModel, has_ranges: bool, start: int, stop: int
) -> None:
    push(registry, REPOSITORY, "v1", files())
    registry.has_ranges = has_ranges
    source = open_model()
    assert content_of(source, weights_of(source), start, stop) == WEIGHTS[start:stop]


def test_an_empty_file_needs_no_request(registry: ContainerRegistry, open_model: OpenModel) -> None:
    push(registry, REPOSITORY, "v1", files({"config.json": b""}))
    source = open_model()
    (file,) = source.snapshot().files
    assert content_of(source, file) == b""
    assert registry.requests_for("/blobs/") == []


def test_ranges_are_read_by_several_threads(registry: ContainerRegistry, open_model: OpenModel) -> None:
    push(registry, REPOSITORY, "v1", files())
    source = open_model()
    file = weights_of(source)
    starts = range(0, len(WEIGHTS), 5000)
    with ThreadPoolExecutor(8) as pool:
        parts = pool.map(lambda start: content_of(source, file, start, min(start + 5000, file.size)), starts)
        assert b"".join(parts) == WEIGHTS


def test_parts_that_follow_each_other_use_one_connection(
    registry: ContainerRegistry, storage: ContainerRegistry, open_model: OpenModel
) -> None:
    push(registry, REPOSITORY, "v1", files())
    storage.add_blob(REPOSITORY, WEIGHTS)
    registry.redirect_blobs = storage.url
    registry.require_tokens()
    source = open_model()
    file = weights_of(source)
    for start in range(0, 50_000, 10_000):
        assert content_of(source, file, start, start + 10_000) == WEIGHTS[start : start + 10_000]
    for server in (registry, storage):
        assert len({request.client_port for request in server.requests}) == 1


def test_a_cut_connection_loses_nothing_that_arrived(
    registry: ContainerRegistry, open_model: OpenModel
) -> None:
    push(registry, REPOSITORY, "v1", files())
    source = open_model()
    file = weights_of(source)
    cut = RegistryReply(
        206, WEIGHTS, {"Content-Range": f"bytes 0-{len(WEIGHTS) - 1}/{len(WEIGHTS)}"}, cut_after=40_000
    )
    registry.script("/blobs/", cut)
    received: list[bytes] = []
    with pytest.raises(TransientError, match=registry.host):
        received.extend(map(bytes, source.read(file, 0, file.size)))
    assert b"".join(received) == WEIGHTS[:40_000]
    assert b"".join(received) + content_of(source, file, 40_000) == WEIGHTS


def test_a_reader_may_stop_early(registry: ContainerRegistry, open_model: OpenModel) -> None:
    push(registry, REPOSITORY, "v1", files())
    source = open_model()
    file = weights_of(source)
    for _ in range(40):  # more than there may be connections at once
        reader = source.read(file, 0, file.size)
        assert next(reader)
        reader.close()
    assert content_of(source, file) == WEIGHTS


def test_a_layer_that_is_gone_or_has_another_size_is_a_change(
    registry: ContainerRegistry, open_model: OpenModel
) -> None:
    push(registry, REPOSITORY, "v1", files())
    source = open_model()
    file = weights_of(source)
    registry.replace_blob(file.version, WEIGHTS + b"more")
    for has_ranges in (True, False):
        registry.has_ranges = has_ranges
        with pytest.raises(SourceChanged, match=r"has not the|bytes instead of"):
            content_of(source, file)
    registry.has_ranges = True
    registry.replace_blob(file.version, WEIGHTS[:10])
    with pytest.raises(SourceChanged, match=r"has not the|bytes instead of"):
        content_of(source, file, 100)  # 416
    registry.remove_blob(file.version)
    with pytest.raises(SourceChanged, match="no longer"):
        content_of(source, file)


@pytest.mark.parametrize("content_range", ["", "bytes 1-5/102400", "bytes */102400", "items 0-5/102400"])
def test_another_range_than_the_one_asked_for_is_refused(
    registry: ContainerRegistry, open_model: OpenModel, content_range: str
) -> None:
    push(registry, REPOSITORY, "v1", files())
    source = open_model()
    file = weights_of(source)
    headers = {"Content-Range": content_range} if content_range else {}
    registry.script("/blobs/", RegistryReply(206, WEIGHTS, headers))
    with pytest.raises(FetchError, match="another range"):
        content_of(source, file)


@pytest.mark.parametrize("has_ranges", [True, False])
def test_a_registry_without_ranges_is_noticed_once_and_sends_a_layer_once(
    registry: ContainerRegistry, open_model: OpenModel, tmp_path: Path, has_ranges: bool
) -> None:
    push(registry, REPOSITORY, "v1", files())
    registry.has_ranges = has_ranges
    source = open_model()
    targets = {tmp_path / name: weights_of(source) for name in ("a", "b")}
    settings = TransferSettings(part_bytes=-(-len(WEIGHTS) // 4))
    Transfer(source, targets, tmp_path, progress=Progress(), settings=settings, known={}).run()
    assert [path.read_bytes() for path in targets] == [WEIGHTS, WEIGHTS]
    probe, *parts = registry.requests_for("/blobs/")
    assert probe.headers["range"] == f"bytes={len(WEIGHTS) - 1}-{len(WEIGHTS) - 1}"
    assert len(parts) == (8 if has_ranges else 2)


def test_no_more_than_the_range_is_yielded(registry: ContainerRegistry, open_model: OpenModel) -> None:
    push(registry, REPOSITORY, "v1", files())
    source = open_model()
    file = weights_of(source)
    headers = {"Content-Range": f"bytes 10-{len(WEIGHTS) - 1}/{len(WEIGHTS)}"}
    registry.script("/blobs/", RegistryReply(206, WEIGHTS[10:], headers))
    assert content_of(source, file, 10, 20) == WEIGHTS[10:20]


def test_blobs_may_be_elsewhere_and_no_credentials_go_there(
    registry: ContainerRegistry, storage: ContainerRegistry, open_model: OpenModel
) -> None:
    push(registry, REPOSITORY, "v1", files())
    for content in MODEL.values():
        storage.add_blob(REPOSITORY, content)
    registry.redirect_blobs = storage.url
    registry.require_tokens()
    source = open_model(OCI_USERNAME="ada", OCI_PASSWORD="s3cret")
    file = weights_of(source)
    assert content_of(source, file, 1000, 2000) == WEIGHTS[1000:2000]
    (request,) = storage.requests
    assert request.authorization == ""
    assert request.headers["range"] == "bytes=1000-1999"
    assert all(request.authorization for request in registry.requests_for("/blobs/"))


def test_a_redirect_within_the_registry_keeps_the_authorization(
    registry: ContainerRegistry, open_model: OpenModel
) -> None:
    digest = push(registry, REPOSITORY, "v1", files())
    registry.require_tokens()
    source = open_model()
    assert source.snapshot().files
    moved = RegistryReply(301, headers={"Location": f"/v2/{REPOSITORY}/manifests/{digest}"})
    registry.script("/manifests/v1", moved)
    assert source.snapshot().revision == digest.replace(":", "-")
    assert registry.requests[-1].authorization.startswith("Bearer ")


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_link_that_storage_refuses_may_be_asked_for_again(
    registry: ContainerRegistry, storage: ContainerRegistry, open_model: OpenModel, status: int
) -> None:
    push(registry, REPOSITORY, "v1", files())
    storage.add_blob(REPOSITORY, WEIGHTS)
    registry.redirect_blobs = f"{storage.url}/signed"
    source = open_model()
    file = weights_of(source)
    storage.script("/blobs/", error_reply(status, "EXPIRED"))
    with pytest.raises(TransientError, match=f"{storage.host.partition(':')[0]}.* answered {status}"):
        content_of(source, file)


@pytest.mark.parametrize(
    "location",
    [
        "http://storage.example/x",
        "ftp://127.0.0.1/x",
        "http://ada:s3cret@127.0.0.1/x",
        "file:///etc/passwd",
        "https:///x",
        "https://storage.example/" + "x" * 9000,
        "https://[::1/x",
    ],
)
def test_redirects_to_unsafe_places_are_not_followed(
    registry: ContainerRegistry, open_model: OpenModel, location: str
) -> None:
    push(registry, REPOSITORY, "v1", files())
    registry.script("/manifests/", RegistryReply(302, headers={"Location": location}))
    with pytest.raises(FetchError, match=r"redirects to|malformed URL") as caught:
        open_model().snapshot()
    assert "s3cret" not in str(caught.value)


def test_redirects_end(registry: ContainerRegistry, open_model: OpenModel) -> None:
    moved = RegistryReply(307, headers={"Location": f"/v2/{REPOSITORY}/manifests/v1"})
    registry.script("/manifests/", *[moved] * 50)
    with pytest.raises(FetchError, match="more than 5 redirects"):
        open_model().snapshot()
    assert len(registry.requests) < 10
