"""Credentials from the environment and from the files of a mounted Secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy_fetcher.errors import InvalidSource
from argosy_fetcher.sources.registry import (
    DIRECTORY_ENV,
    MAX_CREDENTIAL_BYTES,
    MAX_CREDENTIAL_FILES,
    load_credentials,
)


def test_the_environment_is_enough() -> None:
    assert load_credentials({"HF_TOKEN": "t"}) == {"HF_TOKEN": "t"}


def test_files_win_over_the_environment(tmp_path: Path) -> None:
    (tmp_path / "HF_TOKEN").write_text("from a file\n")
    values = load_credentials({"HF_TOKEN": "t", "AWS_REGION": "here", DIRECTORY_ENV: str(tmp_path)})
    assert (values["HF_TOKEN"], values["AWS_REGION"]) == ("from a file", "here")


def test_a_mounted_secret_is_read_through_its_links(tmp_path: Path) -> None:
    """Kubernetes links each key to a file of the folder that ..data links to."""
    (tmp_path / "..2024").mkdir()
    (tmp_path / "..2024" / ".dockerconfigjson").write_text("{}")
    (tmp_path / "..2024" / "HF_TOKEN").write_text("t")
    (tmp_path / "..data").symlink_to("..2024")
    for name in ("HF_TOKEN", ".dockerconfigjson"):
        (tmp_path / name).symlink_to(f"..data/{name}")
    (tmp_path / ".hidden").write_text("x")
    values = load_credentials({DIRECTORY_ENV: str(tmp_path)})
    assert values == {DIRECTORY_ENV: str(tmp_path), "HF_TOKEN": "t", "DOCKER_AUTH_CONFIG": "{}"}


def test_what_cannot_be_read_is_told_without_its_content(tmp_path: Path) -> None:
    with pytest.raises(InvalidSource, match="cannot read /nonexistent"):
        load_credentials({DIRECTORY_ENV: "/nonexistent"})
    (tmp_path / "HF_TOKEN").write_bytes(b"hunter2\xff")
    with pytest.raises(InvalidSource, match="is not UTF-8 text") as refusal:
        load_credentials({DIRECTORY_ENV: str(tmp_path)})
    assert "hunter2" not in str(refusal.value)
    (tmp_path / "HF_TOKEN").write_bytes(b"x" * (MAX_CREDENTIAL_BYTES + 1))
    with pytest.raises(InvalidSource, match="is larger than"):
        load_credentials({DIRECTORY_ENV: str(tmp_path)})


def test_a_directory_of_too_many_files_is_no_directory_of_credentials(tmp_path: Path) -> None:
    for number in range(MAX_CREDENTIAL_FILES + 1):
        (tmp_path / f"K{number}").touch()
    with pytest.raises(InvalidSource, match="has more than 64 files"):
        load_credentials({DIRECTORY_ENV: str(tmp_path)})
