"""Generated names fit into a DNS label."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from argosy_operator.names import shorten


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.text("abc-", min_size=1, max_size=90).filter(lambda name: name[0] != "-"), st.integers(12, 63))
def test_shortened_names_fit(name: str, limit: int) -> None:
    short = shorten(name, limit)
    assert len(short) <= limit
    assert short == name or len(name) > limit
    assert short.startswith(name[:1])
