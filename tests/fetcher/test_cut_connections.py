"""Connections that are cut at every tenth of a download, for each kind of source that serves ranges: nothing is lost
but time, and what is asked for again lies in the ranges whose answers were cut."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from argosy_fetcher.model_fetch import fetch_model
from argosy_fetcher.source_uri import SourceUri, parse
from argosy_fetcher.sources.hub import HubSource
from argosy_fetcher.sources.object_store import ObjectStoreSource
from argosy_fetcher.sources.oci import OciSource
from argosy_fetcher.sources.web import WebSource
from argosy_fetcher.store import Store
from argosy_fetcher.transfer import TransferSettings
from bucket_server import BUCKET, BucketServer, forget_cloud
from container_registry import running_registry
from cutting_proxy import CuttingProxy
from hub_server import HubServer
from model_files import served_files
from moto_server import running_moto
from oci_artifacts import files as layers
from oci_artifacts import push
from recorded_progress import RecordedProgress
from retry_time import RetryTime
from scripted_http import Asked, Reply, ScriptedHttp, file_reply

pytestmark = pytest.mark.timeout(600)  # moto is installed first

FILES = served_files(num_shards=3, shard_bytes=100_000)
WEIGHTS = {path: content for path, content in FILES.items() if path.endswith(".safetensors")}
SIZES = [len(content) for content in WEIGHTS.values()]
PART_BYTES = 24_000
IN_FLIGHT = 4
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
# `make test` cuts before the first bytes, amid the second file and in the last parts.
PERCENTS = [
    percent if percent in (0, 50, 90) else pytest.param(percent, marks=pytest.mark.full)
    for percent in range(0, 100, 10)
]
OpenSource = Callable[[CuttingProxy], Any]
Served = tuple[str, OpenSource]
"""A server's URL, and how its model is opened through a proxy."""


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    with running_moto() as url:
        httpx.put(f"{url}/{BUCKET}").raise_for_status()
        for path, content in FILES.items():
            httpx.put(f"{url}/{BUCKET}/acme/tiny/{path}", content=content).raise_for_status()
        yield url


@contextmanager
def hub() -> Iterator[Served]:
    with HubServer() as server:
        server.add_model("acme/tiny", FILES)
        uri = SourceUri("hf", "acme/tiny", "")
        yield (
            server.endpoint,
            lambda proxy: HubSource(uri, {"HF_ENDPOINT": proxy.url, "HF_HOME": "/nonexistent"}),
        )


@contextmanager
def s3(url: str) -> Iterator[Served]:
    uri = parse(f"s3://{BUCKET}/acme/tiny")
    yield url, lambda proxy: ObjectStoreSource(uri, {**KEYS, "AWS_ENDPOINT_URL": proxy.url})


@contextmanager
def gs() -> Iterator[Served]:
    with BucketServer({f"acme/tiny/{path}": content for path, content in FILES.items()}) as server:
        uri = parse(f"gs://{BUCKET}/acme/tiny")
        yield server.url, lambda proxy: ObjectStoreSource(uri, {"STORAGE_EMULATOR_HOST": proxy.url})


@contextmanager
def oci() -> Iterator[Served]:
    with running_registry() as registry:
        push(registry, "acme/tiny", "v1", layers(FILES))
        yield registry.url, lambda proxy: OciSource(parse(f"oci://{proxy.host}/acme/tiny:v1"), {})


@contextmanager
def https() -> Iterator[Served]:
    sums = "".join(f"{hashlib.sha256(content).hexdigest()}  {path}\n" for path, content in FILES.items())

    def answer(asked: Asked) -> Reply:
        path = asked.path.removeprefix("/tiny/")
        content = sums.encode() if path == "SHA256SUMS" else FILES.get(path)
        return Reply(404) if content is None else file_reply(asked, content, {"ETag": f'"{path}"'})

    with ScriptedHttp(answer) as server:
        yield server.url, lambda proxy: WebSource(parse(f"{proxy.url}/tiny/SHA256SUMS"), {})


KINDS: dict[str, Callable[[], AbstractContextManager[Served]]] = {
    "hf": hub, "gs": gs, "oci": oci, "https": https,
}  # fmt: skip


def check_a_cut(served: Served, percent: int, folder: Path) -> None:
    """Fetch a model through a proxy that cuts every connection at a share of the weights."""
    upstream, open_source = served
    cut_after = sum(SIZES) * percent // 100
    time, progress = RetryTime(), RecordedProgress()
    settings = TransferSettings(PART_BYTES, IN_FLIGHT, time.policy())
    with CuttingProxy(upstream, SIZES, cut_after) as proxy, closing(open_source(proxy)) as source:
        model = fetch_model(source, Store(folder), progress=progress, settings=settings)
    found = {path: hashlib.sha256((model.path / path).read_bytes()).hexdigest() for path in FILES}
    assert found == {path: hashlib.sha256(content).hexdigest() for path, content in FILES.items()}
    assert progress.present + progress.received == progress.total
    whole = [each for each in proxy.passages if not each.is_cut]
    assert 1 <= len(proxy.cuts) <= IN_FLIGHT
    assert len(time.waits) == len(proxy.cuts)
    assert all(each.size <= PART_BYTES for each in proxy.cuts)
    assert sum(each.size for each in whole) <= sum(SIZES), "more was asked for again than was cut"


@pytest.mark.parametrize("percent", PERCENTS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_arrived_before_a_cut_is_kept(
    kind: str, percent: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_cloud(monkeypatch)
    with KINDS[kind]() as served:
        check_a_cut(served, percent, tmp_path)


@pytest.mark.parametrize("percent", PERCENTS)
def test_what_arrived_before_a_cut_is_kept_of_a_store_that_speaks_s3(
    moto: str, percent: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_cloud(monkeypatch)
    with s3(moto) as served:
        check_a_cut(served, percent, tmp_path)
