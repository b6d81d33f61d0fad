"""FP8 weights: every format that is read, against a checkpoint of the same numbers in float32, and what is refused."""

from __future__ import annotations

import copy
import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.quantizers.quantizers_utils import should_convert_module

from argosy_engine.api.doctor import diagnose
from argosy_engine.checkpoint.weights import DummyWeights, SafetensorsWeights
from argosy_engine.config import EngineArgs
from argosy_engine.errors import ConfigError
from argosy_engine.layers.experts import ExpertsSpec
from argosy_engine.layers.linear import Linear, LinearSpec
from argosy_engine.layers.linear_method import OnlineFp8LinearMethod, SchemeLinearMethod
from argosy_engine.layers.products import Fp8Linear, Fp8Product
from argosy_engine.model_configs.experts_config import EXPERT_LAYERS, RoutingSpec
from argosy_engine.model_configs.quantization_config import QuantizationConfig
from argosy_engine.model_configs.quantization_formats import parse_quantization
from argosy_engine.model_configs.sharding import Shard
from argosy_engine.model_configs.weight_schemes import Fp8Scheme
from argosy_engine.models.config_file import load_model_config
from argosy_engine.models.loader import load_model
from argosy_engine.native.library import kernels
from argosy_engine.sizing.kv_cache_sizing import estimate_weights
from argosy_engine.sizing.resources import DeviceMemory
from attention_cases import model_inputs
from fp8_checkpoints import FORMATS, FP8, quantize_checkpoint
from random_checkpoints import KINDS, make_checkpoint
from transformers_checkpoints import write_checkpoint
from transformers_sweep import served

CPU = torch.device("cpu")
BLOCK_SIZE = 16
TOKEN_IDS = list(range(2, 22))


COMPRESSED = FORMATS["compressed-tensors-channel"]


def changed(**group: Any) -> dict[str, Any]:
    raw = copy.deepcopy(COMPRESSED)
    for name, fields in group.items():
        raw["config_groups"]["group_0"][name] |= fields
    return raw


def write(path: Path, form: str, kind: str = "qwen3-yarn", **settings: Any) -> None:
    make_checkpoint(KINDS[kind], path)
    quantize_checkpoint(path, form, **settings)


@torch.inference_mode()
def logits(path: Path, backend: str = "cpu" if kernels() else "torch", **settings: Any) -> torch.Tensor:
    config = load_model_config(path)
    model = load_model(
        path, config, dtype=torch.float32, device=CPU, attention_backend=backend, max_positions=64,
        load_format="auto", seed=0, **settings,
    ).model  # fmt: skip
    for layer in model.attention_layers:
        layer.bind(torch.zeros(layer.kv_cache_shape(2, BLOCK_SIZE)).to(layer.kv_cache_dtype))
    inputs = model_inputs(TOKEN_IDS, 0, torch.tensor([[1, 0]]), BLOCK_SIZE)
    return model.logits(model.forward(inputs))


@pytest.mark.parametrize("form", FORMATS)
def test_a_cpu_widens_the_weights_and_says_so(
    form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, form)
    with caplog.at_level(logging.INFO, logger="argosy.models"):
        ours = logits(tmp_path)
    torch.testing.assert_close(ours, logits(tmp_path / "widened"), atol=1e-5, rtol=1e-5)
    assert "widened to float32 at load" in caplog.text
    assert form.endswith("block") or "because a CPU has no FP8 product" in caplog.text


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_the_estimate_counts_fp8_in_blocks(kind: str, tmp_path: Path) -> None:
    """On a GPU a number takes a byte, and each row has a scale per 128 inputs; elsewhere all is widened."""
    fields = {"moe_intermediate_size": 256} if kind == "qwen3_moe" else {}
    write_checkpoint(kind, tmp_path, hidden_size=256, intermediate_size=384, head_dim=64, **fields)
    quantize_checkpoint(tmp_path, "fp8-block-128")
    stored = load_file(tmp_path / "model.safetensors")
    elements = {name: tensor.numel() for name, tensor in stored.items()}
    numbers = sum(tensor.numel() for tensor in stored.values() if tensor.dtype is FP8)
    assert numbers
    config, plain = load_model_config(tmp_path), load_model_config(tmp_path / "widened")
    own = {name: count for name, count in elements.items() if not name.endswith("_scale_inv")}
    widened = estimate_weights(plain, own, 2, "cuda")
    assert estimate_weights(config, elements, 2, "cuda") == widened - numbers + 4 * numbers // 128
    assert estimate_weights(config, elements, 2, "cpu") == estimate_weights(plain, own, 2, "cpu")


