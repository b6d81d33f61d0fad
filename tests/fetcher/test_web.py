"""Models behind https://: folders with a list of digests."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from urllib.parse import unquote

import pytest

from argosy_fetcher.errors import (
    FetchError,
    InvalidSource,
    ModelNotFound,
    SourceChanged,
    TransientError,
    UnsupportedModel,
)
from argosy_fetcher.selection import COMPANIONS, CONFIG, INDEX, SINGLE
from argosy_fetcher.source import Digest, RemoteFile
from argosy_fetcher.source_uri import parse
from argosy_fetcher.sources.web import MAX_PROBED_FILES, MODEL_SUFFIXES, WebSource
from scripted_http import Asked, Reply, ScriptedHttp, file_reply

CONTENT = bytes(range(256)) * 1000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
ETAG = {"ETag": '"first"'}
DATE = {"Last-Modified": "Sat, 21 Nov 2026 10:00:00 GMT"}
MISSING = Reply(404)


@contextmanager
def opened(
    server: ScriptedHttp, path: str, credentials: Mapping[str, str] | None = None
) -> Iterator[WebSource]:
    with closing(WebSource(parse(server.url + path), credentials or {})) as source:
        yield source


SUMS = f"{SHA256}  model.safetensors\n".encode()


def weights(headers: Mapping[str, str] = ETAG, content: bytes = CONTENT) -> Callable[[Asked], Reply]:
    """Answer as a folder with one file."""

    def answer(asked: Asked) -> Reply:
        if asked.path == "/m/SHA256SUMS":
            return Reply(200, SUMS)
        return file_reply(asked, content, headers) if asked.path == "/m/model.safetensors" else MISSING

    return answer


def listed(answer: Callable[[Asked], Reply]) -> Callable[[Asked], Reply]:
    """Answer with a list of one file, and for the file as a function says."""
    return lambda asked: Reply(200, SUMS) if asked.path.endswith("/SHA256SUMS") else answer(asked)


def everything(source: WebSource, file: RemoteFile) -> bytes:
    return b"".join(source.read(file, 0, file.size))


class Folder:
    """Files with a list of their digests, as a server has them below /m."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = dict(files)
        self.sums = "".join(f"{hashlib.sha256(files[path]).hexdigest()}  {path}\n" for path in files).encode()

    def answer(self, asked: Asked) -> Reply:
        path = unquote(asked.path).removeprefix("/m/")
        if path == "SHA256SUMS":
            return Reply(200, self.sums)
        content = self.files.get(path)
        if content is None:
            return MISSING
        return file_reply(asked, content, {"ETag": f'"{hashlib.md5(content).hexdigest()}"'})


def test_a_folder_has_the_files_of_its_list() -> None:
    folder = Folder({"config.json": b"{}", "sub dir/a#1%41?.safetensors": CONTENT, "empty": b""})
    with ScriptedHttp(folder.answer) as server, opened(server, "/m/SHA256SUMS") as source:
        snapshot = source.snapshot()
        assert snapshot.source == f"{server.url}/m/SHA256SUMS"
        assert {file.path: file.size for file in snapshot.files} == {
            path: len(content) for path, content in folder.files.items()
        }
        for file in snapshot.files:
            content = folder.files[file.path]
            assert file.digest == Digest("sha256", hashlib.sha256(content).hexdigest())
            assert everything(source, file) == content


def test_only_files_that_a_model_can_have_are_asked_for() -> None:
    folder = Folder({"config.json": b"{}", "model.safetensors": CONTENT})
    sums = [f"{SHA256}  shards/{number}.gguf" for number in range(MAX_PROBED_FILES + 1)]
    folder.sums += "\n".join(sums).encode()
    with ScriptedHttp(folder.answer) as server, opened(server, "/m/SHA256SUMS") as source:
        snapshot = source.snapshot()
        assert len(snapshot.files) == MAX_PROBED_FILES + 3
        assert sorted(server.paths()) == ["/m/SHA256SUMS", "/m/config.json", "/m/model.safetensors"]


def test_every_file_that_is_served_has_a_name_that_is_asked_for() -> None:
    assert all(name.endswith(MODEL_SUFFIXES) for name in (CONFIG, INDEX, SINGLE, *COMPANIONS))


def test_more_files_than_any_model_has_are_not_asked_for() -> None:
    folder = Folder({})
    folder.sums = "".join(f"{SHA256}  {number}.json\n" for number in range(MAX_PROBED_FILES + 1)).encode()
    with ScriptedHttp(folder.answer) as server, opened(server, "/m/SHA256SUMS") as source:
        with pytest.raises(
            UnsupportedModel, match=r"names 2001 files that may belong to a model; the limit is 2000"
        ):
            source.snapshot()
        assert server.paths() == ["/m/SHA256SUMS"]


