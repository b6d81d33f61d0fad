"""HTTP of registries: what broken connections mean, dates of Retry-After, and bounds on time."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import closing

import httpx
import pytest

from argosy_fetcher.errors import FetchError, TransientError, UnknownHost
from argosy_fetcher.source_uri import parse
from argosy_fetcher.sources.http import retry_after_s
from argosy_fetcher.sources.oci_http import DOCUMENT_S, RegistryClient
from argosy_fetcher.sources.registry import parse_reference

REQUEST = httpx.Request("GET", "https://registry.example:5000/v2/x?X-Amz-Signature=s3cret")


@pytest.fixture
def client() -> Iterator[RegistryClient]:
    with closing(RegistryClient(parse_reference(parse("oci://registry.example:5000/x:v1")), {})) as client:
        yield client


def ssl_error(reason: str) -> ssl.SSLError:
    error = ssl.SSLError(1, f"[SSL: {reason}]")
    error.reason = reason
    return error


def certificate_error() -> ssl.SSLError:
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_message = "self-signed certificate"
    return error


@pytest.mark.parametrize(
    ("cause", "expected", "said"),
    [
        (certificate_error(), FetchError, "self-signed certificate.*SSL_CERT_FILE"),
        (ssl_error("WRONG_VERSION_NUMBER"), FetchError, "ARGOSY_OCI_PLAIN_HTTP=registry.example:5000"),
        (ssl_error("UNEXPECTED_EOF_WHILE_READING"), TransientError, "no answer from registry.example:5000"),
        (socket.gaierror(socket.EAI_NONAME, "unknown"), UnknownHost, "no host registry.example:5000"),
        (socket.gaierror(socket.EAI_AGAIN, "later"), TransientError, "no answer from"),
        (ConnectionRefusedError(111, "refused"), TransientError, "no answer from"),
        (None, TransientError, "no answer from"),
    ],
)
def test_failed_connections_are_told_apart(
    client: RegistryClient, cause: Exception | None, expected: type[Exception], said: str
) -> None:
    between = httpx.ConnectError("handshake")
    between.__cause__ = cause
    error = httpx.ConnectError("failed", request=REQUEST)
    error.__cause__ = between
    with pytest.raises(expected, match=said) as caught, client.translated("oci://registry.example:5000/x:v1"):
        raise error
    assert type(caught.value) is expected
    assert "oci://registry.example:5000/x:v1" in str(caught.value)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (httpx.ReadTimeout("slow", request=REQUEST), TransientError),
        (httpx.PoolTimeout("full", request=REQUEST), TransientError),
        (httpx.RemoteProtocolError("cut", request=REQUEST), TransientError),
        (httpx.ProxyError("407", request=REQUEST), TransientError),
        (httpx.ReadError("without a request"), TransientError),
        (httpx.UnsupportedProtocol("https missing", request=REQUEST), FetchError),
        (httpx.LocalProtocolError("bad header", request=REQUEST), FetchError),
        (httpx.InvalidURL("https://s3cret"), FetchError),
    ],
)
def test_failures_of_requests_are_told_apart(
    client: RegistryClient, error: Exception, expected: type[Exception]
) -> None:
    with pytest.raises(expected) as caught, client.translated("oci://x/y:v1"):
        raise error
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("120", 120.0),
        ("Sun, 06 Nov 1994 08:49:37 GMT", 37.0),
        ("Sun, 06 Nov 1994 08:48:00 GMT", 0.0),
        ("Mon, 07 Nov 2994 08:49:37 GMT", 3600.0),
        ("Sun, 99 Nov 1994 08:49:37 GMT", None),
        ("²", None),
    ],
)
def test_retry_after_is_seconds_or_a_date(value: str, expected: float | None) -> None:
    response = httpx.Response(429, headers=[(b"Retry-After", value.encode())])
    assert retry_after_s(response.headers, lambda: 784_111_740.0) == expected  # 08:49:00


class Drip(httpx.SyncByteStream):
    """A body that arrives byte by byte."""

    def __iter__(self) -> Iterator[bytes]:
        while True:
            yield b" "


def test_a_document_must_arrive_in_time(client: RegistryClient) -> None:
    times = iter(range(1000))
    response = httpx.Response(200, stream=Drip(), request=REQUEST)
    with pytest.raises(TransientError, match="took longer than 60 s"):
        client.document(response, 1 << 20, "oci://x/y:v1", DOCUMENT_S, lambda: float(next(times)))
    assert next(times) <= DOCUMENT_S + 3
