"""Garbage collector while modules are imported: it rests, and is afterwards as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from argosy_engine.osproc import paused_collector


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    yield
    gc.enable()


def test_the_collector_rests_until_the_block_ends_or_fails() -> None:
    with paused_collector():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), paused_collector():
        raise ImportError
    assert gc.isenabled()


def test_a_program_that_has_disabled_the_collector_keeps_it_so() -> None:
    gc.disable()
    with paused_collector():
        pass
    assert not gc.isenabled()
