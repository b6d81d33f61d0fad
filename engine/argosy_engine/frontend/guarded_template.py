"""GuardedEnvironment: the sandbox for chat templates that come with requests.

Such a template may be written to exhaust the server. Besides what `BoundedEnvironment` bounds, operators, filters and
methods are checked before they make something long, and what they have made is counted. A list counts with all that is
in it, since comparing two lists, or writing one, is a single step of Python that no deadline ends.

Must not know: HTTP, requests. It is no boundary against code: that is Jinja's sandbox.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from itertools import chain
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context
from jinja2.utils import Namespace

from argosy_engine.frontend.bounded_template import (
    CHARS_OF_ITEM,
    BoundedEnvironment,
    LimitExceeded,
    current_budget,
)

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
