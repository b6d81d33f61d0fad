"""QuantizationConfig: which layers of a checkpoint are quantised, and by which scheme. No torch.

`quantization_formats` reads it from config.json or hf_quant_config.json. The patterns of layers that these have are
bounded, because they come with a checkpoint and are matched against every layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fnmatch import translate
from functools import cached_property
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from argosy_engine.errors import ConfigError
from argosy_engine.model_configs.weight_schemes import (
    AwqScheme,
    BlockFp8Scheme,
    Bnb8Scheme,
    Fp8Scheme,
    GptqScheme,
    IntScheme,
    PackedIntScheme,
    Scheme,
    SchemeTensor,
)

INTEGER_BITS = {"int8": 8, "int4": 4}
"""Values of `--quantization` that quantise to integers, and their bits."""
HEAD_BITS = 8
"""Of the output head, whatever the layers have: its rounding is seen in every log probability."""

PACKED_SCHEMES = (GptqScheme, AwqScheme, PackedIntScheme, IntScheme, Bnb8Scheme)
"""Integers, by which kernels multiply as they are packed (`no_packed_product`)."""
PACKED_GROUPS = {"cpu": 8, "cuda": 32}
"""By device: inputs that share a scale must be a multiple of this, or all."""
_KERNELS = {"cpu": "the CPU kernels", "cuda": "the GPU kernels"}

_MULTIPLIED_FP8 = "FP8 with scales of tensors, channels or blocks of 128 inputs is multiplied in FP8"
_NO_KERNEL = "no kernel multiplies by them as they are"
_MAX_IGNORED = 1 << 16
_MAX_PATTERN = 256
_MAX_PATTERNS = 256
"""Patterns are matched one by one against every layer; plain names are looked up in a set."""
_MAX_REPEATS = 2
"""Repetitions of one kind in a regular expression. Its time grows with this power of the length of a name."""
_MAX_STARS = 4
_DIGIT = r"\\d|\[0-9\]"
_CLASS = r"\[\^?[\w.-]+\]"
_ATOM = rf"(?:[\w:/ .-]|\\[.dw_-]|{_CLASS})"
_EXPRESSION = re.compile(rf"\^?(?:{_ATOM}[*+]?)*\$?", re.ASCII)
_WORD = r"(?:[\w/ -]|\\[._-])+"
_ALTERNATIVES = re.compile(rf"\((?:\?:)?{_WORD}(?:\|{_WORD}){{1,15}}\)(?![*+?{{])", re.ASCII)
"""One of a few words, of which an expression may have one place: its time grows with their number."""
SPECIAL = re.compile(r"[*+?^$()\[\]{}|\\]")
_EXPERTS = ".experts."
_DIGITS_REPEATED = re.compile(rf"(?:{_DIGIT})[*+]")


class QuantizationConfig(Struct, frozen=True, kw_only=True, dict=True):
    """Which linear layers are quantised, and how."""

    method: str
    """`quant_method` in config.json."""
    default: Scheme | None = None
    """Of the layers that nothing else names; None: they are not quantised."""
    experts: Scheme | None = None
    """Of experts that are stored stacked; None: they are not quantised."""
    ignored: tuple[str, ...] = ()
    """Linear layers that are not quantised: names of layers or of modules that contain them, with `*` for any text, or
    simple regular expressions after `re:`."""
    skips_as_transformers: bool = False
    """Whether `ignored` is transformers' `modules_to_not_convert` (`layer_names_of_transformers`)."""
    rules: tuple[tuple[str, Scheme | None], ...] = ()
    """Schemes of layers by name or by a regular expression after `re:`. Names count before expressions, and of these
    the first that matches."""
    plain: frozenset[str] = frozenset()
    """Layers that the checkpoint stores unquantised (`with_stored_layers`)."""

    def scheme_of(self, layer: str) -> Scheme | None:
        """Return the scheme of a linear layer; None: it is not quantised.

        Args:
            layer: its name in the checkpoint, without `.weight`.
        """
        if self._is_ignored(layer):
            return None
        scheme = self._scheme(layer)
        return None if layer in self.plain and scheme is not None and scheme.is_told_by_storage else scheme

    def quantises(self, layer: str) -> bool:
        """Whether a linear layer is quantised."""
        return self.scheme_of(layer) is not None

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """All schemes that layers may have, each once."""
        found = [self.default, *(scheme for _, scheme in self.rules)]
        return tuple(dict.fromkeys(scheme for scheme in found if scheme is not None))

    @property
    def has_fp8(self) -> bool:
        """Whether there are weights that GPUs multiply by in FP8."""
        return any(map(is_multiplied, self.schemes))

    def has_packed(self, device: str) -> bool:
        """Whether there are weights that a device's kernels multiply by as they are packed."""
        return any(no_packed_product(each, device) is None for each in self.schemes)

    def stored_tensor(self, name: str) -> tuple[str, Scheme, SchemeTensor] | None:
        """Return the layer that a tensor of a checkpoint belongs to, its scheme, and which of its tensors it is; None:
        it is none of a quantised layer."""
        for suffix in self._suffixes:
            if name.endswith(suffix) and (scheme := self.scheme_of(name.removesuffix(suffix))) is not None:
                for tensor in scheme.tensors:
                    if tensor.suffix == suffix:
                        return name.removesuffix(suffix), scheme, tensor
        return None

    def widened_elements(
        self, elements: Mapping[str, int], *, multiplies_fp8: bool
    ) -> tuple[dict[str, int], int]:
        """Return how many numbers tensors have once they are loaded, by name, and how many of these are in FP8.

        Scales of blocks become float32, one for each row, and count as two numbers of 16 bits.

        Args:
            elements: number of stored elements of each.
            multiplies_fp8: whether the device does.
        """
        found, num_fp8 = {}, 0
        for name, count in elements.items():
            place = self.stored_tensor(name)
            if place is not None:
                layer, scheme, tensor = place
                needed = [each for each in scheme.tensors[1:2] if layer + each.suffix in elements]
                if needed and tensor == scheme.tensors[0]:
                    count = round(count / scheme.elements_per_number)
                    num_fp8 += count if multiplies_fp8 and is_multiplied(scheme) else 0
                elif (
                    needed and multiplies_fp8 and isinstance(scheme, BlockFp8Scheme) and is_multiplied(scheme)
                ):
                    count = 2 * elements.get(layer + scheme.tensors[0].suffix, 0) // FP8_BLOCK
                elif needed and (isinstance(scheme, BlockFp8Scheme) or not is_multiplied(scheme)):
                    count = 0
            elif self.experts is not None and name.endswith("_blocks"):
                if multiplies_fp8:
                    num_fp8 += count  # bytes, as they are stored
                else:
                    count *= 2  # numbers in a byte
            found[name] = count
        return found, num_fp8

    def packed_numbers(
        self, elements: Mapping[str, int], num_ranks: int, device: str = "cpu"
    ) -> tuple[int, int]:
        """Return how many numbers stay packed on a device, and at most how many bytes they take with their scales.

        Where parts of a fused layer may differ (`rules`), and where ranks divide inputs that were ordered by
        activation, weights may have to be widened, and count so.

        Args:
            elements: number of stored elements of each tensor.
        """
        count = size = 0
        if self.rules:
            return 0, 0
        for name, stored in elements.items():
            if (place := self.stored_tensor(name)) is None:
                continue
            layer, scheme, tensor = place
            if tensor != scheme.tensors[0] or no_packed_product(scheme, device) is not None:
                continue
            if layer + scheme.tensors[1].suffix not in elements:
                continue
            if num_ranks > 1 and getattr(scheme, "is_ordered", False):
                continue
            own = round(stored / scheme.elements_per_number)
            groups = getattr(scheme, "group_size", None)
            has_zeros = not getattr(scheme, "is_symmetric", isinstance(scheme, Bnb8Scheme))
            count += own
            size += own * getattr(scheme, "bits", 8) // 8
            size += 0 if groups is None else own // groups * (8 if has_zeros else 4)
        return count, size

    def renamed(self, name_of: Callable[[str], str | None]) -> QuantizationConfig:
        """Return this with other names of layers.

        Args:
            name_of: maps a name or pattern; to None what is none of the layers.
        """
        return replace(
            self,
            ignored=tuple(own for name in self.ignored if (own := name_of(name)) is not None),
            rules=tuple((own, scheme) for name, scheme in self.rules if (own := name_of(name)) is not None),
        )

    def with_stored_layers(self, names: Collection[str]) -> QuantizationConfig:
        """Return this with the layers that a checkpoint stores unquantised, though no list of exceptions names them,
        and with the names that it gives to scales.

        Args:
            names: of all tensors.
        """
        found = {name.removesuffix(".weight") for name in names if name.endswith(".weight")}
        is_told = [scheme for scheme in self.schemes if scheme.is_told_by_storage]
        ends = {each.tensors[1].suffix for each in is_told}
        plain = {layer for layer in found if not any(layer + end in names for end in ends)}
        default = self.default
        if self.skips_as_transformers and isinstance(default, Fp8Scheme):
            is_of_transformers = any(name.endswith(".weight_scale_inv") for name in names)
            default = replace(default, is_of_transformers=is_of_transformers)
        return replace(self, default=default, plain=frozenset(plain if is_told else ()))

    def _is_ignored(self, layer: str) -> bool:
        if not self._names.isdisjoint(_modules(layer)):
            return True
        if self.skips_as_transformers and self._is_skipped(layer):
            return True
        if any(pattern.match(layer) for pattern in self._expressions):
            return True
        return any(glob.match(module) for glob in self._globs for module in _modules(layer))

    def _is_skipped(self, layer: str) -> bool:
        """Whether transformers does not convert the module of a layer (`quantizers_utils.should_convert_module`). It
        converts the experts of a layer as one module."""
        experts = layer.find(_EXPERTS)
        module = layer if experts < 0 else layer[: experts + len(_EXPERTS) - 1]
        if (found := self._skipped.get(module)) is None:
            found = any(module[len(module) - size :] in self._names for size in self._sizes) or any(
                pattern.match(module) for pattern in self._skips
            )
            self._skipped[module] = found
        return found

    def _scheme(self, layer: str) -> Scheme | None:
        if layer in self._named_rules:
            return self._named_rules[layer]
        for pattern, scheme in self._matched_rules:
            if pattern.match(layer):
                return scheme
        return self.default

    @cached_property
    def _suffixes(self) -> list[str]:
        """Suffixes of all stored tensors, the longest first."""
        found = {tensor.suffix for scheme in self.schemes for tensor in scheme.tensors}
        return sorted(found, key=len, reverse=True)

    @cached_property
    def _named_rules(self) -> dict[str, Scheme | None]:
        return {name: scheme for name, scheme in reversed(self.rules) if not _is_pattern(name)}

    @cached_property
    def _matched_rules(self) -> list[tuple[re.Pattern[str], Scheme | None]]:
        return [
            (re.compile(name[3:] if name.startswith("re:") else translate(name)), scheme)
            for name, scheme in self.rules
            if _is_pattern(name)
        ]

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(each for each in self.ignored if not self._is_expression(each))

    @cached_property
    def _globs(self) -> list[re.Pattern[str]]:
        return [
            re.compile(translate(each))
            for each in self.ignored
            if _is_pattern(each) and not each.startswith("re:") and not self._is_skip(each)
        ]

    @cached_property
    def _sizes(self) -> frozenset[int]:
        """Lengths of `_names`, by which ends of other names are looked up."""
        return frozenset(map(len, self._names))

    @cached_property
    def _skips(self) -> list[re.Pattern[str]]:
        """Expressions of transformers, which match from the start of a name up to where that of a module ends."""
        return [
            re.compile(rf"(?:{each})(?:(?<=\.)|(?=\.|$))") for each in self.ignored if self._is_skip(each)
        ]

    @cached_property
    def _skipped(self) -> dict[str, bool]:
        """What `_is_skipped` has found, by module."""
        return {}

    def _is_skip(self, name: str) -> bool:
        return self.skips_as_transformers and _is_skip(name)

    def _is_expression(self, name: str) -> bool:
        return _is_pattern(name) or self._is_skip(name)

    @cached_property
    def _expressions(self) -> list[re.Pattern[str]]:
        return [re.compile(each[3:]) for each in self.ignored if each.startswith("re:")]


