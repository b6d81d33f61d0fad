"""Reads how a checkpoint is quantised from config.json or hf_quant_config.json, in each format that is known. No torch.

What is not read is refused by name before any weight is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from argosy_engine.errors import OTHER_ENGINES, ConfigError
from argosy_engine.model_configs.quantization_config import (
    SPECIAL,
    QuantizationConfig,
    layer_names,
    layer_names_of_transformers,
)
from argosy_engine.model_configs.weight_schemes import (
    AwqScheme,
    BlockFp8Scheme,
    Bnb4Scheme,
    Bnb8Scheme,
    Fp8Scheme,
    GptqScheme,
    IntScheme,
    Mxfp4ExpertsScheme,
    Mxfp8Scheme,
    Nvfp4Scheme,
    PackedIntScheme,
    Scheme,
)

_SUPPORTED = (
    "FP8, GPTQ, AWQ, AutoRound, compressed-tensors, ModelOpt's FP8, NVFP4 and MXFP8, bitsandbytes, and gpt-oss' "
    "experts in MXFP4"
)
_MAX_BLOCK = 4096
_MAX_GROUP = 1 << 16


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
    if (read := _METHODS.get("modelopt" if method.startswith("modelopt") else method)) is None:
        raise _refused(f"quant_method {method!r}", _NEAREST.get(method))
    return read(raw)


def _compressed_tensors(raw: Mapping[str, Any]) -> QuantizationConfig:
    """https://github.com/vllm-project/compressed-tensors"""
    if _mapping(raw.get("sparsity_config") or {}, "sparsity_config").get("format", "dense") != "dense":
        raise _refused("compressed-tensors with sparse weights")
    if raw.get("transform_config"):
        raise _refused("compressed-tensors with transforms")
    rules: list[tuple[str, Scheme | None]] = []
    default: Scheme | None = None
    for each in _mapping(raw.get("config_groups") or {}, "config_groups").values():
        group = _mapping(each, "config_groups")
        scheme = _group_scheme(group, group.get("format") or raw.get("format"))
        for target in layer_names(group.get("targets")):
            if target == "Linear" and default in (None, scheme):
                default = scheme
            elif target.startswith("re:") or "." in target:
                rules.append((target, scheme))
            else:
                raise _refused(f"compressed-tensors with the target {target!r}")
    if default is None and not rules:
        raise _refused("compressed-tensors without targets in config_groups")
    layer_names([target for target, _ in rules])  # together they are bounded as well
    return QuantizationConfig(
        method="compressed-tensors",
        default=default,
        rules=tuple(rules),
        ignored=layer_names(raw.get("ignore")),
    )


def _group_scheme(group: Mapping[str, Any], form: Any) -> Scheme:
    """Return the scheme of the weights. Inputs are quantised in FP8 only."""
    weights = _mapping(group.get("weights") or {}, "weights")
    bits, strategy = weights.get("num_bits"), weights.get("strategy")
    kind = str(weights.get("type", "int"))[:20]
    of = f"compressed-tensors with weights of {bits} bits {kind!r}"
    if form not in _FORMS.get(kind, ()) or (form == "nvfp4-pack-quantized") != (
        kind == "float" and bits == 4
    ):
        raise _refused(f"{of} in the format {form!r}")
    is_symmetric = weights.get("symmetric") is not False
    if kind == "float" and not is_symmetric:
        raise _refused(f"{of} and zero points")
    group_size = None if strategy in ("tensor", "channel", "block") else _group_size(weights)
    ordering, is_per_tensor = weights.get("actorder"), strategy == "tensor"
    if kind == "float" and bits == 8:
        return _float_scheme(weights, group.get("input_activations"))
    if kind == "float" and strategy in ("tensor_group", "group"):
        return Nvfp4Scheme(
            weight=".weight_packed",
            tensor_scale=".weight_global_scale",
            divides=True,
            group_size=group_size or 16,
        )
    if kind == "float" or strategy not in ("tensor", "channel", "group"):
        raise _refused(f"{of} per {strategy!r}")
    if form == "pack-quantized" and bits in (4, 8):
        return PackedIntScheme(
            bits=bits,
            group_size=group_size,
            is_per_tensor=is_per_tensor,
            is_symmetric=is_symmetric,
            is_ordered=ordering in ("group", "dynamic", True),
        )
    if form != "pack-quantized" and bits in range(2, 9) and ordering in (None, False, "weight", "static"):
        return IntScheme(group_size=group_size, is_per_tensor=is_per_tensor, is_symmetric=is_symmetric)
    raise _refused(f"{of}, actorder {ordering!r}")


