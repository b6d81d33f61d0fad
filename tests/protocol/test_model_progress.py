"""The report of a fetch: its bounds, and its line for people."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy_protocol.reports import MAX_REPORT_BYTES, WAITING, ModelProgress, percent, summary

GIB = 1 << 30
MODEL = "hf://Qwen/Qwen3-8B"


def progress(phase: str = "fetching", **fields: Any) -> ModelProgress:
    return msgspec.convert({"source": MODEL, "phase": phase, **fields}, ModelProgress)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (progress(fetched_bytes=int(12.1 * GIB), total_bytes=28 * GIB, eta_seconds=70.2),
         "43 % 12.1/28.0 GiB, eta 70 s"),
        (progress(fetched_bytes=0, total_bytes=700, eta_seconds=4000.0), "0 % 0/700 B, eta 67 min"),
        (progress(fetched_bytes=3 * GIB, total_bytes=3072 * GIB, eta_seconds=1e5), "0 % 0.0/3.0 TiB, eta 27.8 h"),
        (progress(fetched_bytes=3, total_bytes=4, eta_seconds=1e300), "75 % 3/4 B, eta 9999.0 h"),
        (progress(fetched_bytes=9 * GIB, total_bytes=GIB), "100 % 1.0/1.0 GiB"),
        (progress(fetched_bytes=GIB, total_bytes=2 * GIB, note="503 from the hub; next attempt in 8 s"),
         "50 % 1.0/2.0 GiB; 503 from the hub; next attempt in 8 s"),
        (progress(fetched_bytes=GIB, total_bytes=2 * GIB, note="old news", eta_seconds=5.0),
         "50 % 1.0/2.0 GiB, eta 5 s"),
        (progress(), "fetching"),
        (progress("waiting", total_bytes=GIB, note="pid 7"), WAITING),
        (progress("blocked", note="pod-7 holds the lock"), "pod-7 holds the lock"),
        (progress("blocked"), WAITING),
        (progress("resolving"), "resolving the revision"),
        (progress("resolving", note="a\x1b[2J\nb"), "resolving the revision; a [2J b"),
        (progress("unpacking"), "unpacking"),
        (progress("unpacking", fetched_bytes=GIB, total_bytes=4 * GIB), "unpacking, 25 % 1.0/4.0 GiB"),
        (progress("done", fetched_bytes=GIB, total_bytes=GIB), "fetched"),
    ],
)  # fmt: skip
def test_summary(made: ModelProgress, expected: str) -> None:
    assert summary(made) == expected


@pytest.mark.parametrize(
    "wrong",
    [
        {"source": "x" * 1025},
        {"revision": "x" * 257},
        {"phase": "sleeping"},
        {"fetched_bytes": -1},
        {"total_bytes": 2**63},
        {"bytes_per_second": -0.1},
        {"eta_seconds": -1.0},
        {"note": "x" * 513},
    ],
    ids=str,
)
def test_a_report_out_of_bounds_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        progress(**{"phase": "fetching", **wrong})


def test_the_longest_report_of_printable_ascii_is_read() -> None:
    made = progress(
        source="s" * 1024,
        revision="r" * 256,
        fetched_bytes=2**63 - 1,
        total_bytes=2**63 - 1,
        bytes_per_second=1.7976931348623157e308,
        eta_seconds=1.7976931348623157e308,
        note='"' * 512,
    )
    assert len(msgspec.json.encode(made)) <= MAX_REPORT_BYTES


SIZES = st.integers(0, 2**63 - 1)


@given(
    phase=st.sampled_from(["waiting", "resolving", "fetching", "unpacking", "done"]),
    fetched=SIZES,
    total=SIZES,
    eta=st.none() | st.floats(0, allow_nan=False),
    note=st.text(max_size=512),
)
def test_any_report_makes_one_printable_line(
    phase: str, fetched: int, total: int, eta: float | None, note: str
) -> None:
    line = summary(
        progress(phase, fetched_bytes=fetched, total_bytes=total, eta_seconds=eta, note=note),
    )
    assert line.isprintable()
    share = percent(line)
    if total and phase in ("fetching", "unpacking"):
        assert share == 100 * min(fetched, total) // total
    else:
        assert share is None or "; " in line


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("43 % 12.1/28.0 GiB, eta 70 s", 43),
        ("unpacking, 7 % 1.0/14.0 GiB", 7),
        ("7 % 1.0/14.0 GiB; unpacking, 9 % of it", 7),
        (WAITING, None),
        ("", None),
        ("resolving the revision; 9 % of the calls fail", None),
    ],
)
def test_percent(line: str, expected: int | None) -> None:
    assert percent(line) == expected
