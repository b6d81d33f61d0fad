"""Loading images from URLs that clients choose: what is refused, and where connections go."""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import os
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from argosy_engine.errors import InvalidRequest
from argosy_engine.frontend.media import loader as module
from argosy_engine.frontend.media.loader import Address, MediaLoader, decode_data_url, is_public
from image_processors import data_url, encoded, picture

PNG = encoded(picture(4, 3))
JPEG = encoded(picture(4, 3), "JPEG")
Handler = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


def is_ours(address: Address) -> bool:
    return str(address) == "127.0.0.1"


def response(body: bytes, *lines: str, status: str = "200 OK") -> bytes:
    return "\r\n".join((f"HTTP/1.1 {status}", *lines, "", "")).encode() + body


def whole(body: bytes = PNG, kind: str = "image/png", *lines: str) -> bytes:
    return response(body, f"Content-Type: {kind}", f"Content-Length: {len(body)}", *lines)


@asynccontextmanager
async def host(handle: Handler) -> AsyncIterator[int]:
    """A server on 127.0.0.1 that gives each request to `handle`; yields its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handle(await reader.readuntil(b"\r\n\r\n"), writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


def answering(*answers: bytes) -> Handler:
    """Answer requests one after the other; the last answer repeats."""
    left = list(answers)

    async def handle(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(left.pop(0) if len(left) > 1 else left[0])

    return handle


async def load(handle: Handler, url: str = "http://127.0.0.1:{port}/a.png", **options: Any) -> module.Media:
    async with host(handle) as port:
        domains = options.pop("domains", (f"127.0.0.1:{port}",))
        made = MediaLoader(domains, permits=options.pop("permits", is_ours), **options)
        return await made.load(url.format(port=port), "image_url")


async def test_an_image_is_fetched_with_nothing_of_the_client() -> None:
    asked = []

    async def handle(request: bytes, writer: asyncio.StreamWriter) -> None:
        asked.append(request)
        writer.write(whole())

    found = await load(handle, "http://127.0.0.1:{port}/a.png?b=c")
    assert (found.data, found.format) == (PNG, "png")
    lines = asked[0].decode().split("\r\n")
    assert lines[0] == "GET /a.png?b=c HTTP/1.1"
    names = {line.partition(":")[0].lower() for line in lines[1:] if line}
    assert names == {"host", "accept", "accept-encoding", "user-agent", "connection"}


@pytest.mark.parametrize(
    "answer",
    [
        response(PNG, "Content-Type: application/octet-stream"),  # ended by the connection
        response(b"%x\r\n%b\r\n0\r\n\r\n" % (len(PNG), PNG), "Transfer-Encoding: chunked"),
        whole(JPEG, "image/jpg"),
    ],
)
async def test_forms_of_responses(answer: bytes) -> None:
    assert (await load(answering(answer))).data in (PNG, JPEG)


def moved(target: str, status: str = "302 Found") -> bytes:
    return response(b"", f"Location: {target}", "Content-Length: 0", status=status)


async def test_a_redirect_is_followed() -> None:
    assert (await load(answering(moved("/other"), whole()))).data == PNG


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (moved("http://169.254.169.254/latest/meta-data"), "images are not fetched from 169.254.169.254"),
        (moved("http://localhost/x"), "images are not fetched from localhost"),
        (moved("file:///etc/passwd"), "the URL is malformed"),
        (moved("http://user:password@127.0.0.1/x"), "must not have a user or a password"),
        (moved("/again"), "too many redirects"),
        (moved(""), "too many redirects"),
        (whole(PNG, "image/jpeg"), "is declared as 'image/jpeg', but its content is png"),
        (whole(b"<html>", "text/html"), "is no PNG, JPEG, WebP or GIF"),
        (whole(b"", "image/png"), "the image is empty"),
        (whole(PNG, "image/png", "Content-Encoding: gzip"), "compresses it without being asked"),
        (response(b"", "Content-Length: 0", status="404 Not Found"), "status 404"),
        (response(b"", f"Content-Length: {1 << 40}"), "more than 32 MiB"),
        (response(PNG[:9], f"Content-Length: {len(PNG)}"), "the connection failed"),
        (response(b"", "X: " + "a" * 100_000), "too many headers"),
        (b"HTTP/9 what\r\n\r\n", "cannot be fetched"),
        (b"", "the connection failed"),
    ],
)
async def test_what_hosts_must_not_do(answer: bytes, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        await load(answering(answer))


async def test_a_redirect_to_what_is_no_url() -> None:
    with pytest.raises(InvalidRequest, match="the URL is malformed"):
        await load(answering(response(b"", "Location: http://[x", status="302 Found")))


async def test_a_host_without_an_end_is_cut_off() -> None:
    async def endless(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(response(b"", "Content-Type: image/png"))
        while True:
            writer.write(bytes(1 << 16))
            await writer.drain()

    with pytest.raises(InvalidRequest, match="more than 32 MiB"):
        await load(endless)


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n\x89PNG"])
async def test_a_slow_host_is_given_up(sent: bytes) -> None:
    released = asyncio.Event()

    async def slow(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        await released.wait()

    async with host(slow) as port:
        made = MediaLoader((f"127.0.0.1:{port}",), permits=is_ours, timeout_s=0.05)
        with pytest.raises(InvalidRequest, match=r"did not arrive within 0\.05 s"):
            await made.load(f"http://127.0.0.1:{port}/", "image_url")
        released.set()


@pytest.mark.parametrize(
    "name", ["127.0.0.1", "0.0.0.0", "10.1.2.3", "169.254.169.254", "192.168.0.1", "100.64.0.1", "[::1]", "[fe80::1]",
             "[::ffff:10.0.0.1]", "[64:ff9b::a00:1]", "[2002:a00:1::]", "[fc00::1]", "224.0.0.1", "localhost"],
)  # fmt: skip
async def test_private_addresses_are_refused_whatever_the_flag_says(name: str) -> None:
    made = MediaLoader((name,))
    with pytest.raises(InvalidRequest, match=r"is in a private network|has no address"):
        await made.load(f"http://{name}/a.png", "image_url")


def test_public_addresses() -> None:
    for text in ("93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946", "::ffff:93.184.216.34"):
        assert is_public(ipaddress.ip_address(text)), text


async def test_the_connection_goes_to_the_address_that_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that resolves to another address the second time (DNS rebinding) has no second time."""
    resolved: list[str] = []
    async with host(answering(whole())) as port:
        loop = asyncio.get_running_loop()
        real = loop.getaddrinfo

        async def getaddrinfo(name: str, *args: Any, **options: Any) -> Any:
            resolved.append(name)
            return await real("127.0.0.1" if resolved.count(name) == 1 else "127.0.0.2", *args, **options)

        monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
        made = MediaLoader((f"images.example:{port}",), permits=is_ours)
        assert (await made.load(f"http://images.example:{port}/", "image_url")).data == PNG
    assert resolved.count("images.example") == 1


