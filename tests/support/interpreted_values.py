"""Makes Triton's interpreter look up types, shapes and constants, instead of building them for every value.

NumPy computes most operations of a kernel in a few microseconds. Triton's front end, which is made to compile a kernel
once, takes ten times as long to work out the result's type, although that depends on element types and shapes alone.
"""

from __future__ import annotations

from dataclasses import replace
from numbers import Number
from typing import Any

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def reuse_types() -> None:
    """Replace functions of Triton's front end by faster ones with the same results, for this process."""
    _call_builtins_directly()
    _compare_types_at_once()
    _reuse_numpy_types()
    _reuse_block_types()
    _reuse_shapes()
    _broadcast_equal_shapes_at_once()
    _promote_equal_types_at_once()
    # Integers would be added twice, the second time in 64 bits, for an assertion that only a builder in debug mode
    # makes.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)


def _call_builtins_directly() -> None:
    """Leave out the check for a compiler, which each built-in function of Triton makes before it runs."""

    def patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **kwargs)

        scope.set_attr(owner, name, call)

    interpreter._patch_attr = patch_attr


def _compare_types_at_once() -> None:
    compare, unwrap = tl.dtype.__eq__, tl.core._unwrap_if_constexpr
    plain = {tl.tensor, int, float, bool, tl.dtype, type(None)}

    def equals(self: Any, other: Any) -> Any:
        return self is other or compare(self, other)

    def unwrap_if_constexpr(value: Any) -> Any:
        return value if type(value) in plain else unwrap(value)

    tl.dtype.__eq__ = equals
    tl.core._unwrap_if_constexpr = unwrap_if_constexpr


def _reuse_numpy_types() -> None:
    build, fits = interpreter._get_np_dtype, interpreter._validate_np_data_size
    known: dict[str, Any] = {}

    def numpy_type(dtype: Any) -> Any:
        name = dtype.scalar.name
        found = known.get(name)
        if found is None:
            found = known[name] = build(dtype)
        return found

    def has_size(array: Any, dtype: Any) -> bool:
        return array.dtype is known.get(dtype.name) or fits(array, dtype)

    interpreter._get_np_dtype = numpy_type
    interpreter._validate_np_data_size = has_size


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

    with_element = tl.block_type.with_element_ty
    blocks: dict[tuple[str, str], Any] = {}

    def with_element_type(self: Any, element_ty: Any) -> Any:
        key = self.name, element_ty.name
        found = blocks.get(key)
        if found is None:
            found = blocks[key] = with_element(self, element_ty)
        return found

    tl.block_type.__init__ = init
    tl.block_type.with_element_ty = with_element_type


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
    known: dict[tuple[str, str], tuple[Any, Any]] = {}

    def broadcast_values(self: Any, left: Any, right: Any) -> Any:
        if left.shape is right.shape:  # `_reuse_shapes`
            return left, right
        key = left.type.name, right.type.name
        types = known.get(key)
        if types is None:
            results = broadcast(self, left, right)
            known[key] = results[0].type, results[1].type
            return results
        return _broadcast(self, left, types[0]), _broadcast(self, right, types[1])

    TritonSemantic.broadcast_impl_value = broadcast_values


def _broadcast(semantic: Any, value: Any, target: Any) -> Any:
    if value.type.name == target.name:
        return value
    if not value.type.is_block():
        return tl.tensor(semantic.builder.create_splat(target, value.handle), target)
    return tl.tensor(semantic.builder.create_broadcast(value.handle, target.shape.values), target)


def _promote_equal_types_at_once() -> None:
    cast, check = TritonSemantic.cast, TritonSemantic.binary_op_type_checking_impl
    constants: dict[tuple[Any, ...], Any] = {}
    max_constants = 1024

    def cast_values(self: Any, value: Any, dtype: Any, fp_downcast_rounding: str | None = None) -> Any:
        if value.dtype is dtype.scalar:
            return value
        return cast(self, value, dtype, fp_downcast_rounding)

    def check_operands(
        self: Any,
        left: Any,
        right: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        options = (allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
        left_type, right_type = type(left), type(right)
        if left_type is right_type is tl.tensor:
            element = left.dtype
            if element is right.dtype and not div_or_mod and not element.is_ptr():
                return self.broadcast_impl_value(left, right)
        elif left_type is tl.tensor and isinstance(right, Number) and (right or right_type is int):
            key = (
                left.type.name,
                right_type,
                right,
                False,
                *options,
            )  # unlike 0.0, no other number equals it
            constant = constants.get(key)
            if constant is not None:
                return left, constant
            promoted, constant = check(self, left, right, *options)
            if promoted is left and len(constants) < max_constants:
                constants[key] = constant
            return promoted, constant
        elif right_type is tl.tensor and isinstance(left, Number) and (left or left_type is int):
            key = (right.type.name, left_type, left, True, *options)
            constant = constants.get(key)
            if constant is not None:
                return constant, right
            constant, promoted = check(self, left, right, *options)
            if promoted is right and len(constants) < max_constants:
                constants[key] = constant
            return constant, promoted
        return check(self, left, right, *options)

    TritonSemantic.cast = cast_values
    TritonSemantic.binary_op_type_checking_impl = check_operands