_FORMS: dict[str, tuple[str | None, ...]] = {
    "float": (None, "float-quantized", "naive-quantized", "nvfp4-pack-quantized"),
    "int": ("pack-quantized", "int-quantized", "naive-quantized"),
}
"""Formats of compressed-tensors by the type of weights; None: config.json names none."""


def _float_scheme(weights: Mapping[str, Any], input_activations: Any) -> Scheme:
    strategy = weights.get("strategy")
    if strategy == "block":
        return BlockFp8Scheme(block=_block(weights.get("block_structure")))
    if strategy not in ("tensor", "channel"):
        raise _refused(f"compressed-tensors with weights per {strategy!r}")
    if input_activations is None:
        return Fp8Scheme(is_per_channel=strategy == "channel", is_weight_only=True)
    inputs = _mapping(input_activations, "input_activations")
    bits, kind, dynamic = inputs.get("num_bits"), inputs.get("type"), inputs.get("dynamic")
    if (bits, kind) != (8, "float") or inputs.get("symmetric") is False:
        raise _refused(f"compressed-tensors with input activations of {bits} bits {kind!r}")
    if (inputs.get("strategy"), dynamic) not in (("token", True), ("tensor", False), ("tensor", True)):
        raise _refused(f"compressed-tensors with input activations per {inputs.get('strategy')!r}")
    return Fp8Scheme(is_per_channel=strategy == "channel", is_static=not dynamic)


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
    fields = {**nested, **raw}
    ignored = layer_names(raw.get("ignore") or raw.get("exclude_modules") or nested.get("exclude_modules"))
    if fields.get("quant_algo") != "MIXED_PRECISION":
        return QuantizationConfig(method="modelopt", default=_modelopt_scheme(fields), ignored=ignored)
    layers = _mapping(fields.get("quantized_layers") or {}, "quantized_layers")
    names = layer_names(list(layers))
    rules = [(name, _modelopt_scheme(_mapping(layers[name], "quantized_layers"))) for name in names]
    return QuantizationConfig(method="modelopt", rules=tuple(rules), ignored=ignored)


def _modelopt_scheme(fields: Mapping[str, Any]) -> Scheme:
    algorithm = str(fields.get("quant_algo")).upper()
    if algorithm in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        return Fp8Scheme(is_per_channel=algorithm != "FP8", is_static=algorithm == "FP8")
    if algorithm == "FP8_PB_WO":
        return BlockFp8Scheme(block=(128, 128))
    if algorithm in ("NVFP4", "W4A16_NVFP4"):
        return Nvfp4Scheme(group_size=_group_size({"group_size": fields.get("group_size") or 16}) or 16)
    if algorithm == "MXFP8":
        return Mxfp8Scheme()
    raise _refused(f"ModelOpt's quant_algo {fields.get('quant_algo')!r}", "one in NVFP4, MXFP8 or FP8")


