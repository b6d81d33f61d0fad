"""Back-off and free ports."""

from __future__ import annotations

from argosy.local.settings import Settings, backoff_s, free_port, is_port_free


def test_back_off_doubles_up_to_its_cap() -> None:
    settings = Settings(first_backoff_s=0.5, most_backoff_s=30.0)
    delays = [backoff_s(settings, failures) for failures in (1, 2, 3, 7, 8, 10_000)]
    assert delays == [0.5, 1.0, 2.0, 30.0, 30.0, 30.0]


def test_a_replica_that_was_never_ready_is_started_ever_more_rarely() -> None:
    settings = Settings(first_backoff_s=0.5, most_backoff_s=30.0, most_backoff_unready_s=300.0)
    delays = [backoff_s(settings, failures, has_served=False) for failures in (1, 2, 7, 8, 10, 11, 10_000)]
    assert delays == [0.5, 1.0, 32.0, 64.0, 256.0, 300.0, 300.0]


def test_a_free_port_is_free() -> None:
    assert is_port_free(free_port())
