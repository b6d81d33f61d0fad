"""Offline commands: what `argosy bench throughput` and `latency` have in common around the engine.

Owns: errors as exit codes, and the figures' file. Must not know: what is measured.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from argosy_engine.api.engine_flag_parser import EngineFlagParser
from argosy_engine.benchmarks.benchmark_error import FAILURE, USAGE, BenchmarkError
from argosy_engine.benchmarks.vllm_bench_flags import OFFLINE_REFUSED, OFFLINE_WITHOUT_EFFECT
from argosy_engine.config import EngineArgs
from argosy_engine.errors import ConfigError, EngineError, InvalidRequest
from argosy_engine.vllm_flag_lists import ENGINE_REFUSED, ENGINE_WITHOUT_EFFECT
from argosy_engine.vllm_flags import add_vllm_flags, check_vllm_flags
from argosy_engine.vllm_settings import SETTINGS
from argosy_protocol.program.flags import InvalidValue

Args = TypeVar("Args")


def add_vllm_bench_flags(parser: EngineFlagParser) -> None:
    """Add vLLM's flags without a setting. The help text has those of its benchmarks; those of its engine are in that
    of `argosy serve`."""
    add_vllm_flags(parser, OFFLINE_WITHOUT_EFFECT, OFFLINE_REFUSED)
    add_vllm_flags(parser, ENGINE_WITHOUT_EFFECT, ENGINE_REFUSED, SETTINGS, is_listed=False)


def run_offline(
    parser: EngineFlagParser,
    argv: Sequence[str] | None,
    cls: type[Args],
    run: Callable[[Args, EngineArgs], int],
    defaults: Mapping[str, Any] | None = None,
) -> int:
    """Parse the command line, run the benchmark and return the exit code. Errors are one line on standard error.

    Args:
        cls: the benchmark's own flags, which the parser has.
        defaults: of engine flags, where they differ from the engine's.
    """
    options = parser.parse_args(argv)
    for name, value in (defaults or {}).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    try:
        args = parser.build(cls, options)
    except InvalidValue as error:
        parser.error(str(error))
    engine_args = parser.engine_args(options)
    without_effect = (*ENGINE_WITHOUT_EFFECT, *OFFLINE_WITHOUT_EFFECT)
    refused = (*ENGINE_REFUSED, *OFFLINE_REFUSED)
    check_vllm_flags(parser, options, without_effect, refused, engine_args.data_parallel_size)
    try:
        return run(args, engine_args)
    except BenchmarkError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return error.exit_code
    except EngineError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return USAGE if isinstance(error, ConfigError | InvalidRequest) else FAILURE


def check_writable(path: str | None) -> None:
    """Make sure, before a run that takes long, that its figures can be written. A new file is left empty.

    Raises:
        BenchmarkError: the file cannot be written.
    """
    if path is not None:
        with _writing(path):
            Path(path).open("ab").close()


def write_json(path: str, document: Mapping[str, Any]) -> None:
    """Write the figures.

    Raises:
        BenchmarkError: the file cannot be written.
    """
    with _writing(path):
        Path(path).write_text(json.dumps(document, indent=4) + "\n", "utf-8")


@contextlib.contextmanager
def _writing(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BenchmarkError(f"cannot write {path}: {error.strerror}; give another --output-json") from None
