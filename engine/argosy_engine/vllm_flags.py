"""Flags of vLLM that have no setting here, so that its command lines start unchanged or name what is missing.

A flag whose effect this engine has anyway, or cannot miss, is accepted with a line that says so. One that asks for
something that the engine does not do is refused with the reason, unless its value asks for nothing.

Owns: what becomes of such a flag. Must not know: which there are (`vllm_flag_lists`), and the flags that the engine
honours (`config`, `server_args`).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from argosy_protocol.program.flags import add_switch


class VllmFlag(NamedTuple):
    """A flag of vLLM without a setting."""

    name: str
    """Without leading dashes."""
    reason: str
    """Why it has no effect, or cannot be used."""
    is_switch: bool = False
    """Whether it takes no value."""
    neutral: tuple[str, ...] = ()
    """Values that ask for nothing, of a flag that is refused otherwise."""
    short: str = ""
    is_list: bool = False
    """Whether it takes several values."""
    pattern: str = ""
    """The values of a flag without effect that ask for nothing; any other is refused."""

    @property
    def dest(self) -> str:
        return f"vllm.{self.name}"

    def asks_for_nothing(self, value: Any) -> bool:
        """Whether a flag without effect is accepted with this value, a text or what a Python caller gives."""
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        return not self.pattern or re.fullmatch(self.pattern, text) is not None


LOCAL_SIZE = "data-parallel-size-local"
"""A flag that may be the number of all cores."""


def add_vllm_flags(
    parser: argparse.ArgumentParser,
    without_effect: Sequence[VllmFlag],
    refused: Sequence[VllmFlag],
    settings: Sequence[VllmFlag] = (),
    *,
    is_listed: bool = True,
) -> None:
    """Add the flags, in groups of the help text.

    Args:
        settings: flags that have an effect, which `vllm_settings` knows.
        is_listed: whether the help text has them.
    """
    groups = (
        *([(parser.add_argument_group("vLLM's flags with another name here"), settings)] if settings else []),
        (parser.add_argument_group("vLLM's flags without effect"), without_effect),
        (parser.add_argument_group("vLLM's flags that are refused"), refused),
    )
    for group, flags in groups:
        for flag in flags:
            names = [f"--{flag.name}", *([flag.short] if flag.short else [])]
            but = f"; accepted: {', '.join(flag.neutral)}" if flag.neutral else ""
            told = flag.reason + but if is_listed else argparse.SUPPRESS
            if flag.is_switch:
                add_switch(group, flag.name, told, flag.dest, flag.short)
            else:
                group.add_argument(
                    *names,
                    nargs="+" if flag.is_list else None,
                    metavar=flag.name.split("-")[-1].upper(),
                    help=told,
                    dest=flag.dest,
                )


def check_vllm_flags(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    without_effect: Sequence[VllmFlag],
    refused: Sequence[VllmFlag],
    data_parallel_size: int = 1,
) -> None:
    """Tell on standard error which of the given flags have no effect; end with code 2 if one is refused.

    Args:
        data_parallel_size: number of engine cores, all of which must be local.
    """
    for flag in refused:
        neutral = (str(data_parallel_size),) if flag.name == LOCAL_SIZE else flag.neutral
        value = getattr(options, flag.dest)
        if value and value not in neutral:
            parser.error(f"--{flag.name} is not supported: {flag.reason}")
    for flag in without_effect:
        value = getattr(options, flag.dest)
        if value is not None and not flag.asks_for_nothing(value):
            parser.error(f"--{flag.name} {value[:64]} is not supported: {flag.reason}")
        if value is not None:
            print(f"{parser.prog}: --{flag.name} has no effect: {flag.reason}", file=sys.stderr)
