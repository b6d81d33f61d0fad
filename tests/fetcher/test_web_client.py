"""What the fetcher tells web servers, where it follows them, and what it makes of their refusals."""

from __future__ import annotations

import base64
import logging
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from argosy_fetcher.errors import (
    AccessDenied,
    FetchError,
    InvalidSource,
    ModelNotFound,
    SourceChanged,
    TransientError,
)
from argosy_fetcher.sources.http import MAX_DISCARDED_BYTES, MAX_REDIRECTS, retry_after_s
from argosy_fetcher.sources.web import WebClient
from loopback_certificate import issue_certificate
from scripted_http import Asked, Reply, ScriptedHttp


def body(server: ScriptedHttp, path: str, credentials: Mapping[str, str] | None = None) -> bytes:
    url = httpx.URL(server.url + path)
    with closing(WebClient("source", url, credentials or {})) as client:
        return b"".join(client.chunks(client.answer(url, "source: file", {}), "source: file"))


def to(location: str, status: int = 302) -> Reply:
    return Reply(status, headers={"Location": location})


@pytest.fixture
def tls(tmp_path: Path) -> tuple[Path, Path]:
    return issue_certificate(tmp_path)


@pytest.mark.parametrize(
    ("status", "error", "reason"),
    [
        (400, FetchError, "HTTP 400"),
        (
            401,
            AccessDenied,
            r"set ARGOSY_HTTPS_TOKEN and ARGOSY_HTTPS_HOST=127\.0\.0\.1:\d+, or add .* ~/\.netrc",
        ),
        (403, AccessDenied, "HTTP 403"),
        (404, ModelNotFound, "check the URL"),
        (408, TransientError, "HTTP 408"),
        (410, ModelNotFound, "HTTP 410"),
        (412, SourceChanged, "has changed"),
        (416, SourceChanged, "has changed"),
        (418, FetchError, "HTTP 418"),
        (429, TransientError, "HTTP 429"),
        (500, TransientError, "HTTP 500"),
        (503, TransientError, "HTTP 503"),
    ],
)
def test_a_status_tells_what_to_do(
    status: int, error: type[FetchError] | type[TransientError], reason: str
) -> None:
    with ScriptedHttp(lambda _: Reply(status)) as server, pytest.raises(error, match=reason) as failure:
        body(server, "/x")
    assert str(failure.value).startswith("source: file: ")


def test_a_busy_server_says_when_to_come_back() -> None:
    with (
        ScriptedHttp(lambda _: Reply(429, headers={"Retry-After": "17"})) as server,
        pytest.raises(TransientError) as failure,
    ):
        body(server, "/x")
    assert failure.value.retry_after_s == 17


@pytest.mark.parametrize(
    ("value", "wait_s"),
    [
        ("0", 0), (" 5 ", 5), ("9" * 30, 3600), ("", None), ("-5", None), ("soon", None), ("٣", None),
        ("Sat, 21 Nov 2026 10:00:30 GMT", 30), ("Sat, 21 Nov 2026 09:00:00 GMT", 0),
    ],
)  # fmt: skip
def test_retry_after_is_a_number_or_a_date(value: str, wait_s: float | None) -> None:
    ten_o_clock = 1795255200.0
    assert retry_after_s({"retry-after": value}, lambda: ten_o_clock) == wait_s


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("location", ["/b", "b", "{url}/b"])
def test_redirects_are_followed(status: int, location: str) -> None:
    def answer(asked: Asked) -> Reply:
        return to(location.format(url=server.url), status) if asked.path == "/a" else Reply(200, b"there")

    with ScriptedHttp(answer) as server:
        assert body(server, "/a") == b"there"


