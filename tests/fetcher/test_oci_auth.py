"""Authentication to registries: challenges, tokens, who gets credentials, and refusals told apart."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

import pytest

from argosy_fetcher.errors import (
    AccessDenied,
    FetchError,
    InvalidSource,
    ModelNotFound,
    TransientError,
    UnsupportedModel,
)
from argosy_fetcher.source_uri import parse
from argosy_fetcher.sources.oci import OciSource
from argosy_fetcher.sources.oci_http import MAX_TOKEN_CHARACTERS, AuthChallenge, parse_challenges
from container_registry import (
    TOKEN_PATH,
    ContainerRegistry,
    RegistryReply,
    error_reply,
    running_registry,
)
from oci_artifacts import MODEL, files, push

OpenModel: TypeAlias = Callable[..., OciSource]

REPOSITORY = "team/qwen"
LOGIN = {"OCI_USERNAME": "ada", "OCI_PASSWORD": "s3cret"}
BASIC = "Basic " + base64.b64encode(b"ada:s3cret").decode()


@pytest.fixture
def registry() -> Iterator[ContainerRegistry]:
    with running_registry() as running:
        push(running, REPOSITORY, "v1", files())
        yield running


@pytest.fixture
def open_model(registry: ContainerRegistry) -> Iterator[OpenModel]:
    opened: list[OciSource] = []

    def open_at(**values: str) -> OciSource:
        values = {"OCI_REGISTRY": registry.host, **values}
        opened.append(OciSource(parse(f"oci://{registry.host}/{REPOSITORY}:v1"), values))
        return opened[-1]

    yield open_at
    for source in opened:
        source.close()


def read_config(source: OciSource) -> bytes:
    file = source.snapshot().file("config.json")
    assert file is not None
    return b"".join(source.read(file, 0, file.size))


@pytest.mark.parametrize("host", ["", "registry.example", "127.0.0.1"])
def test_a_password_goes_to_the_registry_that_it_is_for(
    registry: ContainerRegistry, open_model: OpenModel, host: str
) -> None:
    registry.challenge = "Basic"
    remedy = f"are sent to one registry only: set OCI_REGISTRY={registry.host} if it is meant"
    with pytest.raises(AccessDenied, match=remedy) as caught:
        read_config(open_model(**LOGIN, OCI_REGISTRY=host))
    assert {request.authorization for request in registry.requests} == {""}
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([], []),
        (["Basic"], [("basic", {})]),
        (['Basic realm="a b"'], [("basic", {"realm": "a b"})]),
        (
            ['Bearer realm="https://t.example/x?y=1,2",service="s", scope="repository:a/b:pull,push"'],
            [
                (
                    "bearer",
                    {
                        "realm": "https://t.example/x?y=1,2",
                        "service": "s",
                        "scope": "repository:a/b:pull,push",
                    },
                )
            ],
        ),
        (["bearer REALM=x , Service = y"], [("bearer", {"realm": "x", "service": "y"})]),
        (['Basic realm="a", Bearer realm="b"'], [("basic", {"realm": "a"}), ("bearer", {"realm": "b"})]),
        (["Negotiate", 'Basic realm="a"'], [("negotiate", {}), ("basic", {"realm": "a"})]),
        ([r'Basic realm="a \"quoted\" b\\"'], [("basic", {"realm": 'a "quoted" b\\'})]),
        (['Bearer realm="first",realm="second"'], [("bearer", {"realm": "first"})]),
        (['realm="no scheme"'], []),
        ([""], []),
        (["Basic " + "x" * 5000], []),
    ],
)
def test_challenges(headers: list[str], expected: list[tuple[str, dict[str, str]]]) -> None:
    assert parse_challenges(headers) == [AuthChallenge(*challenge) for challenge in expected]


@pytest.mark.parametrize(
    "header", ['Bearer realm="open', "Bearer =,=,", ',,, "', 'Basic realm="a\\', "Bearer\t \t" * 300]
)
def test_broken_challenges_are_survived(header: str) -> None:
    assert all(
        "open" not in challenge.parameters.get("realm", "") for challenge in parse_challenges([header])
    )


def test_a_public_repository_is_read_with_an_anonymous_token(
    registry: ContainerRegistry, open_model: OpenModel
) -> None:
    registry.require_tokens()
    assert read_config(open_model()) == MODEL["config.json"]
    (request,) = registry.requests_for(TOKEN_PATH)
    assert (request.method, request.authorization) == ("GET", "")
    assert request.query == {"service": "test-registry", "scope": f"repository:{REPOSITORY}:pull"}


def test_a_password_buys_a_token_and_goes_nowhere_else(
    registry: ContainerRegistry, open_model: OpenModel
) -> None:
    registry.require_tokens(scope="repository:mirror/qwen:pull")
    assert read_config(open_model(**LOGIN)) == MODEL["config.json"]
    (request,) = registry.requests_for(TOKEN_PATH)
    assert request.authorization == BASIC
    assert request.query["scope"] == "repository:mirror/qwen:pull"
    assert {request.authorization for request in registry.requests_for("/v2/")} == {"", "Bearer token-1"}


def test_an_identity_token_is_exchanged(
    registry: ContainerRegistry, open_model: OpenModel, tmp_path: Path
) -> None:
    registry.require_tokens()
    entry = {"auth": base64.b64encode(b"0000:").decode(), "identitytoken": "id3ntity"}
    path = tmp_path / "auth.json"
    path.write_text(json.dumps({"auths": {registry.host: entry}}))
    assert read_config(open_model(REGISTRY_AUTH_FILE=str(path))) == MODEL["config.json"]
    (request,) = registry.requests_for(TOKEN_PATH)
    assert (request.method, request.authorization) == ("POST", "")
    assert request.form == {
        "grant_type": "refresh_token",
        "client_id": "argosy-fetcher",
        "refresh_token": "id3ntity",
        "service": "test-registry",
        "scope": f"repository:{REPOSITORY}:pull",
    }


def test_the_newer_name_of_a_token_is_known(registry: ContainerRegistry, open_model: OpenModel) -> None:
    registry.require_tokens()
    registry.accepted = {"Bearer abc"}
    registry.token = lambda request: RegistryReply(200, b'{"access_token": "abc", "token": null}')
    assert read_config(open_model()) == MODEL["config.json"]


def test_a_token_is_kept_until_it_is_refused(registry: ContainerRegistry, open_model: OpenModel) -> None:
    registry.require_tokens()
    source = open_model()
    for _ in range(3):
        read_config(source)
    assert len(registry.requests_for(TOKEN_PATH)) == 1
    registry.accepted.clear()  # it has expired
    assert read_config(source) == MODEL["config.json"]
    assert len(registry.requests_for(TOKEN_PATH)) == 2


def test_threads_that_are_refused_at_once_share_a_new_token(
    registry: ContainerRegistry, open_model: OpenModel
) -> None:
    registry.require_tokens()
    source = open_model()
    file = source.snapshot().file("config.json")
    assert file is not None
    registry.accepted.clear()
    refused = threading.Barrier(8, timeout=30)

    def read() -> bytes:
        refused.wait()
        return b"".join(source.read(file, 0, file.size))

    with ThreadPoolExecutor(8) as pool:
        results = [pool.submit(read) for _ in range(8)]
        assert {result.result() for result in results} == {MODEL["config.json"]}
    assert len(registry.requests_for(TOKEN_PATH)) == 2


def test_basic_authentication(registry: ContainerRegistry, open_model: OpenModel) -> None:
    registry.challenge, registry.accepted = 'Basic realm="Registry"', {BASIC}
    assert read_config(open_model(**LOGIN)) == MODEL["config.json"]
    assert [request.authorization for request in registry.requests] == ["", BASIC, BASIC]


@pytest.mark.parametrize("challenge", ['Basic realm="x"', "bearer"])
@pytest.mark.parametrize("values", [{}, LOGIN])
def test_wrong_and_missing_credentials_name_the_remedy(
    registry: ContainerRegistry, open_model: OpenModel, challenge: str, values: dict[str, str]
) -> None:
    if challenge == "bearer":
        registry.require_tokens()
        registry.token = lambda request: RegistryReply(200, b'{"token": "useless"}')
    else:
        registry.challenge = challenge
    with pytest.raises(AccessDenied, match="OCI_USERNAME and OCI_PASSWORD") as caught:
        open_model(**values).snapshot()
    assert f"oci://{registry.host}/{REPOSITORY}:v1" in str(caught.value)
    assert not any(secret in str(caught.value) for secret in ("s3cret", BASIC, "useless", "secret text"))
    assert len(registry.requests) <= 4


def test_a_credential_helper_is_named_when_access_is_denied(
    registry: ContainerRegistry, open_model: OpenModel
) -> None:
    config = json.dumps({"credHelpers": {registry.host: "ecr-login"}})
    registry.require_tokens()
    assert read_config(open_model(DOCKER_AUTH_CONFIG=config)) == MODEL["config.json"]
    registry.token = lambda request: error_reply(401)
    registry.accepted.clear()
    with pytest.raises(AccessDenied, match=r"'ecr-login'.*helpers are not run"):
        open_model(DOCKER_AUTH_CONFIG=config).snapshot()


def test_auth_files_are_only_read_when_they_are_needed(
    registry: ContainerRegistry, open_model: OpenModel
) -> None:
    source = open_model(DOCKER_AUTH_CONFIG="{")
    assert read_config(source) == MODEL["config.json"]
    registry.require_tokens()
    with pytest.raises(InvalidSource, match="DOCKER_AUTH_CONFIG: malformed"):
        source.snapshot()


@pytest.mark.parametrize("challenge", ["", 'Negotiate realm="x"', "Bearer", 'Digest realm="s3cret"'])
def test_unknown_challenges_are_refused(
    registry: ContainerRegistry, open_model: OpenModel, challenge: str
) -> None:
    headers = {"WWW-Authenticate": challenge} if challenge else {}
    registry.script("/manifests/", RegistryReply(401, headers=headers))
    with pytest.raises(AccessDenied, match="requires authentication"):
        open_model(**LOGIN).snapshot()
    assert len(registry.requests) == 1


@pytest.mark.parametrize(
    "realm",
    [
        "http://tokens.example/token",
        "ftp://tokens.example/token",
        "/token",
        "token",
        "https://ada:s3cret@tokens.example/token",
        "https:///token",
    ],
)
def test_credentials_go_to_no_unsafe_token_server(
    registry: ContainerRegistry, open_model: OpenModel, realm: str
) -> None:
    registry.require_tokens(realm=realm)
    with pytest.raises(AccessDenied, match="token server that is not asked") as caught:
        open_model(**LOGIN).snapshot()
    assert "s3cret" not in str(caught.value)
    assert {request.authorization for request in registry.requests} == {""}


def test_a_malformed_token_server_is_an_error(registry: ContainerRegistry, open_model: OpenModel) -> None:
    registry.require_tokens(realm="https://[::1/token")
    with pytest.raises(FetchError, match=r"malformed URL|not asked"):
        open_model(**LOGIN).snapshot()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"{}",
        b'{"token": ""}',
        b'{"token": 17}',
        b'{"token": "a b"}',
        b'{"token": "a\\r\\nX-Injected: 1"}',
        b'{"token": "\\u00e4"}',
        json.dumps({"token": "x" * (MAX_TOKEN_CHARACTERS + 1)}).encode(),
    ],
    ids=lambda body: f"{len(body)}-bytes",
)
def test_tokens_that_cannot_be_used_are_refused(
    registry: ContainerRegistry, open_model: OpenModel, body: bytes
) -> None:
    registry.require_tokens()
    registry.token = lambda request: RegistryReply(200, body)
    with pytest.raises(AccessDenied, match="sent no token"):
        open_model().snapshot()


def test_the_answer_of_a_token_server_is_bounded(registry: ContainerRegistry, open_model: OpenModel) -> None:
    registry.require_tokens()
    registry.token = lambda request: RegistryReply(200, b" " * (1 << 20), has_length=False)
    with pytest.raises(UnsupportedModel, match="more than 65536 bytes"):
        open_model().snapshot()


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (error_reply(401, "UNAUTHORIZED"), AccessDenied),
        (error_reply(403, "DENIED"), AccessDenied),
        (error_reply(400), AccessDenied),
        (error_reply(404), AccessDenied),
        (RegistryReply(302, headers={"Location": "https://elsewhere.example/"}), AccessDenied),
        (error_reply(429, "TOOMANYREQUESTS"), TransientError),
        (error_reply(503), TransientError),
        (RegistryReply(200, b'{"token": "x"}', cut_after=3), TransientError),
    ],
)
def test_refusals_of_token_servers(
    registry: ContainerRegistry, open_model: OpenModel, reply: RegistryReply, expected: type[Exception]
) -> None:
    registry.require_tokens()
    registry.token = lambda request: reply
    with pytest.raises(expected, match=registry.host) as caught:
        open_model(**LOGIN).snapshot()
    assert "s3cret" not in str(caught.value)
    assert len(registry.requests_for(TOKEN_PATH)) == 1


@pytest.mark.parametrize(
    ("reply", "expected", "said"),
    [
        (error_reply(401, "UNAUTHORIZED"), AccessDenied, "requires authentication"),
        (error_reply(403, "DENIED"), AccessDenied, "403 DENIED"),
        (error_reply(400, "DENIED"), AccessDenied, "400 DENIED"),
        (error_reply(403), AccessDenied, "denies access"),
        (error_reply(404, "NAME_UNKNOWN"), ModelNotFound, "no such repository"),
        (error_reply(404, "MANIFEST_UNKNOWN"), ModelNotFound, "no such tag or digest"),
        (error_reply(404, "NOT_FOUND"), ModelNotFound, "404 NOT_FOUND"),
        (error_reply(404), ModelNotFound, "or is no registry"),
        (error_reply(400, "NAME_INVALID"), InvalidSource, "refuses the name"),
        (error_reply(400, "TAG_INVALID"), InvalidSource, "refuses the name"),
        (error_reply(406), UnsupportedModel, "in no form that is supported"),
        (error_reply(415, "UNSUPPORTED"), UnsupportedModel, "415 UNSUPPORTED"),
        (error_reply(429, "TOOMANYREQUESTS"), TransientError, "limits the rate"),
        (error_reply(403, "TOOMANYREQUESTS"), TransientError, "limits the rate"),
        (error_reply(429), TransientError, "limits the rate"),
        (error_reply(408), TransientError, "408"),
        (error_reply(500), TransientError, "500"),
        (error_reply(503, "UNAVAILABLE"), TransientError, "503 UNAVAILABLE"),
        (error_reply(418), FetchError, "answered unexpectedly"),
        (RegistryReply(204), FetchError, "answered unexpectedly"),
        (RegistryReply(302), FetchError, "answered unexpectedly"),
        (RegistryReply(404, b'{"errors": [{"code": "<script>"}]}'), ModelNotFound, "or is no registry"),
        (RegistryReply(404, b"x" * (1 << 20)), ModelNotFound, "or is no registry"),
        (RegistryReply(200, b"{}", cut_after=1), TransientError, "no answer from"),
    ],
)
def test_refusals_of_registries(
    registry: ContainerRegistry,
    open_model: OpenModel,
    reply: RegistryReply,
    expected: type[Exception],
    said: str,
) -> None:
    registry.script("/manifests/", reply)
    with pytest.raises(expected, match=said) as caught:
        open_model().snapshot()
    assert registry.host in str(caught.value)
    assert "secret text" not in str(caught.value)


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize(
    ("value", "expected"), [("7", 7.0), ("99999999999", 3600.0), ("-1", None), ("", None), ("soon", None)]
)
def test_servers_say_when_to_try_again(
    registry: ContainerRegistry, open_model: OpenModel, status: int, value: str, expected: float | None
) -> None:
    registry.script("/manifests/", error_reply(status, Retry_After=value))
    with pytest.raises(TransientError) as caught:
        open_model().snapshot()
    assert caught.value.retry_after_s == expected
