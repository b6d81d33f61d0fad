"""Fetching the source distribution whose tests the conformance sample runs, from an index of the test's own."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from processes import free_port
from scripted_http import Asked, Reply, ScriptedHttp
from vllm_sdist import UNREACHABLE, VERSION, fetched

PROGRAM = Path(__file__).resolve().parent.parent / "conformance" / "vllm_sdist.py"
FILES = ("pyproject.toml", "tests/a.py", "vllm/b.py")


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def index(tmp_path: Path) -> Iterator[str]:
    root = tmp_path / "index"
    (root / "vllm").mkdir(parents=True)
    with tarfile.open(root / "archive.tar.gz", "w:gz") as tar:
        for name in FILES:
            member = tarfile.TarInfo(f"vllm-{VERSION}/{name}")
            member.size = len(name)
            tar.addfile(member, io.BytesIO(name.encode()))
    (root / "vllm" / "index.html").write_text(
        json.dumps({"files": [{"url": "../archive.tar.gz", "hashes": {"sha256": digest(root)}}]})
    )
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(root))) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.002,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def digest(root: Path) -> str:
    return hashlib.sha256((root / "archive.tar.gz").read_bytes()).hexdigest()


def test_tests_are_unpacked_and_nothing_else(index: str, tmp_path: Path) -> None:
    unpacked = fetched(tmp_path / "out", index, digest(tmp_path / "index"))
    found = {file.relative_to(unpacked).as_posix() for file in unpacked.rglob("*") if file.is_file()}
    assert found == {"pyproject.toml", "tests/a.py"}
    assert fetched(tmp_path / "out", "http://127.0.0.1:1") == unpacked
    assert [path.name for path in (tmp_path / "out").iterdir()] == [unpacked.name]


def test_another_archive_is_refused(index: str, tmp_path: Path) -> None:
    sha256 = digest(tmp_path / "index")
    with pytest.raises(ValueError, match="has no vllm"):
        fetched(tmp_path / "out", index)
    with (tmp_path / "index" / "archive.tar.gz").open("ab") as file:
        file.write(b"more")
    with pytest.raises(ValueError, match="has the SHA-256 digest"):
        fetched(tmp_path / "out", index, sha256)
    assert not list((tmp_path / "out").iterdir())


def run_on(index: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(PROGRAM), str(folder)],
        env={**os.environ, "PIP_INDEX_URL": index},
        capture_output=True,
        text=True,
    )


def test_an_unreachable_index_has_an_exit_code_of_its_own(tmp_path: Path) -> None:
    done = run_on(f"http://127.0.0.1:{free_port()}", tmp_path / "out")
    assert done.returncode == UNREACHABLE
    assert "cannot be reached" in done.stderr
    assert "vLLM's tests are not run" in done.stderr


@pytest.mark.parametrize(("status", "code"), [(429, UNREACHABLE), (503, UNREACHABLE), (404, 1), (403, 1)])
def test_an_index_that_is_busy_or_broken_is_one_that_cannot_be_reached_now(
    status: int, code: int, tmp_path: Path
) -> None:
    with ScriptedHttp(lambda asked: Reply(status)) as server:
        done = run_on(server.url, tmp_path / "out")
    assert done.returncode == code, done.stderr
    assert f"HTTP Error {status}" in done.stderr


def test_an_archive_that_ends_early_is_no_wrong_archive(index: str, tmp_path: Path) -> None:
    archive = (tmp_path / "index" / "archive.tar.gz").read_bytes()
    sha256 = digest(tmp_path / "index")
    listed = json.dumps({"files": [{"url": "../archive.tar.gz", "hashes": {"sha256": sha256}}]}).encode()

    def answer(asked: Asked) -> Reply:
        return Reply(200, listed) if asked.path == "/vllm/" else Reply(200, archive, cut_at=100)

    with ScriptedHttp(answer) as server, pytest.raises(ConnectionError, match="ended after 100 of"):
        fetched(tmp_path / "out", server.url, sha256)
    assert not list((tmp_path / "out").iterdir())