def test_experts_are_widened_and_routers_are_not_quantised(tmp_path: Path) -> None:
    kind = replace(KINDS["qwen3-moe"], is_sharded=False)
    make_checkpoint(kind, tmp_path)
    quantize_checkpoint(tmp_path, "compressed-tensors-channel")
    torch.testing.assert_close(logits(tmp_path), logits(tmp_path / "widened"), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", ["compressed-tensors-channel", "compressed-tensors-tensor"])
def test_what_latents_are_multiplied_by_is_widened(form: str, tmp_path: Path) -> None:
    write_checkpoint("deepseek_v3", tmp_path)
    quantize_checkpoint(tmp_path, form)
    exact = logits(tmp_path / "widened", "torch")
    torch.testing.assert_close(logits(tmp_path, "torch"), exact, atol=1e-5, rtol=1e-5)


def test_scales_of_an_fp8_kv_cache_are_read_if_there_is_one(tmp_path: Path) -> None:
    write(tmp_path, "modelopt", kv_scale=0.25)
    exact = logits(tmp_path, "torch")
    ours = logits(tmp_path, "torch", has_fp8_kv_cache=True)
    assert 0 < (ours - exact).abs().mean() < 0.2 * exact.abs().mean()
    # With a scale of 1e-4 everything saturates.
    write(tmp_path / "small", "modelopt", kv_scale=1e-4)
    small = logits(tmp_path / "small", "torch", has_fp8_kv_cache=True)
    assert (small - exact).abs().mean() > 3 * (ours - exact).abs().mean()


def quantize_rows(x: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    if scale is None:
        scales = x.float().abs().amax(dim=1, keepdim=True) / 448
    else:
        scales = scale.expand(len(x), 1).contiguous()
    return (x.float() / scales).clamp(-448, 448).to(FP8), scales


PRODUCT = Fp8Product(quantize_rows)
SPEC = LinearSpec({"q_proj": 32, "k_proj": 16, "v_proj": 16}, 64)


def part(tensor: torch.Tensor, shard: Shard | None) -> torch.Tensor:
    if shard is None:
        return tensor
    return torch.cat([tensor.narrow(shard.dim, each.start, len(each)) for each in shard.ranges], shard.dim)


class GivenWeights(DummyWeights):
    """Tensors by name, without a file."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(torch.bfloat16, CPU, 0)
        self.tensors = tensors

    def take(
        self, name: str, *shape: int, dtype: torch.dtype | None = None, shard: Shard | None = None
    ) -> torch.Tensor:
        assert self.tensors[name].shape == shape
        return part(self.tensors[name], shard).to(dtype or self.dtype)

    def take_scale(
        self,
        name: str,
        count: int | tuple[int, ...],
        shard: Shard | None = None,
        *,
        is_signed: bool = False,
    ) -> torch.Tensor:
        return part(self.tensors[name].float().reshape(count), shard)


def quantised_tensors(*, is_per_channel: bool, input_scale: float | None) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for index, (name, size) in enumerate(SPEC.parts.items()):
        tensors[name + ".weight"] = (10 * torch.randn(size, 64, generator=generator)).to(FP8)
        scale = torch.rand(size if is_per_channel else 1, generator=generator) * (1 + index) / 10
        tensors[name + ".weight_scale"] = scale
        if input_scale is not None:
            tensors[name + ".input_scale"] = torch.tensor(input_scale * (1 + index) / 3)
    return tensors


def expected(x: torch.Tensor, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    weights = [
        tensors[name + ".weight"].float() * tensors[name + ".weight_scale"].reshape(-1, 1)
        for name in SPEC.parts
    ]
    return x.float() @ torch.cat(weights).t()


@pytest.mark.parametrize("is_per_channel", [True, False])
@pytest.mark.parametrize("input_scale", [None, 0.01])
def test_a_product_in_fp8_is_as_exact_as_its_inputs(is_per_channel: bool, input_scale: float | None) -> None:
    raw = changed(
        weights={"strategy": "channel" if is_per_channel else "tensor"},
        input_activations={"strategy": "tensor", "dynamic": False} if input_scale else {},
    )
    config = parse_quantization({"quantization_config": raw}, {})
    assert config is not None
    tensors = quantised_tensors(is_per_channel=is_per_channel, input_scale=input_scale)
    layer = SchemeLinearMethod(config, PRODUCT).load(GivenWeights(tensors), SPEC)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    rows, scales = quantize_rows(x, None if input_scale is None else torch.tensor([input_scale]))
    out = layer(x)
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out.float(), expected(rows.float() * scales, tensors), atol=0.05, rtol=0.01)
    assert (out.float() - expected(x, tensors)).norm() < 0.06 * expected(x, tensors).norm()


def relative_error(layer: Linear, weight: torch.Tensor) -> float:
    x = torch.randn(5, weight.shape[1], generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    wanted = F.linear(x.float(), weight.float())
    return float((layer(x).float() - wanted).norm() / wanted.norm())


def test_weights_are_quantised_online_per_channel() -> None:
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    weight[3] *= 1e4  # one scale for all channels would leave nothing of the others
    method, weights = OnlineFp8LinearMethod(quantize_rows), GivenWeights({"up.weight": weight})
    layer = method.load(weights, LinearSpec({"up": 32}, 64))
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    wanted = F.linear(x.float(), weight)
    error = (layer(x).float() - wanted).norm(dim=0) / wanted.norm(dim=0)
    assert (error < 0.1).all()
    exact = method.load(weights, LinearSpec({"up": 32}, 64, keeps_precision=True))
    assert relative_error(exact, weight) < 0.01


def test_experts_are_stacked_in_fp8_with_scales() -> None:
    spec = ExpertsSpec("", RoutingSpec(num_experts=3, experts_per_token=1), hidden=32, inner=16)
    generator = torch.Generator().manual_seed(0)
    shapes = {"gate": (16, 32), "up": (16, 32), "down": (32, 16)}
    plain = {
        spec.projection(index, name) + ".weight": torch.randn(shape, generator=generator)
        for index in range(3)
        for name, shape in shapes.items()
    }
    online = OnlineFp8LinearMethod(quantize_rows).load_experts(GivenWeights(plain), spec)
    assert online.gate_up.dtype is online.down.dtype is FP8
    assert online.gate_up_scale is not None
    assert online.down_scale is not None
    for index in range(3):
        gate_up = online.gate_up[index].float() * online.gate_up_scale[index, :, None]
        halves = [plain[spec.projection(index, name) + ".weight"] for name in ("gate", "up")]
        torch.testing.assert_close(gate_up, torch.cat(halves), rtol=0.08, atol=0.02)
        down = online.down[index].float() * online.down_scale[index, :, None]
        torch.testing.assert_close(
            down, plain[spec.projection(index, "down") + ".weight"], rtol=0.08, atol=0.02
        )


def test_experts_without_a_gate_are_stacked_alone() -> None:
    """Where a layer is left as it is whose name is that of a gate's projection."""
    routing = RoutingSpec(num_experts=2, experts_per_token=1)
    spec = ExpertsSpec("", routing, hidden=32, inner=16, activation="relu2", features=range(8, 16))
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for index in range(2):
        for name in spec.layers:
            layer, shape = spec.projection(index, name), spec.weight_shape(name)
            tensors[layer + ".weight"] = torch.randn(shape, generator=generator).to(FP8)
            tensors[layer + ".weight_scale"] = torch.rand(shape[0], generator=generator)
    scheme = Fp8Scheme(is_per_channel=True)
    config = QuantizationConfig(method="compressed-tensors", default=scheme, ignored=("re:.*gate_proj$",))
    stacked = SchemeLinearMethod(config, PRODUCT).load_experts(GivenWeights(tensors), spec)
    assert stacked.gate_up_scale is not None
    for index in range(2):
        up, down = (spec.projection(index, name) for name in spec.layers)
        assert torch.equal(stacked.gate_up[index].float(), tensors[up + ".weight"].float()[8:])
        assert torch.equal(stacked.gate_up_scale[index], tensors[up + ".weight_scale"][8:])
        assert torch.equal(stacked.down[index].float(), tensors[down + ".weight"].float()[:, 8:])


@pytest.mark.parametrize("is_per_channel", [True, False])
def test_a_rank_stacks_its_features_of_the_experts(is_per_channel: bool) -> None:
    spec = ExpertsSpec("", RoutingSpec(num_experts=2, experts_per_token=1), hidden=32, inner=16)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for index in range(2):
        for name in EXPERT_LAYERS:
            layer, shape = spec.projection(index, name), spec.weight_shape(name)
            tensors[layer + ".weight"] = torch.randn(shape, generator=generator).to(FP8)
            tensors[layer + ".weight_scale"] = torch.rand(
                shape[0] if is_per_channel else 1, generator=generator
            )
    config = QuantizationConfig(method="compressed-tensors", default=Fp8Scheme(is_per_channel=is_per_channel))
    method = SchemeLinearMethod(config, PRODUCT)
    whole, rank = (
        method.load_experts(GivenWeights(tensors), replace(spec, features=features))
        for features in (None, range(8, 16))
    )
    rows = [*range(8, 16), *range(24, 32)]
    assert torch.equal(rank.gate_up.float(), whole.gate_up.float()[:, rows])
    assert torch.equal(rank.down.float(), whole.down.float()[:, :, 8:])
    assert whole.gate_up_scale is not None
    assert rank.gate_up_scale is not None
    assert torch.equal(rank.gate_up_scale, whole.gate_up_scale[:, rows])
    assert whole.down_scale is not None
    assert rank.down_scale is not None
    assert torch.equal(rank.down_scale, whole.down_scale)
    widened = SchemeLinearMethod(config).load_experts(GivenWeights(tensors), spec)
    exact = whole.gate_up.float() * whole.gate_up_scale.unsqueeze(2)
    torch.testing.assert_close(widened.gate_up.float(), exact, rtol=0.01, atol=1e-3)
    assert widened.gate_up_scale is None


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"quant_method": "aqlm", "bits": 2}, "quant_method 'aqlm'"),
        ({"quant_method": "hqq"}, "quant_method 'hqq'"),
        ({"bits": 4}, "quant_method ''"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "scales per block of [128]"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "scales per block of [128, 0]"),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"},
            "per block and static activations",
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "'NVFP4_AWQ'"),
        ({**COMPRESSED, "format": "pack-quantized"}, "format 'pack-quantized'"),
        (changed(weights={"num_bits": 4, "type": "int"}), "weights of 4 bits 'int'"),
        (changed(weights={"strategy": "block"}), "scales per block of None"),
        (changed(weights={"strategy": "group"}), "weights per 'group'"),
        (changed(input_activations={"strategy": "group"}), "activations per 'group'"),
        ({**COMPRESSED, "ignore": ["re:(a+)+b"]}, "too complex"),
        ({**COMPRESSED, "ignore": ["re:["]}, "malformed"),
        ({**COMPRESSED, "ignore": [3]}, "not a list of names"),
        ({**COMPRESSED, "config_groups": 5}, "config_groups is not a JSON object"),
        ("fp8", "quantization_config is not a JSON object"),
    ],
)
def test_what_is_not_served_is_refused_by_name(raw: Any, message: str, tmp_path: Path) -> None:
    make_checkpoint(KINDS["llama"], tmp_path)
    (tmp_path / "model.safetensors").unlink()  # no weight is read
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": raw}))
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_model_config(tmp_path)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("lm_head", {"lm_head"}),
        ("model.layers.0", {"model.layers.0.mlp.gate", "model.layers.0.mlp.down_proj"}),
        ("re:.*mlp.gate$", {"model.layers.0.mlp.gate", "model.layers.1.mlp.gate"}),
        ("*.mlp.gate", {"model.layers.0.mlp.gate", "model.layers.1.mlp.gate"}),
        ("model.layers.1*", {"model.layers.1.mlp.gate"}),
    ],
)
def test_layers_that_are_not_quantised(pattern: str, names: set[str]) -> None:
    config = parse_quantization({"quantization_config": {**COMPRESSED, "ignore": [pattern]}}, {})
    assert config is not None
    layers = [
        "lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate", "model.layers.0.mlp.down_proj"
    ]  # fmt: skip
    assert {layer for layer in layers if not config.quantises(layer)} == names


