"""Counters, histograms and readings, and their Prometheus text exposition.

Owns: their values and rendering.
Must not know: what is counted.
Invariants: counting is a dict or list operation on the event loop's thread; a scrape only reads; rendering may pause
between any two parts of a series, while values and the sources of readings change.

prometheus_client's own counters take a lock and a label lookup per event, some 10 us per request for all that a router
counts, and its exposition takes ten times as long per sample: a second for 512 replicas.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Literal

Labels = tuple[str, ...]
Rows = Iterable[tuple[Labels, float]]

PREFIX: Final = "argosy_router_"
"""Prefix of the name of every series."""
ROWS_PER_PART: Final = 64
"""Readings taken without a pause: the most expensive one, a replica's state, costs some microseconds."""


class _LabelText:
    """Renders the label sets of one series, ordered by label name as in prometheus_client."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = sorted((name, position) for position, name in enumerate(names))

    def of(self, values: Labels) -> str:
        """Render `{name="value",...}`; empty without labels."""
        if not values:
            return ""
        return "{%s}" % ",".join([f'{name}="{_escaped(values[at])}"' for name, at in self._names])  # noqa: UP031

    def around_bound(self, values: Labels) -> tuple[str, str]:
        """The text before and after the value of `le` in the label set of a bucket."""
        pairs = [(name, f'{name}="{_escaped(values[at])}"') for name, at in self._names]
        before = "".join([f"{pair}," for name, pair in pairs if name < "le"])
        behind = "".join([f",{pair}" for name, pair in pairs if name > "le"])
        return f'{{{before}le="', f'"{behind}}}'


def _escaped(value: str) -> str:
    if "\\" in value or '"' in value or "\n" in value:
        return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
    return value


def _head(name: str, kind: str, text: str) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n"


class Counter:
    """A monotonic sum per label tuple."""

    def __init__(self, name: str, text: str, labels: Sequence[str]) -> None:
        self.name = name
        self.help = text
        self.labels = labels
        self.values: dict[Labels, _Sum] = {}
        self._label_text = _LabelText(labels)

    def add(self, labels: Labels, amount: float = 1.0) -> None:
        total = self.values.get(labels)
        if total is None:
            total = self.values[labels] = _Sum()
        total.value += amount

    def sum(self, labels: Labels) -> float:
        total = self.values.get(labels)
        return 0.0 if total is None else total.value

    def sums(self) -> list[tuple[Labels, float]]:
        return [(labels, total.value) for labels, total in self.values.items()]

    def parts(self, prefix: str) -> Iterator[str]:
        """Render the exposition, one sample per part; `prefix` is prepended to the name."""
        name = f"{prefix}{self.name}_total"
        yield _head(name, "counter", self.help)
        for labels, total in list(self.values.items()):
            yield f"{name}{self._label_text.of(labels)} {total.value!r}\n"


class _Sum:
    """A mutable sum, so that counting looks its labels up once instead of twice (to read and to write)."""

    def __init__(self) -> None:
        self.value = 0.0


class Histogram:
    """Observations per label tuple, by bucket."""

    def __init__(self, name: str, text: str, labels: Sequence[str], bounds: Sequence[float]) -> None:
        self.name = name
        self.help = text
        self.labels = labels
        self.bounds = bounds
        self.values: dict[Labels, list[float]] = {}
        """labels -> bucket counts, then the sum"""
        self._label_text = _LabelText(labels)

    def observe(self, labels: Labels, value: float) -> None:
        row = self.values.get(labels)
        if row is None:
            row = self.values[labels] = [0.0] * (len(self.bounds) + 2)
        row[bisect_left(self.bounds, value)] += 1.0
        row[-1] += value

    def parts(self, prefix: str) -> Iterator[str]:
        """Render the exposition, one label set per part; `prefix` is prepended to the name."""
        name = prefix + self.name
        yield _head(name, "histogram", self.help)
        bounds = [*map(str, self.bounds), "+Inf"]
        for labels, row in list(self.values.items()):
            before, behind = self._label_text.around_bound(labels)
            total = 0.0
            lines = []
            for bound, count in zip(bounds, row, strict=False):
                total += count
                lines.append(f"{name}_bucket{before}{bound}{behind} {total!r}\n")
            label_text = self._label_text.of(labels)
            lines.append(f"{name}_count{label_text} {total!r}\n{name}_sum{label_text} {row[-1]!r}\n")
            yield "".join(lines)


class Reading:
    """Values kept elsewhere and read at scrape time; rows with equal labels are summed."""

    def __init__(
        self,
        kind: Literal["gauge", "counter"],
        name: str,
        text: str,
        labels: Sequence[str],
        read: Callable[[], Rows],
    ) -> None:
        """`read` may be suspended between any two rows, and what it reads may change meanwhile."""
        self.kind = kind
        self.name = name
        self.help = text
        self.labels = labels
        self.read = read
        self._label_text = _LabelText(labels)

    def parts(self, prefix: str) -> Iterator[str]:
        """Render the exposition in parts, some of them empty; `prefix` is prepended to the name."""
        name = f"{prefix}{self.name}_total" if self.kind == "counter" else prefix + self.name
        yield _head(name, self.kind, self.help)
        sums: defaultdict[Labels, float] = defaultdict(float)
        for count, (labels, value) in enumerate(self.read(), 1):
            sums[labels] += value
            if count % ROWS_PER_PART == 0:
                yield ""
        for labels, value in sums.items():
            yield f"{name}{self._label_text.of(labels)} {value!r}\n"


Series = Counter | Histogram | Reading
