"""The progress of a model's fetch, from the pod that fetches to the operator.

`argosy models pull --progress-port PORT` serves it as JSON at `GET PROGRESS_PATH` while it runs. Owns the report and
its one line for people. Must not know who fetches, or who reads. Invariant: a summary is one printable line, whatever
the report says.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

PROGRESS_PATH: Final = "/progress"
MAX_REPORT_BYTES: Final = 4096
"""A longer report is not read."""

Phase = Literal["waiting", "blocked", "resolving", "fetching", "unpacking", "done"]
"""`waiting`: another process fetches the model into the same store. `blocked`: that process has made no progress for
long, and the note names it. `resolving`: the source is asked for the revision and its files."""

NumBytes = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class ModelProgress(Struct, frozen=True, kw_only=True):
    """What one fetch has done so far."""

    source: Annotated[str, Meta(max_length=1024)]
    revision: Annotated[str, Meta(max_length=256)] = ""
    """Empty until it is resolved."""
    phase: Phase
    fetched_bytes: NumBytes = 0
    """Bytes that are in the store, those of earlier attempts included."""
    total_bytes: NumBytes = 0
    """0 until the files are known."""
    bytes_per_second: Annotated[float, Meta(ge=0.0)] = 0.0
    eta_seconds: Annotated[float, Meta(ge=0.0)] | None = None
    """None while it cannot be told: before the first bytes, and while none arrive."""
    note: Annotated[str, Meta(max_length=512)] = ""
    """The last event, such as a retry after a failure."""


WAITING: Final = "waiting for another pod that fetches it"
"""Summary of a fetch whose phase is `waiting`."""

_MAX_HOURS: Final = 9999.0
_UNITS: Final = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def summary(progress: ModelProgress) -> str:
    """Describe a fetch in one line: `43 % 12.1/28.0 GiB, eta 70 s`. While nothing arrives, the note says why."""
    note = "".join(char if char.isprintable() else " " for char in progress.note).strip()
    if progress.phase == "waiting":
        return WAITING
    if progress.phase == "blocked":
        return note or WAITING
    if progress.phase == "done":
        return "fetched"
    if progress.phase == "resolving":
        text = "resolving the revision"
    elif progress.phase == "unpacking":
        text = f"unpacking, {_share(progress)}" if progress.total_bytes else "unpacking"
    else:
        text = _share(progress) if progress.total_bytes else "fetching"
    if progress.eta_seconds is not None:
        return f"{text}, eta {_duration(progress.eta_seconds)}"
    return f"{text}; {note}" if note else text


def percent(summary: str) -> int | None:
    """The share that a summary names; None if it names none."""
    head, found, _ = summary.removeprefix("unpacking, ").partition(" % ")
    return int(head) if found and head.isdecimal() and len(head) <= 3 else None


def stage(shown: str) -> str:
    """How far a fetch is, in steps of a tenth, for places that must not change with every report: `fetching 40 %`.

    Args:
        shown: a summary, or another word for the state of a fetch, such as `cached`, which stays as it is.
    """
    if (share := percent(shown)) is not None and not shown.startswith("unpacking"):
        return f"fetching {share // 10 * 10} %"
    if shown in ("", "cached", "failed", "locked"):
        return shown
    if shown.startswith("unpacking"):
        return "unpacking"
    return "waiting" if shown == WAITING else "fetching"


def _share(progress: ModelProgress) -> str:
    total = progress.total_bytes
    done = min(progress.fetched_bytes, total)
    unit, name = next((entry for entry in _UNITS if total >= entry[0]), (1, "B"))
    digits = 0 if unit == 1 else 1
    return f"{100 * done // total} % {done / unit:.{digits}f}/{total / unit:.{digits}f} {name}"


def _duration(seconds: float) -> str:
    if seconds < 120.0:
        return f"{seconds:.0f} s"
    return f"{seconds / 60.0:.0f} min" if seconds < 7200.0 else f"{min(seconds / 3600.0, _MAX_HOURS):.1f} h"
