"""Weights in few bits: every format that is read, against a checkpoint of the numbers that it stands for, in this
engine and in transformers, and what is refused."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from argosy_engine.api.doctor import diagnose
from argosy_engine.attention import cpu_attn
from argosy_engine.checkpoint.model_folder import resolve_model
from argosy_engine.checkpoint.shards import checkpoint_elements
from argosy_engine.checkpoint.weights import SafetensorsWeights
from argosy_engine.config import EngineArgs
from argosy_engine.core.proc.core_client import InprocClient
from argosy_engine.errors import ConfigError
from argosy_engine.layers.experts import ExpertsSpec
from argosy_engine.layers.linear import Linear, LinearSpec
from argosy_engine.layers.linear_method import LinearMethod, SchemeLinearMethod
from argosy_engine.layers.products import CpuIntegers, IntegerProduct
from argosy_engine.model_configs.quantization_config import (
    QuantizationConfig,
    no_integer_product,
    what_becomes,
)
from argosy_engine.model_configs.quantization_formats import parse_quantization
from argosy_engine.model_configs.sharding import Sharding
from argosy_engine.model_configs.transformers_config import TransformersConfig
from argosy_engine.models.config_file import load_model_config
from argosy_engine.native.build import usable_variant
from argosy_engine.native.library import Kernels, PackedLinear, QuantizedWeight, kernels
from argosy_engine.sizing.kv_cache_sizing import estimate_weights
from argosy_engine.sizing.resources import DeviceMemory
from argosy_engine.worker import worker
from option_pairs import each_once
from packed_checkpoints import FORMATS, Format, gptq, gptq_config, pack_checkpoint
from rank_logits import TOKENS, logits_of
from thread_ranks import run_threads
from transformers_checkpoints import write_checkpoint
from transformers_sweep import EXACT, served

needs_kernels = pytest.mark.skipif(kernels() is None, reason="no CPU kernels here")
MODELS = {"llama": {}, "qwen3_moe": {"moe_intermediate_size": 64}, "arcee": {}}
"""The last runs on transformers' modelling code."""


PACKED = {
    form
    for form in FORMATS
    if form.startswith(
        ("gptq-4", "gptq-8", "gptq-dynamic", "awq", "pack-", "int-8", "mixed", "auto", "bnb-int8")
    )
}
"""Formats of which the CPU kernels multiply weights as they are packed."""


@pytest.fixture
def widens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Widens all weights, as where the kernels do not take them."""
    for name in ("linear", "gated"):
        monkeypatch.setattr(IntegerProduct, name, lambda *_: None)


def write(path: Path, form: str, model_type: str = "llama", **fields: Any) -> torch.nn.Module:
    """Write a quantised checkpoint; return transformers' model of what its numbers stand for."""
    write_checkpoint(model_type, path, **MODELS[model_type], **fields)
    pack_checkpoint(path, form)
    model = AutoModelForCausalLM.from_pretrained(
        path / "widened", dtype=torch.float32, attn_implementation="eager"
    )
    reference: torch.nn.Module = model.eval()
    return reference