def test_redirects_have_an_end() -> None:
    with ScriptedHttp(lambda _: to("/again")) as server:
        with pytest.raises(FetchError, match="more than 5 redirects"):
            body(server, "/a")
        assert len(server.asked) == MAX_REDIRECTS + 1


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("http://192.0.2.1/b", "redirects to 192.0.2.1 without encryption"),
        ("http://user:s3cret@127.0.0.1/b", "not followed"),
        ("file:///etc/passwd", "not followed"),
        ("ftp://host/b", "not followed"),
        ("", "not followed"),
        ("https://[::1/b", "not a URL"),
    ],
)
def test_other_redirects_are_refused(location: str, reason: str) -> None:
    with (
        ScriptedHttp(lambda _: to(location)) as server,
        pytest.raises(FetchError, match=reason) as failure,
    ):
        body(server, "/a")
    assert "s3cret" not in str(failure.value)


class Endless(httpx.SyncByteStream):
    """A body without an end, which counts what is read of it."""

    num_bytes = 0

    def __iter__(self) -> Iterator[bytes]:
        while True:
            self.num_bytes += 4096
            yield bytes(4096)


def test_a_body_that_nobody_wants_is_read_up_to_a_bound() -> None:
    stream = Endless()
    with closing(WebClient("source", httpx.URL("https://host/"), {})) as client:
        client.discard(httpx.Response(302, stream=stream, request=httpx.Request("GET", "https://host/")))
    assert 0 < stream.num_bytes <= MAX_DISCARDED_BYTES + 4096


def test_a_signed_address_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    logging.getLogger("test").info("seen")

    def answer(asked: Asked) -> Reply:
        return Reply(200, b"there") if asked.query else to("/b?Signature=hidden")

    with ScriptedHttp(answer) as server:
        assert body(server, "/a") == b"there"
    assert "seen" in caplog.text
    assert "hidden" not in caplog.text


def test_encryption_is_not_given_up(tls: tuple[Path, Path]) -> None:
    with (
        ScriptedHttp(lambda _: Reply(200, b"plain")) as plain,
        ScriptedHttp(lambda _: to(f"{plain.url}/b"), tls) as server,
    ):
        with pytest.raises(FetchError, match="without encryption"):
            body(server, "/a", {"SSL_CERT_FILE": str(tls[0])})
        assert plain.asked == []


def test_a_certificate_must_be_trusted(tls: tuple[Path, Path], tmp_path: Path) -> None:
    with ScriptedHttp(lambda _: Reply(200, b"there"), tls) as server:
        assert body(server, "/a", {"SSL_CERT_FILE": str(tls[0])}) == b"there"
        with pytest.raises(FetchError, match=r"127\.0\.0\.1 is not trusted.* SSL_CERT_FILE"):
            body(server, "/a")
        with pytest.raises(InvalidSource, match="SSL_CERT_FILE"):
            body(server, "/a", {"SSL_CERT_FILE": str(tmp_path / "missing")})


def test_unencrypted_servers_are_loopback_only() -> None:
    with pytest.raises(InvalidSource, match="without encryption"):
        WebClient("source", httpx.URL("http://192.0.2.1/"), {})


def test_a_server_that_is_gone_is_transient() -> None:
    with ScriptedHttp(lambda _: Reply()) as server:
        pass
    with pytest.raises(TransientError, match=r"no answer from 127\.0\.0\.1"):
        body(server, "/a")


