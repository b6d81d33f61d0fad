"""Pruning the stores of many tenants: the order, what stays, and tenants that are hostile."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

import pytest

from argosy_fetcher import store_tree
from argosy_fetcher.disk import FreeSpace, SharedLock, exclusive_lock
from argosy_fetcher.store_index import LAST_USE, LOCK, MANIFEST, PARTIAL_PREFIX, TRASH_PREFIX
from argosy_fetcher.store_tree import PruneLimits, TreePruned, prune_tree

NOW = 2_000_000_000.0
HOUR_S = 3600.0
SIZE = 64 << 10
ALL = PruneLimits(0, None, min_age=HOUR_S)
SOURCE = "hf-acme-tiny-0123abcd"


def add(tree: Path, where: str, hours_ago: float, num_files: int = 1) -> Path:
    """Add a model at NAMESPACE/SCOPE/SOURCE/REVISION."""
    path = tree / where
    path.mkdir(parents=True)
    for name in (MANIFEST, LAST_USE):
        (path / name).touch()
    for number in range(num_files):
        (path / f"model-{number}.safetensors").write_bytes(b"x" * SIZE)
    (path.parent / LOCK).touch()
    use(path, hours_ago)
    return path


def use(path: Path, hours_ago: float) -> None:
    then = NOW - hours_ago * HOUR_S
    for file in (*path.iterdir(), path):
        os.utime(file, (then, then), follow_symlinks=False)


def prune(tree: Path, limits: PruneLimits) -> TreePruned:
    return prune_tree(tree, limits, now=lambda: NOW)


def test_all_stores_are_one_pool_in_the_order_of_their_use(tmp_path: Path) -> None:
    places = [f"blue/public/{SOURCE}/a", f"green/secret-hub/{SOURCE}/b", f"blue/secret-hub/{SOURCE}/c"]
    oldest, old, new = (add(tmp_path, place, hours) for place, hours in zip(places, (9, 5, 2), strict=True))
    pruned = prune(tmp_path, PruneLimits(2 * SIZE, None, min_age=HOUR_S))
    assert [str(model) for model in pruned.removed] == places[:1]
    assert (pruned.removed[0].size, pruned.kept_bytes) == (SIZE, 2 * SIZE)
    assert [path.exists() for path in (oldest, old, new)] == [False, True, True]
    pruned = prune(tmp_path, PruneLimits(None, 4 * HOUR_S, min_age=HOUR_S))
    assert [str(model) for model in pruned.removed] == places[1:2]
    assert prune(tmp_path, PruneLimits(SIZE, 4 * HOUR_S, min_age=HOUR_S)).removed == ()


def test_what_is_held_fetched_or_just_used_stays(tmp_path: Path) -> None:
    held = add(tmp_path, f"blue/public/{SOURCE}/held", 9)
    add(tmp_path, f"blue/public/{SOURCE}/used", 0.5)
    fetched = add(tmp_path, f"green/public/{SOURCE}/{PARTIAL_PREFIX}abc", 9)
    with SharedLock(held / LAST_USE), exclusive_lock(fetched.parent / LOCK, lambda: None):
        pruned = prune(tmp_path, ALL)
    assert pruned.removed == ()
    assert {model.path[3] for model in pruned.in_use} == {"held", fetched.name}
    use(held, 9)
    assert len(prune(tmp_path, ALL).removed) == 2


def test_a_model_that_is_used_before_its_turn_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = add(tmp_path, f"blue/public/{SOURCE}/a", 9)
    flock = fcntl.flock

    def use_then_lock(descriptor: int, kind: int) -> None:
        use(path, 0.0)
        flock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", use_then_lock)
    assert len(prune(tmp_path, ALL).in_use) == 1
    assert path.exists()


def test_what_is_no_model_stays(tmp_path: Path) -> None:
    for name in ("no-source", "Not-A-Tenant"):
        (tmp_path / "blue/public" / name / "a").mkdir(parents=True)
    add(tmp_path, f"UPPER/public/{SOURCE}/a", 9)
    (tmp_path / "blue/public/file-0123abcd").touch()
    assert prune(tmp_path, ALL) == TreePruned((), (), (), 0)


def test_no_link_is_followed(tmp_path: Path) -> None:
    tree, outside = tmp_path / "tree", tmp_path / "outside"
    victim = add(outside, f"ns/scope/{SOURCE}/a", 9)
    own = add(tree, f"blue/public/{SOURCE}/own", 9)
    (tree / "linked-ns").symlink_to(outside / "ns")
    (tree / "blue/linked").symlink_to(victim.parent.parent)
    (tree / "blue/public/hf-linked-0123abcd").symlink_to(victim.parent)
    (own.parent / "linked").symlink_to(victim)
    (own / "folder").symlink_to(victim)
    (own / "file").symlink_to(victim / "model-0.safetensors")
    (own / LAST_USE).unlink()
    (own / LAST_USE).symlink_to(victim / LAST_USE)
    use(own, 9)
    with SharedLock(victim / LAST_USE):  # held by another tenant; not by this one
        pruned = prune(tree, ALL)
    assert [model.path[3] for model in pruned.removed] == ["own"]
    assert not own.exists()
    assert sorted(path.name for path in victim.iterdir()) == [MANIFEST, LAST_USE, "model-0.safetensors"]


def test_a_directory_that_becomes_a_link_in_between_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look and the removal the tenant replaces its directory by a link to another tenant's."""
    tree = tmp_path
    own = add(tree, f"blue/public/{SOURCE}/a", 9).parent
    victim = add(tree, f"green/public/{SOURCE}/a", 2)
    opened = os.open
    looks = [0]

    def swap(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        looks[0] += path == "a"
        if path == SOURCE and looks[0] == 2:  # both were looked at; now comes the first removal
            looks[0] += 1
            own.rename(own.with_name("away"))
            own.symlink_to(victim.parent)
        return opened(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", swap)
    pruned = prune(tree, PruneLimits(SIZE, None, min_age=HOUR_S))
    assert looks[0] > 2
    assert [model.path[0] for model, _ in pruned.failed] == ["blue"]
    assert (victim / MANIFEST).exists() or [model.path[0] for model in pruned.removed] == ["green"]


def test_a_fifo_does_not_stop_the_round(tmp_path: Path) -> None:
    path = add(tmp_path, f"blue/public/{SOURCE}/a", 9)
    for name in (LAST_USE, MANIFEST):
        (path / name).unlink()
        os.mkfifo(path / name)
    use(path, 9)
    assert len(prune(tmp_path, ALL).removed) == 1
    assert not path.exists()


def test_folders_of_any_depth_are_deleted(tmp_path: Path) -> None:
    path = add(tmp_path, f"blue/public/{SOURCE}/a", 9)
    top = os.open(path, os.O_RDONLY)
    deep = os.dup(top)
    for _ in range(3000):  # more than a path, the interpreter's stack or a process's descriptors can hold
        os.mkdir("d", dir_fd=deep)
        os.mkdir("e", dir_fd=deep)
        below = os.open("d", os.O_RDONLY, dir_fd=deep)
        os.close(deep)
        deep = below
    os.close(deep)
    os.close(top)
    use(path, 9)
    assert len(prune(tmp_path, ALL).removed) == 1
    assert os.listdir(path.parent) == [LOCK]


def test_a_time_in_the_future_counts_as_now(tmp_path: Path) -> None:
    add(tmp_path, f"blue/public/{SOURCE}/a", -10_000)
    add(tmp_path, f"green/public/{SOURCE}/b", 9)
    pruned = prune(tmp_path, PruneLimits(0, None, min_age=0.0))
    assert [(model.path[3], model.last_used_at) for model in pruned.removed][1] == ("a", NOW)


def test_the_work_of_one_store_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_tree, "MAX_ENTRIES", 50)
    add(tmp_path, f"blue/public/{SOURCE}/a", 9, num_files=100)
    (tmp_path / "blue/public" / SOURCE / LOCK).unlink()
    other = add(tmp_path, f"green/public/{SOURCE}/b", 5)
    pruned = prune(tmp_path, ALL)
    sizes = {model.path[0]: model.size for model in pruned.removed}
    assert 0 < sizes["blue"] < 50 * SIZE
    assert sizes["green"] == SIZE
    assert not other.exists()


def test_a_removal_that_takes_too_long_goes_on_in_the_next_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_tree, "MAX_DELETIONS", 50)
    path = add(tmp_path, f"blue/public/{SOURCE}/a", 9, num_files=100)
    ((_, reason),) = prune(tmp_path, ALL).failed
    assert "one round" in reason
    assert not path.exists()
    assert [name for name in os.listdir(path.parent) if name.startswith(TRASH_PREFIX)]
    for _ in range(2):
        prune(tmp_path, ALL)
    assert os.listdir(path.parent) == [LOCK]