_LAYERS = [
    "lm_head", "language_model", "visual.blocks.0.attn", "model.layers.1.mlp.gate", "model.layers.11.mlp.gate",
    "model.layers.1.mlp.gate_proj", "model.layers.11.mlp.down_proj", "model.layers.2.mlp.shared_expert_gate",
    "model.layers.2.mlp.experts", "model.layers.2.mlp.shared_experts.up_proj", "model.layers.10.self_attn.q_proj",
]  # fmt: skip
_SKIPS = [
    "lm_head", "gate", "mlp.gate", "visual", "q_proj", "proj", "model.layers.1", "model.layers.1.", "layers.1",
    "model.layers.1*", "model.layers.*.self_attn", "model.layers.*gate", r"model\.layers\.1\d\.mlp", "experts",
    "model.layers.[0-9].mlp", "model.layers.(1|2).mlp", "model.layers.2.mlp.experts", "", "mlp.experts.down_proj",
]  # fmt: skip


@pytest.mark.parametrize("skip", _SKIPS)
@pytest.mark.parametrize("field", ["modules_to_not_convert", "ignored_layers"])
def test_modules_are_not_converted_as_transformers_has_it(field: str, skip: str) -> None:
    raw = {"quant_method": "fp8", field: [skip, "of.no.layer"]}
    config = parse_quantization({"quantization_config": raw}, {})
    assert config is not None
    for layer in _LAYERS:
        asked = layer.replace("mlp.experts", "mlp.experts.3.gate_proj")
        assert config.quantises(asked) == should_convert_module(layer, [skip]), layer