def _fp8(raw: Mapping[str, Any]) -> QuantizationConfig:
    block = None if (sizes := raw.get("weight_block_size")) is None else _block(sizes)
    scheme = raw.get("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise _refused(f"FP8 with activation_scheme {scheme!r}")
    # The other is vLLM's name of it.
    lists = [raw.get(name) for name in ("modules_to_not_convert", "ignored_layers")]
    skipped = lists[0] or lists[1]
    if lists == [None, None]:
        skipped = ("lm_head",)
    if block is not None and scheme == "static":
        raise _refused("FP8 with scales per block and static activations")
    # Only transformers writes that there are no blocks.
    found: Scheme = Fp8Scheme(is_static=scheme == "static", is_of_transformers="weight_block_size" in raw)
    if block is not None:
        found = BlockFp8Scheme(block=block, scale=".weight_scale_inv")
    names = layer_names_of_transformers(skipped)
    return QuantizationConfig(method="fp8", default=found, ignored=names, skips_as_transformers=True)


def _gptq(raw: Mapping[str, Any]) -> QuantizationConfig:
    """https://github.com/ModelCloud/GPTQModel, and AutoGPTQ before it"""
    form = raw.get("checkpoint_format") or raw.get("format") or "gptq"
    if form not in ("gptq", "gptq_v2") or raw.get("is_marlin_format"):
        raise _refused(f"GPTQ in the format {'marlin' if raw.get('is_marlin_format') else form!r}")
    if raw.get("pack_dtype") not in (None, "int32"):
        raise _refused(f"GPTQ packed into {raw['pack_dtype']!r}")
    meta = raw.get("meta")
    is_gptqmodel = isinstance(meta, Mapping) and "gptqmodel" in str(meta.get("quantizer"))

    def scheme(fields: Mapping[str, Any]) -> Scheme:
        bits = _bits(fields, (2, 3, 4, 8))
        is_v2, is_symmetric = form == "gptq_v2", bool(fields.get("sym", False))
        if bits == 3 and not is_v2 and is_gptqmodel:
            raise _refused("GPTQ of 3 bits with GPTQModel's zero points in the first format (take gptq_v2)")
        return GptqScheme(
            bits=bits,
            group_size=_group_size(fields),
            is_symmetric=is_symmetric,
            is_ordered=bool(fields.get("desc_act", False)),
            is_v2=is_v2,
        )

    rules: list[tuple[str, Scheme | None]] = []
    for pattern, changes in _mapping(raw.get("dynamic") or {}, "dynamic").items():
        name = "re:" + pattern.removeprefix("-:").removeprefix("+:")
        if pattern.startswith(
            "-:"
        ):  # the file tells these layers, too, where the expression is not understood
            with suppress(ConfigError):
                layer_names([name])
                rules.append((name, None))
        else:
            rules.append((name, scheme({**raw, **_mapping(changes or {}, "dynamic")})))
    layer_names([name for name, _ in rules])
    return QuantizationConfig(
        method="gptq",
        default=scheme(raw),
        rules=tuple(rules),
        ignored=() if raw.get("lm_head") else ("lm_head",),
    )


def _awq(raw: Mapping[str, Any]) -> QuantizationConfig:
    """https://github.com/casper-hansen/AutoAWQ"""
    if (version := str(raw.get("version") or "gemm").lower()) != "gemm":
        raise _refused(f"AWQ packed for {version!r}")
    return QuantizationConfig(
        method="awq",
        default=AwqScheme(bits=_bits(raw, (4,)), group_size=_group_size(raw)),
        ignored=("lm_head", *layer_names(raw.get("modules_to_not_convert"))),
    )


def _auto_round(raw: Mapping[str, Any]) -> QuantizationConfig:
    """https://github.com/intel/auto-round: layers packed as GPTQ or AWQ has them"""
    form = raw.get("packing_format") or raw.get("backend")
    if form not in ("auto_round:auto_gptq", "auto_round:auto_awq"):
        raise _refused(f"AutoRound packed as {form!r}", "one that is packed as auto_round:auto_gptq")

    def scheme(fields: Mapping[str, Any]) -> Scheme | None:
        kind = fields.get("data_type", "int")
        if isinstance(bits := fields.get("bits"), int) and bits >= 16:
            return None
        if kind != "int":
            raise _refused(f"AutoRound with weights of the type {kind!r}")
        if form == "auto_round:auto_awq":
            return AwqScheme(bits=_bits(fields, (4,)), group_size=_group_size(fields))
        return GptqScheme(
            bits=_bits(fields, (2, 3, 4, 8)),
            group_size=_group_size(fields),
            is_symmetric=bool(fields.get("sym", False)),
        )

    rules = []
    for name, changes in _mapping(raw.get("extra_config") or {}, "extra_config").items():
        if SPECIAL.search(name):  # a regular expression that is searched for
            name = "re:" + ("" if name.startswith(("^", ".*")) else ".*") + name
        rules.append((name, scheme({**raw, **_mapping(changes, "extra_config")})))
    layer_names([name for name, _ in rules])
    return QuantizationConfig(
        method="auto-round",
        default=scheme(raw),
        rules=tuple(rules),
        ignored=() if "lm_head" in dict(rules) else ("lm_head",),
    )


def _bitsandbytes(raw: Mapping[str, Any]) -> QuantizationConfig:
    """https://github.com/bitsandbytes-foundation/bitsandbytes, as transformers stores it"""
    ignored = layer_names(raw.get("llm_int8_skip_modules"))
    if raw.get("load_in_8bit") or raw.get("_load_in_8bit"):
        return QuantizationConfig(method="bitsandbytes", default=Bnb8Scheme(), ignored=ignored)
    if not (raw.get("load_in_4bit") or raw.get("_load_in_4bit")):
        raise _refused("bitsandbytes without load_in_4bit or load_in_8bit")
    kind, storage = raw.get("bnb_4bit_quant_type", "fp4"), raw.get("bnb_4bit_quant_storage", "uint8")
    if kind not in ("nf4", "fp4") or storage not in (None, "uint8"):
        raise _refused(f"bitsandbytes of the type {kind!r} in {storage!r}")
    default = Bnb4Scheme(kind=kind, is_double=bool(raw.get("bnb_4bit_use_double_quant", False)))
    return QuantizationConfig(method="bitsandbytes", default=default, ignored=ignored)


def _bits(raw: Mapping[str, Any], known: tuple[int, ...]) -> int:
    bits = raw.get("bits", raw.get("w_bit"))
    if not isinstance(bits, int) or bits not in known:
        choices = ", ".join(map(str, known))
        raise _refused(f"{raw.get('quant_method')} of {str(bits)[:20]} bits (of {choices} it is)")
    return bits


def _group_size(raw: Mapping[str, Any]) -> int | None:
    """Return the inputs that share a scale; None: all."""
    size = raw.get("group_size", raw.get("q_group_size", -1))
    if not isinstance(size, int) or isinstance(size, bool) or not (size == -1 or 1 <= size <= _MAX_GROUP):
        raise _refused(f"groups of {str(size)[:20]} inputs")
    return None if size == -1 else size


def _mxfp4(_: Mapping[str, Any]) -> QuantizationConfig:
    return QuantizationConfig(method="mxfp4", experts=Mxfp4ExpertsScheme())


_METHODS: dict[str, Callable[[Mapping[str, Any]], QuantizationConfig]] = {
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "fp8": _fp8,
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "intel/auto-round": _auto_round,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": _mxfp4,
}
"""Readers of `quantization_config`, by its `quant_method`."""


_NEAREST: dict[str, str] = {
    **dict.fromkeys(("fbgemm_fp8", "ptpc_fp8"), "FP8 per channel by compressed-tensors"),
    **dict.fromkeys(("torchao", "quark", "quanto", "eetq"), "one of as many bits by compressed-tensors"),
    **dict.fromkeys(
        ("aqlm", "hqq", "higgs", "quip", "spqr", "vptq", "fp_quant", "bitnet", "squeezellm"),
        "GPTQ or AWQ of as many bits",
    ),
}
"""What comes nearest to a `quant_method` that is not read, and is."""


def _refused(scheme: str, nearest: str | None = None) -> ConfigError:
    return ConfigError(
        f"the checkpoint is quantised: {scheme[:200]} is not supported, only {_SUPPORTED}; use "
        f"{nearest or 'such a checkpoint'}, or the unquantised one, {OTHER_ENGINES}"
    )


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is not a JSON object")
    return value
