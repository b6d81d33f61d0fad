"""Makes Triton's interpreter look up the types and shapes of values, instead of building them for every value.

NumPy computes most operations of a kernel in a few microseconds. Triton's front end, which is made to compile a kernel
once, takes ten times as long to work out the result's type, although that depends on element types and shapes alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def reuse_types() -> None:
    """Replace functions of Triton's front end by faster ones with the same results, for this process."""
    _reuse_block_types()
    _reuse_shapes()
    _broadcast_equal_shapes_at_once()
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


def _broadcast_equal_shapes_at_once() -> None:
    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_values(self: Any, left: Any, right: Any) -> Any:
        if left.shape is right.shape:  # `_reuse_shapes`
            return left, right
        return broadcast(self, left, right)

    TritonSemantic.broadcast_impl_value = broadcast_values