FP8_BLOCK = 128
"""Inputs with one scale in the blocks that GPUs multiply by as they are."""


def is_multiplied(scheme: Scheme) -> bool:
    """Whether there are devices that multiply in FP8 by weights of a scheme."""
    if isinstance(scheme, BlockFp8Scheme):
        return scheme.block[1] == FP8_BLOCK
    return isinstance(scheme, Fp8Scheme) and not scheme.is_weight_only


def no_packed_product(scheme: Scheme, device: str) -> str | None:
    """Return why a device's kernels do not multiply by weights of a scheme as they are packed, or None. A layer may
    have to be widened all the same (`layers.products.IntegerProduct`)."""
    if not isinstance(scheme, PACKED_SCHEMES) or device not in _KERNELS:
        return _NO_KERNEL
    if (
        isinstance(scheme, GptqScheme | AwqScheme | PackedIntScheme)
        and scheme.bits not in INTEGER_BITS.values()
    ):
        return f"{_KERNELS[device]} multiply by 4 and 8 bits, not by {scheme.bits}"
    size = None if isinstance(scheme, Bnb8Scheme) else scheme.group_size
    if size is not None and size % PACKED_GROUPS[device]:
        return (
            f"{_KERNELS[device]} take groups of a multiple of {PACKED_GROUPS[device]} inputs, not of {size}"
        )
    return None


