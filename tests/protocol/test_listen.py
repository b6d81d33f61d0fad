"""Listening sockets: what they are bound to, and what the errors advise."""

from __future__ import annotations

import errno
import re
import socket
from pathlib import Path

import pytest

from argosy_protocol.program.listen import CannotListen, explain_listen_errors, listen, listen_unix


def test_sockets_listen_at_once() -> None:
    (listening,) = listen("127.0.0.1", 0)
    with listening, socket.create_connection(listening.getsockname()):
        pass


def test_a_taken_port_is_named_with_the_remedy() -> None:
    (first,) = listen("127.0.0.1", 0)
    with first:
        port = first.getsockname()[1]
        expected = re.escape(f"cannot listen on 127.0.0.1:{port}: the port is taken; ")
        with pytest.raises(CannotListen, match=expected + ".* another port with --admin-port"):
            listen("127.0.0.1", port, port_flag="--admin-port")


@pytest.mark.parametrize(
    ("host", "error", "message"),
    [
        ("", OSError(errno.EADDRINUSE, "in use"), r"\*:80: the port is taken; .* --port"),
        ("::1", OSError(errno.EACCES, "no"), r"\[::1\]:80: permission denied; .* above 1023 with --port"),
        ("10.0.0.1", OSError(errno.EADDRNOTAVAIL, "no"), "not an address of this machine; correct --host"),
        ("nowhere", socket.gaierror(socket.EAI_NONAME, "no"), "does not resolve; correct --host"),
        ("h", OSError(errno.EMFILE, "no"), "Too many open files; change --host or --port"),
    ],
)
def test_errors_name_the_remedy(host: str, error: OSError, message: str) -> None:
    with pytest.raises(CannotListen, match=message), explain_listen_errors(host, 80):
        raise error


def test_an_abandoned_unix_socket_is_replaced_and_a_served_one_is_not(tmp_path: Path) -> None:
    path = str(tmp_path / "engine.sock")
    with (
        listen_unix(path),
        pytest.raises(CannotListen, match=r"it exists already; .* another path with --uds"),
    ):
        listen_unix(path)
    with listen_unix(path), socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(CannotListen, match="it exists already"):
        listen_unix(str(file))
    assert file.read_text() == "x"


def test_a_unix_socket_removes_its_own_file_only(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    with listen_unix(str(path)) as first:
        first.unlink()
        assert not path.exists()
        with listen_unix(str(path)) as second:
            first.unlink()
            assert path.exists()
            path.rename(tmp_path / "elsewhere")
            with listen_unix(str(path)):
                second.unlink()
                assert path.exists()


def test_a_path_without_its_directory_is_named_with_the_remedy(tmp_path: Path) -> None:
    path = str(tmp_path / "none" / "socket")
    with pytest.raises(
        CannotListen,
        match=re.escape(f"cannot listen on {path}: No such file or directory; choose a path in a directory"),
    ):
        listen_unix(path)
