"""The histogram of what is observed on the event loop: its text is that of prometheus_client's own."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from argosy_engine.api.observability.metrics import LoopHistogramFamily

BUCKETS = (0.001, 0.01, 0.25, 1.0, 10.0)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 20) | st.sampled_from(BUCKETS))))
def test_the_text_is_that_of_the_librarys_histogram(observed: list[tuple[str, float]]) -> None:
    own, theirs = CollectorRegistry(auto_describe=True), CollectorRegistry(auto_describe=True)
    family = LoopHistogramFamily("x:seconds", "Some time.", ("engine", "rank"), BUCKETS, own)
    histogram = Histogram("x:seconds", "Some time.", ("engine", "rank"), buckets=BUCKETS, registry=theirs)
    for engine in "ab":
        family.labels(engine, "0")
        histogram.labels(engine, "0")
    for engine, value in observed:
        family.labels(engine, "0").observe(value)
        histogram.labels(engine, "0").observe(value)
    texts = [
        re.sub(r"(_created\{.*\}) .*", r"\1", generate_latest(registry).decode())
        for registry in (own, theirs)
    ]
    assert texts[0] == texts[1]
    assert texts[0].count("_bucket{") == 2 * (len(BUCKETS) + 1)