def test_without_a_list_the_output_head_is_not_quantised() -> None:
    for raw, expected in (({}, False), ({"modules_to_not_convert": []}, True)):
        config = parse_quantization({"quantization_config": {"quant_method": "fp8", **raw}}, {})
        assert config is not None
        assert (config.quantises("lm_head"), config.quantises("model.layers.0.mlp.gate")) == (expected, True)


@pytest.mark.parametrize("skip", ["(.|.)(.|.)!", "(a|b)*c", "a.*b.*c.*d", "a?"])
def test_expressions_of_transformers_that_may_take_long_are_refused(skip: str) -> None:
    raw = {"quant_method": "fp8", "modules_to_not_convert": [skip]}
    with pytest.raises(ConfigError, match=r"malformed or too complex: .*; write the names out"):
        parse_quantization({"quantization_config": raw}, {})
    raw["modules_to_not_convert"] = [f"a.[{each}]" for each in range(257)]
    with pytest.raises(ConfigError, match="more than 256 patterns"):
        parse_quantization({"quantization_config": raw}, {})


_HEAD, _ROUTERS = "lm_head", "mlp.gate"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("form", ["fp8", "fp8-transformers", "fp8-block"])
@pytest.mark.parametrize(
    ("model_type", "skipped"),
    [
        ("llama", [_HEAD, "visual", "o_proj", "model.layers.1"]),
        ("llama", ["lm_head", "model.layers.(0|2).mlp", "model.layers.*.self_attn.k_proj"]),
        ("qwen3_moe", [_HEAD, "gate", "model.visual"]),
        ("qwen3_moe", [_HEAD, _ROUTERS, "experts", "layers.3.self_attn.q_proj"]),
        ("minimax_m2", ["gate", "e_score_correction_bias", _HEAD]),  # as it is published
    ],
)
def test_tokens_are_those_of_what_modules_to_not_convert_leaves(
    model_type: str, skipped: list[str], form: str, tmp_path: Path
) -> None:
    write_checkpoint(model_type, tmp_path, tie_word_embeddings=False)
    quantize_checkpoint(tmp_path, form, skipped=skipped)
    stored = load_file(tmp_path / "model.safetensors")
    plain = {name for name, tensor in stored.items() if tensor.ndim == 2 and tensor.dtype is torch.float32}
    assert len(plain) > 2 + len(skipped), "too little is left"
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path / "widened", attn_implementation="eager", dtype=torch.float32
    )
    assert served(reference.eval(), tmp_path, model_impl="argosy")[:2] == ("served", "")