@pytest.mark.usefixtures("widens")
@pytest.mark.parametrize(("model_type", "form"), each_once(MODELS, FORMATS))
def test_numbers_count_for_what_they_stand_for(model_type: str, form: str, tmp_path: Path) -> None:
    reference = write(tmp_path, form, model_type)
    assert isinstance(load_model_config(tmp_path), TransformersConfig) == (model_type == "arcee")
    with torch.inference_mode():
        exact = logits_of(tmp_path / "widened")
        assert torch.equal(logits_of(tmp_path), exact)
        theirs = reference(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(exact.log_softmax(-1), theirs.log_softmax(-1), atol=1e-4, rtol=1e-4)
    ranks = run_threads(2, lambda group: logits_of(tmp_path, group, Sharding(group.rank, 2)))
    torch.testing.assert_close(ranks[0], exact, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("form", "model_type"),
    [
        ("gptq-4-order", "llama"),
        ("gptq-dynamic", "arcee"),
        ("awq", "qwen3_moe"),
        ("pack-4-order", "arcee"),
        ("mixed", "qwen3_moe"),
        ("nvfp4-pack", "llama"),
        ("auto-round-gptq", "arcee"),
        ("modelopt-mxfp8", "qwen3_moe"),
        ("bnb-nf4-double", "arcee"),
    ],
)
def test_greedy_tokens_are_those_of_transformers(form: str, model_type: str, tmp_path: Path) -> None:
    reference = write(tmp_path, form, model_type)
    assert served(reference, tmp_path)[:2] == ("served", "")


def load_quantization(path: Path) -> QuantizationConfig:
    found = load_model_config(path).quantization
    assert found is not None
    return found


@needs_kernels
@pytest.mark.parametrize(("model_type", "form"), each_once(["llama", "qwen3_moe"], sorted(PACKED)))
def test_integers_are_multiplied_as_they_are_packed(
    model_type: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales multiply sums in float32, which is all that differs from widened weights; so do those of ranks."""
    packed: list[int] = []
    pack = Kernels.pack_quantized

    def counted(self: Kernels, weight: QuantizedWeight, *args: Any, **flags: Any) -> Any:
        packed.append(weight.bits)
        return pack(self, weight, *args, **flags)

    monkeypatch.setattr(Kernels, "pack_quantized", counted)
    write(tmp_path, form, model_type)
    exact = logits_of(tmp_path / "widened")
    assert not packed
    found = logits_of(tmp_path)
    assert packed
    torch.testing.assert_close(found, exact, atol=1e-4, rtol=1e-4)
    assert not torch.equal(found, exact)
    ranks = run_threads(2, lambda group: logits_of(tmp_path, group, Sharding(group.rank, 2)))
    torch.testing.assert_close(ranks[0], exact, atol=1e-4, rtol=1e-4)


@needs_kernels
@pytest.mark.parametrize("form", ["gptq-4-order", "gptq-8", "pack-4-asym", "int-8", "auto-round-awq"])
@pytest.mark.parametrize(("model_type", "head_dim"), [("llama", 24), ("llama", 32), ("qwen3_moe", 16)])
def test_greedy_tokens_of_packed_weights(
    model_type: str, head_dim: int, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are those of the dequantised model in transformers, in every batch, also where all layers are one call."""
    fused: list[int] = []
    call = cpu_attn.NativeDecoder.__call__

    def counted(self: cpu_attn.NativeDecoder, x: torch.Tensor, meta: Any) -> torch.Tensor:
        fused.append(len(x))
        return call(self, x, meta)

    monkeypatch.setattr(cpu_attn.NativeDecoder, "__call__", counted)
    assert served(write(tmp_path, form, model_type, head_dim=head_dim), tmp_path)[:2] == ("served", "")
    assert bool(fused) == (model_type == "llama" and head_dim % usable_variant().lanes == 0)


QKV = {f"model.layers.0.self_attn.{each}_proj": size for each, size in (("q", 64), ("k", 32), ("v", 32))}


def load_fused(path: Path, parts: dict[str, int]) -> Linear:
    weights = SafetensorsWeights(path, torch.float32, torch.device("cpu"), prefix="")
    quantization = load_quantization(path).with_stored_layers(weights.names)
    loaded = kernels()
    assert loaded is not None
    return SchemeLinearMethod(quantization, IntegerProduct(CpuIntegers(loaded))).load(
        weights, LinearSpec(parts, 64)
    )


@needs_kernels
@pytest.mark.parametrize("form", sorted(PACKED))
def test_rows_do_not_depend_on_their_batch_and_parts_alike_are_one_product(form: str, tmp_path: Path) -> None:
    write(tmp_path, form)
    shapes = {
        each.removesuffix(".weight"): len(tensor)
        for each, tensor in load_file(tmp_path / "widened" / "model.safetensors").items()
        if each.removesuffix(".weight") in QKV
    }
    layer = load_fused(tmp_path, {name: shapes[name] for name in QKV})
    assert layer.packed is not None
    assert bool(layer.packed.struct.bits) == (form not in ("mixed", "gptq-dynamic"))
    x = torch.randn(100, 64, generator=torch.Generator().manual_seed(1))
    whole = layer(x)
    for count in (1, 2, 3, 7, 16, 33, 97):
        assert torch.equal(layer(x[:count]), whole[:count])


@needs_kernels
def test_what_the_kernels_do_not_take_is_widened_and_the_reason_is_said(
    tmp_path: Path,
) -> None:
    write_checkpoint("llama", tmp_path)
    pack_checkpoint(tmp_path, Format(gptq_config(4, 4), gptq(4, 4)))
    quantization = load_quantization(tmp_path)
    told = what_becomes(quantization, "float32", "a CPU has no FP8", None, "cpu")
    assert "groups of a multiple of 8 inputs, not of 4" in told
    refusal = no_integer_product("cpu", "float32", has_kernels=False)
    assert "the CPU kernels are off" in what_becomes(
        parse_quantization({"quantization_config": FORMATS["gptq-4"].config}, {}),
        "float32",
        None,
        refusal,
        "cpu",
    )
    assert torch.equal(logits_of(tmp_path), logits_of(tmp_path / "widened"))


@needs_kernels
@pytest.mark.parametrize("form", ["gptq-4-order", "gptq-8", "awq", "pack-4-asym", "int-8"])
def test_the_estimate_is_what_packed_weights_take(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, form, hidden_size=256, intermediate_size=512, head_dim=64)
    taken: list[int] = []
    make = PackedLinear.__init__

    def counted(self: PackedLinear, struct: Any, *kept: torch.Tensor | None) -> None:
        taken.append(sum(each.nbytes for each in kept if each is not None))
        make(self, struct, *kept)

    monkeypatch.setattr(PackedLinear, "__init__", counted)
    logits_of(tmp_path)
    config = load_model_config(tmp_path)
    estimate = estimate_weights(config, checkpoint_elements(tmp_path), 4, "cpu", keeps_integers=True)
    embedding = config.vocab_size * config.hidden_size * 4
    assert abs(estimate - embedding - sum(taken)) < 0.03 * estimate


def test_reasons_are_those_of_the_device() -> None:
    def told(form: str, integer_refusal: str | None, device: str, *, has_experts: bool = False) -> str:
        config = parse_quantization({"quantization_config": FORMATS[form].config}, {})
        refusal = "no FP8" if device == "cpu" else None
        return what_becomes(
            config, "bfloat16", refusal, integer_refusal, device, has_experts=has_experts
        ).partition(": ")[2]

    widened = "widened to bfloat16 at load, because"
    for device, name in (("cpu", "the CPU kernels"), ("cuda", "the GPU kernels")):
        for form in ("bnb-nf4", "modelopt-nvfp4"):
            assert told(form, None, device) == f"{widened} no kernel multiplies by them as they are"
        assert told("gptq-3", None, device) == f"{widened} {name} multiply by 4 and 8 bits, not by 3"
        assert told("gptq-4", None, device) == f"multiplied by {name} as they are packed"
    assert told("pack-4-asym", None, "cuda").endswith("take groups of a multiple of 32 inputs, not of 16")
    assert told("gptq-4", no_integer_product("cuda", "float32", has_kernels=False), "cuda") == (
        f"{widened} the GPU kernels multiply by integers in bfloat16 and float16"
    )
    assert told("gptq-4", no_integer_product("cuda", "float16", has_kernels=False), "cuda") == (
        f"{widened} the Triton kernels do not serve here"
    )
    assert no_integer_product("cuda", "float16", has_kernels=True) is None
    config = parse_quantization({"quantization_config": {"quant_method": "mxfp4"}}, {})
    kept = "multiplied by the GPU kernels as they are packed"
    for dtype, refusal, device, becomes in (
        ("bfloat16", None, "cuda", kept),
        ("bfloat16", "no Triton", "cuda", f"{widened} no Triton"),
        (
            "float16",
            None,
            "cuda",
            "widened to float16 at load, because the GPU kernels multiply by MXFP4 in bfloat16",
        ),
        ("bfloat16", None, "cpu", f"{widened} no kernel multiplies by them as they are"),
    ):
        assert what_becomes(config, dtype, "no FP8", refusal, device).partition(": ")[2] == becomes
    assert told("gptq-4", None, "cuda", has_experts=True) == (
        "multiplied by the GPU kernels as they are packed; experts of packed integers widened to bfloat16 at load"
    )


@needs_kernels
def test_unlike_parts_are_widened_and_a_line_of_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, "mixed")
    with caplog.at_level("INFO", logger="argosy.models"):
        logits_of(tmp_path)
    assert re.search("gate_proj is widened, and others may be: its parts differ", caplog.text)


@needs_kernels
def test_the_fingerprint_tells_packed_from_widened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "gptq-4")
    found = []
    for keeps in (True, True, False):
        if not keeps:
            monkeypatch.setattr(worker, "keeps_integers", lambda *_, **__: False)
        with closing(InprocClient(EngineArgs.of(model=str(tmp_path), **EXACT))) as client:
            found.append(client.config.model_fingerprint)
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("form", FORMATS)
def test_doctor_says_what_becomes_of_the_weights_and_counts_them_so(form: str, tmp_path: Path) -> None:
    write(tmp_path, form)
    tokenizer = (resolve_model("builtin://tiny") / "tokenizer.json").read_bytes()
    found = []
    for path in (tmp_path, tmp_path / "widened"):
        (path / "tokenizer.json").write_bytes(tokenizer)
        memory = DeviceMemory("cpu", "a CPU", 8 << 30, 8 << 30)
        found.append(diagnose(EngineArgs.of(model=str(path), dtype="float32"), memory))
    assert all(each.budget is not None for each in found)
    quantised, plain = (each.budget.weights_bytes for each in found if each.budget is not None)
    if form in PACKED and not load_quantization(tmp_path).rules:
        assert quantised < 0.8 * plain
    else:
        assert plain <= quantised <= 1.001 * plain
    config = load_quantization(tmp_path)
    assert found[0].weights is not None
    becomes = "widened to float32 at load, because .+"
    if form in PACKED:
        becomes = "multiplied by the CPU kernels as they are packed(, where fused .+)?"
    assert re.fullmatch(rf"weights in .+ \({config.method}\): {becomes}; .+ in the files", found[0].weights)
    assert found[1].weights is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_doctor_says_it_of_a_gpu_and_counts_them_so(dtype: str, tmp_path: Path) -> None:
    """Experts are widened there."""
    (tmp_path / "dense").mkdir()
    (tmp_path / "sparse").mkdir()
    write(tmp_path / "dense", "gptq-4", hidden_size=256, intermediate_size=512, head_dim=64)
    write(tmp_path / "sparse", "gptq-4", "qwen3_moe")
    memory = DeviceMemory("cuda", "a GPU", 8 << 30, 8 << 30)
    shares = {}
    for name in ("dense", "sparse"):
        path = tmp_path / name
        sizes = []
        for each in (path, path / "widened"):
            (each / "tokenizer.json").write_bytes(
                (resolve_model("builtin://tiny") / "tokenizer.json").read_bytes()
            )
            found = diagnose(EngineArgs.of(model=str(each), dtype=dtype), memory)
            assert found.budget is not None
            sizes.append(found.budget.weights_bytes)
            if each == path:
                assert found.weights is not None
                packs = "multiplied by the GPU kernels as they are packed" in found.weights
                assert packs == (dtype == "bfloat16")
                assert ("experts of packed integers widened" in found.weights) == (packs and name == "sparse")
        shares[name] = sizes[0] / sizes[1]
    if dtype == "bfloat16":
        assert shares["dense"] < 0.45
        assert 0.5 < shares["sparse"] < 1
    else:
        assert all(0.99 < share < 1.01 for share in shares.values())


