"""Fields that take JSON's null for their default, as OpenAI's and vLLM's do: many clients send every field they know.

Owns: the replacement of null. Must not know: which requests there are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from msgspec import Struct

_T = TypeVar("_T")

if TYPE_CHECKING:
    Nullable = Annotated[_T, "nullable"]
else:

    class Nullable:
        """`Nullable[T]` is what decoders accept, T or null; type checkers read T, as `NullDefaults` keeps no null."""

        def __class_getitem__(cls, kind: Any) -> Any:
            return kind | None


class NullDefaults(Struct):
    """Base of structs in which a field that is null gets its default, unless the default is null."""

    def __post_init__(self) -> None:
        defaults, values = _defaults(type(self))
        if None not in values(self):
            return
        for name, default in defaults:
            if getattr(self, name) is None:
                setattr(self, name, default)


@cache
def _defaults(struct: type[Struct]) -> tuple[tuple[tuple[str, Any], ...], Callable[[Any], tuple[Any, ...]]]:
    """Return the fields whose type has null, and whose default is another value, and what reads their values."""
    fields = msgspec.structs.fields(struct)
    defaults = tuple(
        (field.name, field.default)
        for field in fields
        if field.default not in (None, msgspec.NODEFAULT) and _takes_null(field.type)
    )
    if len(defaults) < 2:  # of one name attrgetter returns the value alone
        return defaults, lambda value: tuple(getattr(value, name) for name, _ in defaults)
    return defaults, attrgetter(*(name for name, _ in defaults))


def _takes_null(kind: Any) -> bool:
    return type(None) in getattr(kind, "__args__", ())
