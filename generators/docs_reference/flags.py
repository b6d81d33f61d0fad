"""Pages of command-line flags, from argparse parsers."""

from __future__ import annotations

import argparse

from docs_reference.markdown import code, section, table

_TITLES = {"positional arguments": "Arguments", "options": "General"}
"""argparse's titles of groups -> ours"""


def groups_of(parser: argparse.ArgumentParser) -> list[str]:
    """A section per group of flags, in the order of `--help`."""
    sections = []
    for group in parser._action_groups:
        rows = rows_of(group)
        if rows:
            title = _TITLES.get(group.title or "", group.title or "")
            sections.append(section(title[:1].upper() + title[1:], table(("flag", "meaning"), rows)))
    return sections


def rows_of(group: argparse._ArgumentGroup) -> list[tuple[str, str]]:
    """(spelling, meaning) of each argument."""
    return [(_spelling(action), _meaning(action)) for action in group._group_actions if _is_told(action)]


def _is_told(action: argparse.Action) -> bool:
    return action.help != argparse.SUPPRESS and action.dest != "help"


def _spelling(action: argparse.Action) -> str:
    if not action.option_strings:
        return code(str(action.metavar or action.dest).upper())
    value = ""
    if action.choices:
        value = f" {{{','.join(map(str, action.choices))}}}"
    elif action.nargs != 0:
        value = f" {action.metavar or action.dest.upper()}"
    return (
        ", ".join(code(option) for option in action.option_strings[:-1])
        + (", " if len(action.option_strings) > 1 else "")
        + code(action.option_strings[-1] + value)
    )


def _meaning(action: argparse.Action) -> str:
    """The help text as `--help` prints it; where there is none, the default."""
    if not action.help:
        return f"default: {action.default}"
    return action.help % {**vars(action), "prog": "argosy"}