@pytest.mark.usefixtures("widens")
@pytest.mark.parametrize("form", ["gptq-4", "pack-8", "bnb-nf4"])
def test_a_quantised_output_head(form: str, tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path, vocab_size=320)
    config = FORMATS[form].config | ({"lm_head": True} if form.startswith("gptq") else {"ignore": []})
    pack_checkpoint(tmp_path, FORMATS[form]._replace(config=config), has_head=True)
    exact = logits_of(tmp_path / "widened")
    assert torch.equal(logits_of(tmp_path), exact)
    ranks = run_threads(2, lambda group: logits_of(tmp_path, group, Sharding(group.rank, 2)))
    torch.testing.assert_close(ranks[0], exact, atol=1e-4, rtol=1e-4)
    (tmp_path / "tokenizer.json").write_bytes(
        (resolve_model("builtin://tiny") / "tokenizer.json").read_bytes()
    )
    memory = DeviceMemory("cpu", "a CPU", 8 << 30, 8 << 30)
    assert diagnose(EngineArgs.of(model=str(tmp_path)), memory).fits


@pytest.mark.parametrize("features", [None, range(16, 48)])
@pytest.mark.parametrize("form", ["gptq-4-order", "mixed", "modelopt-nvfp4", "bnb-nf4"])
def test_experts_are_stacked_widened(form: str, features: range | None, tmp_path: Path) -> None:
    """As kernels take them that compute all of a layer."""
    write(tmp_path, form, "qwen3_moe")
    experts = getattr(load_model_config(tmp_path), "experts")  # noqa: B009 (not every family has them)
    spec = ExpertsSpec("model.layers.1.mlp.", experts.routing, 64, 64, features=features)
    stacked = []
    for path in (tmp_path, tmp_path / "widened"):
        weights = SafetensorsWeights(path, torch.float32, torch.device("cpu"), prefix="model.")
        quantization = load_model_config(path).quantization
        method = LinearMethod()
        if quantization is not None:
            method = SchemeLinearMethod(quantization.with_stored_layers(weights.names))
        stacked.append(method.load_experts(weights, spec))
    assert torch.equal(stacked[0].gate_up, stacked[1].gate_up)
    assert torch.equal(stacked[0].down, stacked[1].down)
    assert stacked[0].gate_up_scale is None


