"""QuantizationConfig: how the weights of a checkpoint are quantised, read from config.json or hf_quant_config.json. No
torch.

FP8 (e4m3) weights with a scale per tensor, per output channel or per block are served, as compressed-tensors, NVIDIA's
ModelOpt and vLLM's own `fp8` write them, and gpt-oss' experts in MXFP4. Other schemes are refused by name before any
weight is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import translate
from functools import cached_property
from typing import Any, Literal

from msgspec import Struct

from argosy_engine.errors import OTHER_ENGINES, ConfigError

Method = Literal["compressed-tensors", "modelopt", "fp8", "mxfp4"]

_SUPPORTED = "FP8 per tensor, channel or block, of compressed-tensors, ModelOpt or fp8, and experts in MXFP4"
_MAX_BLOCK = 4096
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
_DIGITS_REPEATED = re.compile(rf"(?:{_DIGIT})[*+]")


class QuantizationConfig(Struct, frozen=True, kw_only=True, dict=True):
    """Quantised weights, and how their inputs are to be quantised."""

    method: Method
    is_per_channel: bool = False
    """Whether a weight has a scale per output channel, rather than one."""
    block: tuple[int, int] | None = None
    """Rows and columns of a weight that share a scale; None: see `is_per_channel`."""
    is_static: bool = False
    """Whether inputs have a scale in the checkpoint (`input_scale`), rather than one per token and step."""
    ignored: tuple[str, ...] = ()
    """Linear layers that are not quantised: names of layers or of modules that contain them, with `*` for any text, or
    simple regular expressions after `re:`."""

    def quantises(self, layer: str) -> bool:
        """Whether a linear layer is quantised.

        Args:
            layer: its name in the checkpoint, without `.weight`.
        """
        if not self._names.isdisjoint(_modules(layer)):
            return False
        if any(pattern.match(layer) for pattern in self._expressions):
            return False
        return not any(glob.match(module) for glob in self._globs for module in _modules(layer))

    def quantises_all(self, layers: Sequence[str]) -> bool:
        """Whether linear layers that are computed together are quantised.

        Raises:
            ConfigError: some are and some are not.
        """
        found = {self.quantises(layer) for layer in layers}
        if len(found) > 1:
            raise ConfigError(
                f"some of {', '.join(layers[:3])} are quantised and some are not; they are computed together, so "
                "quantise all of them or none"
            )
        return found.pop()

    @property
    def is_widened(self) -> bool:
        """Whether weights are widened on every device as they are loaded."""
        return self.block is not None or self.method == "mxfp4"

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(each for each in self.ignored if not _is_pattern(each))

    @cached_property
    def _globs(self) -> list[re.Pattern[str]]:
        return [
            re.compile(translate(each))
            for each in self.ignored
            if _is_pattern(each) and not each.startswith("re:")
        ]

    @cached_property
    def _expressions(self) -> list[re.Pattern[str]]:
        return [re.compile(each[3:]) for each in self.ignored if each.startswith("re:")]


def _is_pattern(name: str) -> bool:
    return name.startswith("re:") or "*" in name


def _modules(layer: str) -> Iterator[str]:
    """Yield a layer's name and those of the modules that contain it."""
    while layer:
        yield layer
        layer = layer.rpartition(".")[0]


def parse_quantization(
    config: Mapping[str, Any], hf_quant_config: Mapping[str, Any]
) -> QuantizationConfig | None:
    """Return the quantisation of a checkpoint, or None if it is not quantised.

    Args:
        config: config.json.
        hf_quant_config: hf_quant_config.json, which ModelOpt writes; empty if there is none.

    Raises:
        ConfigError: the scheme is not supported, or the description is malformed.
    """
    raw = config.get("quantization_config") or config.get("compression_config")
    if not raw and hf_quant_config:
        raw = {"quant_method": "modelopt", **_mapping(hf_quant_config.get("quantization"), "quantization")}
    if not raw:
        return None
    raw = _mapping(raw, "quantization_config")
    method = str(raw.get("quant_method") or "")[:64]
    if method == "compressed-tensors":
        return _compressed_tensors(raw)
    if method.startswith("modelopt"):
        return _modelopt(raw)
    if method == "fp8":
        return _fp8(raw)
    if method == "mxfp4":
        return QuantizationConfig(method="mxfp4")
    raise _refused(f"quant_method {method!r}")