async def test_a_name_with_one_private_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 80)) for each in ("93.184.216.34", "10.0.0.1")
    ]

    async def getaddrinfo(*_: Any, **__: Any) -> Any:
        return found

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    with pytest.raises(InvalidRequest, match="is in a private network"):
        await MediaLoader(("images.example",)).load("http://images.example/", "image_url")


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://other.example/a.png", "images are not fetched from other.example"),
        ("http://example.com.evil.example/", "images are not fetched from example.com.evil.example"),
        ("http://example.com:22/", "images are not fetched from example.com"),
        ("https://example.com@evil.example/", "must not have a user"),
        ("http://example.com/a b", "the URL is malformed"),
        ("http://example.com/a\r\nX: y", "the URL is malformed"),
        ("http://exämple.com/", "the URL is malformed"),
        ("http://example.com:99999/", "the URL is malformed"),
        ("http:///a", "the URL is malformed"),
        ("http://example.com/" + "a" * 5000, "longer than 4096"),
        ("gopher://example.com/", "must be a URL that begins with data:"),
        ("", "must be a URL that begins with data:"),
        ("image.png", "must be a URL that begins with data:"),
    ],
)
async def test_urls_that_are_refused(url: str, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        await MediaLoader(("example.com",)).load(url, "image_url")


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("data:image/png;base64,", "the image is empty"),
        ("data:image/png,abc", "must have the form data:image/png;base64,DATA"),
        ("data:image/png;base64", "must have the form"),
        ("data:image/png;base64,a", "is not valid base64"),
        ("data:image/png;base64,ab*d", "is not valid base64"),
        (data_url(PNG, "jpeg"), "declared as 'image/jpeg', but its content is png"),
        (data_url(JPEG), "declared as 'image/png', but its content is jpeg"),
        (data_url(b"%PDF-1.7"), "is no PNG, JPEG, WebP or GIF"),
        (data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "svg+xml"), "is no PNG, JPEG, WebP or GIF"),
        ("data:image/png;base64," + "A" * (45 << 20), "more than 32 MiB"),
    ],
    ids=range(10),
)
def test_data_urls_that_are_refused(url: str, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        decode_data_url(url, "image_url")


@pytest.mark.parametrize(
    "written",
    [
        base64.b64encode(PNG).decode().rstrip("="),
        base64.encodebytes(PNG).decode(),
        base64.urlsafe_b64encode(PNG).decode(),
        base64.b64encode(PNG).decode().replace("+", "%2B").replace("/", "%2F"),
    ],
)
def test_base64_as_clients_write_it(written: str) -> None:
    for head in ("data:image/png;base64,", "data:;base64,", "DATA:IMAGE/PNG;charset=x;BASE64,"):
        assert decode_data_url(head + written, "image_url").data == PNG


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "media"
    (root / "inner").mkdir(parents=True)
    (root / "inner" / "a b.png").write_bytes(PNG)
    (tmp_path / "secret.png").write_bytes(PNG)
    (root / "link.png").symlink_to(tmp_path / "secret.png")
    (root / "inside.png").symlink_to(root / "inner" / "a b.png")
    (root / "up").symlink_to(tmp_path)
    os.mkfifo(root / "pipe")
    return root


@pytest.mark.parametrize(
    "path", ["{root}/inner/a%20b.png", "{root}/inside.png", "{root}/inner/../inside.png"]
)
async def test_files_below_the_folder_are_read(path: str, folder: Path) -> None:
    found = await MediaLoader(allowed_path=str(folder)).load(
        "file://" + path.format(root=folder), "image_url"
    )
    assert found.data == PNG


@pytest.mark.parametrize(
    "path",
    [
        *(
            "{root}/../secret.png",
            "{root}/%2e%2e/secret.png",
            "{root}/link.png",
            "{root}/up/secret.png",
            "{root}",
        ),
        *("{root}/pipe", "{root}/none.png", "/etc/passwd", "/dev/zero", "{root}/a%00.png"),
        *("//evil.example{root}/inside.png", "{root}/" + "a" * 5000, "//[x"),
    ],
)
async def test_other_files_are_not(path: str, folder: Path) -> None:
    """And no message tells which of them are there."""
    url = "file://" + path.format(root=folder).removeprefix("//")
    with pytest.raises(InvalidRequest) as refused:
        await MediaLoader(allowed_path=str(folder)).load(url, "image_url")
    assert str(refused.value) == (
        "image_url: the file cannot be read, or is not below --allowed-local-media-path"
    )


async def test_a_tenant_with_slow_hosts_leaves_places_to_others() -> None:
    asked, is_answered = asyncio.Semaphore(0), asyncio.Event()

    async def handle(request: bytes, writer: asyncio.StreamWriter) -> None:
        if b"slow" in request:
            asked.release()
            await is_answered.wait()
        writer.write(whole())

    async with host(handle) as port:
        loader, url = MediaLoader((f"127.0.0.1:{port}",), permits=is_ours), f"http://127.0.0.1:{port}/"
        slow = [asyncio.ensure_future(loader.load(f"{url}slow", "image_url", "a")) for _ in range(40)]
        for _ in range(12):
            await asked.acquire()
        for left in slow[30:]:
            left.cancel()
        assert (await loader.load(f"{url}a.png", "image_url", "b")).data == PNG
        assert asked.locked()
        is_answered.set()
        assert all(each.data == PNG for each in await asyncio.gather(*slow[:30]))
        assert (await loader.load(f"{url}a.png", "image_url", "b")).data == PNG


@pytest.mark.parametrize("path", ["{root}/pipe", "{root}/up/secret.png", "{root}/link.png", "/dev/zero"])
async def test_other_files_are_not_even_opened(
    path: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe's writer would take the engine for its reader, and some devices act when they are opened."""
    opened: list[str] = []
    open_file = os.open

    def opening(path: Any, *args: Any, **options: Any) -> int:
        opened.append(path)
        return open_file(path, *args, **options)

    monkeypatch.setattr(os, "open", opening)
    loader = MediaLoader(allowed_path=str(folder))
    with pytest.raises(InvalidRequest):
        await loader.load("file://" + path.format(root=folder), "image_url")
    assert not opened
    await loader.load(f"file://{folder}/inside.png", "image_url")
    assert len(opened) == 1


async def test_what_takes_long_to_decode_does_not_hold_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Escapes take thirty times as long as base64, and a request may have hundreds of such URLs."""
    threads: list[threading.Thread] = []

    def decode(url: str, where: str) -> module.Media:
        threads.append(threading.current_thread())
        return decode_data_url(url, where)

    monkeypatch.setattr(module, "decode_data_url", decode)
    body = base64.b64encode(PNG + bytes(60_000)).decode()
    escaped = "".join(f"%{ord(char):02X}" for char in body)
    for text, is_inline in ((body, True), (escaped, False), ("\n".join(body), False)):
        threads.clear()
        found = await MediaLoader().load(f"data:image/png;base64,{text}", "image_url")
        assert found.data == PNG + bytes(60_000)
        assert (threads == [threading.main_thread()]) is is_inline


async def test_no_file_is_read_without_the_flag(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="--allowed-local-media-path"):
        await MediaLoader().load(f"file://{folder}/inside.png", "image_url")