_OF_MINISTRAL = ["model.vision_tower", "model.multi_modal_projector", "model.language_model.layers.1.mlp"]
_OF_QWEN3_5 = ["model.visual", "mtp.fc"] + [
    f"model.language_model.layers.{index}.{layer}"
    for index in range(4)
    for layer in ("mlp.gate", "mlp.shared_expert_gate", "linear_attn.in_proj_a", "linear_attn.in_proj_b")
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("model_type", "form", "skipped"),
    [("mistral3", "fp8-transformers", _OF_MINISTRAL), ("qwen3_5_moe", "fp8-block", _OF_QWEN3_5)],
)
def test_a_text_part_has_the_list_of_its_wrapper(
    model_type: str, form: str, skipped: list[str], tmp_path: Path
) -> None:
    """As these are published: the inputs of Ministral 3 have scales, with the names that transformers gives them."""
    write_checkpoint(model_type, tmp_path, tie_word_embeddings=False)
    quantize_checkpoint(tmp_path, form, skipped=[_HEAD, *skipped])
    reference = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "widened", attn_implementation="eager", dtype=torch.float32
    )
    assert served(reference.eval(), tmp_path, model_impl="argosy")[:2] == ("served", "")


def test_scales_are_found_by_either_name(tmp_path: Path) -> None:
    """Whatever config.json makes one expect."""
    write(tmp_path, "fp8")
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    raw["quantization_config"]["weight_block_size"] = None
    file.write_text(json.dumps(raw))
    torch.testing.assert_close(logits(tmp_path), logits(tmp_path / "widened"), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        (r"re:.*self_attn\.q_proj$", {"model.layers.10.self_attn.q_proj"}),
        (r"re:^model\.layers\.\d+\.self_attn\.q_proj", {"model.layers.10.self_attn.q_proj"}),
        (r"re:.*layers\.[0-9]+\.mlp\.experts\.[0-9]+\..*", {"model.layers.9.mlp.experts.3.up_proj"}),
        ("re:.*layers.[1-3][0-9].*attn.*", {"model.layers.10.self_attn.q_proj"}),
        ("re:.*lm_head", {"lm_head"}),
        (r"re:.*mlp.*\.(gate|up|gate_up|down)_proj.*", {"model.layers.9.mlp.experts.3.up_proj"}),
        (r"re:model.*(?:q|k)_proj$", {"model.layers.10.self_attn.q_proj"}),
        ("re:visual.*", set()),
    ],
)
def test_expressions_as_they_are_written_are_understood(pattern: str, names: set[str]) -> None:
    config = parse_quantization({"quantization_config": {**COMPRESSED, "ignore": [pattern]}}, {})
    assert config is not None
    layers = ["lm_head", "model.layers.10.self_attn.q_proj", "model.layers.9.mlp.experts.3.up_proj"]
    assert {layer for layer in layers if not config.quantises(layer)} == names


