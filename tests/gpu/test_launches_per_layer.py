"""How many kernels a decode step launches per layer on a GPU: counted on fake CUDA tensors, which need no device.

Every torch operation that is no view and no allocation counts as one launch; our own are recorded.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from argosy_engine.attention.backend import AttentionMetadata, ModelInputs
from argosy_engine.attention.triton_attn import TritonBackend
from argosy_engine.checkpoint.weights import DummyWeights
from argosy_engine.layers.layer_factory import LayerFactory
from argosy_engine.layers.linear_method import (
    OnlineFp8LinearMethod,
    OnlineIntLinearMethod,
    SchemeLinearMethod,
)
from argosy_engine.layers.products import Fp8Product, TritonIntegers
from argosy_engine.model_configs.quantization_config import QuantizationConfig
from argosy_engine.model_configs.weight_schemes import BlockFp8Scheme, Fp8Scheme
from argosy_engine.models import registry
from argosy_engine.models.config_file import load_model_config
from argosy_engine.triton_kernels.activations import quantize_fp8
from argosy_engine.triton_kernels.launch import KNOWN_DEVICES, assume_device, recorded_launches
from random_checkpoints import KINDS

CUDA = torch.device("cuda")
BLOCK_SIZE, MAX_BLOCKS = 16, 64


class CountedOps(TorchDispatchMode):
    """Collects the names of torch's operations that launch a kernel."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::")
        if not func.is_view and not name.startswith(("prim::", "empty", "new_empty", "_unsafe_view")):
            self.names.append(name)
        return func(*args, **kwargs or {})


def decode_metadata(requests):
    starts = np.arange(requests + 1, dtype=np.int32)
    lens = np.full(requests, 300, np.int32)

    def empty(*shape, dtype=torch.int64):
        return torch.empty(shape, dtype=dtype, device=CUDA)

    return AttentionMetadata(
        num_decodes=requests,
        query_start_loc=empty(requests + 1, dtype=torch.int32),
        seq_lens=empty(requests, dtype=torch.int32),
        positions=empty(requests),
        slot_mapping=empty(requests),
        block_table=empty(requests, MAX_BLOCKS, dtype=torch.int32),
        query_start_loc_cpu=starts,
        seq_lens_cpu=lens,
    )


def launched(kind, num_layers, path, *, requests=1, method=None, **fields):
    """Return the names of what a decode step launches, torch's operations first."""
    kind = replace(kind, fields={**kind.fields, **fields, "num_hidden_layers": num_layers})
    getattr(transformers, kind.config)(**kind.fields, architectures=[kind.model]).save_pretrained(path)
    config = load_model_config(path)
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.no_grad(),
        assume_device(KNOWN_DEVICES["H100"]),
        recorded_launches() as launches,
    ):
        weights = DummyWeights(torch.bfloat16, CUDA, 0)
        factory = LayerFactory(weights, TritonBackend(torch.bfloat16), 512, method)
        model = registry.model_class(config.architecture)(config, factory)
        shape = (2, MAX_BLOCKS, BLOCK_SIZE, config.num_key_value_heads, config.head_dim)
        for layer in model.attention_layers:
            layer.bind(torch.empty(shape, dtype=torch.bfloat16, device=CUDA))
        meta = decode_metadata(requests)
        token_ids = torch.empty(requests, dtype=torch.int64, device=CUDA)
        with CountedOps() as counted:
            model.forward(ModelInputs(token_ids=token_ids, positions=meta.positions, meta=meta))
    return counted.names + [launch.name for launch in launches]


def per_layer(name, path, **fields):
    """Return the names of what two more layers launch, sorted: gemma's layers come in two kinds."""
    few, many = (launched(KINDS[name], layers, path, **fields) for layers in (2, 4))
    for each in few:
        many.remove(each)
    return sorted(many)


GEMMS = ["mm"] * 4
ATTENTION = ["merge_segments_kernel", "paged_attention_kernel", "rope_and_cache"]
DENSE = sorted([*ATTENTION, *GEMMS, "activation_and_mul", "rms_norm", "rms_norm"])
EXPERTS = ["route", "sort_by_expert", "gate_up_experts", "down_experts", "sum_experts"]


