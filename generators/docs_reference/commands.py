"""The page of the command line, from the table of commands and the parsers that they make."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Never
from unittest import mock

from argosy.errors import EXIT_CODES
from argosy.main import BENCHMARKS, COMMANDS, Command
from argosy_operator.main import EXIT_CODES as OPERATOR_EXIT_CODES
from docs_reference.flags import rows_of
from docs_reference.markdown import code, page, section, table

_INTRODUCTION = """\
`argosy COMMAND --help` prints the same. `-o json`, where a command has it, prints JSON for scripts."""
_ELSEWHERE = {"serve": "engine-flags.md", "router": "router-flags.md", "batch": "batch-flags.md"}
_SUBCOMMANDS = {"bench": BENCHMARKS}
"""Command -> its table of subcommands. Those that argparse knows are found in the parser."""


class _Made(Exception):
    """A command has made its parser and is about to parse."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__(parser.prog)
        self.parser = parser


def commands_page() -> str:
    rows = [(_link(command.name, name), text) for command in COMMANDS for name, _, text in _programs(command)]
    sections = [section("Commands", table(("command", "what it does"), rows)), _exit_codes()]
    for command in COMMANDS:
        if command.name in _ELSEWHERE:
            continue
        for name, target, _ in _programs(command):
            module, _, function = target.partition(":")
            parser = parser_of(getattr(import_module(module), function))
            sections.append(_section(name, parser))
            sections += [_section(f"{name} {inner}", made) for inner, made in _subparsers(parser)]
    return page("Command line", _INTRODUCTION, sections)


def _programs(command: Command) -> list[tuple[str, str, str]]:
    """Name, target and help of a command, or of each of its subcommands."""
    if command.name not in _SUBCOMMANDS:
        return [(command.name, command.target, command.help)]
    return [(f"{command.name} {each.name}", each.target, each.help) for each in _SUBCOMMANDS[command.name]]


def _exit_codes() -> str:
    rows = [(str(number), meaning) for number, meaning in EXIT_CODES.items()]
    operators = [(str(number), meaning) for number, meaning in OPERATOR_EXIT_CODES.items()]
    return section(
        "Exit codes",
        table(("code", "meaning"), rows),
        f"Those of {code('argosy operator')}:",
        table(("code", "meaning"), operators),
    )


def parser_of(main: Callable[[Sequence[str]], object]) -> argparse.ArgumentParser:
    """The parser that a command makes; the command goes no further."""

    def stop(parser: argparse.ArgumentParser, *_: object, **__: object) -> Never:
        raise _Made(parser)

    with mock.patch.object(argparse.ArgumentParser, "parse_known_args", stop):
        try:
            main([])
        except _Made as made:
            return made.parser
    raise AssertionError(f"{main} parses nothing")


def _subparsers(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def _section(name: str, parser: argparse.ArgumentParser) -> str:
    groups = [group for group in parser._action_groups if group.title != "engine"]
    rows = [row for group in groups for row in rows_of(group)]
    also = (
        ""
        if len(groups) == len(parser._action_groups)
        else "Also the [engine's flags](engine-flags.md#engine)."
    )
    flags = table(("argument", "meaning"), rows) if rows else "It has no flags."
    return section(f"argosy {name}", parser.description or "", flags, also)


def _link(command: str, name: str) -> str:
    full = f"argosy {name}"
    return f"[{code(full)}]({_ELSEWHERE.get(command) or '#' + full.replace(' ', '-')})"
