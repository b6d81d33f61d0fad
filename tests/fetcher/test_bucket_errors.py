"""Failures of object stores, told apart by what a user must do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from argosy_fetcher.errors import AccessDenied, FetchError, ModelNotFound, SourceChanged, TransientError
from argosy_fetcher.source_uri import parse
from argosy_fetcher.sources.object_store import ObjectStoreSource
from bucket_server import BUCKET, BucketServer, credentials_for, forget_cloud, refusal
from scripted_http import Reply, ScriptedHttp

KEYS = {"AWS_ACCESS_KEY_ID": "AKIAEXAMPLE", "AWS_SECRET_ACCESS_KEY": "s3cret", "AWS_SESSION_TOKEN": "t0ken"}
SECRETS = ("AKIAEXAMPLE", "s3cret", "t0ken")
SIGNED = "<AWSAccessKeyId>AKIAEXAMPLE</AWSAccessKeyId><StringToSign>t0ken</StringToSign>"


@pytest.fixture(autouse=True)
def _no_cloud(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_cloud(monkeypatch)


@pytest.fixture
def server() -> Iterator[BucketServer]:
    with BucketServer({"qwen/config.json": b"{}"}) as server:
        yield server


def signed(server: ScriptedHttp) -> ObjectStoreSource:
    return ObjectStoreSource(parse(f"s3://{BUCKET}/qwen"), {**KEYS, "AWS_ENDPOINT_URL": server.url})


LISTING = [
    (refusal(403, "AccessDenied", SIGNED), AccessDenied, "the credentials need s3:ListBucket"),
    (refusal(403), AccessDenied, r"access denied \(HTTP 403\)"),
    (refusal(401), AccessDenied, "HTTP 401"),
    (refusal(403, "InvalidAccessKeyId", SIGNED), AccessDenied, "does not accept the credentials"),
    (
        refusal(403, "SignatureDoesNotMatch", SIGNED),
        AccessDenied,
        "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS",
    ),
    (refusal(400, "InvalidToken", SIGNED), AccessDenied, "does not accept the credentials"),
    (refusal(400, "ExpiredToken", SIGNED), AccessDenied, "have expired"),
    (refusal(403, "RequestTimeTooSkewed"), FetchError, "clocks"),
    (refusal(404, "NoSuchBucket"), ModelNotFound, "has no bucket 'models'"),
    (refusal(404), ModelNotFound, "has no bucket 'models'"),
    (refusal(301, "PermanentRedirect"), FetchError, "set AWS_REGION to the bucket's region"),
    (
        refusal(400, "AuthorizationHeaderMalformed", "<Region>eu-west-1</Region>"),
        FetchError,
        "set AWS_REGION=eu-west-1",
    ),
    (refusal(503, "SlowDown"), TransientError, "SlowDown"),
    (refusal(500), TransientError, "HTTP 500"),
    (refusal(429), TransientError, "HTTP 429"),
    (refusal(400, "RequestTimeout"), TransientError, "RequestTimeout"),
    (refusal(400, "InvalidArgument"), FetchError, "the store answers InvalidArgument"),
    (Reply(200, b"<html>a proxy's page</html"), FetchError, "does not answer as an object store"),
    (Reply(200, b"<ListBucketResult>", cut_at=5), TransientError, "cut"),
]


@pytest.mark.parametrize(("reply", "error", "reason"), LISTING)
def test_a_refused_listing_tells_what_to_do(
    server: BucketServer, reply: Reply, error: type[Exception], reason: str
) -> None:
    server.on_list = lambda _: reply
    with closing(signed(server)) as source, pytest.raises(error, match=reason) as failure:
        source.snapshot()
    assert type(failure.value) is error
    assert str(failure.value).startswith(source.name)
    assert not [secret for secret in SECRETS if secret in str(failure.value)]
    assert failure.value.__suppress_context__  # tracebacks do not quote the error document either
    assert server.num_listings() == 1


READING = [
    (refusal(403, "AccessDenied"), AccessDenied, "s3:GetObject"),
    (refusal(404, "NoSuchKey"), SourceChanged, "has changed"),
    (refusal(412, "PreconditionFailed"), SourceChanged, "has changed"),
    (refusal(416, "InvalidRange"), SourceChanged, "has changed"),
    (refusal(404, "NoSuchBucket"), ModelNotFound, "has no bucket"),
    (refusal(403, "InvalidObjectState"), FetchError, "archived"),
    (refusal(503, "SlowDown"), TransientError, "SlowDown"),
    (refusal(400, "ExpiredToken"), AccessDenied, "renew AWS_ACCESS_KEY_ID"),
]


@pytest.mark.parametrize(("reply", "error", "reason"), READING)
def test_a_refused_read_tells_what_to_do(
    server: BucketServer, reply: Reply, error: type[Exception], reason: str
) -> None:
    with closing(signed(server)) as source:
        (file,) = source.snapshot().files
        server.on_read = lambda _: reply
        with pytest.raises(error, match=reason) as failure:
            list(source.read(file, 0, 2))
    assert type(failure.value) is error
    assert str(failure.value).startswith(f"{source.name}: config.json: ")


@pytest.mark.parametrize(
    ("provider", "reason"), [("s3", "set AWS_ACCESS_KEY_ID"), ("gs", "set GOOGLE_APPLICATION_CREDENTIALS")]
)
def test_without_credentials_the_remedy_is_to_give_some(
    server: BucketServer, provider: str, reason: str
) -> None:
    server.on_list = lambda _: refusal(403, "AccessDenied")
    credentials = credentials_for(provider, server)
    with (
        closing(ObjectStoreSource(parse(f"{provider}://{BUCKET}/qwen"), credentials)) as source,
        pytest.raises(AccessDenied, match=f"without credentials; {reason}"),
    ):
        source.snapshot()


def test_a_store_that_is_gone_is_transient() -> None:
    with BucketServer() as server:
        source = signed(server)
    with closing(source), pytest.raises(TransientError, match=f"no connection to {server.url}"):
        source.snapshot()
