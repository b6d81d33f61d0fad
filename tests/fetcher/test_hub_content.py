"""Reads of a hub's files: ranges, redirects, signed addresses that expire, and connections that break."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

from argosy_fetcher.errors import AccessDenied, FetchError, SourceChanged, TransientError
from argosy_fetcher.progress import Progress
from argosy_fetcher.source import RemoteFile
from argosy_fetcher.sources.hub import HubSource
from argosy_fetcher.transfer import Transfer, TransferSettings
from hub_faults import Fault, Hold
from hub_server import HubServer
from hub_sources import MODEL, file_of, hub_source, read
from scripted_http import ScriptedHttp, file_reply

WEIGHTS = Random(3).randbytes(300_000)
CONFIG = b'{"architectures": ["LlamaForCausalLM"], "note": "' + b"x" * 5000 + b'"}'
FILES = {
    "config.json": CONFIG,
    "model.safetensors": WEIGHTS,
    "sub/with space & #1?.json": b"odd",
    "empty.txt": b"",
}
TOKEN = "hf_reader"


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as hub:
        hub.add_model(MODEL, FILES)
        hub.tokens[TOKEN] = set()
        yield hub


@pytest.fixture
def source(hub: HubServer) -> Iterator[HubSource]:
    source = hub_source(hub, HF_TOKEN=TOKEN)
    source.snapshot()
    hub.forget_requests()
    yield source
    source.close()


@pytest.fixture
def weights(hub: HubServer) -> RemoteFile:
    return file_of(hub_source(hub).snapshot(), "model.safetensors")


@pytest.fixture
def config(hub: HubServer) -> RemoteFile:
    return file_of(hub_source(hub).snapshot(), "config.json")


def broken_read(source: HubSource, file: RemoteFile, start: int, stop: int) -> tuple[bytes, Exception | None]:
    """Return what arrived, and the error that ended it."""
    received = bytearray()
    try:
        for chunk in source.read(file, start, stop):
            received += chunk
    except (FetchError, TransientError) as error:
        return bytes(received), error
    return bytes(received), None


@pytest.mark.parametrize("redirects_small_files", [True, False])
@pytest.mark.parametrize("path", FILES)
def test_a_file_is_read_whole(hub: HubServer, path: str, redirects_small_files: bool) -> None:
    hub.redirects_small_files = redirects_small_files
    source = hub_source(hub)
    file = file_of(source.snapshot(), path)
    assert read(source, file) == FILES[path]
    asked = hub.requests("resolve", path) + hub.requests("content", path)
    assert bool(asked) == bool(FILES[path])


@pytest.mark.parametrize(
    ("start", "stop"),
    [(0, 1), (0, 65_536), (1, 2), (65_535, 65_537), (299_999, 300_000), (100_000, 300_000), (7, 7)],
)
def test_a_range_is_exactly_what_was_asked_for(
    source: HubSource, weights: RemoteFile, start: int, stop: int
) -> None:
    assert read(source, weights, start, stop) == WEIGHTS[start:stop]


def test_the_ranges_of_a_file_share_one_address_and_one_connection(
    hub: HubServer, source: HubSource, weights: RemoteFile
) -> None:
    hub.forget_requests()
    content = b"".join(read(source, weights, start, start + 50_000) for start in range(0, 300_000, 50_000))
    assert content == WEIGHTS
    assert len(hub.requests("resolve")) == 1
    asked = hub.requests("content")
    assert [request.headers["range"] for request in asked] == [
        f"bytes={start}-{start + 49_999}" for start in range(0, 300_000, 50_000)
    ]
    assert len({request.client_port for request in asked}) == 1
    assert hub.sent_bytes == len(WEIGHTS)


def test_the_token_is_sent_to_the_hub_and_to_nobody_else(
    hub: HubServer, source: HubSource, weights: RemoteFile, config: RemoteFile
) -> None:
    hub.forget_requests()
    assert read(source, weights) == WEIGHTS
    assert read(source, config) == CONFIG
    to_hub = [*hub.requests("resolve"), *hub.requests("content", "config.json")]
    assert [request.headers["authorization"] for request in to_hub] == [f"Bearer {TOKEN}"] * 3
    assert [request.is_authorized for request in hub.requests("content", "model.safetensors")] == [False]


def test_neither_the_token_nor_a_signed_address_is_logged(
    hub: HubServer, source: HubSource, weights: RemoteFile, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    logging.getLogger("test").info("seen")
    source.snapshot()
    assert read(source, weights) == WEIGHTS
    assert "seen" in caplog.text
    assert "Signature" not in caplog.text
    assert TOKEN not in caplog.text


def test_an_address_that_has_expired_is_asked_for_once_more(
    hub: HubServer, source: HubSource, weights: RemoteFile
) -> None:
    hub.forget_requests()
    assert read(source, weights, 0, 1000) == WEIGHTS[:1000]
    hub.expire_signatures()
    assert read(source, weights, 1000) == WEIGHTS[1000:]
    assert [request.status for request in hub.requests("content")] == [206, 403, 206]
    assert len(hub.requests("resolve")) == 2


def test_an_address_that_is_refused_when_it_is_new_is_asked_for_once_more(
    hub: HubServer, source: HubSource, weights: RemoteFile
) -> None:
    hub.forget_requests()
    hub.faults.add("content", Fault(status=403))
    assert read(source, weights) == WEIGHTS
    assert len(hub.requests("resolve")) == 2


@pytest.mark.parametrize("status", [400, 401, 403])
def test_a_storage_that_refuses_every_address_is_an_error_that_names_it(
    hub: HubServer, source: HubSource, weights: RemoteFile, status: int
) -> None:
    hub.forget_requests()
    hub.faults.add("content", Fault(status=status), times=2)
    with pytest.raises(
        AccessDenied, match=f"127.0.0.1, where the hub keeps the file, answers with status {status}"
    ):
        read(source, weights)
    assert len(hub.requests("resolve")) == 2
    assert hub.faults.is_used_up


def test_threads_read_at_once_while_addresses_expire(hub: HubServer) -> None:
    files = {f"model-{index}.safetensors": Random(index).randbytes(64_000) for index in range(3)}
    hub.add_model("org/sharded", files)
    source = hub_source(hub, "org/sharded")
    snapshot = source.snapshot()

    def is_right(job: tuple[str, int]) -> bool:
        path, start = job
        return read(source, file_of(snapshot, path), start, start + 4000) == files[path][start : start + 4000]

    jobs = [(path, start) for start in range(0, 64_000, 4000) for path in files]
    with ThreadPoolExecutor(8) as pool:
        for round_ in range(4):
            assert all(pool.map(is_right, jobs[round_::4]))
            hub.expire_signatures()
    assert any(request.status == 403 for request in hub.requests("content"))
    assert not any(request.is_authorized for request in hub.requests())


@pytest.mark.parametrize(
    "tenth",
    [tenth if tenth in (0, 5, 9) else pytest.param(tenth, marks=pytest.mark.full) for tenth in range(10)],
)
def test_a_cut_connection_loses_nothing_that_had_arrived(
    hub: HubServer, source: HubSource, weights: RemoteFile, tenth: int
) -> None:
    hub.forget_requests()
    cut = len(WEIGHTS) * tenth // 10
    hub.faults.add("content", Fault(cut_after=cut))
    received, error = broken_read(source, weights, 0, len(WEIGHTS))
    assert isinstance(error, TransientError)
    assert "hf://org/model: model.safetensors: connection lost" in str(error)
    assert received == WEIGHTS[:cut]
    assert received + read(source, weights, cut) == WEIGHTS
    assert hub.sent_bytes == len(WEIGHTS)


@pytest.mark.parametrize("kind", ["resolve", "content"])
def test_a_connection_closed_without_an_answer_is_transient(
    hub: HubServer, source: HubSource, weights: RemoteFile, kind: str
) -> None:
    hub.faults.add("resolve" if kind == "resolve" else "content", Fault(drops=True))
    with pytest.raises(TransientError, match=r"model\.safetensors: connection lost"):
        read(source, weights)
    assert read(source, weights) == WEIGHTS


def test_bytes_are_handed_on_as_they_arrive(hub: HubServer, source: HubSource, weights: RemoteFile) -> None:
    hold = Hold(after_bytes=1000)
    hub.faults.add("content", Fault(hold=hold, pieces_of=1000))
    chunks = source.read(weights, 0, 3000)
    received = b""
    while len(received) < 1000:
        received += next(chunks)
    assert hold.reached.wait(60)
    assert received == WEIGHTS[:1000]
    hold.release.set()
    assert received + b"".join(bytes(chunk) for chunk in chunks) == WEIGHTS[:3000]


def test_an_abandoned_read_does_not_disturb_the_next(
    hub: HubServer, source: HubSource, weights: RemoteFile
) -> None:
    chunks = source.read(weights, 0, len(WEIGHTS))
    first = next(chunks)
    assert WEIGHTS.startswith(bytes(first))
    del chunks
    assert read(source, weights) == WEIGHTS


def test_other_threads_read_while_one_waits(hub: HubServer, source: HubSource, weights: RemoteFile) -> None:
    hold = Hold()
    hub.faults.add("content", Fault(hold=hold))
    results: list[bytes] = []
    waiting = threading.Thread(target=lambda: results.append(read(source, weights)))
    waiting.start()
    assert hold.reached.wait(60)
    assert read(source, weights) == WEIGHTS
    assert results == []
    hold.release.set()
    waiting.join(60)
    assert results == [WEIGHTS]


@pytest.mark.parametrize(("start", "stop"), [(0, 300_000), (0, 10), (70_000, 70_010), (299_000, 300_000)])
def test_a_server_that_ignores_ranges_yields_no_other_bytes(
    hub: HubServer, source: HubSource, weights: RemoteFile, start: int, stop: int
) -> None:
    hub.faults.add("content", Fault(ignores_range=True, pieces_of=4096))
    assert read(source, weights, start, stop) == WEIGHTS[start:stop]


@pytest.mark.parametrize("has_ranges", [True, False])
def test_a_storage_without_ranges_is_noticed_once_and_sends_a_file_once(
    hub: HubServer, source: HubSource, weights: RemoteFile, tmp_path: Path, has_ranges: bool
) -> None:
    if not has_ranges:
        hub.faults.add("content", Fault(ignores_range=True, pieces_of=4096), times=1000)
    hub.forget_requests()
    settings = TransferSettings(part_bytes=10_000)
    targets = {tmp_path / name: weights for name in ("a", "b")}
    Transfer(source, targets, tmp_path, progress=Progress(), settings=settings, known={}).run()
    assert [path.read_bytes() for path in targets] == [WEIGHTS, WEIGHTS]
    probe, *parts = hub.requests("content")
    assert probe.headers["range"] == "bytes=299999-299999"
    assert len(parts) == (60 if has_ranges else 2)


@pytest.mark.parametrize("is_known", [True, False])
def test_a_resumed_file_of_a_storage_that_now_ignores_ranges_is_not_damaged(
    hub: HubServer, source: HubSource, weights: RemoteFile, tmp_path: Path, is_known: bool
) -> None:
    targets = {tmp_path / "a": weights}
    settings = TransferSettings(part_bytes=10_000, max_parts_in_flight=1)
    hub.faults.add("content", Fault(status=418), after=8)
    with pytest.raises(AccessDenied):
        Transfer(source, targets, tmp_path, progress=Progress(), settings=settings, known={}).run()
    hub.faults.add("content", Fault(ignores_range=True), times=1000)
    if is_known:  # a new process asks anew; this one still believes in ranges
        source = hub_source(hub)
        source.snapshot()
    Transfer(source, targets, tmp_path, progress=Progress(), settings=settings, known={}).run()
    assert (tmp_path / "a").read_bytes() == WEIGHTS


def test_a_storage_that_does_not_say_is_taken_to_have_ranges(
    hub: HubServer, source: HubSource, weights: RemoteFile
) -> None:
    hub.faults.add("content", Fault(status=503))
    hub.forget_requests()
    assert source.can_read_ranges(weights)
    assert source.can_read_ranges(weights)
    assert [request.status for request in hub.requests("content")] == [503]


@pytest.mark.parametrize(
    "fault", [Fault(status=503), Fault(drops=True), Fault(cut_after=0), Fault(cut_after=500)], ids=str
)
def test_an_address_that_fails_is_asked_for_anew(
    hub: HubServer, source: HubSource, weights: RemoteFile, fault: Fault
) -> None:
    assert read(source, weights, 0, 1000) == WEIGHTS[:1000]
    hub.forget_requests()
    hub.faults.add("content", fault)
    received, error = broken_read(source, weights, 0, 1000)
    assert isinstance(error, TransientError)
    assert hub.requests("resolve") == []
    assert received + read(source, weights, len(received), 1000) == WEIGHTS[:1000]
    assert len(hub.requests("resolve")) == 1


def test_an_address_of_a_host_that_is_gone_is_asked_for_anew(
    hub: HubServer, source: HubSource, weights: RemoteFile
) -> None:
    with ScriptedHttp(lambda asked: file_reply(asked, WEIGHTS, {"Connection": "close"})) as edge:
        hub.faults.add("resolve", Fault(headers={"Location": f"{edge.url}/objects"}))
        assert read(source, weights, 0, 1000) == WEIGHTS[:1000]
        assert len(edge.asked) == 1
    hub.forget_requests()
    _, error = broken_read(source, weights, 0, 1000)
    assert isinstance(error, TransientError)
    assert read(source, weights, 0, 1000) == WEIGHTS[:1000]
    assert len(hub.requests("resolve")) == 1


def test_a_body_that_goes_on_after_the_range_is_cut(
    hub: HubServer, source: HubSource, weights: RemoteFile
) -> None:
    body = WEIGHTS[:100] + b"more"
    hub.faults.add("content", Fault(body=body))
    assert read(source, weights, 0, 100) == WEIGHTS[:100]
    assert read(source, weights, 100, 200) == WEIGHTS[100:200]


def test_a_body_that_ends_early_ends_the_iterator(
    hub: HubServer, source: HubSource, weights: RemoteFile
) -> None:
    hub.faults.add("content", Fault(body=WEIGHTS[:60]))
    assert read(source, weights, 0, 100) == WEIGHTS[:60]


WRONG_ANSWERS = {
    "another range": ("content", Fault(moves_range_by=1), TransientError, "answers with another range"),
    "no range named": (
        "content",
        Fault(headers={"Content-Range": ""}),
        TransientError,
        "answers with another range",
    ),
    "a malformed range": (
        "content",
        Fault(headers={"Content-Range": "bytes 0-9/x"}),
        TransientError,
        "answers with another range",
    ),
    "compressed": (
        "content",
        Fault(headers={"Content-Encoding": "gzip"}),
        TransientError,
        "compresses the file",
    ),
    "another length": (
        "content",
        Fault(headers={"Content-Range": "bytes 0-9/11"}),
        SourceChanged,
        "11 bytes instead of 300000; fetch the model anew",
    ),
    "another length of the whole": (
        "content",
        Fault(ignores_range=True, body=b"short"),
        SourceChanged,
        "5 bytes instead of 300000",
    ),
    "another commit": (
        "resolve",
        Fault(headers={"X-Repo-Commit": "f" * 40}),
        SourceChanged,
        "another model.safetensors now than when it listed",
    ),
    "another linked size": (
        "resolve",
        Fault(headers={"X-Linked-Size": "7"}),
        SourceChanged,
        "another model.safetensors now",
    ),
    "another hash": (
        "resolve",
        Fault(headers={"X-Linked-ETag": '"' + "0" * 64 + '"'}),
        SourceChanged,
        "another model.safetensors now",
    ),
    "file gone": (
        "resolve",
        Fault(status=404, headers={"X-Error-Code": "EntryNotFound"}),
        SourceChanged,
        "model.safetensors is not on",
    ),
    "revision gone": (
        "resolve",
        Fault(status=404, headers={"X-Error-Code": "RevisionNotFound"}),
        SourceChanged,
        "the revision is not on",
    ),
    "shorter than the range": ("content", Fault(status=416), SourceChanged, "model.safetensors is not on"),
    "a redirect to a file": (
        "resolve",
        Fault(headers={"Location": "file:///etc/passwd"}),
        FetchError,
        "leads to no web server",
    ),
    "a redirect with a password": (
        "resolve",
        Fault(headers={"Location": "http://user:hidden@127.0.0.1:1/"}),
        FetchError,
        "leads to no web server",
    ),
    "a malformed redirect": (
        "resolve",
        Fault(headers={"Location": "http://[::1/x"}),
        TransientError,
        "model.safetensors: connection lost",
    ),
    "storage busy": ("content", Fault(status=503), TransientError, "127.0.0.1 answers with status 503"),
    "storage teapot": ("content", Fault(status=418), AccessDenied, "answers with status 418"),
}


@pytest.mark.parametrize("case", WRONG_ANSWERS)
def test_wrong_answers_are_told_apart(
    hub: HubServer, source: HubSource, weights: RemoteFile, case: str
) -> None:
    kind, fault, error, message = WRONG_ANSWERS[case]
    hub.faults.add("content" if kind == "content" else "resolve", fault)
    received, caught = broken_read(source, weights, 0, 10)
    assert received == b""
    assert type(caught) is error, caught
    assert message in str(caught)
    assert str(caught).startswith("hf://org/model: ")
    assert not any(hidden in str(caught) for hidden in (TOKEN, "Signature", "hidden"))
    assert hub.faults.is_used_up
    assert read(source, weights, 0, 10) == WEIGHTS[:10]


def test_redirects_without_end_are_transient(hub: HubServer, source: HubSource, weights: RemoteFile) -> None:
    target = f"/{MODEL}/resolve/main/model.safetensors"
    hub.faults.add("resolve", Fault(headers={"Location": target}), times=6)
    with pytest.raises(TransientError, match="more than 5 redirects"):
        read(source, weights)


def test_etags_of_another_kind_say_nothing(hub: HubServer, source: HubSource, config: RemoteFile) -> None:
    for etag in ('W/"5f2-abc"', '"0123456789abcdef0123456789abcdef"', f'W/"{config.version}"'):
        hub.faults.add("resolve", Fault(headers={"ETag": etag}))
        assert read(source, config) == CONFIG


def test_the_hash_of_a_small_file_is_compared_with_its_etag(
    hub: HubServer, source: HubSource, config: RemoteFile
) -> None:
    hub.faults.add("content", Fault(headers={"ETag": '"' + "0" * 40 + '"'}))
    with pytest.raises(SourceChanged, match=r"another config\.json now"):
        read(source, config)


def test_a_storage_that_cannot_be_reached_is_named(
    hub: HubServer, source: HubSource, weights: RemoteFile, unused_tcp_port: int
) -> None:
    target = f"http://127.0.0.1:{unused_tcp_port}/objects?Signature=hidden"
    hub.faults.add("resolve", Fault(headers={"Location": target}))
    with pytest.raises(
        TransientError, match=r"where http://127\.0\.0\.1.* keeps its files, does not answer"
    ) as caught:
        read(source, weights)
    assert "hidden" not in str(caught.value)