def check_quantization(found: QuantizationConfig | None, wanted: str | None) -> None:
    """Check `--quantization` against the checkpoint.

    Args:
        found: the checkpoint's.

    Raises:
        ConfigError: they contradict each other.
    """
    method = None if found is None else found.method
    if wanted in (None, method) or (wanted == "fp8" and method is None):
        return
    is_or_not = "not quantised" if method is None else f"quantised by {method}"
    raise ConfigError(
        f"--quantization {wanted}: the checkpoint is {is_or_not}; leave the flag out to take what config.json says"
    )


def check_online_quantization(
    found: QuantizationConfig | None, wanted: str | None, refusal: str | None
) -> None:
    """Check that the device can quantise an unquantised checkpoint, if `--quantization` asks for it.

    Args:
        refusal: why the device does not multiply in FP8 (`no_fp8_product`), or None.

    Raises:
        ConfigError: it cannot.
    """
    if found is None and wanted is not None and refusal is not None:
        raise ConfigError(f"--quantization fp8 of an unquantised model: {refusal}; leave the flag out")


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


def _compressed_tensors(raw: Mapping[str, Any]) -> QuantizationConfig:
    """https://github.com/vllm-project/compressed-tensors"""
    if (form := raw.get("format")) not in (None, "float-quantized", "naive-quantized"):
        raise _refused(f"compressed-tensors format {form!r}")
    if _mapping(raw.get("sparsity_config") or {}, "sparsity_config").get("format", "dense") != "dense":
        raise _refused("compressed-tensors with sparse weights")
    if raw.get("transform_config"):
        raise _refused("compressed-tensors with transforms")
    groups = list(_mapping(raw.get("config_groups") or {}, "config_groups").values())
    schemes = {_group_scheme(_mapping(group, "config_groups")) for group in groups}
    if len(schemes) != 1:
        raise _refused(f"compressed-tensors with {len(schemes)} schemes in one checkpoint")
    is_per_channel, is_static, block = schemes.pop()
    return QuantizationConfig(
        method="compressed-tensors",
        is_per_channel=is_per_channel,
        block=block,
        is_static=is_static,
        ignored=_ignored(raw.get("ignore")),
    )


def _group_scheme(group: Mapping[str, Any]) -> tuple[bool, bool, tuple[int, int] | None]:
    """Return `is_per_channel`, `is_static` and `block`."""
    if group.get("targets") != ["Linear"]:
        raise _refused("compressed-tensors with other targets than Linear")
    weights = _mapping(group.get("weights") or {}, "weights")
    inputs = _mapping(group.get("input_activations") or {}, "input_activations")
    for name, each in (("weights", weights), ("input activations", inputs)):
        kind = f"{name} of {each.get('num_bits')} bits {each.get('type')!r}"
        if (each.get("num_bits"), each.get("type")) != (8, "float") or each.get("symmetric") is False:
            raise _refused(f"compressed-tensors with {kind}")
    strategy, dynamic = weights.get("strategy"), inputs.get("dynamic")
    if strategy == "block":
        return False, False, _block(weights.get("block_structure"))
    if strategy not in ("tensor", "channel"):
        raise _refused(f"compressed-tensors with weights per {strategy!r}")
    if (inputs.get("strategy"), dynamic) not in (("token", True), ("tensor", False), ("tensor", True)):
        raise _refused(f"compressed-tensors with input activations per {inputs.get('strategy')!r}")
    return strategy == "channel", not dynamic, None


