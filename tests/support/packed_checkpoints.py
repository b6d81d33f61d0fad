"""Checkpoints with weights in few bits, made from others as the tools that publish them write them.

Everything is written from the formats' descriptions, with numpy's bit functions, and shares no code with the engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file


class Packed(NamedTuple):
    """A weight [out, in] as it is stored, and what that stands for."""

    tensors: dict[str, torch.Tensor]
    """By the suffix after the layer's name."""
    widened: torch.Tensor


class Format(NamedTuple):
    config: dict[str, Any]
    """`quantization_config`."""
    pack: Callable[[str, torch.Tensor], Packed | None]
    """Packs a layer's weight, given its name; None: it is left as it is."""
    file: dict[str, Any] | None = None
    """hf_quant_config.json, in place of `quantization_config`."""


def words(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack numbers along the last dimension, the first into the lowest bits, into int32."""
    array = numbers.numpy().astype(np.uint8)
    lanes = np.unpackbits(array[..., None], axis=-1, bitorder="little")[..., :bits]
    packed = np.packbits(lanes.reshape(*array.shape[:-1], -1), axis=-1, bitorder="little")
    return torch.from_numpy(packed.view("<i4").copy())


def integers(
    weight: torch.Tensor, bits: int, groups: torch.Tensor, *, is_symmetric: bool, least_zero: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round a weight [out, in] to integers from 0: return these, float16 scales and zero points, both [out, groups].

    Args:
        groups: of each input.
    """
    top, count = (1 << bits) - 1, int(groups.max()) + 1
    scales, zeros = torch.empty(len(weight), count), torch.empty(len(weight), count)
    for group in range(count):
        part = weight[:, groups == group]
        if is_symmetric:
            scales[:, group] = part.abs().amax(dim=1) * 2 / top
            zeros[:, group] = 1 << (bits - 1)
        else:
            low, high = part.amin(dim=1).clamp(max=0), part.amax(dim=1).clamp(min=0)
            scales[:, group] = (high - low) / top
            zeros[:, group] = (-low / scales[:, group]).round().clamp(least_zero, top)
    scales = scales.half()
    numbers = (weight / scales.float()[:, groups]).round() + zeros[:, groups]
    return numbers.clamp(0, top), scales, zeros


def stands_for(
    numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, groups: torch.Tensor
) -> torch.Tensor:
    return (numbers - zeros[:, groups]) * scales.float()[:, groups]


def gptq(
    bits: int,
    group_size: int = -1,
    *,
    is_symmetric: bool = True,
    is_ordered: bool = False,
    is_v2: bool = False,
    has_index: bool = True,
) -> Callable[[str, torch.Tensor], Packed | None]:
    def pack(_: str, weight: torch.Tensor) -> Packed | None:
        if bits == 3 and len(weight) % 32:
            return None
        size = weight.shape[1]
        groups = torch.arange(size) // (size if group_size == -1 else group_size)
        if is_ordered:
            groups = groups[torch.randperm(size, generator=torch.Generator().manual_seed(size))]
        numbers, scales, zeros = integers(
            weight, bits, groups, is_symmetric=is_symmetric, least_zero=0 if is_v2 else 1
        )
        tensors = {
            ".qweight": words(numbers, bits).t(),
            ".qzeros": words(zeros.t() - (0 if is_v2 else 1), bits),
            ".scales": scales.t(),
        }
        if has_index:
            tensors[".g_idx"] = groups.int()
        return Packed(tensors, stands_for(numbers, scales, zeros, groups))

    return pack


def gptq_config(bits: int, group_size: int = -1, **fields: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "sym": True,
        "desc_act": False,
        **fields,
    }


def _mixed_gptq(name: str, weight: torch.Tensor) -> Packed | None:
    """4 bits, of keys 8, and values as they are: parts of one product that differ."""
    if name.endswith("v_proj"):
        return None
    return gptq(8, 16)(name, weight) if name.endswith("k_proj") else gptq(4, 32)(name, weight)


_DYNAMIC = {"-:.*v_proj": {}, "+:.*k_proj": {"bits": 8, "group_size": 16}}


def awq(group_size: int = -1) -> Callable[[str, torch.Tensor], Packed]:
    def in_words(numbers: torch.Tensor) -> torch.Tensor:
        """Pack outputs, the last dimension, each eight of them in the order of the GEMM kernel."""
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        return words(numbers.view(len(numbers), -1, 8)[..., order].reshape(numbers.shape), 4)

    def pack(_: str, weight: torch.Tensor) -> Packed:
        size = weight.shape[1]
        groups = torch.arange(size) // (size if group_size == -1 else group_size)
        numbers, scales, zeros = integers(weight, 4, groups, is_symmetric=False)
        tensors = {
            ".qweight": in_words(numbers.t().contiguous()),
            ".qzeros": in_words(zeros.t().contiguous()),
            ".scales": scales.t(),
        }
        return Packed(tensors, stands_for(numbers, scales, zeros, groups))

    return pack


def awq_config(group_size: int) -> dict[str, Any]:
    return {
        "quant_method": "awq", "bits": 4, "group_size": group_size, "version": "gemm", "zero_point": True,
        "modules_to_not_convert": None,
    }  # fmt: skip


def compressed(form: str, weights: dict[str, Any], **group: Any) -> dict[str, Any]:
    plain = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": plain | weights, **group}},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "kv_cache_scheme": None,
    }


