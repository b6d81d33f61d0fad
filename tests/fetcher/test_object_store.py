"""Models in buckets, in a store that speaks S3 (moto's server)."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from contextlib import closing

import httpx
import pytest
from obstore.store import S3Store

from argosy_fetcher.errors import AccessDenied, ModelNotFound, SourceChanged
from argosy_fetcher.source import Digest, RemoteFile
from argosy_fetcher.source_uri import parse
from argosy_fetcher.sources.object_store import ObjectStoreSource
from bucket_server import forget_cloud
from moto_server import running_moto

pytestmark = pytest.mark.timeout(600)  # moto is installed first

KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
CONFIG = b'{"model_type": "qwen3"}'
WEIGHTS = bytes(range(256)) * 8192
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with running_moto() as url:
        yield url


class Bucket:
    """A new bucket of the server."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.name = f"models-{next(NUMBERS)}"
        httpx.put(f"{endpoint}/{self.name}").raise_for_status()
        self.store = S3Store(
            self.name,
            endpoint=endpoint,
            access_key_id="key",
            secret_access_key="secret",
            client_options={"allow_http": True},
        )

    def put(self, files: dict[str, bytes]) -> None:
        for key, content in files.items():
            self.store.put(key, content, use_multipart=False)

    def source(self, prefix: str = "qwen", credentials: dict[str, str] = KEYS) -> ObjectStoreSource:
        uri = parse(f"s3://{self.name}/{prefix}")
        return ObjectStoreSource(uri, {**credentials, "AWS_ENDPOINT_URL": self.endpoint})


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    forget_cloud(monkeypatch)
    return Bucket(endpoint)


def md5(content: bytes) -> Digest:
    return Digest("md5", hashlib.md5(content).hexdigest())


def everything(source: ObjectStoreSource, file: RemoteFile) -> bytes:
    return b"".join(source.read(file, 0, file.size))


def test_a_snapshot_has_the_objects_below_the_prefix(bucket: Bucket) -> None:
    bucket.put({
        "qwen/config.json": CONFIG, "qwen/model.safetensors": WEIGHTS, "qwen/sub/é (1)+%41.json": b"x",
        "qwen2/config.json": b"other", "qwen": b"other", "config.json": b"other",
    })  # fmt: skip
    with closing(bucket.source()) as source:
        snapshot = source.snapshot()
        assert snapshot.source == source.name == f"s3://{bucket.name}/qwen?endpoint={bucket.endpoint}"
        assert {file.path: (file.size, file.digest) for file in snapshot.files} == {
            "config.json": (len(CONFIG), md5(CONFIG)),
            "model.safetensors": (len(WEIGHTS), md5(WEIGHTS)),
            "sub/é (1)+%41.json": (1, md5(b"x")),
        }
        contents = {file.path: everything(source, file) for file in snapshot.files}
    assert contents["model.safetensors"] == WEIGHTS
    assert contents["sub/é (1)+%41.json"] == b"x"


def test_a_bucket_can_be_a_model(bucket: Bucket) -> None:
    bucket.put({"config.json": CONFIG, "sub/x": b"x"})
    with closing(bucket.source("")) as source:
        assert source.name == f"s3://{bucket.name}?endpoint={bucket.endpoint}"
        assert [file.path for file in source.snapshot().files] == ["config.json", "sub/x"]


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 1), (1000, 1_500_000), (len(WEIGHTS) - 1, len(WEIGHTS)), (5, 5)]
)
def test_ranges_are_read_exactly(bucket: Bucket, start: int, stop: int) -> None:
    bucket.put({"qwen/model.safetensors": WEIGHTS})
    with closing(bucket.source()) as source:
        (file,) = source.snapshot().files
        assert b"".join(source.read(file, start, stop)) == WEIGHTS[start:stop]


def test_etags_of_multipart_uploads_are_not_digests(bucket: Bucket) -> None:
    content = WEIGHTS * 3
    bucket.put({"qwen/config.json": CONFIG})
    bucket.store.put("qwen/model.safetensors", content, use_multipart=True, chunk_size=5 << 20)
    with closing(bucket.source()) as source:
        config, weights = source.snapshot().files
        assert config.digest == md5(CONFIG)
        assert weights.version.endswith('-2"')
        assert weights.digest is None
        assert everything(source, weights) == content