def _block(sizes: Any) -> tuple[int, int]:
    """Return the rows and columns of a weight that share a scale."""
    if (
        not isinstance(sizes, list)
        or len(sizes) != 2
        or not all(isinstance(size, int) and 1 <= size <= _MAX_BLOCK for size in sizes)
    ):
        raise _refused(f"FP8 with scales per block of {str(sizes)[:60]}")
    return sizes[0], sizes[1]


def _modelopt(raw: Mapping[str, Any]) -> QuantizationConfig:
    """https://github.com/NVIDIA/TensorRT-Model-Optimizer"""
    nested = _mapping(raw.get("quantization") or {}, "quantization")
    algorithm = raw.get("quant_algo") or nested.get("quant_algo")
    is_per_channel = algorithm == "FP8_PER_CHANNEL_PER_TOKEN"
    if algorithm != "FP8" and not is_per_channel:
        raise _refused(f"ModelOpt's quant_algo {algorithm!r}")
    ignored = raw.get("ignore") or raw.get("exclude_modules") or nested.get("exclude_modules")
    return QuantizationConfig(
        method="modelopt",
        is_per_channel=is_per_channel,
        is_static=not is_per_channel,
        ignored=_ignored(ignored),
    )


def _fp8(raw: Mapping[str, Any]) -> QuantizationConfig:
    block = None if (sizes := raw.get("weight_block_size")) is None else _block(sizes)
    scheme = raw.get("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise _refused(f"FP8 with activation_scheme {scheme!r}")
    ignored = raw.get("ignored_layers") or raw.get("modules_to_not_convert")
    if block is not None and scheme == "static":
        raise _refused("FP8 with scales per block and static activations")
    return QuantizationConfig(
        method="fp8", block=block, is_static=scheme == "static", ignored=_ignored(ignored)
    )


def _refused(scheme: str) -> ConfigError:
    return ConfigError(
        f"the checkpoint is quantised: {scheme[:200]} is not supported, only {_SUPPORTED}; use such a checkpoint or "
        f"the unquantised one, {OTHER_ENGINES}"
    )


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is not a JSON object")
    return value


def _ignored(value: Any) -> tuple[str, ...]:
    names: Sequence[Any] = value or ()
    if not isinstance(names, list | tuple) or not all(isinstance(each, str) for each in names):
        raise ConfigError("the list of layers that are not quantised is not a list of names")
    if len(names) > _MAX_IGNORED or any(len(each) > _MAX_PATTERN for each in names):
        raise ConfigError(
            f"the list of layers that are not quantised has more than {_MAX_IGNORED} names, or one of more than "
            f"{_MAX_PATTERN} characters"
        )
    if sum(map(_is_pattern, names)) > _MAX_PATTERNS:
        raise ConfigError(
            f"the list of layers that are not quantised has more than {_MAX_PATTERNS} patterns; write the names out"
        )
    for each in names:
        if each.startswith("re:"):
            _check_expression(each[3:])
        elif each.count("*") > _MAX_STARS:
            raise ConfigError(f"the pattern {each!r} of layers that are not quantised has too many *")
    return tuple(names)


def _check_expression(pattern: str) -> None:
    """Refuse regular expressions but those of a few repeated characters, whose matching is fast.

    Runs of digits are counted by themselves, because those of a layer's name are short. A `.*` at the end costs
    nothing.
    """
    digits = len(_DIGITS_REPEATED.findall(pattern))
    others = len(re.findall(r"[*+]", pattern.removesuffix(".*"))) - digits
    try:
        re.compile(pattern)
        is_simple = bool(_EXPRESSION.fullmatch(pattern)) and max(digits, others) <= _MAX_REPEATS
    except (re.error, OverflowError, RecursionError):
        is_simple = False
    if not is_simple:
        raise ConfigError(
            f"the pattern {pattern!r} of layers that are not quantised is malformed or too complex: only plain text, "
            f"classes of characters and {_MAX_REPEATS} repetitions (.*) are supported; write the names out"
        )
