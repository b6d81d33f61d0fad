"""Keys of an engine that are rotated while it serves: two are valid meanwhile, and no request is refused."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import pytest

from argosy_engine.api.app import accepted_keys
from argosy_engine.api.http.asgi_layers import LOOK_EVERY_S, MAX_FILE_BYTES, MAX_LINGERING, FollowedKeys
from argosy_engine.api.server_args import ServerArgs
from argosy_engine.errors import ConfigError
from argosy_protocol.headers import internal_key

OLD, NEW = (internal_key(fleet_key, "a-service") for fleet_key in (b"o" * 32, b"n" * 32))


class Engine:
    """An engine's keys, with a clock that stands still."""

    def __init__(self, path: Path, *fixed: str) -> None:
        self.now = 0.0
        self.path = path
        self.keys = FollowedKeys(fixed, path, lambda: self.now)

    def write(self, *lines: str) -> None:
        """Replace the file as a kubelet does, and let the time pass after which it is seen."""
        new = self.path.with_suffix(".new")
        new.write_text("\n".join(lines))
        os.replace(new, self.path)
        self.now += LOOK_EVERY_S

    def accepts(self, key: str) -> bool:
        return self.keys.accepts(f"Bearer {key}")


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    path = tmp_path / "keys"
    path.write_text(f"{OLD}\n")
    return Engine(path)


def test_no_request_is_refused_whichever_side_has_the_new_key_first(engine: Engine) -> None:
    assert (engine.accepts(OLD), engine.accepts(NEW)) == (True, False)
    engine.write(
        "# current, previous", NEW, OLD
    )  # a router may still send the old key, or already the new one
    assert (engine.accepts(OLD), engine.accepts(NEW)) == (True, True)
    engine.write(NEW)
    assert (engine.accepts(OLD), engine.accepts(NEW)) == (False, True)


def test_the_file_is_looked_at_once_a_second_at_most(engine: Engine) -> None:
    assert engine.accepts(OLD)
    engine.path.write_text(NEW)
    engine.now += LOOK_EVERY_S / 2
    assert engine.accepts(OLD), "it was read again too soon"
    engine.now += LOOK_EVERY_S / 2
    assert not engine.accepts(OLD)


@pytest.mark.parametrize("content", ["", "# no key\n\n", "x" * (MAX_FILE_BYTES + 1), None])
def test_a_key_is_required_whatever_happens_to_the_file(
    engine: Engine, content: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    engine.path.unlink() if content is None else engine.path.write_text(content)
    for _ in range(3):
        engine.now += LOOK_EVERY_S
        assert engine.keys
        assert not engine.accepts(OLD)
        assert not engine.accepts("")
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1, "each problem is logged once"
    engine.write(OLD)
    assert engine.accepts(OLD)


def test_keys_of_the_command_line_stay(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "none", "fixed")
    assert engine.accepts("fixed")
    engine.write(NEW)
    assert engine.accepts("fixed")
    assert engine.accepts(NEW)


def test_no_key_is_logged(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    engine.write(NEW, OLD)
    assert engine.accepts(NEW)
    assert any("has 2 keys" in message for message in caplog.messages)
    assert not any(key in caplog.text for key in (NEW, OLD))


def test_an_internal_key_lingers_after_it_has_left_the_file(tmp_path: Path) -> None:
    """A router whose kubelet is slower still sends the old key, and its requests are answered."""
    path = tmp_path / "keys"
    path.write_text(f"{OLD}\n")
    engine = Engine(path)
    engine.keys = FollowedKeys((), path, lambda: engine.now, linger_s=60.0)
    engine.write(NEW)
    assert (engine.accepts(OLD), engine.accepts(NEW)) == (True, True)
    assert engine.keys.found == (NEW,)
    engine.now += 59.0
    assert engine.accepts(OLD)
    engine.now += LOOK_EVERY_S
    assert (engine.accepts(OLD), engine.accepts(NEW)) == (False, True)
    engine.write(OLD)  # the rotation is taken back, and taken back again: none of both lapses meanwhile
    engine.write(NEW)
    engine.write(OLD)
    assert (engine.accepts(OLD), engine.accepts(NEW)) == (True, True)
    engine.now += 60.0
    assert (engine.accepts(OLD), engine.accepts(NEW)) == (True, False)


def test_a_key_lapses_although_nobody_asks(tmp_path: Path) -> None:
    """The first to ask may be whoever it was disclosed to, hours later."""
    path = tmp_path / "keys"
    path.write_text(f"{OLD}\n")
    engine = Engine(path)
    engine.keys = FollowedKeys((), path, lambda: engine.now, linger_s=60.0)
    engine.write(NEW)
    written = time.time() - 30.0
    os.utime(path, (written, written))
    assert engine.accepts(OLD)
    engine.write(OLD)
    assert engine.accepts(OLD)
    engine.write(NEW)
    os.utime(path, (written - 31.0, written - 31.0))
    assert (engine.accepts(OLD), engine.accepts(NEW)) == (False, True)


def test_the_keys_that_linger_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("key-0\n")
    engine = Engine(path)
    engine.keys = FollowedKeys((), path, lambda: engine.now, linger_s=1e9)
    for number in range(1, 3 + MAX_LINGERING):
        engine.write(f"key-{number}")
        assert engine.accepts(f"key-{number}")
    accepted = [number for number in range(3 + MAX_LINGERING) if engine.accepts(f"key-{number}")]
    assert accepted == list(range(2, 3 + MAX_LINGERING)), "the ones that left first are refused first"


def test_beside_internal_keys_the_key_of_the_start_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pod template sets both, for engines that know no file of internal keys. The variable cannot be revoked."""
    path = tmp_path / "api-keys"
    path.write_text(f"{NEW}\n{OLD}\n")
    monkeypatch.setenv("ARGOSY_API_KEY", "of-the-start")
    monkeypatch.setenv("VLLM_API_KEY", "mine")
    assert accepted_keys(ServerArgs()).accepts("Bearer of-the-start")
    monkeypatch.setenv("ARGOSY_INTERNAL_KEYS_FILE", str(path))
    keys = accepted_keys(ServerArgs())
    accepted = [key for key in ("of-the-start", "mine", OLD, NEW) if keys.accepts(f"Bearer {key}")]
    assert accepted == ["mine", OLD, NEW]
    path.unlink()
    assert accepted_keys(ServerArgs()), "a key is required while the file is missing"
    with pytest.raises(ConfigError, match="ARGOSY_INTERNAL_KEYS_FILE"):
        accepted_keys(ServerArgs(api_keys_file=path))