def test_shared_files_count_once(tmp_path: Path) -> None:
    first = add(tmp_path, f"blue/public/{SOURCE}/a", 9)
    second = add(tmp_path, f"blue/public/{SOURCE}/b", 5)
    (second / "model-0.safetensors").unlink()
    os.link(first / "model-0.safetensors", second / "model-0.safetensors")
    assert prune(tmp_path, PruneLimits(None, None, min_age=0.0)).kept_bytes == SIZE
    assert stat.S_ISDIR(first.stat().st_mode)


def test_a_tree_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        prune(tmp_path / "none", ALL)


def test_the_age_counts_from_the_last_round_in_which_a_model_was_held(tmp_path: Path) -> None:
    path = add(tmp_path, f"blue/public/{SOURCE}/a", 40 * 24)
    limits = PruneLimits(None, 30 * 24 * HOUR_S, min_age=HOUR_S)
    with SharedLock(path / LAST_USE):  # by an engine that sees the store read-only
        assert prune(tmp_path, limits).removed == ()
    assert prune(tmp_path, limits).removed == ()
    assert (path / LAST_USE).stat().st_mtime == NOW
    use(path, 40 * 24)
    assert len(prune(tmp_path, limits).removed) == 1


def test_models_go_until_so_much_of_the_disk_is_free(tmp_path: Path) -> None:
    add(tmp_path, f"blue/public/{SOURCE}/a", 9)
    assert prune(tmp_path, PruneLimits(None, None, 0.0, FreeSpace(num_bytes=1))).removed == ()
    assert prune(tmp_path, PruneLimits(None, None, 100 * HOUR_S, FreeSpace(percent=100.0))).removed == ()
    assert len(prune(tmp_path, PruneLimits(None, None, 0.0, FreeSpace(percent=100.0))).removed) == 1


