"""What listings of buckets may hold, and reads of what was listed, with S3 and Google Cloud Storage alike."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from argosy_fetcher.errors import (
    FetchError,
    InvalidSource,
    ModelNotFound,
    SourceChanged,
    TransientError,
    UnsupportedModel,
)
from argosy_fetcher.progress import Progress
from argosy_fetcher.pull import find_model, pull_model, stored_gguf
from argosy_fetcher.source import MAX_FILES, Digest, RemoteFile
from argosy_fetcher.source_uri import SourceUri, parse
from argosy_fetcher.sources.object_store import ObjectStoreSource
from bucket_server import BUCKET, DATE, BucketServer, credentials_for, forget_cloud
from scripted_http import Asked, Reply, file_reply

CONFIG = b'{"model_type": "qwen3"}'
WEIGHTS = bytes(range(256)) * (3 << 12)
MODEL = {"qwen/config.json": CONFIG, "qwen/model.safetensors": WEIGHTS}


@pytest.fixture(autouse=True)
def _no_cloud(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_cloud(monkeypatch)


@pytest.fixture(params=["s3", "gs"])
def provider(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server() -> Iterator[BucketServer]:
    with BucketServer(MODEL) as server:
        yield server


def source_of(server: BucketServer, provider: str) -> ObjectStoreSource:
    return ObjectStoreSource(parse(f"{provider}://{BUCKET}/qwen"), credentials_for(provider, server))


def everything(source: ObjectStoreSource, file: RemoteFile) -> bytes:
    return b"".join(source.read(file, 0, file.size))


def md5(content: bytes) -> Digest:
    return Digest("md5", hashlib.md5(content).hexdigest())


def test_objects_are_listed_and_read(server: BucketServer, provider: str) -> None:
    with closing(source_of(server, provider)) as source:
        snapshot = source.snapshot()
        assert snapshot.source == source.name == f"{provider}://{BUCKET}/qwen?endpoint={server.url}"
        assert source.requested_revision == ""
        assert [(file.path, file.digest) for file in snapshot.files] == [
            ("config.json", md5(CONFIG)), ("model.safetensors", md5(WEIGHTS)),
        ]  # fmt: skip
        assert everything(source, snapshot.files[1]) == WEIGHTS
        assert b"".join(source.read(snapshot.files[1], 70_000, 2_100_000)) == WEIGHTS[70_000:2_100_000]
    assert all("authorization" not in asked.headers for asked in server.asked)


@pytest.mark.parametrize("folder", ["", "a/b/"])
def test_a_gguf_file_is_fetched_with_its_parts_alone(provider: str, folder: str, tmp_path: Path) -> None:
    one, parts = "tiny-Q8_0.gguf", [f"tiny-Q4_0-0000{number}-of-00002.gguf" for number in (1, 2)]
    contents = {name: b"GGUF" + name.encode() for name in (one, *parts)}
    others = {f"{folder}config.json": CONFIG, f"{folder}{one}.txt": b"a", f"{folder}c/{one}": b"b"}
    with BucketServer({**{folder + name: each for name, each in contents.items()}, **others}) as server:
        environment = {**credentials_for(provider, server), "ARGOSY_MODELS_DIR": str(tmp_path)}
        for given, names in ((one, [one]), (parts[0], parts)):
            uri = parse(f"{provider}://{BUCKET}/{folder}{given}")
            assert uri.is_gguf
            with closing(pull_model(uri, progress=Progress(), environment=environment)) as model:
                assert stored_gguf(uri, model.path) == model.path / names[0]
                found = {path.name: path.read_bytes() for path in model.path.glob("[!.]*")}
                assert found == {name: contents[name] for name in names}
            stored = find_model(uri, environment={**environment, "ARGOSY_OFFLINE": "1"})
            assert stored is not None
            assert stored.path == model.path
        with pytest.raises(ModelNotFound, match="the bucket has no such object"):
            pull_model(
                parse(f"{provider}://{BUCKET}/{folder}x.gguf"), progress=Progress(), environment=environment
            )
        alone = parse(f"{provider}://{BUCKET}/{folder}c")
        with pytest.raises(
            UnsupportedModel, match=r"it has GGUF files: add the name of one .*'tiny-Q8_0\.gguf'"
        ):
            pull_model(alone, progress=Progress(), environment=environment)


def test_a_gguf_file_without_all_its_parts_is_refused(provider: str, tmp_path: Path) -> None:
    with BucketServer({"a-00001-of-00003.gguf": b"GGUF"}) as server:
        environment = {**credentials_for(provider, server), "ARGOSY_MODELS_DIR": str(tmp_path)}
        uri = parse(f"{provider}://{BUCKET}/a-00001-of-00003.gguf")
        with pytest.raises(
            UnsupportedModel, match=r"of which 'a-00002-of-00003\.gguf' and 1 more are not there"
        ):
            pull_model(uri, progress=Progress(), environment=environment)


def test_a_listing_of_several_pages_is_read_to_its_end(provider: str) -> None:
    with (
        BucketServer({f"qwen/{number:02}": b"x" for number in range(25)}, page_size=10) as server,
        closing(source_of(server, provider)) as source,
    ):
        assert len(source.snapshot().files) == 25
        assert server.num_listings() == 3


def test_a_listing_has_an_end(provider: str) -> None:
    objects = {f"qwen/{number:05}": b"" for number in range(3 * MAX_FILES)}
    with BucketServer(objects) as server, closing(source_of(server, provider)) as source:
        with pytest.raises(UnsupportedModel, match="more than 10000 objects"):
            source.snapshot()
        assert server.num_listings() < 2 * MAX_FILES / 1000


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("qwen/../../etc/passwd", "name has an empty part"),
        ("qwen//x", "name has an empty part"),
        ("qwen/a\\b", "unsafe name"),
        ("qwen/a\u202eb", "unsafe name"),
        ("qwen/" + "x" * 600, "unsafe name"),
        ("qwen/config.json/x", "'config.json' is an object and a folder at once"),
    ],
)
def test_names_that_files_cannot_have_are_refused(
    server: BucketServer, provider: str, key: str, reason: str
) -> None:
    server.objects[key] = b"x"
    with closing(source_of(server, provider)) as source, pytest.raises(UnsupportedModel, match=reason):
        source.snapshot()


def test_what_a_store_of_models_adds_is_left_out(server: BucketServer, provider: str) -> None:
    server.objects |= {"qwen/.argosy-model.json": b"{}", "qwen/sub/.argosy-lock": b""}
    with closing(source_of(server, provider)) as source:
        assert [file.path for file in source.snapshot().files] == ["config.json", "model.safetensors"]


def test_a_size_beyond_all_bounds_is_refused(server: BucketServer, provider: str) -> None:
    server.sizes["qwen/model.safetensors"] = 1 << 50
    with closing(source_of(server, provider)) as source, pytest.raises(UnsupportedModel, match="too large"):
        source.snapshot()


def test_a_list_of_digests_has_a_bound(server: BucketServer, provider: str) -> None:
    server.objects["qwen/SHA256SUMS"] = b"\n"
    server.sizes["qwen/SHA256SUMS"] = 1 << 30
    with closing(source_of(server, provider)) as source, pytest.raises(UnsupportedModel, match="too large"):
        source.snapshot()


def test_etags_that_only_look_like_sums_are_not_digests(server: BucketServer, provider: str) -> None:
    server.etags |= {key: hashlib.md5(key.encode()).hexdigest() for key in MODEL}
    with closing(source_of(server, provider)) as source:
        assert [file.digest for file in source.snapshot().files] == [None, None]


def test_without_a_small_object_etags_are_not_believed(server: BucketServer, provider: str) -> None:
    del server.objects["qwen/config.json"]
    with closing(source_of(server, provider)) as source:
        assert [file.digest for file in source.snapshot().files] == [None]
        assert not [asked for asked in server.asked if "list-type" not in asked.query]


@pytest.mark.parametrize(
    ("listed", "sent"),
    [
        ("d" * 32 + "-3", '"' + "d" * 32 + '-3"'),
        ('W/"x"', 'W/"x"'),
        ("x" * 3000, '"y"'),
        ("a b", '"y"'),
        ("é", '"y"'),
    ],
    ids=["multipart", "weak", "long", "blank", "not ASCII"],
)
def test_other_etags_are_no_digests(server: BucketServer, provider: str, listed: str, sent: str) -> None:
    server.etags["qwen/model.safetensors"] = listed
    answer = partial(file_reply, content=WEIGHTS, headers={"ETag": sent, **DATE})
    server.on_read = lambda asked: answer(asked) if asked.path.endswith("safetensors") else None
    with closing(source_of(server, provider)) as source:
        weights = source.snapshot().files[1]
        assert weights.digest is None
        assert everything(source, weights) == WEIGHTS


@pytest.mark.parametrize("knows_conditions", [True, False])
def test_a_changed_object_is_noticed(server: BucketServer, provider: str, knows_conditions: bool) -> None:
    server.knows_conditions = knows_conditions
    with closing(source_of(server, provider)) as source:
        weights = source.snapshot().files[1]
        server.objects["qwen/model.safetensors"] = WEIGHTS[::-1]
        with pytest.raises(SourceChanged, match=r"model\.safetensors.* changed"):
            everything(source, weights)


@pytest.mark.parametrize("size", [1000, len(WEIGHTS) + 1])
def test_a_changed_size_is_noticed(server: BucketServer, provider: str, size: int) -> None:
    server.etags["qwen/model.safetensors"] = "same"
    with closing(source_of(server, provider)) as source:
        weights = source.snapshot().files[1]
        server.objects["qwen/model.safetensors"] = bytes(size)
        with pytest.raises(SourceChanged):
            b"".join(source.read(weights, 500, 2000))


def test_a_vanished_object_is_noticed(server: BucketServer, provider: str) -> None:
    with closing(source_of(server, provider)) as source:
        weights = source.snapshot().files[1]
        server.objects.clear()
        with pytest.raises(SourceChanged, match="changed"):
            everything(source, weights)


def cut(at: int) -> Callable[[Asked], Reply | None]:
    def reply(asked: Asked) -> Reply | None:
        if not asked.path.endswith("safetensors"):
            return None
        etag = f'"{hashlib.md5(WEIGHTS).hexdigest()}"'
        full = file_reply(asked, WEIGHTS, {"ETag": etag, **DATE})
        return Reply(full.status, full.body, full.headers, cut_at=at)

    return reply


def test_a_cut_connection_keeps_what_came(server: BucketServer, provider: str) -> None:
    received = bytearray()

    def receive(source: ObjectStoreSource, file: RemoteFile) -> None:
        for chunk in source.read(file, 0, file.size):
            received.extend(chunk)

    with closing(source_of(server, provider)) as source:
        weights = source.snapshot().files[1]
        server.on_read = cut(2_500_000)
        num_asked = len(server.asked)
        with pytest.raises(TransientError, match="cut"):
            receive(source, weights)
        assert len(server.asked) == num_asked + 1  # retries are the caller's
        assert received == WEIGHTS[: len(received)]
        assert len(received) >= 1 << 20
        server.on_read = lambda _: None
        rest = b"".join(source.read(weights, len(received), weights.size))
        assert bytes(received) + rest == WEIGHTS


def test_a_store_without_ranges_is_told(server: BucketServer, provider: str) -> None:
    with closing(source_of(server, provider)) as source:
        weights = source.snapshot().files[1]
        server.on_read = lambda asked: Reply(200, WEIGHTS, {"ETag": weights.version, **DATE})
        with pytest.raises(FetchError, match=r"cannot read parts of objects \(Range\)"):
            everything(source, weights)


def test_a_prefix_must_be_a_path(server: BucketServer, provider: str) -> None:
    uri = SourceUri("s3" if provider == "s3" else "gs", f"{BUCKET}/a\\b")
    with pytest.raises(InvalidSource, match="path that files can have"):
        ObjectStoreSource(uri, credentials_for(provider, server))