@pytest.mark.parametrize(
    "entry", ["machine 127.0.0.1 login me password s3cret", "default login me password s3cret"]
)
@pytest.mark.parametrize("token", ["", "t0ken\n"])
def test_credentials_are_the_token_or_the_hosts_entry(entry: str, token: str, tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text(f"machine other login x password y\n{entry}\n")
    with ScriptedHttp(lambda _: Reply(200)) as server:
        values = {"ARGOSY_HTTPS_TOKEN": token, "ARGOSY_HTTPS_HOST": server.authority}
        body(server, "/a", {"HOME": str(tmp_path), **values})
    sent = server.asked[0].headers.get("authorization")
    if token:
        assert sent == "Bearer t0ken"
    elif entry.startswith("machine"):
        assert sent == f"Basic {base64.b64encode(b'me:s3cret').decode()}"
    else:
        assert sent is None


def test_credentials_stay_with_the_server() -> None:
    with (
        ScriptedHttp(lambda _: Reply(200)) as other,
        ScriptedHttp(lambda asked: to("/b") if asked.path == "/a" else to(f"{other.url}/c")) as server,
    ):
        body(server, "/a", {"ARGOSY_HTTPS_TOKEN": "t0ken", "ARGOSY_HTTPS_HOST": server.authority})
    assert [asked.headers.get("authorization") for asked in server.asked] == ["Bearer t0ken"] * 2
    assert [asked.headers.get("authorization") for asked in other.asked] == [None]


def test_a_refused_token_is_not_shown() -> None:
    with (
        ScriptedHttp(lambda _: Reply(401)) as server,
        pytest.raises(AccessDenied, match="check ARGOSY_HTTPS_TOKEN") as failure,
    ):
        body(server, "/a", {"ARGOSY_HTTPS_TOKEN": "t0ken", "ARGOSY_HTTPS_HOST": server.authority})
    assert "t0ken" not in str(failure.value)


@pytest.mark.parametrize("host", ["", "127.0.0.1", "other.example", "127.0.0.1:1"])
def test_the_token_goes_to_the_host_that_it_is_for(host: str) -> None:
    values = {"ARGOSY_HTTPS_TOKEN": "t0ken", "ARGOSY_HTTPS_HOST": host}
    with ScriptedHttp(lambda _: Reply(401)) as server:
        remedy = f"sent to one host only: set ARGOSY_HTTPS_HOST={server.authority} if"
        with pytest.raises(AccessDenied, match=remedy) as failure:
            body(server, "/a", values)
    assert "authorization" not in server.asked[0].headers
    assert "t0ken" not in str(failure.value)


@pytest.mark.parametrize("form", ["{host}", " https://{host}/ \n"])
def test_the_token_s_host_may_be_written_as_a_url(form: str) -> None:
    with ScriptedHttp(lambda _: Reply(200)) as server:
        host = form.format(host=server.authority)
        body(server, "/a", {"ARGOSY_HTTPS_TOKEN": "t0ken", "ARGOSY_HTTPS_HOST": host})
    assert server.asked[0].headers["authorization"] == "Bearer t0ken"


@pytest.mark.parametrize(
    ("netrc", "token"), [("machine h login l password s3cret trash s3cret", ""), ("", "s3cret\r\nx: y")]
)
def test_malformed_credentials_are_refused_and_not_shown(netrc: str, token: str, tmp_path: Path) -> None:
    (tmp_path / "netrc").write_text(netrc)
    with pytest.raises(AccessDenied) as failure:
        WebClient(
            "source",
            httpx.URL("https://host/"),
            {"NETRC": str(tmp_path / "netrc"), "ARGOSY_HTTPS_TOKEN": token, "ARGOSY_HTTPS_HOST": "host"},
        )
    assert "s3cret" not in str(failure.value)


def test_a_malformed_netrc_that_nobody_named_does_not_matter(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ".netrc").write_text("machine h login l password s3cret trash s3cret")
    with ScriptedHttp(lambda _: Reply(200, b"there")) as server:
        assert body(server, "/a", {"HOME": str(tmp_path)}) == b"there"
    assert f"{tmp_path / '.netrc'} is malformed; its entries are not used" in caplog.text
    assert "s3cret" not in caplog.text


def test_a_named_netrc_must_exist(tmp_path: Path) -> None:
    with pytest.raises(AccessDenied, match="No such file"):
        WebClient("source", httpx.URL("https://host/"), {"NETRC": str(tmp_path / "missing")})


def test_requests_ask_for_files_as_they_are() -> None:
    with ScriptedHttp(lambda _: Reply(200)) as server:
        body(server, "/a")
    headers = server.asked[0].headers
    assert headers["accept-encoding"] == "identity"
    assert headers["user-agent"].startswith("argosy-fetcher/")