def test_the_namespace_that_has_most_gives_first(tmp_path: Path) -> None:
    """Whatever times a tenant gives to its files."""
    small = add(tmp_path, f"blue/public/{SOURCE}/a", 9)
    for name in "bcd":
        add(tmp_path, f"green/public/{SOURCE}/{name}", 2)
    pruned = prune(tmp_path, PruneLimits(2 * SIZE, None, min_age=HOUR_S))
    assert [model.path[0] for model in pruned.removed] == ["green", "green"]
    assert small.exists()


def test_links_outside_of_models_hide_no_bytes(tmp_path: Path) -> None:
    path = add(tmp_path, f"blue/public/{SOURCE}/a", 9)
    for number in range(10):
        os.link(path / "model-0.safetensors", path.parent.parent / f"link-{number}")
    assert prune(tmp_path, PruneLimits(None, None, min_age=0.0)).kept_bytes == SIZE


def test_the_models_of_one_namespace_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_tree, "MAX_MODELS", 3)
    for number in range(4):
        add(tmp_path, f"blue/scope-{number % 2}/{SOURCE}/{number}", 9)
    add(tmp_path, f"green/public/{SOURCE}/a", 9)
    assert prune(tmp_path, PruneLimits(None, None, min_age=0.0)).kept_bytes == 4 * SIZE
