"""The router's configuration: flags, environment, files, exit codes and their messages."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from argosy_router.config import ConfigError
from argosy_router.main import EXIT_ADDRESS, EXIT_USAGE, build_parser, config_of, main


@pytest.mark.parametrize(
    ("flags", "environment", "message"),
    [
        ([], {}, "exactly one of"),
        (["--replica", "http://a:1", "--kubernetes"], {}, "exactly one of"),
        (["--replica", "http://a:1", "--replica-dns", "http://a:1"], {}, "exactly one of"),
        (["--replica", "http://a:1", "--host", "0.0.0.0"], {}, "without API keys"),
        (["--kubernetes"], {}, "ARGOSY_FLEET_KEY"),
        (["--replica", "http://a:1", "--max-inflight-bytes", "1000"], {}, "--max-inflight-bytes"),
        (["--fleet-file", "f"], {"ARGOSY_FLEET_KEY": "short"}, "16 bytes"),
        (["--replica", "http://a:1", "--port", "8081"], {}, "--port and --admin-port are both 8081"),
        (
            ["--replica", "http://a:1", "--port", "8081", "--admin-host", "0.0.0.0"],
            {},
            "--port and --admin-port are both 8081",
        ),
    ],
)
def test_unsafe_or_contradictory_configuration_is_refused(
    flags: list[str], environment: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(build_parser().parse_args(flags), environment)


@pytest.mark.parametrize("url", ["127.0.0.1:8082", "http://a:1/v1", "http://user:secret@a:1"])
def test_the_address_of_argosy_batch_must_be_a_url(url: str) -> None:
    """The message does not repeat it, because it may have a password."""
    flags = ["--replica", "http://a:1", "--batch-url", url]
    with pytest.raises(
        ConfigError, match=r"^--batch-url: must be a URL such as http://HOST:PORT, without a path$"
    ):
        config_of(build_parser().parse_args(flags), {"ARGOSY_FLEET_KEY": "k" * 32})


@pytest.mark.parametrize(
    "flags", [["--port", "8081", "--admin-host", "127.0.0.2"], ["--port", "0", "--admin-port", "0"]]
)
def test_ports_of_two_addresses_may_be_the_same(flags: list[str]) -> None:
    config_of(build_parser().parse_args(["--replica", "http://a:1", *flags]), {})


def test_flags_win_over_the_environment() -> None:
    environment = {"ARGOSY_ROUTER_API_KEY": "env", "ARGOSY_REPLICA_KEY": "env"}
    replica = ["--replica", "http://a:1", "--host", "0.0.0.0"]
    assert config_of(build_parser().parse_args(replica), environment).api_keys == ("env",)
    flags = [*replica, "--api-key", "a", "b", "--replica-key", "c"]
    assert config_of(build_parser().parse_args(flags), environment).api_keys == ("a", "b")
    flags = [*replica, "--api-key", "a", "--api-key", "b", "--replica-key", "c"]
    config = config_of(build_parser().parse_args(flags), environment)
    assert (config.api_keys, config.replica_key) == (("a", "b"), "c")


def test_a_file_gives_flags_below_the_environment_and_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "router.yaml"
    path.write_text(
        "replica: [http://a:1, http://b:1]\nqueue-timeout: 5\napi-key: [file]\nmax_inflight_bytes: 64M\n"
        "access-log: false\nidle-timeout: 7\n"
    )
    flags = ["--config", str(path), "--idle-timeout", "8"]
    config = config_of(build_parser().parse_args(flags), {"ARGOSY_ROUTER_API_KEY": "env"})
    assert (config.replicas, config.access_log) == (("http://a:1", "http://b:1"), False)
    assert (config.flow_control.queue_timeout_s, config.server.max_inflight_bytes) == (5.0, 64 << 20)
    assert (config.api_keys, config.upstream.idle_timeout_s) == (("env",), 8.0)


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--host", "0.0.0.0", "--replica", "http://a:1"]) == EXIT_USAGE
    assert "--api-key" in capsys.readouterr().err
    assert main(["--replica", "ftp://a:1"]) == EXIT_USAGE
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["--replica", "http://127.0.0.1:1", "--port", port, "--admin-port", "-1"]) == EXIT_ADDRESS


@pytest.mark.parametrize(
    ("flag", "others"),
    [("--port", ("--admin-port", "-1")), ("--admin-port", ("--port", "0"))],
)
def test_a_taken_port_ends_the_router_with_the_port_and_the_remedy(
    flag: str, others: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["--replica", "http://127.0.0.1:1", flag, port, *others]) == EXIT_ADDRESS
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"argosy router: cannot listen on 127.0.0.1:{port}: the port is taken; ")
    assert line.endswith(f"choose another port with {flag}")


def test_every_flag_has_a_help_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    listed = build_parser().format_help().partition("options:")[2]
    bare = re.compile(r"^  (--\S+(?: [A-Z]+)?)\n(?!   )", re.MULTILINE)
    assert bare.findall(listed) == []


@pytest.mark.parametrize("flag", ["--storage", "--storage=x", "--batch-max-inflight", "--max-file-bytes=1"])
def test_flags_that_have_moved_name_the_program_that_has_them(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--replica", "http://a:1", flag])
    assert stopped.value.code == EXIT_USAGE
    assert "a flag of `argosy batch` now" in capsys.readouterr().err