@pytest.mark.parametrize("name", ["llama", "qwen3-yarn", "qwen2-window", "gemma3", "gemma2", "gemma"])
def test_a_dense_layer_takes_ten_launches(name, tmp_path):
    names = [each.replace("addmm", "mm") for each in per_layer(name, tmp_path)]
    assert sorted(names) == sorted(DENSE * 2)
    assert len(DENSE) == 10


def test_biases_are_part_of_the_matrix_products(tmp_path):
    assert per_layer("llama3-rope", tmp_path).count("addmm") == 2 * 4


def _fp8(*, is_static):
    config = QuantizationConfig(method="fp8", default=Fp8Scheme(is_static=is_static), ignored=("re:.*gate$",))
    return SchemeLinearMethod(config, Fp8Product(quantize_fp8))


FP8_METHODS = {
    "per token": _fp8(is_static=False),
    "static": _fp8(is_static=True),
    "online": OnlineFp8LinearMethod(quantize_fp8),
}


@pytest.mark.parametrize("method", FP8_METHODS)
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3-moe"])
def test_fp8_products_find_their_inputs_quantised(name, method, tmp_path):
    for requests, product in ((1, "fp8_linear_few"), (17, "_scaled_mm")):
        plain = per_layer(name, tmp_path, requests=requests)
        names = per_layer(name, tmp_path, method=FP8_METHODS[method], requests=requests)
        assert "quantize_fp8" not in names
        assert names.count(product) == 2 * (2 if name == "qwen3-moe" else 4)
        assert len(names) == len(plain) == 2 * (13 if name == "qwen3-moe" else 10)


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_products_by_fp8_in_blocks_quantise_many_tokens(name, tmp_path):
    config = QuantizationConfig(
        method="fp8", default=BlockFp8Scheme(block=(128, 128)), ignored=("re:.*gate$",)
    )
    method = SchemeLinearMethod(config, Fp8Product(quantize_fp8))
    count = 2 * (2 if name == "qwen3-moe" else 4)
    names = per_layer(name, tmp_path, method=method)
    assert names.count("fp8_linear_few") == count
    assert len(names) == len(per_layer(name, tmp_path))
    names = per_layer(name, tmp_path, method=method, requests=17)
    assert names.count("quantize_fp8_blocks") == names.count("block_fp8_linear_many") == count
    assert len(names) == len(per_layer(name, tmp_path, requests=17)) + count


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3-moe"])
def test_products_by_packed_integers_take_a_launch_each(name, bits, tmp_path):
    method = OnlineIntLinearMethod(bits, TritonIntegers(narrows=False))
    plain, names = per_layer(name, tmp_path), per_layer(name, tmp_path, method=method)
    count = 2 * (2 if name == "qwen3-moe" else 4)
    assert names.count("packed_linear_few") == count
    assert len(names) == len(plain)
    many = per_layer(name, tmp_path, method=method, requests=64)
    assert many.count("packed_linear_many") == count


@pytest.mark.parametrize("method", FP8_METHODS)
def test_where_nothing_is_merged_one_launch_quantises_the_attention(method, tmp_path):
    names = per_layer("llama", tmp_path, method=FP8_METHODS[method], requests=600)
    assert "merge_segments_kernel" not in names
    assert names.count("quantize_fp8") == 2 * (method != "static")
    assert len(names) == 2 * (9 if method == "static" else 10)


def test_an_expert_layer_takes_thirteen_launches(tmp_path):
    layer = [*ATTENTION, "mm", "mm", "mm", "rms_norm", "rms_norm", *EXPERTS]
    assert per_layer("qwen3-moe", tmp_path) == sorted(layer * 2)
    assert len(layer) == 13


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3-moe"])
def test_many_requests_take_no_more(name, tmp_path):
    assert len(per_layer(name, tmp_path, requests=256)) <= len(per_layer(name, tmp_path))


def test_no_more_than_embedding_and_last_sum_are_outside_the_layers(tmp_path):
    assert len(launched(KINDS["llama"], 2, tmp_path)) == 2 * len(DENSE) + 2