def test_random_weights_stand_for_quantised_ones(tmp_path: Path) -> None:
    write(tmp_path, "gptq-4-order")
    drawn = [logits_of(path, load_format="dummy") for path in (tmp_path, tmp_path / "widened")]
    assert torch.equal(*drawn)


Tensors = dict[str, torch.Tensor]
LAYER = "model.layers.1.mlp.up_proj"


def refusal(path: Path, **flags: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        InprocClient(EngineArgs.of(model=str(path), **EXACT, **flags))
    return str(caught.value)


def change_tensors(path: Path, change: Callable[[Tensors], object]) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({name: each.contiguous() for name, each in tensors.items()}, file, metadata={"format": "pt"})


def put(suffix: str, place: tuple[int, ...], value: float) -> Callable[[Tensors], object]:
    return lambda tensors: tensors[LAYER + suffix].__setitem__(place, value)


def less(suffix: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({LAYER + suffix: tensors[LAYER + suffix][..., :-1]})


def state(**fields: Any) -> Callable[[Tensors], object]:
    """Change what bitsandbytes says of a weight."""

    def change(tensors: Tensors) -> None:
        name = f"{LAYER}.weight.quant_state.bitsandbytes__nf4"
        text = json.dumps(json.loads(bytes(tensors[name].tolist())) | fields)
        tensors[name] = torch.tensor(list(text.encode()), dtype=torch.uint8)

    return change


@pytest.mark.parametrize("model_type", ["llama", "arcee"])
@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("gptq-4", put(".scales", (0, 3), float("nan")), f"{LAYER}.scales of .* not finite"),
        ("gptq-4", put(".qzeros", (1, 0), 0), f"{LAYER}.qzeros has other zero points than 8"),
        ("gptq-4-order", put(".g_idx", (5,), 4), f"{LAYER}.g_idx has groups .* among the 4"),
        ("gptq-4-order", put(".g_idx", (5,), -1), f"{LAYER}.g_idx has groups .* among the 4"),
        ("gptq-4-order", lambda tensors: tensors.pop(f"{LAYER}.g_idx"), rf"{LAYER}\.g_idx"),
        ("gptq-4", lambda tensors: tensors.pop(f"{LAYER}.qzeros"), rf"{LAYER}\.q\w+"),
        ("gptq-4", less(".qweight"), rf"{LAYER}\W"),
        ("gptq-4", less(".qzeros"), rf"{LAYER}\.qzeros is"),
        ("gptq-4", less(".scales"), rf"{LAYER}\.scales"),
        ("awq", put(".scales", (0, 3), float("inf")), f"{LAYER}.scales of .* not finite"),
        ("awq", less(".qzeros"), rf"{LAYER}\.qzeros is"),
        ("pack-4", put(".weight_scale", (0, 0), float("nan")), f"{LAYER}.weight_scale of .* not finite"),
        ("pack-4", less(".weight_packed"), rf"{LAYER}\W"),
        ("pack-4-asym", less(".weight_zero_point"), rf"{LAYER}\.weight_zero_point is"),
        ("pack-4-order", put(".weight_g_idx", (0,), 77), f"{LAYER}.weight_g_idx has groups .* among the 4"),
        ("int-8", put(".weight_scale", (3, 0), float("nan")), f"{LAYER}.weight_scale of .* not finite"),
        ("int-8-asym-static", lambda tensors: tensors.pop(f"{LAYER}.weight_zero_point"), LAYER),
        ("modelopt-nvfp4", put(".weight_scale_2", (), float("nan")), f"{LAYER}.weight_scale_2 of .* finite"),
        ("modelopt-nvfp4", less(".weight_scale"), rf"{LAYER}\.weight_scale is"),
        ("modelopt-mxfp8", put(".weight_scale", (0, 0), 255), f"{LAYER}.weight_scale has .* not finite"),
        ("bnb-nf4", put(".weight.absmax", (0,), float("nan")), f"{LAYER}.weight.absmax of .* not finite"),
        ("bnb-nf4", state(blocksize=128), "a scale per 128 numbers"),
        ("bnb-nf4", state(shape=[95, 64]), rf"{LAYER}\W"),
        ("bnb-nf4", state(quant_type=3), "malformed"),
        ("bnb-nf4-double", state(nested_offset=None), "malformed"),
        ("bnb-nf4", lambda tensors: tensors.pop(f"{LAYER}.weight.quant_state.bitsandbytes__nf4"), LAYER),
        ("bnb-int8", put(".weight_format", (), 1), f"{LAYER}.weight_format is not that of rows"),
        ("bnb-int8", put(".SCB", (0,), float("nan")), f"{LAYER}.SCB of .* not finite"),
        ("nvfp4-pack", put(".weight_scale", (0, 0), float("nan")), f"{LAYER}.weight_scale has .* not finite"),
        ("nvfp4-pack", put(".weight_global_scale", (0,), 0.0), f"{LAYER}.weight_global_scale of .* greater"),
    ],
)
def test_what_contradicts_itself_is_refused(
    form: str, change: Callable[[Tensors], object], message: str, model_type: str, tmp_path: Path
) -> None:
    write(tmp_path, form, model_type)
    change_tensors(tmp_path, change)
    assert re.search(message, refusal(tmp_path))


