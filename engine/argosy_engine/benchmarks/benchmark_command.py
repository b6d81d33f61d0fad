"""What the benchmarks' commands have in common: their error, progress, and the flags of vLLM's that have no setting.

Progress is a bar on a terminal and lines elsewhere. It goes to standard error, so that standard output has the report
alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Protocol, Self

from argosy_engine.vllm_flags import VllmFlag

FAILURE = 1
USAGE = 2


class BenchmarkError(Exception):
    """The benchmark cannot run.

    Its message is one line for people that names the remedy; the commands print it and exit with its code.

    Args:
        exit_code: `FAILURE` if a later try may succeed as it is, `USAGE` if the command line or a file must change.
    """

    def __init__(self, message: str, exit_code: int = USAGE) -> None:
        super().__init__(message)
        self.exit_code = exit_code


LINE_INTERVAL_S: Final = 10.0
_BAR_INTERVAL_S: Final = 0.1


class RunProgress(Protocol):
    """Shows a run while its context is open."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None: ...

    def done(self, *, is_failed: bool = False) -> None:
        """Count one request."""


def run_progress(title: str, total: int, noun: str = "requests", *, is_shown: bool = True) -> RunProgress:
    """Choose the display.

    Args:
        title: what is done, as in `warming up`.
        noun: what is counted.
        is_shown: False shows nothing.
    """
    if not is_shown:
        return _Silent()
    return _Bar(title, total) if sys.stderr.isatty() else LineProgress(title, total, noun)


class _Silent:
    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def done(self, *, is_failed: bool = False) -> None: ...


class LineProgress:
    """Prints one line every `LINE_INTERVAL_S` seconds in which a request ends, and one at the end.

    Args:
        write: takes a line without its end; standard error if left out.
        clock: seconds from any start.
    """

    def __init__(
        self,
        title: str,
        total: int,
        noun: str = "requests",
        write: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._title, self._total, self._noun = title, total, noun
        self._write = write or (lambda line: print(line, file=sys.stderr, flush=True))
        self._clock = clock
        self._started = self._shown = clock()
        self._done = self._failed = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._show(self._clock())

    def done(self, *, is_failed: bool = False) -> None:
        self._done += 1
        self._failed += is_failed
        now = self._clock()
        if now - self._shown >= LINE_INTERVAL_S and self._done < self._total:
            self._shown = now
            self._show(now)

    def _show(self, now: float) -> None:
        failed = f", {self._failed} failed" if self._failed else ""
        self._write(
            f"{self._title}: {self._done}/{self._total} {self._noun}{failed}, {now - self._started:.1f} s"
        )


class _Bar:
    """A bar of rich, which draws it in a thread; this one only counts."""

    def __init__(self, title: str, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn(title), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[failed]}"),
            TimeElapsedColumn(), console=Console(stderr=True), refresh_per_second=4,
        )  # fmt: skip
        self._task = self._progress.add_task(title, total=total, failed="")
        self._done = self._failed = 0
        self._shown = 0.0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._update()
        self._progress.stop()

    def done(self, *, is_failed: bool = False) -> None:
        self._done += 1
        self._failed += is_failed
        now = time.monotonic()
        if now - self._shown >= _BAR_INTERVAL_S:
            self._shown = now
            self._update()

    def _update(self) -> None:
        failed = f"{self._failed} failed" if self._failed else ""
        self._progress.update(self._task, completed=self._done, failed=failed)


_TRUST = VllmFlag("trust-remote-code", "a checkpoint's code is never run; the engine's own model is", True)
_MODE = VllmFlag("tokenizer-mode", "a model's tokenizer.json is read in one way")
_PROFILE = VllmFlag("profile", "there is no profiler; see the engine's metrics", True)
_HUB = "data sets are not fetched; give a file, by --dataset-name custom or sharegpt"

SERVE_WITHOUT_EFFECT = (
    _TRUST,
    _MODE,
    VllmFlag("no-stream", "files are read whole", True),
    VllmFlag("enable-multimodal-chat", "prompts are texts", True),
    VllmFlag("custom-ensure-client-side-data", "prompts are texts", True),
)
SERVE_REFUSED = (
    _PROFILE,
    VllmFlag(
        "use-beam-search", 'the server searches: --extra-body \'{"use_beam_search": true, "n": 4}\'', True
    ),
    VllmFlag("self-timed", "traces are not replayed here; argosy bench router --replay does", True),
    VllmFlag("probe-request-rate", "run a second client beside this one", neutral=("0", "0.0")),
    VllmFlag("plot-dataset-stats", "--save-detailed has the lengths", True),
    VllmFlag("hf-subset", _HUB),
    VllmFlag("hf-split", _HUB),
    VllmFlag("hf-name", _HUB),
    VllmFlag("hf-output-len", _HUB),
)
OFFLINE_WITHOUT_EFFECT = (
    VllmFlag("async-engine", "the engine's core steps by itself either way", True),
    VllmFlag("prequeue-requests", "all prompts are queued before the first step", True),
    VllmFlag("enable-multimodal-chat", "prompts are texts", True),
)
OFFLINE_REFUSED = (
    _PROFILE,
    VllmFlag("disable-detokenize", "outputs always become text, as servers send it", True),
    VllmFlag("lora-path", "adapters are not served yet; serve the merged model"),
    VllmFlag("hf-subset", _HUB),
    VllmFlag("hf-split", _HUB),
)
