"""Credentials and endpoints of object stores, as they reach a server."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest

from argosy_fetcher.errors import AccessDenied, FetchError, InvalidSource
from argosy_fetcher.source_uri import parse
from argosy_fetcher.sources.object_store import ObjectStoreSource, is_ec2
from bucket_server import BUCKET, BucketServer, forget_cloud
from loopback_certificate import issue_certificate
from scripted_http import Asked, Reply, ScriptedHttp

KEYS = {"AWS_ACCESS_KEY_ID": "AKIAEXAMPLE", "AWS_SECRET_ACCESS_KEY": "s3cret"}


@pytest.fixture(autouse=True)
def _no_cloud(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_cloud(monkeypatch)


@pytest.fixture
def server() -> Iterator[BucketServer]:
    with BucketServer({"qwen/config.json": b"{}"}) as server:
        yield server


def headers(provider: str, server: BucketServer, credentials: Mapping[str, str]) -> Mapping[str, str]:
    """Headers of a request that these named values lead to."""
    endpoint = "AWS_ENDPOINT_URL" if provider == "s3" else "GOOGLE_BASE_URL"
    uri = parse(f"{provider}://{BUCKET}/qwen")
    with closing(ObjectStoreSource(uri, {endpoint: server.url, **credentials})) as source:
        source.snapshot()
    return server.asked[0].headers


def test_keys_sign_requests(server: BucketServer) -> None:
    # files often end with a line break
    values = {**KEYS, "AWS_SESSION_TOKEN": "t0ken", "AWS_REGION": "eu-west-1"}
    sent = headers("s3", server, {name: f"{value}\n" for name, value in values.items()})
    assert sent["authorization"].startswith("AWS4-HMAC-SHA256 Credential=AKIAEXAMPLE/")
    assert "/eu-west-1/s3/" in sent["authorization"]
    assert sent["x-amz-security-token"] == "t0ken"
    assert "s3cret" not in json.dumps(dict(sent))


@pytest.mark.parametrize("credentials", [{}, {**KEYS, "AWS_SKIP_SIGNATURE": "true"}], ids=["none", "skipped"])
def test_without_keys_requests_are_not_signed(server: BucketServer, credentials: dict[str, str]) -> None:
    assert "authorization" not in headers("s3", server, credentials)


def test_keys_of_a_profile_are_found(server: BucketServer, tmp_path: Path) -> None:
    folder = tmp_path / ".aws"
    folder.mkdir()
    (folder / "credentials").write_text(
        "[default]\naws_access_key_id = A\naws_secret_access_key = %s\n"
        "[b]\naws_access_key_id=B\naws_secret_access_key=s\n"
    )
    (folder / "config").write_text("[default]\nregion = eu-north-1\n[profile b]\nregion = ap-south-1\n")
    home = {"HOME": str(tmp_path)}
    assert "Credential=A/" in headers("s3", server, home)["authorization"]
    server.asked.clear()
    sent = headers("s3", server, {**home, "AWS_PROFILE": "b"})
    assert "Credential=B/" in sent["authorization"]
    assert "/ap-south-1/s3/" in sent["authorization"]


def test_a_container_gets_its_credentials_from_an_agent(server: BucketServer, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("pod")
    answer = {
        "AccessKeyId": "POD",
        "SecretAccessKey": "s",
        "Token": "t0ken",
        "Expiration": "2100-01-01T00:00:00Z",
    }
    with ScriptedHttp(lambda _: Reply(200, json.dumps(answer).encode())) as agent:
        sent = headers(
            "s3",
            server,
            {
                "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{agent.url}/creds",
                "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(tmp_path / "token"),
            },
        )
    assert agent.asked[0].headers["authorization"] == "pod"
    assert "Credential=POD/" in sent["authorization"]


ROLE = "/latest/meta-data/iam/security-credentials/"


def metadata_of_a_role(asked: Asked) -> Reply:
    if (asked.method, asked.path) == ("PUT", "/latest/api/token"):
        return Reply(200, b"session")
    assert asked.headers["x-aws-ec2-metadata-token"] == "session"
    if asked.path in (ROLE, ROLE.rstrip("/")):
        return Reply(200, b"fetcher")
    assert asked.path == f"{ROLE}fetcher"
    keys = {
        "AccessKeyId": "ROLE",
        "SecretAccessKey": "s",
        "Token": "t0ken",
        "Expiration": "2100-01-01T00:00:00Z",
    }
    return Reply(200, json.dumps(keys).encode())


@pytest.mark.parametrize("variable", ["AWS_METADATA_ENDPOINT", "AWS_EC2_METADATA_SERVICE_ENDPOINT"])
def test_a_machine_with_a_role_has_credentials(server: BucketServer, variable: str) -> None:
    with ScriptedHttp(metadata_of_a_role) as metadata:
        sent = headers("s3", server, {variable: metadata.url})
    assert "Credential=ROLE/" in sent["authorization"]
    assert sent["x-amz-security-token"] == "t0ken"


@pytest.mark.parametrize("status", [200, 403, 404])
def test_a_machine_without_a_role_reads_public_buckets(server: BucketServer, status: int) -> None:
    with ScriptedHttp(lambda asked: Reply(200 if asked.method == "PUT" else status)) as metadata:
        sent = headers("s3", server, {"AWS_EC2_METADATA_SERVICE_ENDPOINT": metadata.url})
        assert len(metadata.asked) == 2
    assert "authorization" not in sent


def test_the_metadata_service_may_be_forbidden(server: BucketServer) -> None:
    with ScriptedHttp(metadata_of_a_role) as metadata:
        credentials = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": metadata.url, "AWS_EC2_METADATA_DISABLED": "true"}
        assert "authorization" not in headers("s3", server, credentials)
        assert metadata.asked == []


@pytest.mark.parametrize(("vendor", "expected"), [("Amazon EC2\n", True), ("QEMU\n", False), (None, False)])
def test_a_machine_on_ec2_is_told_by_its_vendor(tmp_path: Path, vendor: str | None, expected: bool) -> None:
    if vendor is not None:
        (tmp_path / "sys_vendor").write_text(vendor)
    assert is_ec2(tmp_path / "sys_vendor") == expected


def test_a_web_identity_is_exchanged_for_credentials(server: BucketServer, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("identity")
    answer = (
        "<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult><Credentials>"
        "<AccessKeyId>IRSA</AccessKeyId><SecretAccessKey>s</SecretAccessKey><SessionToken>t0ken</SessionToken>"
        "<Expiration>2100-01-01T00:00:00Z</Expiration>"
        "</Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"
    )
    credentials = {
        "AWS_ROLE_ARN": "arn:aws:iam::1:role/fetcher",
        "AWS_WEB_IDENTITY_TOKEN_FILE": str(tmp_path / "token"),
        "AWS_REGION": "eu-west-1",
    }
    tls = issue_certificate(tmp_path)
    with ScriptedHttp(lambda _: Reply(200, answer.encode()), tls) as sts:
        trust = {"SSL_CERT_FILE": str(tls[0]), "AWS_ENDPOINT_URL_STS": sts.url}
        sent = headers("s3", server, {**credentials, **trust})
    assert "WebIdentityToken=identity" in sts.asked[0].query
    assert "Credential=IRSA/" in sent["authorization"]


@pytest.mark.parametrize(
    ("provider", "path"),
    [
        ("s3", ".aws/credentials"),
        ("s3", ".aws/config"),
        ("gs", ".config/gcloud/application_default_credentials.json"),
    ],
)
def test_a_malformed_file_that_nobody_named_does_not_matter(
    server: BucketServer, tmp_path: Path, provider: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text("s3cret = {")
    assert "authorization" not in headers(provider, server, {"HOME": str(tmp_path)})
    assert str(tmp_path / path) in caplog.text
    assert "it is not used" in caplog.text
    assert "s3cret" not in caplog.text


@pytest.mark.parametrize(
    ("credentials", "reason"),
    [
        ({"AWS_ACCESS_KEY_ID": "a"}, "needed together"),
        (
            {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "s3cret\nb"},
            "AWS_SECRET_ACCESS_KEY has characters",
        ),
        ({**KEYS, "AWS_SESSION_TOKEN": "s3cret\u00e9"}, "AWS_SESSION_TOKEN has characters"),
        ({"AWS_PROFILE": "missing"}, "no keys for the profile 'missing'.*export-credentials"),
        ({"AWS_SHARED_CREDENTIALS_FILE": "{folder}/broken"}, "broken is not a file of the AWS tools"),
    ],
)
def test_unusable_keys_are_told(
    server: BucketServer, tmp_path: Path, credentials: dict[str, str], reason: str
) -> None:
    (tmp_path / "broken").write_text("aws_secret_access_key = s3cret\n")
    values = {name: value.format(folder=tmp_path) for name, value in credentials.items()}
    with pytest.raises(AccessDenied, match=reason) as failure:
        headers("s3", server, {**values, "HOME": str(tmp_path)})
    assert "s3cret" not in str(failure.value)


@pytest.mark.parametrize(
    ("provider", "endpoint"),
    [
        ("s3", "ftp://h"),
        ("s3", "minio:9000"),
        ("s3", "http://user:s3cret@h"),
        ("s3", "http://h?key=s3cret"),
        ("s3", "http://h:999999"),
        ("s3", "http://["),
        ("gs", "http:///x"),
    ],
)
def test_a_malformed_endpoint_is_refused(provider: str, endpoint: str) -> None:
    name = "AWS_ENDPOINT_URL" if provider == "s3" else "STORAGE_EMULATOR_HOST"
    with pytest.raises(InvalidSource, match=f"{name} must be a URL") as failure:
        ObjectStoreSource(parse(f"{provider}://{BUCKET}/qwen"), {name: endpoint})
    assert "s3cret" not in str(failure.value)


def test_an_emulator_is_asked_without_credentials(server: BucketServer) -> None:
    credentials = {"STORAGE_EMULATOR_HOST": server.authority, "GOOGLE_BEARER_TOKEN": "t0ken"}
    assert "authorization" not in headers("gs", server, credentials)


def test_a_token_is_sent(server: BucketServer) -> None:
    assert headers("gs", server, {"GOOGLE_BEARER_TOKEN": "t0ken"})["authorization"] == "Bearer t0ken"


def test_a_token_is_not_shown_to_the_network() -> None:
    credentials = {"GOOGLE_BEARER_TOKEN": "t0ken", "GOOGLE_BASE_URL": "http://192.0.2.1"}
    with (
        closing(ObjectStoreSource(parse(f"gs://{BUCKET}/qwen"), credentials)) as source,
        pytest.raises(InvalidSource, match="use https"),
    ):
        source.snapshot()


def test_a_malformed_token_is_refused(server: BucketServer) -> None:
    with pytest.raises(AccessDenied, match="GOOGLE_BEARER_TOKEN has characters") as failure:
        headers("gs", server, {"GOOGLE_BEARER_TOKEN": "s3cret\nx: y"})
    assert "s3cret" not in str(failure.value)


@pytest.fixture(scope="module")
def service_account() -> dict[str, str]:
    generated = subprocess.run(["openssl", "genrsa", "2048"], check=True, capture_output=True, text=True)
    return {
        "type": "service_account",
        "private_key": generated.stdout,
        "private_key_id": "1",
        "client_email": "fetcher@example.iam.gserviceaccount.com",
    }


@pytest.mark.parametrize("place", ["key", "file", "gcloud"])
def test_a_service_account_signs_its_tokens(
    server: BucketServer, service_account: dict[str, str], place: str, tmp_path: Path
) -> None:
    content = json.dumps(service_account)
    path = tmp_path / (
        "key.json" if place == "file" else ".config/gcloud/application_default_credentials.json"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    if place != "key":
        path.write_text(content)
    credentials = {
        "key": {"GOOGLE_SERVICE_ACCOUNT_KEY": content},
        "file": {"GOOGLE_APPLICATION_CREDENTIALS": str(path)},
        "gcloud": {"HOME": str(tmp_path)},
    }[place]
    assert headers("gs", server, credentials)["authorization"].startswith("Bearer ey")


def test_a_machine_on_google_cloud_has_a_token(server: BucketServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(asked: Asked) -> Reply:
        assert asked.headers["metadata-flavor"] == "Google"
        return Reply(200, b'{"access_token": "t0ken", "expires_in": 3600, "token_type": "Bearer"}')

    with ScriptedHttp(answer) as metadata:
        monkeypatch.setenv("GCE_METADATA_HOST", metadata.authority)
        monkeypatch.setenv("HOME", "/nonexistent")  # obstore looks for gcloud's file there
        sent = headers("gs", server, {"GCE_METADATA_HOST": metadata.authority})
    assert sent["authorization"] == "Bearer t0ken"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read: No such file"),
        ("{", "not a file of Google credentials"),
        ("[]", "not a file of Google credentials"),
        ('{"type": "external_account"}', r"GOOGLE_BEARER_TOKEN=\$\(gcloud"),
        ('{"type": "service_account", "private_key": "s3cret"}', "credentials cannot be used"),
    ],
    ids=["missing", "cut", "list", "federation", "incomplete"],
)
def test_unusable_google_credentials_are_told(
    server: BucketServer, tmp_path: Path, content: str | None, reason: str
) -> None:
    path = tmp_path / "key.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(AccessDenied, match=reason) as failure:
        headers("gs", server, {"GOOGLE_APPLICATION_CREDENTIALS": str(path)})
    assert "s3cret" not in str(failure.value)


def test_a_broken_file_does_not_matter_to_anonymous_reads(server: BucketServer, tmp_path: Path) -> None:
    path = tmp_path / ".config/gcloud/application_default_credentials.json"
    path.parent.mkdir(parents=True)
    path.write_text("{")
    assert "authorization" not in headers(
        "gs", server, {"HOME": str(tmp_path), "GOOGLE_SKIP_SIGNATURE": "true"}
    )


@pytest.mark.parametrize("variable", ["AWS_CA_BUNDLE", "SSL_CERT_FILE"])
def test_a_certificate_must_be_trusted(tmp_path: Path, variable: str) -> None:
    certificate, key = issue_certificate(tmp_path)
    with BucketServer({"qwen/config.json": b"{}"}, tls=(certificate, key)) as server:
        headers("s3", server, {variable: str(certificate)})
        with pytest.raises(FetchError, match=f"certificate of {server.url} is not trusted.*AWS_CA_BUNDLE"):
            headers("s3", server, {})


@pytest.mark.parametrize("content", [None, "no certificate"], ids=["missing", "malformed"])
def test_unusable_certificates_are_told(server: BucketServer, tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InvalidSource, match=r"ca\.pem cannot be used"):
        headers("s3", server, {"AWS_CA_BUNDLE": str(path)})