@pytest.mark.parametrize(
    "pattern",
    [
        "(.|.)(.|.)!",
        "a|b",
        "(a)",
        "a{99999999999999999999}",
        ".*.*.*!",
        "a**",
        r"(.)\1",
        "a?",
        "[z-a]",
        "a$b",
        "." * 99 + "+*",
        "(a|b)+",
        "(a|b)*c",
        "(a|b)(c|d)",
        "(a.|b)",
        "(a*|b)",
        "(" + "|".join("abcdefghijklmnopq") + ")",
    ],
)
def test_expressions_that_may_take_long_are_refused(pattern: str) -> None:
    with pytest.raises(ConfigError, match=r"malformed or too complex: .*; write the names out"):
        parse_quantization({"quantization_config": {**COMPRESSED, "ignore": ["re:" + pattern]}}, {})


@pytest.mark.parametrize("pattern", ["re:.*mlp_{}", "*mlp_{}"])
def test_patterns_are_few_and_names_may_be_many(pattern: str) -> None:
    patterns = [pattern.format(index) for index in range(256)]
    names = [f"layer_{index}" for index in range(1000)]
    config = parse_quantization({"quantization_config": {**COMPRESSED, "ignore": names + patterns}}, {})
    assert config is not None
    assert not config.quantises("layer_999")
    assert not config.quantises("a.mlp_255")
    with pytest.raises(ConfigError, match="more than 256 patterns"):
        parse_quantization({"quantization_config": {**COMPRESSED, "ignore": [*patterns, "*"]}}, {})