def test_a_list_of_digests_is_preferred_to_etags(bucket: Bucket) -> None:
    sums = f"{'a' * 64}  config.json\n{'b' * 64}  missing\n".encode()
    bucket.put({"qwen/config.json": CONFIG, "qwen/x": b"x", "qwen/SHA256SUMS": sums})
    with closing(bucket.source()) as source:
        digests = {file.path: file.digest for file in source.snapshot().files}
    assert digests == {"SHA256SUMS": md5(sums), "config.json": Digest("sha256", "a" * 64), "x": md5(b"x")}


def test_listings_have_pages(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "3")
    bucket.put({f"qwen/{number}": b"x" for number in range(10)})
    with closing(bucket.source()) as source:
        assert [file.path for file in source.snapshot().files] == [str(number) for number in range(10)]


def test_the_revision_follows_the_content(bucket: Bucket) -> None:
    bucket.put({"qwen/config.json": CONFIG, "qwen/x": b"x"})
    with closing(bucket.source()) as source:
        first = source.snapshot().revision
        assert source.snapshot().revision == first
        bucket.put({"qwen/x": b"y"})
        assert source.snapshot().revision != first


def test_changed_and_deleted_objects_are_noticed(bucket: Bucket) -> None:
    bucket.put({"qwen/config.json": CONFIG, "qwen/x": b"x"})
    with closing(bucket.source()) as source:
        config, x = source.snapshot().files
        bucket.put({"qwen/config.json": CONFIG[::-1]})
        bucket.store.delete("qwen/x")
        with pytest.raises(SourceChanged, match=r"config\.json: the object has changed"):
            everything(source, config)
        with pytest.raises(SourceChanged, match="x: the object has changed"):
            everything(source, x)


def test_objects_that_stand_for_folders_are_left_out(bucket: Bucket) -> None:
    bucket.put({"qwen/config.json": CONFIG, "qwen/sub/x": b"x"})
    for key in ("qwen/", "qwen/sub/"):
        httpx.put(f"{bucket.endpoint}/{bucket.name}/{key}", content=b"").raise_for_status()
    with closing(bucket.source()) as source:
        assert [file.path for file in source.snapshot().files] == ["config.json", "sub/x"]


@pytest.mark.parametrize(
    ("prefix", "reason"),
    [
        ("llama", "no objects below llama/; name the folder"),
        ("qwen/config.json", "no objects below qwen/config.json/"),
    ],
)
def test_an_empty_prefix_is_told(bucket: Bucket, prefix: str, reason: str) -> None:
    bucket.put({"qwen/config.json": CONFIG})
    with closing(bucket.source(prefix)) as source, pytest.raises(ModelNotFound, match=reason):
        source.snapshot()


def test_a_missing_bucket_is_told(endpoint: str) -> None:
    credentials = {**KEYS, "AWS_ENDPOINT_URL": endpoint}
    with (
        closing(ObjectStoreSource(parse("s3://no-such-bucket/qwen"), credentials)) as source,
        pytest.raises(ModelNotFound, match=f"{endpoint} has no bucket 'no-such-bucket'"),
    ):
        source.snapshot()


def test_public_objects_need_no_credentials(bucket: Bucket) -> None:
    url = f"{bucket.endpoint}/{bucket.name}/qwen/config.json"
    httpx.put(url, content=CONFIG, headers={"x-amz-acl": "public-read"}).raise_for_status()
    with closing(bucket.source(credentials={})) as source:
        (file,) = source.snapshot().files
        assert everything(source, file) == CONFIG


def test_private_objects_are_refused_without_credentials(bucket: Bucket) -> None:
    bucket.put({"qwen/config.json": CONFIG})
    with (
        closing(bucket.source(credentials={})) as source,
        pytest.raises(AccessDenied, match="without credentials; set AWS_ACCESS_KEY_ID"),
    ):
        source.snapshot()


def test_an_unknown_key_is_refused(bucket: Bucket) -> None:
    bucket.put({"qwen/config.json": CONFIG})
    httpx.post(f"{bucket.endpoint}/moto-api/reset-auth", content=b"0").raise_for_status()
    try:
        with (
            closing(bucket.source(credentials={**KEYS, "AWS_ACCESS_KEY_ID": "AKIAUNKNOWN"})) as source,
            pytest.raises(
                AccessDenied, match=r"does not accept the credentials \(InvalidAccessKeyId\)"
            ) as failure,
        ):
            source.snapshot()
    finally:
        httpx.post(f"{bucket.endpoint}/moto-api/reset-auth", content=b"inf").raise_for_status()
    assert "AKIAUNKNOWN" not in str(failure.value)
    assert "secret" not in str(failure.value)
