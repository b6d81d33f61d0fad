"""The fleet keys of a mounted Secret, which the kubelet replaces while the program runs."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from argosy_protocol.fleet_keys import LINGER_S, MAX_KEY_BYTES, MAX_LINGERING, FleetKeys

K1, K2, K3 = (letter * 32 for letter in (b"1", b"2", b"3"))


class Mount:
    """A mounted Secret, and a clock that stands still."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now = 0.0

    def write(self, **fields: bytes) -> None:
        for file in self.path.iterdir():
            file.unlink()
        for name, content in fields.items():
            (self.path / name).write_bytes(content)

    def keys(self, fixed: bytes = b"") -> FleetKeys:
        return FleetKeys(fixed, self.path, lambda: self.now)


@pytest.fixture
def mount(tmp_path: Path) -> Mount:
    return Mount(tmp_path)


def test_the_newest_key_comes_first_and_the_old_one_lingers(mount: Mount) -> None:
    mount.write(key=K1)
    keys = mount.keys()
    assert keys.keys == (K1,)
    assert not keys.look()
    mount.write(key=K2)  # as a rotation by a tool that knows one value only
    assert keys.look()
    assert keys.keys == (K2, K1)
    mount.now += LINGER_S
    assert keys.look()
    assert keys.keys == (K2,)


def test_the_previous_key_of_the_secret_is_valid_for_as_long_as_it_is_there(mount: Mount) -> None:
    mount.write(key=K2, previous=K1)
    keys = mount.keys()
    mount.now += 10 * LINGER_S
    assert not keys.look()
    assert keys.keys == (K2, K1)
    mount.write(key=K3, previous=K2)
    assert keys.look()
    assert keys.keys == (K3, K2, K1)
    mount.now += LINGER_S
    assert keys.look()
    assert keys.keys == (K3, K2)


def test_a_rotation_can_be_taken_back(mount: Mount) -> None:
    mount.write(key=K2, previous=K1)
    keys = mount.keys()
    mount.write(key=K1)
    keys.look()
    assert keys.keys == (K1, K2)
    mount.write(key=K2, previous=K2)
    keys.look()
    assert keys.keys == (K2, K1)


@pytest.mark.parametrize(
    "broken",
    [{}, {"key": b""}, {"key": b"short"}, {"key": b"x" * (MAX_KEY_BYTES + 1)}, {"previous": K3}],
    ids=["deleted", "empty", "short", "long", "no key"],
)
def test_a_secret_without_a_usable_key_changes_nothing(
    mount: Mount, broken: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    mount.write(key=K1)
    keys = mount.keys()
    mount.write(**broken)
    for _ in range(3):
        mount.now += LINGER_S
        assert not keys.look()
    assert keys.keys == (K1,)
    assert "/key" in keys.problem
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1, "each problem is logged once"
    assert all(key.decode() not in caplog.text for key in (K1, K3))
    mount.write(key=K2)
    assert keys.look()
    assert not keys.problem


@pytest.mark.parametrize("fixed", [b"", K1], ids=["router", "operator"])
def test_a_first_installation_whose_secret_is_not_mounted_yet_is_no_error(
    mount: Mount, fixed: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    keys = mount.keys(fixed)
    assert [(record.levelno, "no fleet key yet" in record.message) for record in caplog.records] == [
        (logging.INFO, True)
    ]
    assert "/key" in keys.problem
    mount.write(key=K2)
    assert keys.look()
    assert not keys.problem


def test_an_unusable_previous_key_does_not_hold_up_the_new_one(mount: Mount) -> None:
    mount.write(key=K1)
    keys = mount.keys()
    mount.write(key=K2, previous=b"short")
    assert keys.look()
    assert keys.keys == (K2, K1)
    assert "previous" in keys.problem


def test_a_key_that_was_given_counts_until_the_files_come(mount: Mount) -> None:
    """The operator's first start: it makes the Secret, and the kubelet mounts it later."""
    keys = mount.keys(fixed=K1)
    assert keys.keys == (K1,)
    mount.write(key=K1)
    assert not keys.look()
    assert FleetKeys(K1).keys == (K1,)
    assert FleetKeys().keys == ()


def test_the_keys_that_linger_are_bounded(mount: Mount) -> None:
    keys = mount.keys()
    made = [b"%032d" % number for number in range(MAX_LINGERING + 3)]
    for key in made:
        mount.write(key=key)
        keys.look()
    assert keys.keys == tuple(reversed(made[2:]))