def no_integer_product(device: str, dtype: str, *, has_kernels: bool) -> str | None:
    """Return why a device does not multiply by integers as they are packed, or None.

    Args:
        dtype: of the activations, without `torch.`.
        has_kernels: whether our kernels serve there in this dtype.
    """
    if has_kernels:
        return None
    if device == "cuda":
        if dtype == "float32":
            return "the GPU kernels multiply by integers in bfloat16 and float16"
        return "the Triton kernels do not serve here"
    return f"the CPU kernels are off or do not run here in {dtype}"


def no_mxfp4_product(device: str, dtype: str, uses_triton: bool) -> str | None:
    """Return why a device does not multiply by stacked experts in MXFP4 as they are packed, or None. Arguments:
    `no_fp8_product`."""
    if device != "cuda":
        return _NO_KERNEL
    if dtype != "bfloat16":
        return "the GPU kernels multiply by MXFP4 in bfloat16"
    return None if uses_triton else "the Triton kernels do not serve here"


def _is_pattern(name: str) -> bool:
    return name.startswith("re:") or "*" in name


def _is_skip(name: str) -> bool:
    """Whether a name of transformers' `modules_to_not_convert` matches as a regular expression only."""
    if not _has_operators(name):
        return False
    try:
        re.compile(name)
    except (re.error, OverflowError, RecursionError):
        return False  # such as `*.mlp.gate`, which only other programs read
    return True


