"""ValidatedStructMeta: validates parameters written in Python as strictly as those that arrive as JSON."""

from __future__ import annotations

import difflib
from functools import cache
from typing import Any, ClassVar

import msgspec
from msgspec import StructMeta

from argosy_engine.errors import InvalidRequest


class ValidatedStructMeta(StructMeta):
    """Metaclass of structs with a `verify` method: calling the class converts values, checks types and verifies.

    Decoding and `structs.replace` bypass it: parameters were checked before they are sent to the core.
    """

    ONE_OR_MORE: ClassVar[tuple[str, ...]] = ()
    """Fields holding strings that also accept a single string."""

    def __call__(cls, **fields: Any) -> Any:  # noqa: N805 (of a metaclass)
        """Build an instance from keyword arguments.

        Raises:
            InvalidRequest: unknown name (with a suggestion), wrong type or value out of bounds.
        """
        if not fields.keys() <= _names(cls):
            name = next(name for name in fields if name not in cls.__struct_fields__)
            close = difflib.get_close_matches(name, cls.__struct_fields__, n=1)
            hint = f", did you mean {close[0]!r}?" if close else ""
            raise InvalidRequest(f"{cls.__name__} has no {name!r}{hint}", param=name)
        for name in cls.ONE_OR_MORE:
            if isinstance(fields.get(name), str):
                fields[name] = (fields[name],)
        try:
            made: Any = msgspec.convert(fields, cls)
        except msgspec.ValidationError as error:
            message, _, path = str(error).partition(" - at ")
            name = path.partition("$.")[2].rstrip("`").partition("[")[0]
            raise InvalidRequest(f"{name}: {message}" if name else message, param=name or None) from None
        made.verify()
        return made


@cache
def _names(struct: StructMeta) -> frozenset[str]:
    return frozenset(struct.__struct_fields__)
