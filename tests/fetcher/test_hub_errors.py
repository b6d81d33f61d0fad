"""What a hub's refusals become: the error, its remedy, and no credential in it."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from argosy_fetcher.errors import AccessDenied, FetchError, ModelHidden, ModelNotFound, TransientError
from argosy_fetcher.source import RemoteFile
from argosy_fetcher.source_uri import SourceUri
from argosy_fetcher.sources.http import retry_after_s
from argosy_fetcher.sources.hub import HubSource
from hub_faults import Fault
from hub_server import HubServer
from hub_sources import MODEL, file_of, hub_source, read
from loopback_certificate import issue_certificate
from scripted_http import Reply, ScriptedHttp

FILES = {"config.json": b"{}", "model.safetensors": b"weights"}
TOKEN = "hf_known"


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as hub:
        hub.add_model(MODEL, FILES)
        hub.add_model("org/private", FILES, is_private=True)
        hub.add_model("org/gated", FILES, gate="content")
        hub.add_model("org/closed", FILES, gate="list")
        hub.add_model("org/disabled", FILES, is_disabled=True)
        hub.tokens[TOKEN] = set()
        hub.tokens["hf_member"] = {"org/private", "org/gated", "org/closed"}
        yield hub


def fetch(hub: HubServer, name: str, token: str = "", revision: str = "") -> dict[str, bytes]:
    source = hub_source(hub, name, revision, HF_TOKEN=token)
    snapshot = source.snapshot()
    return {file.path: read(source, file) for file in snapshot.files}


REFUSALS = {
    "missing, no token": ("org/none", "", "", ModelHidden, ["does not exist", "private", "set HF_TOKEN"]),
    "missing": ("org/none", TOKEN, "", ModelHidden, ["does not exist", "token's account may not see it"]),
    "private, no token": ("org/private", "", "", ModelHidden, ["private and no token", "set HF_TOKEN"]),
    "private, other account": ("org/private", TOKEN, "", ModelHidden, ["token's account may not see it"]),
    "wrong token": (MODEL, "hf_wrong", "", AccessDenied, ["does not accept the token", "/settings/tokens"]),
    "gated, no token": ("org/gated", "", "", AccessDenied, ["is gated", "/org/gated, then set HF_TOKEN"]),
    "gated": ("org/gated", TOKEN, "", AccessDenied, ["is gated", "accept the terms at", "/org/gated"]),
    "gated list, no token": ("org/closed", "", "", AccessDenied, ["is gated", "then set HF_TOKEN"]),
    "gated list": ("org/closed", TOKEN, "", AccessDenied, ["is gated", "accept the terms at"]),
    "disabled": ("org/disabled", TOKEN, "", AccessDenied, ["is disabled", "/org/disabled"]),
    "revision": (MODEL, "", "v9", ModelNotFound, ["hf://org/model@v9", "no revision 'v9'", "/tree/main"]),
    "commit": (MODEL, "", "a" * 40, ModelNotFound, [f"no revision '{'a' * 40}'"]),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_are_told_apart_and_name_the_remedy(hub: HubServer, case: str) -> None:
    name, token, revision, error, parts = REFUSALS[case]
    with pytest.raises(FetchError) as caught:
        fetch(hub, name, token, revision)
    message = str(caught.value)
    assert type(caught.value) is error, message
    assert message.startswith(f"hf://{name}")
    assert all(part in message for part in parts), message
    assert hub.endpoint in message
    assert not token or token not in message


@pytest.mark.parametrize("name", ["org/private", "org/gated", "org/closed"])
def test_a_member_s_token_opens_private_and_gated_models(hub: HubServer, name: str) -> None:
    assert fetch(hub, name, "hf_member") == FILES


def test_the_list_of_a_gated_model_is_public(hub: HubServer) -> None:
    """As on the real hub, so that a model that is not served is refused before its terms are accepted."""
    snapshot = hub_source(hub, "org/gated").snapshot()
    assert {file.path for file in snapshot.files} == set(FILES)


@pytest.mark.parametrize("kind", ["list", "resolve"])
@pytest.mark.parametrize(
    ("status", "headers", "retry_after"),
    [
        (429, {"Retry-After": "7"}, 7.0),
        (429, {"RateLimit": '"api";r=0;t=55'}, 55.0),
        (429, {}, None),
        (503, {"Retry-After": "3"}, 3.0),
        (408, {}, None),
        (500, {}, None),
        (502, {}, None),
        (504, {}, None),
        (507, {}, None),
        (520, {}, None),
        (529, {}, None),
    ],
)
def test_limits_and_failures_of_the_hub_are_transient(
    hub: HubServer, kind: str, status: int, headers: dict[str, str], retry_after: float | None
) -> None:
    source = hub_source(hub)
    file = file_of(source.snapshot(), "model.safetensors")
    hub.faults.add("list" if kind == "list" else "resolve", Fault(status=status, headers=headers))
    with pytest.raises(TransientError) as caught:
        _ = source.snapshot() if kind == "list" else read(source, file)
    assert caught.value.retry_after_s == retry_after
    assert ("limits the rate" in str(caught.value)) == (status == 429)
    assert ("HF_TOKEN" in str(caught.value)) == (status == 429)
    assert hub.faults.is_used_up
    assert read(source, file) == FILES["model.safetensors"]


def test_a_limit_that_a_token_does_not_raise_does_not_advise_one(hub: HubServer) -> None:
    hub.faults.add("list", Fault(status=429))
    with pytest.raises(TransientError, match=r"limits the rate of requests$"):
        hub_source(hub, HF_TOKEN=TOKEN).snapshot()


def test_the_storage_s_wish_to_wait_is_passed_on(hub: HubServer) -> None:
    source = hub_source(hub)
    file = file_of(source.snapshot(), "model.safetensors")
    hub.faults.add("content", Fault(status=503, headers={"Retry-After": "4"}))
    with pytest.raises(TransientError) as caught:
        read(source, file)
    assert caught.value.retry_after_s == 4.0


@pytest.mark.parametrize("cut_after", [0, 20])
def test_a_list_that_breaks_off_is_transient(hub: HubServer, cut_after: int) -> None:
    hub.faults.add("list", Fault(cut_after=cut_after))
    source = hub_source(hub)
    with pytest.raises(TransientError, match="does not answer"):
        source.snapshot()
    assert source.snapshot().files


def test_a_hub_that_cannot_be_reached_says_what_helps() -> None:
    with HubServer() as hub:
        source = hub_source(hub)
    with pytest.raises(TransientError) as caught:
        source.snapshot()
    message = str(caught.value)
    assert message.startswith(f"hf://org/model: {hub.endpoint} does not answer (")
    assert "check the network and HF_ENDPOINT" in message
    assert "outside a cluster, set HF_HUB_OFFLINE=1" in message


def test_a_hub_that_stops_answering_between_list_and_content(hub: HubServer) -> None:
    credentials = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": "/nonexistent"}
    with closing(HubSource(SourceUri("hf", MODEL), credentials)) as source:
        file = file_of(source.snapshot(), "config.json")
        assert read(source, file) == FILES["config.json"]
        hub.close()
        with pytest.raises(TransientError, match=r"does not answer|connection lost"):
            read(source, file)


def test_a_host_without_a_server_s_name_is_unreachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with HubServer() as hub:
        source = hub_source(hub, HF_ENDPOINT=f"http://127.0.0.1:{port}")
        with pytest.raises(TransientError, match=f"http://127.0.0.1:{port} does not answer"):
            source.snapshot()


@pytest.mark.parametrize("status", [520, 522, 524, 530])
def test_failures_of_a_proxy_before_the_storage_are_transient(hub: HubServer, status: int) -> None:
    source = hub_source(hub)
    file = file_of(source.snapshot(), "model.safetensors")
    hub.faults.add("content", Fault(status=status))
    with pytest.raises(TransientError, match=f"status {status}"):
        read(source, file)


def test_a_certificate_must_be_trusted(tmp_path: Path) -> None:
    """At once: no other attempt cures it."""
    certificate, key = issue_certificate(tmp_path)
    model = {"id": MODEL, "sha": "a" * 40, "siblings": []}
    with ScriptedHttp(lambda _: Reply(200, json.dumps(model).encode()), (certificate, key)) as server:
        credentials = {"HF_ENDPOINT": server.url, "HF_HOME": "/nonexistent"}
        with (
            closing(HubSource(SourceUri("hf", MODEL), credentials)) as source,
            pytest.raises(
                FetchError, match=r"^hf://org/model: the certificate of 127\.0\.0\.1 is not trusted.*SSL_"
            ),
        ):
            source.snapshot()
        with closing(
            HubSource(SourceUri("hf", MODEL), {**credentials, "SSL_CERT_FILE": str(certificate)})
        ) as source:
            assert source.snapshot().revision == "a" * 40


def test_the_certificate_of_the_storage_must_be_trusted(hub: HubServer, tmp_path: Path) -> None:
    source = hub_source(hub)
    file = file_of(source.snapshot(), "model.safetensors")
    with ScriptedHttp(lambda _: Reply(200), issue_certificate(tmp_path)) as storage:
        hub.faults.add("resolve", Fault(headers={"Location": f"{storage.url}/objects"}))
        with pytest.raises(FetchError, match="is not trusted"):
            read(source, file)


def test_a_token_is_not_shown_to_the_network() -> None:
    values = {"HF_ENDPOINT": "http://192.0.2.1", "HF_TOKEN": TOKEN}
    with (
        closing(HubSource(SourceUri("hf", MODEL), values)) as source,
        pytest.raises(AccessDenied, match=r"https://, or set HF_HUB_DISABLE_IMPLICIT_TOKEN=1") as caught,
    ):
        source.snapshot()
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize(
    ("status", "error", "text"),
    [
        (403, AccessDenied, "refuses access (the token lacks a scope); check what the token may read"),
        (400, FetchError, "status 400 (the token lacks a scope); check HF_ENDPOINT"),
        (418, FetchError, "status 418 (the token lacks a scope)"),
        (401, AccessDenied, "revoked (the token lacks a scope); set HF_TOKEN"),
    ],
)
def test_the_hub_s_own_words_are_shown(hub: HubServer, status: int, error: type, text: str) -> None:
    words = "the token lacks\u00a0a scope."
    hub.faults.add("list", Fault(status=status, headers={"X-Error-Message": words}))
    with pytest.raises(FetchError) as caught:
        hub_source(hub, HF_TOKEN=TOKEN).snapshot()
    assert type(caught.value) is error
    assert text in str(caught.value)


@pytest.mark.parametrize("kind", ["list", "resolve"])
@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 429, 500])
def test_a_token_that_the_server_sends_back_is_not_shown(hub: HubServer, kind: str, status: int) -> None:
    source = hub_source(hub, HF_TOKEN=TOKEN)
    file = file_of(source.snapshot(), "config.json")
    words = f"Bearer {TOKEN} is refused" + "!" * 2000
    hub.faults.add(
        "list" if kind == "list" else "resolve", Fault(status=status, headers={"X-Error-Message": words})
    )
    with pytest.raises((FetchError, TransientError)) as caught:
        _ = source.snapshot() if kind == "list" else read(source, file)
    assert TOKEN not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_file_s_error_has_no_credential_either(hub: HubServer) -> None:
    source = hub_source(hub, "org/gated", HF_TOKEN=TOKEN)
    snapshot = source.snapshot()
    with pytest.raises(AccessDenied) as caught:
        read(source, file_of(snapshot, "model.safetensors"))
    assert TOKEN not in str(caught.value) + repr(caught.value) + repr(caught.value.__cause__)
    assert isinstance(snapshot.files[0], RemoteFile)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "0"}, 0.0),
        ({"retry-after": " 120 "}, 120.0),
        ({"retry-after": "-5"}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "1e9"}, None),
        ({"retry-after": "9" * 20}, 3600.0),
        (
            {"retry-after": "Wed, 21 Oct 2015 07:28:30 GMT", "date": "Wed, 21 Oct 2015 07:28:00 GMT"},
            30.0,
        ),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT", "date": "Wed, 21 Oct 2015 07:29:00 GMT"}, 0.0),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:40 GMT"}, 10.0),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:40 GMT", "date": "yesterday"}, 10.0),
        ({"ratelimit": '"api";r=0;t=55', "ratelimit-policy": '"fixed window";"api";q=500;w=300'}, 55.0),
        ({"ratelimit": '"resolvers"; r=0; t=9'}, 9.0),
        ({"ratelimit": '"api";r=12;t=55'}, None),
        ({"retry-after": "2", "ratelimit": '"api";r=0;t=55'}, 2.0),
    ],
)
def test_retry_after_is_read_from_seconds_dates_and_rate_limits(
    headers: dict[str, str], seconds: float | None
) -> None:
    assert retry_after_s(headers, lambda: 1445412510.0) == seconds  # 07:28:30
