"""Folders of generated code: nobody but the user can write them, or put others in their place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from argosy_engine.native.private_folder import NoPrivateFolder, private_folder


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def modes(*paths: Path) -> list[int]:
    return [path.stat().st_mode & 0o777 for path in paths]


def test_folders_are_made_for_the_user_alone(base: Path) -> None:
    path = private_folder("code")
    assert path == base.resolve() / "argosy" / "code"
    assert modes(base, base / "argosy", path) == [0o700] * 3
    assert private_folder("code") == path


def test_the_base_may_be_a_link_and_a_directory_for_all_with_the_sticky_bit(
    base: Path, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    base.symlink_to(shared)
    assert private_folder("code") == shared.resolve() / "argosy" / "code"


def test_a_folder_made_by_a_lenient_umask_is_tightened(base: Path) -> None:
    (base / "argosy").mkdir(parents=True)
    (base / "argosy").chmod(0o775)
    private_folder("code")
    assert modes(base / "argosy") == [0o755]


@pytest.mark.parametrize("link", ["argosy", "argosy/code"])
def test_links_are_refused(base: Path, tmp_path: Path, link: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (base / link).parent.mkdir(parents=True, mode=0o700)
    (base / link).symlink_to(elsewhere)
    with pytest.raises(NoPrivateFolder, match="is a link; remove it, or set XDG_CACHE_HOME"):
        private_folder("code")
    assert not list(elsewhere.iterdir())


def test_a_directory_in_which_everybody_may_rename_is_refused(base: Path) -> None:
    base.mkdir()
    base.chmod(0o777)
    with pytest.raises(NoPrivateFolder, match=r"everybody may rename what is in .*; set XDG_CACHE_HOME"):
        private_folder("code")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders away")
@pytest.mark.parametrize("foreign", ["", "argosy", "argosy/code"])
def test_folders_of_others_are_refused(base: Path, foreign: str) -> None:
    private_folder("code")
    os.chown(base / foreign, 65534, 65534)
    with pytest.raises(NoPrivateFolder, match="belongs to"):
        private_folder("code")
