"""The links of a chain, in the order in which a service comes up, and their text.

Owns what a link says. Must not know where the facts come from (`cluster_chain`, `local_chain`). Invariant: links follow
from each other, so nothing is said of the links behind the first one that is not done.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Final, Literal

import msgspec
from msgspec import Struct

from argosy_fetcher.progress_display import printable

State = Literal["done", "failed", "waiting", "stopped"]
"""`failed`: it stays so until somebody acts. `waiting`: it goes on by itself. `stopped`: the spec wants it so."""
_MARKS: Final[dict[State, str]] = {
    "done": "ok",
    "failed": "FAILED",
    "waiting": "waiting",
    "stopped": "stopped",
}
MAX_LINES: Final = 10
"""Lines of a log that are shown."""
MAX_WIDTH: Final = 2048
"""Characters of a row that are shown. An engine may log its whole input as one line."""
READ_LINES: Final = 100
"""Lines of a log that are read, since one of them may say how far the load is."""
_LOADING: Final = re.compile(r"\bloading (?:the model: (?P<step>.+?)|weights: .*\((?P<share>\d+ %)\).*)\s*$")


class Link(Struct, frozen=True, kw_only=True):
    """One step on the way to a service that is ready."""

    name: str
    state: State
    detail: str = ""
    remedy: str = ""
    lines: tuple[str, ...] = ()
    """The last lines of the log that says why."""


class Diagnosis(Struct, frozen=True, kw_only=True):
    """The chain of one service, up to its first link that is not done."""

    service: str
    links: tuple[Link, ...]
    notes: tuple[str, ...] = ()
    """What is beside the chain, such as a problem that keeps no request from its answer."""
    serving: int = 0
    """Routable replicas, of whatever revision, although another one's link is not done."""

    @property
    def state(self) -> State:
        """That of the last link."""
        return self.links[-1].state if self.links else "waiting"

    @property
    def is_served(self) -> bool:
        """Whether clients are served."""
        return self.state == "done" or self.serving > 0


def served_meanwhile(serving: int, newest: int) -> str:
    """The note on replicas that serve although the chain does not end well: all that are routable, and those of the
    newest revision."""
    number = "1 replica is routable" if serving == 1 else f"{serving} replicas are routable"
    of = "" if newest == serving else f", {newest or 'none'} of the newest revision"
    return f"clients are served meanwhile: {number}{of}"


def until_first_problem(links: Iterable[Link]) -> tuple[Link, ...]:
    """The links up to the first one that is not done, which is among them."""
    kept: list[Link] = []
    for link in links:
        kept.append(link)
        if link.state != "done":
            break
    return tuple(kept)


def load_step(log: Iterable[str]) -> str:
    """How far an engine's load is, by the last line of its log that says so, such as `weights, 43 %`; empty if none
    does."""
    found = ""
    for line in log:
        if match := _LOADING.search(line):
            found = match["step"] or f"weights, {match['share']}"
    return found


def loading(log: Iterable[str]) -> str:
    """What the engine does, as part of a link's detail."""
    step = load_step(log)
    return f"the engine loads the model ({step})" if step else "the engine loads the model"


def render(diagnosis: Diagnosis) -> str:
    """The chain as text: one line for each link, then the problem's lines and its remedy. Whoever may look at a service
    reads what its tenant's programs have written, so what is not printable is replaced."""
    width = max((len(link.name) for link in diagnosis.links), default=0)
    rows = [
        f"{_MARKS[link.state]:<8}{link.name:<{width}}  {link.detail}".rstrip() for link in diagnosis.links
    ]
    last = diagnosis.links[-1] if diagnosis.links else None
    if last is not None and last.lines:
        rows += ["", *(f"    {line}" for line in last.lines[-MAX_LINES:])]
    if last is not None and last.remedy:
        rows += ["", f"what to do: {last.remedy}"]
    rows += [f"note: {note}" for note in diagnosis.notes]
    return "\n".join(printable(_shortened(row.expandtabs())) for row in (diagnosis.service, *rows))


def render_json(diagnosis: Diagnosis) -> str:
    """The chain as JSON. What is not printable is written as its number, as JSON has it: a terminal obeys some
    characters that JSON allows as they are."""
    text = msgspec.json.format(msgspec.json.encode(diagnosis), indent=2).decode()
    return "".join(char if char.isprintable() or char == "\n" else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    return json.dumps(char)[1:-1] if char != "\x7f" else "\\u007f"


def _shortened(row: str) -> str:
    return row if len(row) <= MAX_WIDTH else f"{row[:MAX_WIDTH]} ... ({len(row) - MAX_WIDTH} more characters)"
