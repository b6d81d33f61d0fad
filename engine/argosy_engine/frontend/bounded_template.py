"""BoundedEnvironment: the Jinja sandbox of chat templates, with a deadline and a cap on what a template makes.

Jinja's sandbox keeps templates from objects that they must not reach, but bounds neither their time nor their memory.
Here every turn of a loop and every call of a macro checks the deadline, and every text that a template puts together is
measured. `GuardedEnvironment`, for the templates of requests, also refuses operations that make much of little, such as
`'x' * 10 ** 9`.

Invariant: between two checks a template does one operation. A single one, on texts or lists as long as the cap allows,
may exceed the deadline by its own time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from typing import Any, NamedTuple

from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from argosy_engine.frontend.render_pool import stop_if_abandoned

_TICKS_PER_CHECK = 64
"""Turns of loops between two looks at the clock: a turn takes microseconds."""
_DICT_ATTRIBUTES = frozenset(dir(dict))
_TOTAL = 4
"""How many times the characters of its longest text a rendering may make in guarded operations."""
_MAX_DEPTH = 256
"""Levels of lists within lists: Python walks them with its C stack."""
_MAX_CONTAINERS = 1 << 18
_SHORT = 16
"""Entries of a list without lists that is measured anew each time instead of being kept."""
CHARS_OF_ITEM = 16
"""What an entry of a list, or a number, counts for."""


class TemplateLimits(NamedTuple):
    """What one rendering may take."""

    cpu_s: float
    """Processor time of its thread, so that no template fails because the server is busy."""
    chars: int
    """Characters of the prompt, and of each text on the way to it."""
    is_trusted: bool = False
    """Whether its time counts from the first look at the clock on, so that a short rendering needs none."""


MODEL_LIMITS = TemplateLimits(cpu_s=10.0, chars=1 << 27, is_trusted=True)
"""Of the model's own template. Bodies have 32 MB, and a template repeats what they say a few times at most."""
REQUEST_LIMITS = TemplateLimits(cpu_s=2.0, chars=1 << 26)
"""Of a template that comes with a request."""


class LimitExceeded(Exception):
    """Raised by a template that exceeds its limits; the message continues the words "the chat template"."""


class TemplateBudget:
    """What is left to one rendering."""

    def __init__(self, limits: TemplateLimits) -> None:
        self.limits = limits
        self._left = _TOTAL * limits.chars
        self._num_ticks = 0
        self._containers: dict[int, tuple[Any, int, int]] = {}
        """By identity: containers (kept, so that no other one gets the identity), their characters and levels."""
        self._end = 0.0 if limits.is_trusted else time.thread_time() + limits.cpu_s
        """Zero before the clock has been looked at."""

    def tick(self) -> None:
        """
        Raises:
            LimitExceeded: the deadline has passed.
            Abandoned: the client has left.
        """
        self._num_ticks += 1
        if self._num_ticks % _TICKS_PER_CHECK:
            return
        stop_if_abandoned()
        now = time.thread_time()
        if not self._end:
            self._end = now + self.limits.cpu_s
        elif now > self._end:
            raise LimitExceeded(f"takes more than {self.limits.cpu_s:g} seconds of processor time")

    def check(self, num_chars: int) -> None:
        """
        Raises:
            LimitExceeded: a text of so many characters is too long.
        """
        if num_chars > self.limits.chars:
            raise LimitExceeded(f"makes a text of more than {self.limits.chars} characters")

    def measure(self, value: Any, depth: int = 0) -> tuple[int, int]:
        """Return the characters and the levels of a value, with whatever is in it as often as it is in it: a list that
        has another one twice, which has another one twice, and so on, is short, but comparing two of them is not.

        Args:
            depth: levels around it.

        Raises:
            LimitExceeded: it is too long, too deep, or there are too many.
        """
        if isinstance(value, (str, bytes)):
            return CHARS_OF_ITEM + len(value), 0
        if not isinstance(value, (list, tuple, set, Mapping)):
            return CHARS_OF_ITEM, 0
        _, num_chars, levels = self._containers.get(id(value)) or self._walked(value, depth)
        if depth + levels > _MAX_DEPTH:
            raise LimitExceeded(f"makes lists within lists of more than {_MAX_DEPTH} levels")
        return num_chars, levels

    def _walked(self, value: Any, depth: int) -> tuple[Any, int, int]:
        num_chars, levels = CHARS_OF_ITEM, 1
        items = chain(value.keys(), value.values()) if isinstance(value, Mapping) else value
        for item in items if depth < _MAX_DEPTH else ():
            self.tick()
            more, below = self.measure(item, depth + 1)
            num_chars += more
            levels = max(levels, below + 1)
            self.check(num_chars)
        measured = value, num_chars, levels
        if levels > 1 or len(value) > _SHORT:
            self._containers[id(value)] = measured
            if len(self._containers) > _MAX_CONTAINERS:
                raise LimitExceeded(f"makes more than {_MAX_CONTAINERS} lists of lists, or long ones")
        return measured

    def spend(self, num_chars: int) -> None:
        """Count a value that is kept, perhaps, so that many long ones are refused, too.

        Raises:
            LimitExceeded: it is too long, or all of them are.
        """
        self.check(num_chars)
        self._left -= num_chars
        if self._left < 0:
            raise LimitExceeded(f"makes texts of more than {_TOTAL * self.limits.chars} characters in all")


_budget: ContextVar[TemplateBudget | None] = ContextVar("template_budget", default=None)


def current_budget() -> TemplateBudget | None:
    """Return the budget of the rendering that runs; None while a template is compiled."""
    return _budget.get()


@contextmanager
def limited(limits: TemplateLimits) -> Iterator[None]:
    """Apply limits to the rendering of a template that `BoundedEnvironment.compiled` made.

    Raises:
        LimitExceeded: the template exceeds them.
    """
    token = _budget.set(TemplateBudget(limits))
    try:
        yield
    finally:
        _budget.reset(token)


def _tick() -> None:
    budget = _budget.get()
    if budget is not None:
        budget.tick()


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with a deadline and a cap."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], **options
        )
        self.tick = _tick

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        self.filters[name] = function

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Read a field of a message or tool. `message.role` means the attribute, and the item if there is none: a plain
        dict has no attributes but its methods, so the item is read without an exception first."""
        if type(obj) is not dict or attribute in _DICT_ATTRIBUTES:
            return super().getattr(obj, attribute)
        try:
            return obj[attribute]
        except KeyError:
            return self.undefined(obj=obj, name=attribute)

    def compiled(self, tree: nodes.Template) -> Any:
        """Compile a parsed template so that each turn of its loops and each call of its macros checks the deadline."""
        blocks: list[Any] = list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)))
        for block in blocks:
            # The name is written into the code as it is; a call of Jinja's would pass the sandbox, each time.
            call = nodes.EnvironmentAttribute("tick()")
            block.body.insert(0, nodes.ExprStmt(call, lineno=block.lineno))
        template = self.from_string(tree)
        # Jinja has a chain of mappings there, which each rendering would walk in Python.
        template.globals = dict(template.globals)
        return template

    def concat(self, pieces: Iterable[str]) -> str:
        """Join what the template, a macro or a block puts out."""
        budget = _budget.get()
        if budget is None:
            return "".join(pieces)
        texts, num_chars = [], 0
        for piece in pieces:
            num_chars += len(piece)
            budget.check(num_chars)
            texts.append(piece)
        budget.tick()
        return "".join(texts)
