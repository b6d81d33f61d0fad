"""The Jinja sandbox of chat templates, with a deadline and a cap on what a template makes.

Jinja's sandbox keeps templates from objects that they must not reach, but bounds neither their time nor their memory.
`BoundedEnvironment`, for the model's own template, checks the deadline at every turn of a loop and every call of a
macro, and measures every text that a template puts together. `GuardedEnvironment` is for templates that come with
requests and may be written to exhaust the server: operators, filters and methods are checked before they make much of
little, such as `'x' * 10 ** 9`, and what they have made is counted. A list counts with all that is in it, since
comparing two lists, or writing one, is a single step of Python that no deadline ends.

Invariant: between two checks a template does one operation. A single one, on texts or lists as long as the cap allows,
may exceed the deadline by its own time.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from itertools import chain
from typing import Any, NamedTuple

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from argosy_engine.frontend.admission import stop_if_abandoned

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


_MAX_INT_BITS = 1 << 12
_MAX_WIDTH = 1 << 12
"""Largest width that a text is padded to, and largest number of digits."""
_MAX_SEPARATOR = 16
"""Characters of a separator of JSON."""
_FORMAT_DANGERS = re.compile(r"\d{5}|%[^%a-zA-Z]*\*|:[^{}]*\{")
"""Widths in a format that are long, or are taken from its values."""
_SIZED_FILTERS = frozenset(("batch", "center", "indent", "round", "slice", "tojson"))
"""Filters whose numbers determine the length of what they make."""
_SIZED_METHODS = frozenset(("center", "expandtabs", "ljust", "rjust", "to_bytes", "zfill"))
_WRITING_FILTERS = frozenset(
    (
        *("capitalize", "center", "e", "escape", "format", "indent", "join", "lower", "replace", "string"),
        *("title", "tojson", "trim", "truncate", "upper", "urlencode"),
    )
)
"""Filters that write any value as text."""
_LEFT_OUT = (
    *("filesizeformat", "forceescape", "pprint", "random", "striptags"),
    *("urlize", "wordcount", "wordwrap", "xmlattr"),
)
"""Filters for web pages, which serve no prompt, and some of which take more than linear time."""


class _Generator(CodeGenerator):
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 (the name of the base class)
        self.write("environment.concatenated((")
        for operand in node.nodes:
            self.visit(operand, frame)
            self.write(", ")
        self.write("))")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:  # noqa: N802
        self.write("environment.contained(")
        super().visit_List(node, frame)
        self.write(")")

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802
        is_value = node.ctx == "load"  # others are names that are set
        self.write("environment.contained(" if is_value else "")
        super().visit_Tuple(node, frame)
        self.write(")" if is_value else "")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        self.write("environment.contained(")
        super().visit_Dict(node, frame)
        self.write(")")


class GuardedEnvironment(BoundedEnvironment):
    """The sandbox with a deadline, a cap and guarded operations."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    code_generator_class = _Generator

    def __init__(self) -> None:
        # Not optimised: the optimiser would compute constants while it compiles, when there is no budget.
        super().__init__(optimized=False, finalize=_measured)
        del self.globals["lipsum"]
        for name in _LEFT_OUT:
            del self.filters[name]
        for name, function in self.filters.items():
            self.add_filter(name, function)

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        self.filters[name] = _guarded(name, function)

    def concatenated(self, operands: Sequence[Any]) -> str:
        """Join the operands of `~`."""
        texts = [str(_measured(operand)) for operand in operands]
        _check(sum(map(len, texts)))
        return _spent("".join(texts))

    def contained(self, value: Any) -> Any:
        """Measure a list, tuple or object that the template writes out."""
        budget = current_budget()
        if budget is not None:
            budget.measure(value)
        return value

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_operands(operator, left, right)
        return _spent(super().call_binop(context, operator, left, right))

    def call(self, context: Context, function: Any, *args: Any, **kwargs: Any) -> Any:
        text = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        if isinstance(text, (str, bytes, int)):
            args = _checked_method(getattr(function, "__name__", ""), text, args, kwargs)
        budget = current_budget()
        if budget is not None:  # macros and cyclers keep what they are called with together
            budget.check(sum(budget.measure(each, 1)[0] for each in chain(args, kwargs.values())))
        return _spent(super().call(context, function, *args, **kwargs))


def _check(num_chars: int) -> None:
    budget = current_budget()
    if budget is not None:
        budget.check(num_chars)


def _spent(value: Any) -> Any:
    """Count a value that an operation has made."""
    budget = current_budget()
    if budget is not None:
        budget.tick()
        if isinstance(value, (str, bytes)):
            budget.spend(len(value))
        elif isinstance(value, (list, tuple, dict, set)):
            budget.measure(value)
            budget.spend(len(value) * CHARS_OF_ITEM)
    return value


def _measured(value: Any) -> Any:
    """Check the length of a value as text, before it is written: lists may contain one another many times.

    Raises:
        LimitExceeded: it is too long, or contains a namespace.
    """
    budget = current_budget()
    if isinstance(value, (str, int, float)) or budget is None:
        return value
    num_chars, left = 0, [value]
    while left:
        item = left.pop()
        num_chars += len(item) if isinstance(item, (str, bytes)) else CHARS_OF_ITEM
        budget.tick()
        budget.check(num_chars)
        if isinstance(item, Namespace):
            raise LimitExceeded("writes a namespace, which has no text")
        if isinstance(item, Mapping):
            left += chain(item.keys(), item.values())
        elif isinstance(item, (list, tuple, set)):
            left += item
    return value