def group(targets: list[str] = ["Linear"], **weights: Any) -> dict[str, Any]:  # noqa: B006 (never changed)
    """The one group of a checkpoint of compressed-tensors' that is changed."""
    own: dict[str, Any] = copy.deepcopy(FORMATS["pack-4"].config["config_groups"]["group_0"])
    own["targets"] = targets
    own["weights"] |= weights.get("weights", {})
    return {"config_groups": {"group_0": own}}


@pytest.mark.parametrize(
    ("form", "fields", "message"),
    [
        ("gptq-4", {"bits": 5}, "gptq of 5 bits"),
        ("gptq-4", {"bits": None}, "gptq of None bits"),
        ("gptq-4", {"group_size": 0}, "groups of 0 inputs"),
        ("gptq-4", {"group_size": "x"}, "groups of x inputs"),
        ("gptq-4", {"group_size": 24}, "64 inputs, which is not a multiple of 24"),
        ("gptq-4", {"group_size": 64}, "is not a multiple of 64"),
        ("gptq-4", {"bits": 8}, "of another shape"),
        ("gptq-4", {"checkpoint_format": "marlin"}, "the format 'marlin'"),
        ("gptq-4", {"is_marlin_format": True}, "the format 'marlin'"),
        ("gptq-4", {"checkpoint_format": "gptq_v2"}, "other zero points than 8"),
        ("gptq-4", {"pack_dtype": "int16"}, "packed into 'int16'"),
        ("gptq-4", {"dynamic": {"+:(a+)+": {"bits": 8}}}, "too complex"),
        ("gptq-4", {"dynamic": {"+:.*up_proj": {"bits": 7}}}, "gptq of 7 bits"),
        ("gptq-4", {"dynamic": {"-:.*up_proj": {}}}, r"missing: model.*up_proj\.weight"),
        ("gptq-3", {"meta": {"quantizer": ["gptqmodel:2.0"]}}, "take gptq_v2"),
        ("pack-4", {"format": "int-quantized"}, r"missing: model.*up_proj\.weight"),
        ("int-8", {"format": "pack-quantized"}, r"missing: .*weight_packed"),
        ("int-8", {"format": None}, "8 bits 'int' in the format None"),
        ("int-8", {"format": "marlin-24"}, "in the format 'marlin-24'"),
        ("pack-4", group(weights={"num_bits": 3}), "of 3 bits 'int'"),
        ("pack-4", group(weights={"strategy": "token"}), "per 'token'"),
        ("pack-4", group(weights={"group_size": 40}), "not a multiple of 40"),
        ("pack-4", group(targets=["LlamaAttention"]), "the target 'LlamaAttention'"),
        ("pack-4", group(targets=["re:(a|b)+"]), "too complex"),
        ("mixed", {"format": "int-quantized", "config_groups": {}}, "without targets"),
        (
            "auto-round-gptq",
            {"packing_format": "auto_round:llm_compressor"},
            "llm_compressor'.* one that is packed as auto_",
        ),
        ("auto-round-gptq", {"extra_config": {"a.b": {"bits": 7}}}, "auto-round of 7 bits"),
        ("auto-round-gptq", {"data_type": "mx_fp"}, "the type 'mx_fp'"),
        ("modelopt-nvfp4", {"quant_algo": "NVFP4_AWQ"}, "'NVFP4_AWQ' is not supported.*one in NVFP4"),
        ("modelopt-nvfp4", {"group_size": 20}, "not a multiple of 20"),
        ("bnb-nf4", {"bnb_4bit_quant_type": "af4"}, "the type 'af4'"),
        ("bnb-nf4", {"bnb_4bit_quant_storage": "bfloat16"}, "in 'bfloat16'"),
        ("bnb-nf4", {"bnb_4bit_use_double_quant": True}, "missing: .*nested_absmax"),
        ("bnb-nf4", {"bnb_4bit_quant_type": "fp4"}, "missing: .*bitsandbytes__fp4"),
        ("gptq-4", {"quant_method": "hqq"}, "'hqq' is not supported, .* use GPTQ or AWQ of as many bits, or"),
        ("gptq-4", {"quant_method": "quark"}, "'quark' .* use one of as many bits by compressed-tensors, or"),
        ("gptq-4", {"quant_method": "sinq"}, "'sinq' .* use such a checkpoint, or the unquantised one"),
        ("awq", {"version": "gemv"}, "packed for 'gemv'"),
        ("awq", {"bits": 8}, "awq of 8 bits"),
        ("awq", {"group_size": 20}, "not a multiple of 20"),
    ],
)
def test_descriptions_that_do_not_fit_are_refused(
    form: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_checkpoint("llama", tmp_path)
    pack_checkpoint(tmp_path, form)
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    raw["quantization_config"] |= fields
    file.write_text(json.dumps(raw))
    assert re.search(message, refusal(tmp_path))


@pytest.mark.usefixtures("widens")
@pytest.mark.parametrize("model_type", ["llama", "arcee"])
def test_biases_of_zeros_that_the_model_has_not_are_no_fault(model_type: str, tmp_path: Path) -> None:
    """AutoGPTQ once wrote them for every layer."""
    write(tmp_path, "gptq-4", model_type)
    change_tensors(tmp_path, lambda tensors: tensors.update({f"{LAYER}.bias": torch.zeros(96)}))
    assert torch.equal(logits_of(tmp_path), logits_of(tmp_path / "widened"))
    change_tensors(tmp_path, lambda tensors: tensors.update({f"{LAYER}.bias": torch.ones(96)}))
    assert re.search(f"(unexpected|does not use): {LAYER}.bias", refusal(tmp_path))


def test_the_flag_must_agree_with_the_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, "awq")
    assert "the checkpoint is quantised by awq" in refusal(tmp_path, quantization="gptq")
    with closing(InprocClient(EngineArgs.of(model=str(tmp_path), quantization="awq", **EXACT))) as client:
        assert client.config.dtype == "float32"