def _has_operators(name: str) -> bool:
    return not name.startswith("re:") and bool(SPECIAL.search(name) or name.endswith("."))


def _modules(layer: str) -> Iterator[str]:
    """Yield a layer's name and those of the modules that contain it."""
    while layer:
        yield layer
        layer = layer.rpartition(".")[0]


def check_quantization(found: QuantizationConfig | None, wanted: str | None) -> None:
    """Check `--quantization` against the checkpoint.

    Args:
        found: the checkpoint's.

    Raises:
        ConfigError: they contradict each other.
    """
    method = None if found is None else found.method
    if wanted in (None, method) or (method is None and (wanted == "fp8" or wanted in INTEGER_BITS)):
        return
    is_or_not = "not quantised" if method is None else f"quantised by {method}"
    raise ConfigError(
        f"--quantization {wanted}: the checkpoint is {is_or_not}; leave the flag out to take what config.json says"
    )


def what_becomes(
    found: QuantizationConfig,
    dtype: str,
    refusal: str | None,
    integer_refusal: str | None,
    device: str,
    *,
    has_experts: bool = False,
) -> str:
    """Say in which schemes weights are, and what becomes of them when they are loaded.

    Args:
        dtype: of the activations, without `torch.`.
        refusal: why the device does not multiply in FP8 (`no_fp8_product`), or None.
        integer_refusal: why it does not multiply by integers as they are packed (`no_integer_product`), or None.
        device: `cpu` or `cuda`.
        has_experts: whether the model has experts.
    """
    schemes = (*found.schemes, *(() if found.experts is None else (found.experts,)))
    forms = f"weights in {'; '.join(dict.fromkeys(each.about for each in schemes))} ({found.method})"
    widened = f"widened to {dtype} at load"
    if found.has_packed(device) and integer_refusal is None:
        is_fp8 = refusal is None
        reasons = {
            each.about: no_packed_product(each, device)
            for each in schemes
            if not (is_fp8 and is_multiplied(each))
        }
        ends = [
            f"{about} {widened}, because {reason}" for about, reason in reasons.items() if reason is not None
        ]
        if is_fp8 and found.has_fp8:
            ends.insert(0, _MULTIPLIED_FP8)
        if has_experts and device == "cuda":
            ends.append(f"experts of packed integers {widened}")
        kept = f"multiplied by {_KERNELS[device]} as they are packed"
        if found.rules or any(reasons.values()):
            kept += ", where fused projections have equal groups"
        return "; ".join([f"{forms}: {kept}", *ends])
    reason: str | None = None
    if found.experts is not None and device == "cuda":
        reason = no_mxfp4_product(device, dtype, uses_triton=True) or integer_refusal
        if reason is None:
            return f"{forms}: multiplied by {_KERNELS[device]} as they are packed"
        return f"{forms}: {widened}, because {reason}"
    if not found.has_fp8 or refusal is not None:
        reason = _NO_KERNEL
        if found.has_fp8:
            reason = refusal
        elif found.has_packed(device):
            reason = integer_refusal
        elif integer_refusal is None and len(schemes) == 1:
            reason = no_packed_product(schemes[0], device)
        return f"{forms}: {widened}, because {reason}"
    if all(map(is_multiplied, schemes)):
        return f"{forms}: multiplied in FP8"
    return f"{forms}: {_MULTIPLIED_FP8}, all else {widened}"


