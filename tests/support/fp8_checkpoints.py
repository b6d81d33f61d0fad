"""Checkpoints with FP8 weights, made from others, as compressed-tensors, ModelOpt and vLLM's fp8 write them, and of
gpt-oss with experts in MXFP4."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.quantizers.quantizers_utils import should_convert_module

from transformers_checkpoints import write_checkpoint

FP8 = torch.float8_e4m3fn
BLOCK = (24, 40)
"""Rows and columns with one scale; it divides no layer, nor the part of one that a rank has."""


_WRAPPED = re.compile(r"^(language_model|vision_tower|multi_modal_projector)\.")
"""Modules of wrappers that transformers' models have in `model`, and its checkpoints have not."""


def _group(strategy: str, activations: dict[str, Any]) -> dict[str, Any]:
    bits = {"num_bits": 8, "type": "float", "symmetric": True}
    blocks = {"block_structure": list(BLOCK)} if strategy == "block" else {}
    return {
        "targets": ["Linear"],
        "weights": {**bits, **blocks, "strategy": strategy, "dynamic": False},
        "input_activations": {**bits, **activations},
        "output_activations": None,
    }


def _compressed(strategy: str, activations: dict[str, Any]) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": _group(strategy, activations)},
        "ignore": ["lm_head", "re:.*mlp.gate$", "re:.*feed_forward.gate$"],
        "kv_cache_scheme": None,
    }


_DYNAMIC = {"strategy": "token", "dynamic": True}
_STATIC = {"strategy": "tensor", "dynamic": False}
_MODELOPT = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "*mlp.gate"]}

FORMATS: dict[str, dict[str, Any]] = {
    "compressed-tensors-channel": _compressed("channel", _DYNAMIC),
    "compressed-tensors-tensor": _compressed("tensor", _STATIC),
    "modelopt": {"quant_method": "modelopt", **_MODELOPT},
    "modelopt-file": {},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head"]},
    "fp8-block": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)},
    "fp8-block-128": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "fp8-transformers": {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
    "compressed-tensors-block": _compressed(
        "block", {"strategy": "group", "dynamic": True, "group_size": 40}
    ),
}
"""`quantization_config` by format; `modelopt-file` has hf_quant_config.json instead."""


def quantize_checkpoint(
    path: Path, form: str, *, kv_scale: float | None = None, skipped: list[str] | None = None
) -> None:
    """Quantise the linear layers of a checkpoint of one file in place.

    config.json gets the description, and a checkpoint beside it in `widened/` holds what the FP8 numbers stand for.

    Args:
        kv_scale: stored as the scales of keys and values, if given.
        skipped: `modules_to_not_convert`, of a form of `fp8`. Of all other layers transformers' rule makes FP8, routers
            and output head included.
    """
    with safe_open(path / "model.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    stored, widened = dict(tensors), dict(tensors)
    is_per_channel = form.endswith("channel")
    is_static = form in ("compressed-tensors-tensor", "modelopt", "modelopt-file", "fp8-transformers")
    names = ("_scale", "input_scale")
    if form == "fp8-transformers":
        names = ("_scale_inv", "activation_scale")
    for name, tensor in tensors.items():
        is_linear = name.endswith(("_proj.weight", "_proj_with_mqa.weight")) or ".in_proj_" in name
        is_linear = is_linear or ".shared_expert_gate" in name or ".per_layer_" in name
        is_linear = is_linear or name.endswith(
            ("query_key_value.weight", ".dense.weight", "4h.weight", "_to_h.weight")
        )
        is_linear = (
            is_linear or name.endswith((".w1.weight", ".w2.weight", ".w3.weight"))
        ) and tensor.ndim == 2
        if skipped is not None:
            module = name.removesuffix(".weight").replace("language_model.model.", "language_model.")
            module = _WRAPPED.sub(r"model.\1", module)
            module = module[: module.find(".experts.") + 8] if ".experts." in module else module
            is_linear |= name.endswith((".gate.weight", "lm_head.weight"))
            is_linear &= should_convert_module(module, skipped)
        if not is_linear:
            continue
        if "-block" in form:
            suffix = "_scale_inv" if form.startswith("fp8-block") else "_scale"
            size = (128, 128) if form.endswith("128") else BLOCK
            stored[name], stored[name + suffix], widened[name] = in_blocks(tensor, size)
            continue
        largest = tensor.abs().amax(dim=1, keepdim=True) if is_per_channel else tensor.abs().amax()
        # Scales in bfloat16, as compressed-tensors has them, are exact in float32.
        scale = (largest / 448).to(torch.bfloat16 if is_per_channel else torch.float32)
        values = (tensor / scale.float()).clamp(-448, 448).to(FP8)
        stored[name], stored[name + names[0]] = values, scale
        widened[name] = values.float() * scale.float()
        if is_static:
            layer = name.removesuffix("weight")
            stored[layer + names[1]] = torch.tensor(0.02)
        if kv_scale is not None and name.endswith(("k_proj.weight", "v_proj.weight")):
            kind = name.removesuffix("_proj.weight")[-1]
            stored[name.removesuffix("weight") + f"{kind}_scale"] = torch.tensor(kv_scale)
    save_file(stored, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    (path / "widened").mkdir()
    (path / "widened" / "config.json").write_text(json.dumps(config))
    save_file(widened, path / "widened" / "model.safetensors")
    if form == "modelopt-file":
        description = {"producer": {"name": "modelopt"}, "quantization": _MODELOPT}
        (path / "hf_quant_config.json").write_text(json.dumps(description))
    else:
        description = FORMATS[form] | ({} if skipped is None else {"modules_to_not_convert": skipped})
        (path / "config.json").write_text(json.dumps({**config, "quantization_config": description}))


def in_blocks(
    weight: torch.Tensor, size: tuple[int, int] = BLOCK
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a weight [out, in] in FP8, the scale of each block, and what the numbers stand for."""
    counts = [-(-whole // block) for whole, block in zip(weight.shape, size, strict=True)]
    scales, values, widened = torch.empty(counts), weight.to(FP8), weight.clone()
    for row in range(counts[0]):
        for column in range(counts[1]):
            place = tuple(
                slice(index * block, (index + 1) * block)
                for index, block in zip((row, column), size, strict=True)
            )
            scale = weight[place].abs().amax() / 448
            part = (weight[place] / scale).clamp(-448, 448).to(FP8)
            scales[row, column], widened[place] = scale, part.float() * scale
            values.view(torch.uint8)[place] = part.view(torch.uint8)
    return values, scales, widened


def write_packed_experts(path: Path, **fields: Any) -> torch.nn.Module:
    """Write a gpt-oss whose experts are in MXFP4; return transformers' model with the same numbers."""
    reference = write_checkpoint("gpt_oss", path, hidden_size=96, intermediate_size=64, head_dim=32, **fields)
    stored = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    weights = reference.state_dict()
    for name in [each for each in stored if each.endswith(("gate_up_proj", "down_proj"))]:
        count, columns, rows = stored.pop(name).shape
        blocks = torch.randint(0, 256, (count, rows, columns // 32, 16), generator=generator).to(torch.uint8)
        scales = torch.randint(120, 125, (count, rows, columns // 32), generator=generator).to(torch.uint8)
        stored[name + "_blocks"], stored[name + "_scales"] = blocks, scales
        with torch.no_grad():
            weights[name].copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    description = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": description}))
    return reference
