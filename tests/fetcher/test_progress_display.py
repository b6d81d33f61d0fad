"""Progress on a terminal and in a log: the text, how often it appears, and that no server moves the cursor."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from rich.console import Console

from argosy_fetcher.progress import (
    BarDisplay,
    LineDisplay,
    duration_text,
    progress_display,
    size_text,
    status_text,
)

GIB = 1 << 30
MIB = 1 << 20


def terminal(out: io.StringIO) -> Console:
    return Console(file=out, force_terminal=True, width=120, _environ={"TERM": "xterm"})


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("done", "total", "rate", "text"),
    [
        (int(12.1 * GIB), 28 * GIB, 0.0, "43 % 12.1/28.0 GiB"),
        (12 * GIB, 28 * GIB, 200.0 * MIB, "42 % 12.0/28.0 GiB, 200.0 MiB/s, eta 82 s"),
        (0, 28 * GIB, 1.0 * MIB, "0 % 0.0/28.0 GiB, 1.0 MiB/s, eta 8.0 h"),
        (999, 1000, 0.0, "99 % 999/1000 B"),
        (28 * GIB, 28 * GIB, 5.0, "100 % 28.0/28.0 GiB, 5 B/s"),
        (0, 0, 0.0, "100 % 0/0 B"),
    ],
)
def test_a_transfer_in_words(done: int, total: int, rate: float, text: str) -> None:
    assert status_text(done, total, rate) == text


def test_sizes_and_durations() -> None:
    assert [size_text(size) for size in (0, 1023, 1536, 3 * MIB, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3.0 MiB",
        "5.0 TiB",
    ]
    assert [duration_text(seconds) for seconds in (0.4, 70.0, 600.0, 9000.0)] == [
        "0 s",
        "70 s",
        "10 min",
        "2.5 h",
    ]


def test_lines_are_seconds_apart_however_many_chunks_arrive() -> None:
    clock, lines = Clock(), list[str]()
    display = LineDisplay(lines.append, interval_s=5.0, clock=clock)
    display.resolved("hf://a/b", "c0ffee")
    display.begin(100 * MIB, 10 * MIB)
    for _ in range(90):
        clock.now += 0.25
        display.advance(MIB)
    display.end()
    assert lines == [
        "hf://a/b: revision c0ffee",
        "fetching 100.0 MiB, of which 10.0 MiB are here already",
        "30 % 30.0/100.0 MiB, 4.0 MiB/s, eta 18 s",
        "50 % 50.0/100.0 MiB, 4.0 MiB/s, eta 12 s",
        "70 % 70.0/100.0 MiB, 4.0 MiB/s, eta 8 s",
        "90 % 90.0/100.0 MiB, 4.0 MiB/s, eta 2 s",
        "fetched 90.0 MiB in 22 s",
    ]


def test_the_rate_of_a_line_follows_a_line_that_gets_faster() -> None:
    clock, lines = Clock(), list[str]()
    display = LineDisplay(lines.append, interval_s=5.0, clock=clock)
    display.begin(1000 * MIB, 0)
    for rate in [1] * 20 + [10] * 8:
        clock.now += 5.0
        display.advance(5 * rate * MIB)
    assert ", 10.0 MiB/s, " in lines[-1]


def test_a_model_that_is_here_is_no_transfer() -> None:
    lines: list[str] = []
    display = LineDisplay(lines.append)
    display.resolved("hf://a/b", "c0ffee")
    display.begin(100, 100)
    display.end()
    assert lines == ["hf://a/b: revision c0ffee"]


def test_content_that_was_wrong_takes_its_bytes_back() -> None:
    clock, lines = Clock(), list[str]()
    display = LineDisplay(lines.append, interval_s=5.0, clock=clock)
    display.begin(10, 0)
    display.advance(8)
    clock.now += 5.0
    display.advance(-8)
    assert lines[-1] == "0 % 0/10 B"


def line_display() -> tuple[LineDisplay, Callable[[], str]]:
    lines: list[str] = []
    return LineDisplay(lines.append), lambda: "\n".join(lines)


def bar_display() -> tuple[BarDisplay, Callable[[], str]]:
    out = io.StringIO()
    return BarDisplay(terminal(out)), out.getvalue


@pytest.mark.parametrize("make", [line_display, bar_display])
def test_what_is_not_printable_is_replaced(
    make: Callable[[], tuple[LineDisplay | BarDisplay, Callable[[], str]]],
) -> None:
    display, text = make()
    display.resolved("hf://a/b\x1b]0;", "[red]x[/red]\x1b[2J")
    display.note("wait\r\n\x1b[1A [bold]for[/bold]")
    assert "wait???[1A [bold]for[/bold]" in text()
    assert "hf://a/b?]0;: revision [red]x[/red]?[2J" in text()


def test_a_bar_shows_bytes_of_all_threads() -> None:
    out = io.StringIO()
    with BarDisplay(terminal(out)) as display:
        display.resolved("hf://Qwen/Qwen3-0.6B", "c0ffee")
        display.begin(100 * MIB, 20 * MIB)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: display.advance(MIB), range(80)))
        display.end()
    bar = out.getvalue().rpartition("\n")[0].splitlines()[-1]
    assert "Qwen/Qwen3-0.6B" in bar
    assert "100 % 100.0/100.0 MiB" in bar


def fail_at_half(display: BarDisplay) -> None:
    display.begin(100, 50)
    raise RuntimeError


def test_a_failure_ends_the_bar() -> None:
    out = io.StringIO()
    display = BarDisplay(terminal(out))
    with pytest.raises(RuntimeError), display:
        fail_at_half(display)
    shown = out.getvalue()
    assert "50 % " in shown
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l")  # the cursor is visible again
    display.advance(10)
    assert out.getvalue() == shown


def test_without_a_terminal_there_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert not sys.stderr.isatty()
    with progress_display() as display:
        display.note("waiting")
    assert capsys.readouterr().err == "waiting\n"


def test_a_display_that_is_closed_writes_nothing() -> None:
    lines: list[str] = []
    with LineDisplay(lines.append, clock=Clock()) as display:
        display.note("before")
    display.note("after")
    display.resolved("hf://acme/tiny", "abc")
    display.begin(10, 0)
    assert lines == ["before"]
