"""Sources on hosts that do not exist: told from networks that do not answer, for which patience helps."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest
from obstore.exceptions import GenericError

from argosy_fetcher.errors import TransientError, UnknownHost
from argosy_fetcher.source_uri import parse
from argosy_fetcher.sources.object_store import Bucket, explain
from argosy_fetcher.sources.registry import open_source

SOURCES = ["https://models.example/qwen/SHA256SUMS", "hf://acme/qwen", "oci://models.example/acme/qwen:v1"]
LOOKUP_FAILED = """Generic S3 error: Error performing GET https://models.example/b - HTTP error: error sending request

Debug source:
error: "failed to lookup address information: {}",
"""


def snapshot_error(monkeypatch: pytest.MonkeyPatch, source: str, errno: int) -> TransientError:
    def no_address(*_: object, **__: object) -> object:
        raise socket.gaierror(errno, "told by the name server")

    monkeypatch.setattr(socket, "getaddrinfo", no_address)
    credentials = {"HF_ENDPOINT": "https://models.example", "HF_HOME": "/nonexistent", "HOME": "/nonexistent"}
    with closing(open_source(parse(source), credentials)) as opened, pytest.raises(TransientError) as raised:
        opened.snapshot()
    return raised.value


@pytest.mark.parametrize("source", SOURCES)
def test_a_host_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    error = snapshot_error(monkeypatch, source, socket.EAI_NONAME)
    assert type(error) is UnknownHost
    assert "there is no host models.example in this network's DNS; check " in str(error)


@pytest.mark.parametrize("source", SOURCES)
def test_a_name_server_that_does_not_answer_is_an_outage(
    monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    error = snapshot_error(monkeypatch, source, socket.EAI_AGAIN)
    assert type(error) is TransientError
    assert "told by the name server" in str(error)


@pytest.mark.parametrize(
    ("said", "expected"),
    [("Name or service not known", UnknownHost), ("Temporary failure in name resolution", TransientError)],
)
def test_buckets_tell_it_from_their_client_s_text(said: str, expected: type[Exception]) -> None:
    bucket = Bucket("s3://b/qwen", "b", "s3", "https://models.example", is_anonymous=True)
    error = explain(GenericError(LOOKUP_FAILED.format(said)), bucket, None)
    assert type(error) is expected
    assert "https://models.example" in str(error)