def test_projections_that_are_computed_together_need_not_be_quantised_alike(tmp_path: Path) -> None:
    write(tmp_path, "fp8")
    name = "model.layers.0.self_attn.k_proj"
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    raw["quantization_config"]["ignored_layers"].append(name)
    file.write_text(json.dumps(raw))
    exact = load_file(tmp_path / "widened" / "model.safetensors")
    stored = load_file(tmp_path / "model.safetensors") | {name + ".weight": exact[name + ".weight"]}
    del stored[name + ".weight_scale"]
    save_file(stored, tmp_path / "model.safetensors")
    torch.testing.assert_close(logits(tmp_path), logits(tmp_path / "widened"), atol=1e-5, rtol=1e-5)
    config = load_model_config(tmp_path).quantization
    assert config is not None
    spec = LinearSpec({name.replace("k_proj", each): 8 for each in ("q_proj", "k_proj")}, 64)
    names = [each + end for each in spec.parts for end in (".weight", ".weight_scale")]
    tensors = {each: torch.ones(8, 64) if each.endswith("weight") else torch.ones(1) for each in names}
    layer = SchemeLinearMethod(config, PRODUCT).load(GivenWeights(tensors), spec)
    assert not isinstance(layer, Fp8Linear)


def test_the_flag_must_agree_with_the_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, "modelopt")
    torch.testing.assert_close(logits(tmp_path, quantization="modelopt"), logits(tmp_path))
    with pytest.raises(ConfigError, match="the checkpoint is quantised by modelopt"):
        logits(tmp_path, quantization="fp8")
    with pytest.raises(ConfigError, match="a CPU has no FP8 product; leave the flag out"):
        logits(tmp_path / "widened", quantization="fp8")


