"""Makes Triton's interpreter look up the types and shapes of values, instead of building them for every value.

NumPy computes most operations of a kernel in a few microseconds. Triton's front end, which is made to compile a kernel
once, takes ten times as long to work out the result's type, although that depends on element types and shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def reuse_types() -> None:
    """Replace functions of Triton's front end by faster ones with the same results, for this process."""
    _reuse_block_types()
    _reuse_shapes()
    _reuse_numpy_dtypes()
    _broadcast_equal_shapes_at_once()
    core._unwrap_if_constexpr = _unwrap_plain_values_at_once(core._unwrap_if_constexpr)
    # Integers would be added twice, the second time in 64 bits, for an assertion that only a builder in debug mode
    # makes.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)


def _reuse_block_types() -> None:
    build = tl.block_type.__init__
    known: dict[tuple[Any, ...], dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], Any] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(shape.values if type(shape) is tl.tuple else shape)
        is_plain = {*map(type, sizes)} == {int}  # otherwise `build` unwraps the sizes, or refuses them
        attributes = known.get((element_ty.name, *sizes)) if is_plain else None
        if attributes is not None:
            self.__dict__.update(attributes)
            self.element_ty = element_ty
            return
        build(self, element_ty, shape)
        sizes = tuple(self.shape.values)
        self.shape = shapes.setdefault(sizes, self.shape)
        known[element_ty.name, *sizes] = dict(self.__dict__)

    tl.block_type.__init__ = init


def _reuse_shapes() -> None:
    build = tl.tensor.__init__
    known: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def init(self: Any, handle: Any, dtype: Any) -> None:
        sizes = tuple(dtype.shape.values) if dtype.is_block() else ()
        shape = known.get(sizes)
        if shape is None:
            build(self, handle, dtype)
            known[sizes] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, dtype, dtype.scalar
        self.shape, self.numel = shape

    tl.tensor.__init__ = init


def _reuse_numpy_dtypes() -> None:
    find = interpreter._get_np_dtype
    known: dict[str, np.dtype[Any]] = {}

    def numpy_dtype(dtype: Any) -> np.dtype[Any]:
        name = dtype.scalar.name
        if name not in known:
            known[name] = find(dtype)
        return known[name]

    interpreter._get_np_dtype = numpy_dtype


def _broadcast_equal_shapes_at_once() -> None:
    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_values(self: Any, left: Any, right: Any) -> Any:
        if left.shape is right.shape:  # `_reuse_shapes`
            return left, right
        return broadcast(self, left, right)

    TritonSemantic.broadcast_impl_value = broadcast_values


def _unwrap_plain_values_at_once(unwrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    plain = frozenset(
        (int, float, bool, str, type(None), tl.dtype, tl.pointer_type, tl.block_type, tl.tensor)
    )

    def unwrap_value(value: Any) -> Any:
        kind = type(value)
        if kind in plain:
            return value
        return value.value if kind is tl.constexpr else unwrap(value)

    return unwrap_value