def check_online_quantization(
    found: QuantizationConfig | None,
    wanted: str | None,
    refusal: str | None,
    integer_refusal: str | None,
) -> None:
    """Check that the device can quantise an unquantised checkpoint, if `--quantization` asks for it.

    Args:
        refusal: why the device does not multiply in FP8 (`no_fp8_product`), or None.
        integer_refusal: why it does not multiply by integers as they are packed (`no_integer_product`), or None.

    Raises:
        ConfigError: it cannot.
    """
    if found is not None or wanted is None:
        return
    reason = integer_refusal if wanted in INTEGER_BITS else refusal
    if reason is not None:
        raise ConfigError(f"--quantization {wanted} of an unquantised model: {reason}; leave the flag out")


def group_size(inputs: int) -> int | None:
    """Return the number of inputs that share a scale if a layer is quantised to integers; None: it is not."""
    return next((size for size in (128, 64, 32) if inputs % size == 0), None)


def no_fp8_product(dtype: str, device: str, uses_triton: bool) -> str | None:
    """Return why a device does not multiply in FP8, or None if only its compute capability is left to ask for.

    Args:
        dtype: of the activations, without `torch.`.
        device: `cpu` or `cuda`.
        uses_triton: `AttentionBackend.uses_triton`.
    """
    if device != "cuda":
        return "a CPU has no FP8 product"
    if dtype != "bfloat16":
        return "FP8 products come in bfloat16 (--dtype bfloat16)"
    return None if uses_triton else "the Triton kernels do not serve here"


def layer_names(value: Any) -> tuple[str, ...]:
    """Return the names and patterns of a list of layers.

    Raises:
        ConfigError: it is no such list, too long, or has a pattern that may take long.
    """
    names: Sequence[Any] = value or ()
    if not isinstance(names, list | tuple) or not all(isinstance(each, str) for each in names):
        raise ConfigError("a list of layers in quantization_config is not a list of names")
    if len(names) > _MAX_IGNORED or any(len(each) > _MAX_PATTERN for each in names):
        raise ConfigError(
            f"a list of layers in quantization_config has more than {_MAX_IGNORED} names, or one of more than "
            f"{_MAX_PATTERN} characters"
        )
    _check_number(sum(map(_is_pattern, names)))
    for each in names:
        if each.startswith("re:"):
            _check_expression(each[3:])
        elif each.count("*") > _MAX_STARS:
            raise ConfigError(f"the pattern {each!r} of layers in quantization_config has too many *")
    return tuple(names)


def layer_names_of_transformers(value: Any) -> tuple[str, ...]:
    """Return transformers' `modules_to_not_convert`: ends of names of layers, names of layers and of modules that
    contain them, and regular expressions for these, from their start. A dot in a name stands for itself.

    Raises:
        ConfigError: see `layer_names`.
    """
    names = layer_names(value)
    _check_number(sum(map(_has_operators, names)))
    for each in filter(_is_skip, names):
        _check_expression(each)
    return names


def _check_number(num_patterns: int) -> None:
    if num_patterns > _MAX_PATTERNS:
        raise ConfigError(
            f"a list of layers in quantization_config has more than {_MAX_PATTERNS} patterns; write the names out"
        )


def _check_expression(pattern: str) -> None:
    """Refuse regular expressions but those of a few repeated characters and one choice of words, which match fast.

    Runs of digits are counted by themselves, because those of a layer's name are short. A `.*` at the end costs
    nothing.
    """
    digits = len(_DIGITS_REPEATED.findall(pattern))
    others = len(re.findall(r"[*+]", pattern.removesuffix(".*"))) - digits
    try:
        re.compile(pattern)
        plain = _ALTERNATIVES.sub("x", pattern, count=1)
        is_simple = bool(_EXPRESSION.fullmatch(plain)) and max(digits, others) <= _MAX_REPEATS
    except (re.error, OverflowError, RecursionError):
        is_simple = False
    if not is_simple:
        raise ConfigError(
            f"the pattern {pattern!r} of layers in quantization_config is malformed or too complex: only plain text, "
            f"classes of characters, {_MAX_REPEATS} repetitions (.*) and one choice of words (a|b) are supported; "
            "write the names out"
        )
