"""The folders in which torch.compile keeps generated code: shared, bounded, and written by one user only."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from argosy_engine.worker.compilation import (
    MAX_FOLDERS,
    CacheUnavailable,
    CompilationCache,
    cache_key,
    cache_root,
)

CPU = torch.device("cpu")


def names(root: Path) -> set[str]:
    return {each.name for each in root.iterdir() if each.is_dir()}


def use(root: Path, key: str, age: int) -> None:
    """Make a folder that was last used `age` seconds ago, and is not in use."""
    cache = CompilationCache(root, key)
    (cache.path / "code").write_text(key)
    cache.close()
    used = cache.path.stat().st_mtime - age
    os.utime(cache.path, (used, used))


def test_the_oldest_folders_are_removed_unless_they_are_in_use(tmp_path: Path) -> None:
    for age in range(MAX_FOLDERS, 0, -1):
        use(tmp_path, f"used {age} s ago", 100 * age)
    in_use = CompilationCache(tmp_path, f"used {MAX_FOLDERS} s ago")
    used = in_use.path.stat().st_mtime - 10_000
    os.utime(in_use.path, (used, used))
    CompilationCache(tmp_path, "new").close()
    assert len(names(tmp_path)) == MAX_FOLDERS + 1
    CompilationCache(tmp_path, "newer").close()
    assert names(tmp_path) >= {"new", "newer", in_use.path.name}
    assert f"used {MAX_FOLDERS - 1} s ago" not in names(tmp_path)
    assert not (tmp_path / f"used {MAX_FOLDERS - 1} s ago.lock").exists()
    in_use.close()
    CompilationCache(tmp_path, "newest").close()
    assert in_use.path.name not in names(tmp_path)
    assert len(names(tmp_path)) == MAX_FOLDERS


def test_a_folder_is_shared(tmp_path: Path) -> None:
    first, second = CompilationCache(tmp_path, "key"), CompilationCache(tmp_path, "key")
    (first.path / "code").write_text("generated")
    first.close()
    for index in range(MAX_FOLDERS + 1):
        CompilationCache(tmp_path, str(index)).close()
    assert (second.path / "code").read_text() == "generated"
    second.close()


def test_the_key_depends_on_the_settings() -> None:
    assert cache_key(CPU, ["bfloat16", "x"]) == cache_key(CPU, ["bfloat16", "x"])
    assert len({cache_key(CPU, each) for each in (["bfloat16"], ["float16"], ["float", "16"])}) == 3


def test_a_folder_that_others_may_write_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    root = cache_root()
    assert root == tmp_path / "argosy" / "torch_compile"
    assert root.stat().st_mode & 0o777 == 0o700
    root.chmod(0o777)
    with pytest.raises(CacheUnavailable, match="may be written by, somebody else; set XDG_CACHE_HOME"):
        cache_root()


def test_a_folder_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "argosy").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(CacheUnavailable, match="torch_compile cannot be created"):
        cache_root()


def test_a_folder_is_renewed_by_the_first_of_those_that_use_it(tmp_path: Path) -> None:
    (tmp_path / "key").mkdir()
    (tmp_path / "key" / "code").write_text("damaged")
    first, second = CompilationCache(tmp_path, "key"), CompilationCache(tmp_path, "key")
    assert first.has_code
    assert second.has_code
    first.renew()
    assert not list(first.path.iterdir())
    (first.path / "code").write_text("new")
    second.renew()
    assert (first.path / "code").read_text() == "new"
    assert names(tmp_path) == {"key"}
    first.close()
    second.close()
