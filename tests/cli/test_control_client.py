"""Commands that ask the local fleet: what they say where none runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy.main import main


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["why"], "`kubectl argosy why NAME -n NAMESPACE` asks a cluster"),
        (["why", "qwen"], "`kubectl argosy why qwen -n NAMESPACE` asks a cluster"),
        (["why", "team/qwen"], "`kubectl argosy why qwen -n team` asks a cluster"),
        (["ps"], "`kubectl argosy top -A` asks a cluster"),
        (["logs", "qwen"], "`kubectl argosy logs SERVICE -n NAMESPACE` shows those of a cluster"),
        (["logs"], "`kubectl argosy logs SERVICE -n NAMESPACE` shows those of a cluster"),
        (["route", "model", "Hello"], "`kubectl argosy route MODEL PROMPT` asks a cluster"),
        (["dashboard"], "--admin-url names the admin port of a cluster's router"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_without_a_fleet_a_command_says_how_to_ask_a_cluster(
    words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--state-dir", str(tmp_path)]) == 1
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("flag", [["--state-dir", "DIR"], ["--state-dir=DIR"]], ids=["apart", "in one"])
def test_commands_that_an_error_names_are_for_the_same_fleet(
    flag: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They named that of the current directory."""
    folder = tmp_path / "a fleet"
    words = [word.replace("DIR", str(folder)) for word in flag]
    assert main(["ps", *words]) == 1
    told = capsys.readouterr().err
    assert f"`argosy up --state-dir '{folder}' -f FILE`" in told
    assert "`kubectl argosy top -A` asks a cluster" in told


def test_without_the_flag_no_command_has_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARGOSY_STATE_DIR", str(tmp_path))
    assert main(["ps"]) == 1
    assert "`argosy up -f FILE`" in capsys.readouterr().err