def test_another_attempt_asks_for_what_is_missing_only() -> None:
    folder = Folder({f"{number}.json": b"{}" for number in range(20)})
    is_busy = [True]

    def answer(asked: Asked) -> Reply:
        if asked.path == "/m/7.json" and is_busy:
            is_busy.clear()
            return Reply(503)
        return folder.answer(asked)

    with ScriptedHttp(answer) as server, opened(server, "/m/SHA256SUMS") as source:
        with pytest.raises(TransientError):
            source.snapshot()
        assert len(source.snapshot().files) == 20
        asked = server.paths()
    # `0.json` to `6.json` had been answered when `7.json` failed
    assert all(asked.count(f"/m/{number}.json") == 1 for number in range(7))
    assert asked.count("/m/7.json") == 2


def test_the_revision_of_a_folder_is_its_list_of_digests() -> None:
    revisions = []
    for files in ({"a": b"1", "b": b"2"}, {"b": b"2", "a": b"1"}, {"a": b"1", "b": b"3"}):
        with ScriptedHttp(Folder(files).answer) as server, opened(server, "/m/SHA256SUMS") as source:
            revisions.append(source.snapshot().revision)
    assert revisions[0] == revisions[1] != revisions[2]


def test_a_listed_file_that_the_server_does_not_have_is_named() -> None:
    folder = Folder({"config.json": b"{}", "model.safetensors": CONTENT})
    del folder.files["model.safetensors"]
    with (
        ScriptedHttp(folder.answer) as server,
        opened(server, "/m/SHA256SUMS") as source,
        pytest.raises(ModelNotFound, match=r"SHA256SUMS: model\.safetensors: the server has no such file"),
    ):
        source.snapshot()


@pytest.mark.parametrize(
    ("sums", "error", "reason"),
    [
        (b"", ModelNotFound, "names no files"),
        (b"<html>", UnsupportedModel, "line 1"),
        (b"#" * (5 << 20), UnsupportedModel, "more than"),
        (f"{SHA256}  ../../etc/cron.d/x".encode(), UnsupportedModel, "unsafe name"),
    ],
    ids=["empty", "a page", "too long", "unsafe"],
)
def test_an_unusable_list_is_refused(sums: bytes, error: type[FetchError], reason: str) -> None:
    folder = Folder({})
    folder.sums = sums
    with (
        ScriptedHttp(folder.answer) as server,
        opened(server, "/m/SHA256SUMS") as source,
        pytest.raises(error, match=reason),
    ):
        source.snapshot()


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 1), (0, 256000), (1000, 200_000), (255_999, 256_000), (7, 7)]
)
@pytest.mark.parametrize("has_ranges", [True, False])
def test_ranges_are_read_exactly(start: int, stop: int, has_ranges: bool) -> None:
    def answer(asked: Asked) -> Reply:
        return file_reply(asked, CONTENT, ETAG) if has_ranges else Reply(200, CONTENT, ETAG)

    with ScriptedHttp(listed(answer)) as server, opened(server, "/m/SHA256SUMS") as source:
        (file,) = source.snapshot().files
        assert source.can_read_ranges(file) == has_ranges
        assert b"".join(source.read(file, start, stop)) == CONTENT[start:stop]


def test_a_cut_connection_keeps_what_came() -> None:
    def answer(asked: Asked) -> Reply:
        reply = file_reply(asked, CONTENT, ETAG)
        is_probe = asked.headers["range"] == "bytes=0-0"
        return reply if is_probe else Reply(reply.status, reply.body, reply.headers, cut_at=100_000)

    received = bytearray()

    def receive(source: WebSource, file: RemoteFile) -> None:
        for chunk in source.read(file, 0, file.size):
            received.extend(chunk)

    with ScriptedHttp(listed(answer)) as server, opened(server, "/m/SHA256SUMS") as source:
        (file,) = source.snapshot().files
        with pytest.raises(TransientError, match="cut"):
            receive(source, file)
        assert received == CONTENT[:100_000]


@pytest.mark.parametrize("before", [ETAG, DATE, {"ETag": 'W/"first"'}], ids=["etag", "date", "weak"])
@pytest.mark.parametrize("knows_if_range", [True, False])
def test_a_changed_file_is_noticed(before: Mapping[str, str], knows_if_range: bool) -> None:
    headers = dict(before)

    def answer(asked: Asked) -> Reply:
        kept = {name: value for name, value in asked.headers.items() if knows_if_range or name != "if-range"}
        return file_reply(Asked(asked.method, asked.path, asked.query, kept), CONTENT, headers)

    with ScriptedHttp(listed(answer)) as server, opened(server, "/m/SHA256SUMS") as source:
        (file,) = source.snapshot().files
        assert everything(source, file) == CONTENT
        headers |= {
            name: value.replace("first", "other").replace("10:00", "11:00") for name, value in before.items()
        }
        with pytest.raises(SourceChanged, match="has changed"):
            everything(source, file)