@pytest.mark.usefixtures("widens")
def test_layers_that_are_left_out_by_an_expression_that_is_not_understood(tmp_path: Path) -> None:
    """The file tells them."""
    write(tmp_path, "gptq-dynamic")
    dynamic = {r"-:^(?!.*(q|k|o|up|down|gate)_proj).*": {}, "+:.*k_proj": {"bits": 8, "group_size": 16}}
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    raw["quantization_config"]["dynamic"] = dynamic
    file.write_text(json.dumps(raw))
    assert torch.equal(logits_of(tmp_path), logits_of(tmp_path / "widened"))


@pytest.mark.usefixtures("widens")
def test_zero_points_of_0_survive_the_first_format(tmp_path: Path) -> None:
    """GPTQModel subtracts 1 from each of a word by one subtraction, which borrows from the next."""
    write_checkpoint("llama", tmp_path)
    pack_checkpoint(tmp_path, "gptq-4-v2")
    ones = torch.tensor(0x11111111, dtype=torch.int32)
    change_tensors(
        tmp_path,
        lambda tensors: tensors.update(
            {name: each - ones for name, each in tensors.items() if name.endswith("qzeros")}
        ),
    )
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    raw["quantization_config"]["checkpoint_format"] = "gptq"
    file.write_text(json.dumps(raw))
    assert torch.equal(logits_of(tmp_path), logits_of(tmp_path / "widened"))