def packed_ints(
    bits: int,
    group_size: int = -1,
    *,
    is_symmetric: bool = True,
    is_ordered: bool = False,
    per_tensor: bool = False,
) -> Callable[[str, torch.Tensor], Packed]:
    def pack(_: str, weight: torch.Tensor) -> Packed:
        size = weight.shape[1]
        groups = torch.arange(size) // (size if group_size == -1 else group_size)
        if is_ordered:
            groups = groups[torch.randperm(size, generator=torch.Generator().manual_seed(size))]
        numbers, scales, zeros = integers(weight, bits, groups, is_symmetric=is_symmetric)
        if per_tensor:
            scales = scales.max().view(1, 1).expand(scales.shape)
            numbers = ((weight / scales.float()).round() + zeros).clamp(0, (1 << bits) - 1)
        tensors = {
            ".weight_packed": words(numbers, bits),
            ".weight_scale": scales[:1, 0] if per_tensor else scales,
            ".weight_shape": torch.tensor(weight.shape),
        }
        if not is_symmetric:
            tensors[".weight_zero_point"] = words(zeros.t(), bits).t()
        if is_ordered:
            tensors[".weight_g_idx"] = groups.int()
        return Packed(tensors, stands_for(numbers, scales, zeros, groups))

    return pack


def bytes_of_ints(
    group_size: int = -1, *, is_symmetric: bool = True, is_static: bool = False
) -> Callable[[str, torch.Tensor], Packed]:
    def pack(_: str, weight: torch.Tensor) -> Packed:
        size = weight.shape[1]
        groups = torch.arange(size) // (size if group_size == -1 else group_size)
        numbers, scales, zeros = integers(weight, 8, groups, is_symmetric=is_symmetric)
        tensors = {".weight": (numbers - 128).to(torch.int8), ".weight_scale": scales}
        if not is_symmetric:
            tensors[".weight_zero_point"] = (zeros - 128).to(torch.int8)
        if is_static:
            tensors |= {".input_scale": torch.tensor([0.02]), ".input_zero_point": torch.tensor([3]).char()}
        return Packed(tensors, stands_for(numbers, scales, zeros, groups))

    return pack


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def nvfp4(*, is_compressed: bool) -> Callable[[str, torch.Tensor], Packed]:
    """Two levels of scales, of which compressed-tensors stores the inverse of the second."""

    def pack(_: str, weight: torch.Tensor) -> Packed:
        of_tensor = 448 * 6 / weight.abs().max()
        blocks = weight.view(len(weight), -1, 16)
        scales = (blocks.abs().amax(dim=2) / 6 * of_tensor).to(torch.float8_e4m3fn)
        whole = scales.float() / of_tensor if is_compressed else scales.float() * (1 / of_tensor)
        places = ((blocks / whole.unsqueeze(2)).unsqueeze(3) - torch.tensor(E2M1)).abs().argmin(dim=3)
        codes = places.flatten(1).to(torch.uint8)
        packed = codes[:, 0::2] | codes[:, 1::2] << 4
        if is_compressed:
            tensors = {".weight_packed": packed, ".weight_global_scale": of_tensor.view(1)}
        else:
            tensors = {
                ".weight": packed,
                ".weight_scale_2": 1 / of_tensor,
                ".input_scale": torch.tensor(0.01),
            }
        widened = torch.tensor(E2M1)[places] * whole.unsqueeze(2)
        return Packed({**tensors, ".weight_scale": scales}, widened.flatten(1))

    return pack