def test_a_file_of_another_size_is_noticed() -> None:
    folder = Folder({"model.safetensors": CONTENT})
    with ScriptedHttp(folder.answer) as server, opened(server, "/m/SHA256SUMS") as source:
        (file,) = source.snapshot().files
        folder.files["model.safetensors"] = CONTENT + b"more"
        with pytest.raises(SourceChanged):
            everything(source, file)


def test_a_file_that_vanishes_is_noticed() -> None:
    folder = Folder({"model.safetensors": CONTENT})
    with ScriptedHttp(folder.answer) as server, opened(server, "/m/SHA256SUMS") as source:
        (file,) = source.snapshot().files
        folder.files.clear()
        with pytest.raises(SourceChanged, match="does not have the file any more"):
            everything(source, file)


def test_a_weak_etag_is_not_sent_as_a_condition() -> None:
    with ScriptedHttp(weights({"ETag": 'W/"first"'})) as server, opened(server, "/m/SHA256SUMS") as source:
        everything(source, source.snapshot().files[0])
        assert all("if-range" not in asked.headers for asked in server.asked)


@pytest.mark.parametrize(
    ("reply", "error", "reason"),
    [
        (Reply(200, CONTENT, ETAG, is_chunked=True), FetchError, "does not say how large"),
        (Reply(206, b"a", {**ETAG, "Content-Range": "bytes 0-0/*"}), FetchError, "does not say how large"),
        (Reply(206, b"a", ETAG), FetchError, "does not say how large"),
        (Reply(206, b"a", {**ETAG, "Content-Range": f"bytes 0-0/{1 << 50}"}), UnsupportedModel, "too large"),
        (Reply(200, b"a", {**ETAG, "Content-Length": "9" * 19}), UnsupportedModel, "too large"),
        (Reply(416, headers={"Content-Range": "bytes */5"}), FetchError, "first byte"),
        (Reply(200, CONTENT, {**ETAG, "Content-Encoding": "gzip"}), FetchError, "compresses the file"),
    ],
    ids=["chunked", "size *", "no range", "large range", "large", "416", "compressed"],
)
def test_answers_that_cannot_be_relied_on_are_refused(
    reply: Reply, error: type[FetchError], reason: str
) -> None:
    with (
        ScriptedHttp(listed(lambda _: reply)) as server,
        opened(server, "/m/SHA256SUMS") as source,
        pytest.raises(error, match=reason),
    ):
        source.snapshot()


def test_an_empty_file_may_have_no_ranges() -> None:
    folder = Folder({"empty": b""})
    with ScriptedHttp(folder.answer) as server, opened(server, "/m/SHA256SUMS") as source:
        (file,) = source.snapshot().files
        assert file.size == 0
        assert everything(source, file) == b""


@pytest.mark.parametrize(
    "span", ["bytes 1-10/256000", "bytes 0-999/256000", "bytes */256000", "items 0-9/256000"]
)
def test_another_range_than_asked_for_is_refused(span: str) -> None:
    def answer(asked: Asked) -> Reply:
        if asked.headers["range"] == "bytes=0-0":
            return file_reply(asked, CONTENT, ETAG)
        return Reply(206, b"x" * 10, {**ETAG, "Content-Range": span})

    with ScriptedHttp(listed(answer)) as server, opened(server, "/m/SHA256SUMS") as source:
        (file,) = source.snapshot().files
        with pytest.raises((FetchError, SourceChanged)):
            list(source.read(file, 0, 10))


def test_connections_are_used_again() -> None:
    ports = set()

    def answer(asked: Asked) -> Reply:
        ports.add(asked.client)
        return file_reply(asked, CONTENT, ETAG)

    with ScriptedHttp(listed(answer)) as server, opened(server, "/m/SHA256SUMS") as source:
        (file,) = source.snapshot().files
        for start in range(0, 100_000, 10_000):
            list(source.read(file, start, start + 10_000))
    assert len(ports) == 1


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("https://host/model", "must be https://HOST/PATH/SHA256SUMS"),
        ("https://host/", "must be https://HOST/PATH/SHA256SUMS"),
        ("https://host/model.tar.gz", "Archives are not read over https://: unpack the model there"),
        (f"https://host/a.zip#sha256={SHA256}", "push it to a registry"),
        ("https://host/a//SHA256SUMS", "malformed"),
        ("https://host/%2e%2e%2fa/SHA256SUMS", "malformed"),
        ("https://host/SHA256SUMS?a=s3cret", "without a query"),
        (f"https://host/SHA256SUMS#sha256={SHA256}", "without a query and a fragment"),
    ],
)
def test_other_urls_are_refused(uri: str, reason: str) -> None:
    with pytest.raises(InvalidSource, match=reason) as failure:
        WebSource(parse(uri), {})
    assert "s3cret" not in str(failure.value)
