"""Keys of an engine that are rotated while it serves: two are valid meanwhile, and no request is refused."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from argosy_engine.api.http.followed_keys import LOOK_EVERY_S, MAX_FILE_BYTES, FollowedKeys
from argosy_protocol.bearer_keys import internal_key

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