def mxfp8(_: str, weight: torch.Tensor) -> Packed:
    blocks = weight.view(len(weight), -1, 32)
    exponents = (blocks.abs().amax(dim=2) / 448).log2().ceil()
    scales = exponents.exp2().unsqueeze(2)
    values = (blocks / scales).to(torch.float8_e4m3fn)
    tensors = {".weight": values.flatten(1), ".weight_scale": (exponents + 127).to(torch.uint8)}
    return Packed(tensors, (values.float() * scales).flatten(1))


def fp8(_: str, weight: torch.Tensor) -> Packed:
    scale = weight.abs().amax(dim=1, keepdim=True) / 448
    values = (weight / scale).to(torch.float8_e4m3fn)
    return Packed({".weight": values, ".weight_scale": scale}, values.float() * scale)


def fp8_tensor(_: str, weight: torch.Tensor) -> Packed:
    scale = weight.abs().max() / 448
    values = (weight / scale).to(torch.float8_e4m3fn)
    tensors = {".weight": values, ".weight_scale": scale, ".input_scale": torch.tensor(0.02)}
    return Packed(tensors, values.float() * scale)


def fp8_blocks(_: str, weight: torch.Tensor) -> Packed:
    """Scales per 128 x 128, with dimensions of size 1, as ModelOpt has them."""
    rows, columns = (-(-size // 128) for size in weight.shape)
    index = [torch.arange(size) // 128 for size in weight.shape]
    scales = torch.zeros(rows, columns)
    for row in range(rows):
        for column in range(columns):
            part = weight[index[0] == row][:, index[1] == column]
            scales[row, column] = part.abs().max() / 448
    factors = scales[index[0]][:, index[1]]
    values = (weight / factors).to(torch.float8_e4m3fn)
    tensors = {".weight": values, ".weight_scale": scales.view(rows, 1, columns, 1)}
    return Packed(tensors, values.float() * factors)


def _mixed_modelopt(name: str, weight: torch.Tensor) -> Packed | None:
    if "layers.0." not in name:
        return None
    if name.endswith("q_proj"):
        return fp8_tensor(name, weight)
    return nvfp4(is_compressed=False)(name, weight) if name.endswith("k_proj") else None


def modelopt(algorithm: str, **fields: Any) -> dict[str, Any]:
    return {
        "quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head", "*mlp.gate"], **fields
    }  # fmt: skip


_QUANTIZED_LAYERS = {
    "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
    "model.layers.0.self_attn.k_proj": {"quant_algo": "NVFP4", "group_size": 16},
}

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_FP4_MAGNITUDES = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
FP4 = tuple(sign * each / 12 for sign in (1, -1) for each in _FP4_MAGNITUDES)


def bnb4(kind: str, *, is_double: bool = False) -> Callable[[str, torch.Tensor], Packed]:
    """Places in a table, the first of two in the upper half of a byte, and a scale per 64 numbers of all."""
    table = torch.tensor(NF4 if kind == "nf4" else FP4)

    def pack(_: str, weight: torch.Tensor) -> Packed:
        flat = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % 64)).view(-1, 64)
        largest = flat.abs().amax(dim=1)
        state: dict[str, Any] = {
            "quant_type": kind, "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)
        }  # fmt: skip
        tensors = {".weight.absmax": largest, ".weight.quant_map": table.clone()}
        if is_double:
            offset = float(largest.mean())
            padded = torch.nn.functional.pad(largest - offset, (0, -len(largest) % 256)).view(-1, 256)
            nested, of_nested = torch.linspace(-1, 1, 256) ** 3, padded.abs().amax(dim=1)
            places = ((padded / of_nested.unsqueeze(1)).unsqueeze(2) - nested).abs().argmin(dim=2)
            scales = (nested[places] * of_nested.unsqueeze(1)).flatten()[: len(largest)] + offset
            tensors |= {
                ".weight.absmax": places.flatten()[: len(largest)].to(torch.uint8),
                ".weight.nested_absmax": of_nested,
                ".weight.nested_quant_map": nested,
            }
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            largest = scales
        codes = ((flat / largest.unsqueeze(1)).unsqueeze(2) - table).abs().argmin(dim=2)
        widened = (table[codes] * largest.unsqueeze(1)).flatten()[: weight.numel()].view(weight.shape)
        codes = codes.flatten()[: weight.numel()].to(torch.uint8)
        tensors[".weight"] = (codes[0::2] << 4 | codes[1::2]).unsqueeze(1)
        document = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
        return Packed({**tensors, f".weight.quant_state.bitsandbytes__{kind}": document}, widened)

    return pack