def test_missing_and_misshaped_scales_are_found_before_weights_are_read(tmp_path: Path) -> None:
    write(tmp_path, "compressed-tensors-channel")
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    group = raw["quantization_config"]["config_groups"]["group_0"]
    group["weights"]["strategy"] = "tensor"
    file.write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=r"of another shape: .*weight_scale is \[64, 1\]"):
        logits(tmp_path)
    group["weights"]["strategy"] = "channel"
    group["input_activations"] |= {"strategy": "tensor", "dynamic": False}
    file.write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=r"missing: .*input_scale"):
        logits(tmp_path)


def test_doctor_refuses_to_quantise_where_a_start_would() -> None:
    settings = {"model": "builtin://tiny", "quantization": "fp8"}
    with pytest.raises(ConfigError, match="a CPU has no FP8 product; leave the flag out"):
        diagnose(EngineArgs.of(**settings, device="cpu"))
    gpu = DeviceMemory("cuda", "H100", 80 << 30, 80 << 30)
    with pytest.raises(ConfigError, match="in bfloat16"):
        diagnose(EngineArgs.of(**settings, dtype="float16"), gpu)


def change_tensors(path: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    file = path / "model.safetensors"
    save_file({name: change(name, tensor).contiguous() for name, tensor in load_file(file).items()}, file)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -0.1])
@pytest.mark.parametrize(
    ("form", "broken"),
    [
        ("compressed-tensors-channel", "model.layers.1.mlp.up_proj.weight_scale"),
        ("modelopt", "model.layers.0.self_attn.k_proj.input_scale"),
        ("modelopt", "model.layers.0.self_attn.k_proj.k_scale"),
    ],
)
def test_scales_that_are_not_positive_numbers_are_refused(
    form: str, broken: str, value: float, tmp_path: Path
) -> None:
    write(tmp_path, form, kv_scale=0.25)

    def spoil(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name == broken:
            tensor.view(-1)[-1] = value
        return tensor

    change_tensors(tmp_path, spoil)
    with pytest.raises(ConfigError, match=rf"{broken} of .*; quantise again or take the unquantised"):
        logits(tmp_path, "torch", has_fp8_kv_cache=True)


def test_ranks_take_their_part_of_scales_of_any_shape(tmp_path: Path) -> None:
    write(tmp_path, "compressed-tensors-channel", "llama")

    def parts() -> list[torch.Tensor]:
        name, device = "model.layers.0.mlp.up_proj.weight_scale", CPU
        weights = SafetensorsWeights(tmp_path, torch.float32, device, prefix="model.")
        whole = weights.take_scale(name, 128)
        return [whole] + [
            weights.take_scale(name, 128, Shard(0, (range(start, start + 64),))) for start in (0, 64)
        ]

    expected = parts()
    assert torch.equal(torch.cat(expected[1:]), expected[0])
    change_tensors(tmp_path, lambda name, t: t.reshape(1, -1) if name.endswith("weight_scale") else t)
    for ours, wanted in zip(parts(), expected, strict=True):
        assert torch.equal(ours, wanted)


def test_fp8_weights_take_half_on_a_gpu(tmp_path: Path) -> None:
    write(tmp_path, "fp8")
    config = load_model_config(tmp_path)
    elements = {"a_proj.weight": 1000, "a_proj.weight_scale": 1, "norm.weight": 10}
    assert estimate_weights(config, elements, 2, "cuda") == 1000 + 2 * 11
    tied = config.vocab_size * config.hidden_size if config.tie_word_embeddings else 0
    assert estimate_weights(config, elements, 2, "cpu") == 2 * (1011 + tied)