def _check_operands(operator: str, left: Any, right: Any) -> None:
    """Check an operation before it is done.

    Raises:
        LimitExceeded: what it makes is too large.
    """
    if operator == "%":
        if isinstance(left, (str, bytes)):
            _check_format(left, right)
    elif isinstance(left, int) and isinstance(right, int):
        bits, more = left.bit_length(), right.bit_length()
        if operator == "**" and bits > 1:  # 0, 1 and -1 stay as they are
            bits *= max(right, 1)
        elif operator == "*":
            bits += more
        if bits > _MAX_INT_BITS:
            raise LimitExceeded(f"makes a number of more than {_MAX_INT_BITS} bits")
    elif operator == "*":
        for values, count in ((left, right), (right, left)):
            if isinstance(values, (str, bytes, list, tuple)) and isinstance(count, int):
                size = 1 if isinstance(values, (str, bytes)) else CHARS_OF_ITEM
                _check(len(values) * size * max(count, 0))
    elif operator == "+" and isinstance(left, (str, bytes)) and isinstance(right, (str, bytes)):
        _check(len(left) + len(right))


def _check_format(text: str | bytes, values: Any) -> None:
    if _FORMAT_DANGERS.search(text if isinstance(text, str) else text.decode("latin-1")):
        raise LimitExceeded("has a format with a width that is too large, or comes from a value")
    _measured(values)


def _check_width(length: int, arguments: Iterable[Any]) -> None:
    """Check the numbers of an operation that pads, indents or rounds."""
    for argument in arguments:
        width = len(argument) if isinstance(argument, (str, bytes)) else argument
        if not isinstance(width, int):
            continue
        if abs(width) > _MAX_WIDTH:
            raise LimitExceeded(f"has a width of more than {_MAX_WIDTH}")
        _check(length * max(width, 1))


def _checked_method(
    name: str, text: str | bytes | int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """Check the arguments of a method, and return them: an iterator only once."""
    length = len(text) if isinstance(text, (str, bytes)) else 1
    if name in _SIZED_METHODS:
        _check_width(1 if name != "expandtabs" else length, (*args, *kwargs.values()))
    elif name in ("format", "format_map") and isinstance(text, str):
        _check_format(text, [*args, *kwargs.values()])
    elif name == "replace" and len(args) > 1:
        _check_replacement(text, args[0], args[1])
    elif name == "join" and args:
        return (_checked_parts(args[0], length), *args[1:])
    elif name == "translate":
        raise LimitExceeded("uses the method translate, which is not allowed")
    return args


def _check_replacement(text: Any, old: Any, new: Any) -> None:
    if all(isinstance(value, (str, bytes)) for value in (text, old, new)):
        _check(len(text) + len(new) * (text.count(old) if type(old) is type(text) else 0))


def _check_separators(separators: Any) -> None:
    """Check the texts that JSON has between values, as often as it has values."""
    if separators is not None and any(len(separator) > _MAX_SEPARATOR for separator in separators):
        raise LimitExceeded("writes JSON with long separators")


def _checked_parts(parts: Any, num_between: int) -> list[Any]:
    """Return the values to be joined.

    Args:
        num_between: characters between two of them.
    """
    values = list(parts)
    num_chars = 0
    for value in values:
        _measured(value)
        num_chars += num_between + (len(value) if isinstance(value, (str, bytes)) else CHARS_OF_ITEM)
        _check(num_chars)
    return values


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter with checks. Some get Jinja's context or environment before the value."""
    num_before = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        before, (value, *others) = args[:num_before], args[num_before:]
        if name in _SIZED_FILTERS:
            _check_width(_length(name, value), (*others, *kwargs.values()))
        if name == "tojson":
            _check_separators(kwargs.get("separators", others[2] if len(others) > 2 else None))
        if name == "join" and not kwargs and len(others) < 2:
            value = _checked_parts(value, len(str(_measured(others[0]))) if others else 0)
        elif name in _WRITING_FILTERS:
            _measured(value)
        if name == "replace" and len(others) > 1:
            _check_replacement(value, *others[:2])
        if name == "format":
            _check_format(str(value), [*others, *kwargs.values()])
        if name == "sum" and not isinstance(kwargs.get("start", (*others, None, 0)[1] or 0), (int, float)):
            raise LimitExceeded("sums up what are not numbers")
        return _spent(function(*before, value, *others, **kwargs))

    return guarded


def _length(name: str, value: Any) -> int:
    """Return how many times a filter writes its width, at most."""
    if name == "indent" and isinstance(value, str):
        return value.count("\n") + 1
    if name == "tojson":
        return len(value) if isinstance(value, (list, dict)) else 1
    return 1


class GenerationTag(Extension):
    """The tag `{% generation %}`, which templates for transformers may have around the assistant's answers to tell
    trainers what the model has written. Where a prompt is rendered, it has no effect."""

    tags = {"generation"}  # noqa: RUF012 (the type of the base class)

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the body, in a scope of its own, as in transformers."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)