def bnb8(_: str, weight: torch.Tensor) -> Packed:
    largest = weight.abs().amax(dim=1)
    numbers = (weight / largest.unsqueeze(1) * 127).round()
    tensors = {
        ".weight": numbers.to(torch.int8),
        ".SCB": largest,
        ".weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return Packed(tensors, numbers * (largest / 127).unsqueeze(1))


def bnb_config(kind: str, *, is_double: bool = False) -> dict[str, Any]:
    return {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "_load_in_4bit": True, "load_in_8bit": False,
        "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": is_double, "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": None,
    }  # fmt: skip


def auto_round(packing: str, **fields: Any) -> dict[str, Any]:
    return {
        "quant_method": "auto-round", "packing_format": f"auto_round:{packing}", "bits": 4, "group_size": 32,
        "data_type": "int", "sym": True, "block_name_to_quantize": "model.layers", **fields,
    }  # fmt: skip


def _mixed_auto_round(name: str, weight: torch.Tensor) -> Packed | None:
    if name == "model.layers.1.self_attn.q_proj":
        return None
    bits = 8 if "layers.2." in name and name.endswith("proj") else 4
    return gptq(bits, 32, has_index=False)(name, weight)


_EXTRA = {
    "model.layers.1.self_attn.q_proj": {"bits": 16, "data_type": "fp"},
    r"layers\.2\..*proj": {"bits": 8},
}


def _mixed_compressed(name: str, weight: torch.Tensor) -> Packed | None:
    if name.endswith("v_proj"):
        return None
    if name.endswith(("k_proj", "up_proj")):
        return bytes_of_ints()(name, weight)
    return packed_ints(4, 16)(name, weight)


_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
_MIXED = compressed("mixed-precision", {"group_size": 16, "strategy": "group"}, format="pack-quantized")
_MIXED["config_groups"]["group_1"] = {
    "targets": ["re:.*k_proj$", "re:.*up_proj$"],
    "format": "int-quantized",
    "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
    "input_activations": _INT8,
}
_MIXED["ignore"].append("re:.*v_proj")
_FP4 = {"type": "float", "strategy": "tensor_group", "group_size": 16}
_STATIC = _INT8 | {"strategy": "tensor", "dynamic": False, "symmetric": False}

FORMATS: dict[str, Format] = {
    "gptq-2": Format(gptq_config(2, 16), gptq(2, 16)),
    "gptq-3": Format(gptq_config(3, 32), gptq(3, 32)),
    "gptq-3-asym": Format(gptq_config(3, sym=False), gptq(3, is_symmetric=False)),
    "gptq-4": Format(gptq_config(4, 32), gptq(4, 32)),
    "gptq-4-order": Format(
        gptq_config(4, 16, desc_act=True, sym=False), gptq(4, 16, is_ordered=True, is_symmetric=False)
    ),
    "gptq-4-v2": Format(
        gptq_config(4, 32, sym=False, checkpoint_format="gptq_v2"),
        gptq(4, 32, is_symmetric=False, is_v2=True, has_index=False),
    ),
    "gptq-8": Format(gptq_config(8), gptq(8, has_index=False)),
    "gptq-dynamic": Format(gptq_config(4, 32, dynamic=_DYNAMIC), _mixed_gptq),
    "awq": Format(awq_config(32), awq(32)),
    "awq-channel": Format(awq_config(-1), awq()),
    "pack-4": Format(
        compressed("pack-quantized", {"strategy": "group", "group_size": 32}), packed_ints(4, 32)
    ),
    "pack-4-asym": Format(
        compressed("pack-quantized", {"strategy": "group", "group_size": 16, "symmetric": False}),
        packed_ints(4, 16, is_symmetric=False),
    ),
    "pack-4-order": Format(
        compressed("pack-quantized", {"strategy": "group", "group_size": 16, "actorder": "group"}),
        packed_ints(4, 16, is_ordered=True),
    ),
    "pack-8": Format(compressed("pack-quantized", {"num_bits": 8}), packed_ints(8)),
    "pack-8-tensor": Format(
        compressed("pack-quantized", {"num_bits": 8, "strategy": "tensor"}), packed_ints(8, per_tensor=True)
    ),
    "int-8": Format(compressed("int-quantized", {"num_bits": 8}, input_activations=_INT8), bytes_of_ints()),
    "int-8-asym-static": Format(
        compressed("int-quantized", {"num_bits": 8, "symmetric": False}, input_activations=_STATIC),
        bytes_of_ints(is_symmetric=False, is_static=True),
    ),
    "int-8-groups": Format(
        compressed("int-quantized", {"num_bits": 8, "strategy": "group", "group_size": 32}), bytes_of_ints(32)
    ),
    "mixed": Format(_MIXED, _mixed_compressed),
    "fp8-weights": Format(compressed("float-quantized", {"num_bits": 8, "type": "float"}), fp8),
    "auto-round-gptq": Format(auto_round("auto_gptq", extra_config=_EXTRA), _mixed_auto_round),
    "auto-round-awq": Format(auto_round("auto_awq", sym=False), awq(32)),
    "modelopt-nvfp4": Format(modelopt("NVFP4", group_size=16), nvfp4(is_compressed=False)),
    "modelopt-nvfp4-file": Format(
        {},
        nvfp4(is_compressed=False),
        {
            "quantization": {
                "quant_algo": "NVFP4",
                "group_size": 16,
                "exclude_modules": ["lm_head", "*mlp.gate"],
            }
        },
    ),
    "modelopt-mxfp8": Format(modelopt("MXFP8", group_size=32), mxfp8),
    "modelopt-fp8-blocks": Format(modelopt("FP8_PB_WO"), fp8_blocks),
    "modelopt-mixed": Format(
        modelopt("MIXED_PRECISION", quantized_layers=_QUANTIZED_LAYERS), _mixed_modelopt
    ),
    "bnb-nf4": Format(bnb_config("nf4"), bnb4("nf4")),
    "bnb-fp4-double": Format(bnb_config("fp4", is_double=True), bnb4("fp4", is_double=True)),
    "bnb-nf4-double": Format(bnb_config("nf4", is_double=True), bnb4("nf4", is_double=True)),
    "bnb-int8": Format({"quant_method": "bitsandbytes", "load_in_8bit": True}, bnb8),
    "nvfp4-pack": Format(compressed("nvfp4-pack-quantized", _FP4), nvfp4(is_compressed=True)),
}


def pack_checkpoint(path: Path, form: str | Format, *, has_head: bool = False) -> None:
    """Quantise the projections of a checkpoint of one file in place.

    config.json gets the description, and a checkpoint beside it in `widened/` holds what the numbers stand for.

    Args:
        has_head: whether the output head is quantised as well.
    """
    form = FORMATS[form] if isinstance(form, str) else form
    stored = load_file(path / "model.safetensors")
    widened = dict(stored)
    ends = ("_proj.weight", "lm_head.weight") if has_head else "_proj.weight"
    for name in [each for each in stored if each.endswith(ends)]:
        layer = name.removesuffix(".weight")
        if (packed := form.pack(layer, stored[name])) is None:
            continue
        del stored[name]
        stored |= {layer + suffix: tensor.contiguous() for suffix, tensor in packed.tensors.items()}
        widened[name] = packed.widened
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "widened").mkdir()
    (path / "widened" / "config.json").write_text(json.dumps(config))
    save_file(widened, path / "widened" / "model.safetensors", metadata={"format": "pt"})
    if form.file is not None:
        (path / "hf_quant_config.json").write_text(json.dumps(form.file))
    else:
        (path / "config.json").write_text(json.dumps({**config, "quantization_config": form.config}))
