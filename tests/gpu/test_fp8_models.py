"""Models with FP8 products: norms, activations and attention quantise what the products read."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from argosy_engine.attention.torch_attn import TorchBackend
from argosy_engine.attention.triton_attn import TritonBackend
from argosy_engine.checkpoint.weights import SafetensorsWeights
from argosy_engine.layers.layer_factory import LayerFactory
from argosy_engine.layers.linear_method import OnlineFp8LinearMethod, SchemeLinearMethod
from argosy_engine.layers.products import Fp8Product
from argosy_engine.model_configs.sharding import WHOLE, Sharding
from argosy_engine.models import registry
from argosy_engine.models.config_file import load_model_config
from argosy_engine.triton_kernels import paged_attention
from argosy_engine.triton_kernels.activations import quantize_fp8
from argosy_engine.triton_kernels.launch import launched_variants
from attention_cases import model_inputs
from fp8_checkpoints import quantize_checkpoint
from random_checkpoints import KINDS, make_checkpoint
from thread_ranks import run_threads
from transformers_checkpoints import write_checkpoint

CPU = torch.device("cpu")
BLOCK_SIZE = 16
TOKEN_IDS = list(range(2, 12))
LONGER = list(range(2, 26))
FORMS = {"per token": "compressed-tensors-channel", "static": "compressed-tensors-tensor"}
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's, where a GPU has none


@torch.inference_mode()
def logits(
    path,
    backend=TritonBackend,
    *,
    method=None,
    sharding=WHOLE,
    communicator=None,
    token_ids=TOKEN_IDS,
):
    """Logits of a prompt and of a decode after it, by one rank."""
    config = load_model_config(path)
    model_class = registry.model_class(config.architecture)
    weights = SafetensorsWeights(path, torch.float32, CPU, prefix=model_class.checkpoint_prefix)
    if method is None and config.quantization is not None:
        method = SchemeLinearMethod(config.quantization, Fp8Product(quantize_fp8))
    factory = LayerFactory(weights, backend(torch.float32), 64, method, sharding, communicator)
    model = model_class(config, factory)
    for layer in model.attention_layers:
        layer.bind(torch.zeros(layer.kv_cache_shape(4, BLOCK_SIZE)))
    steps = []
    for start, end in [(0, len(token_ids) - 1), (len(token_ids) - 1, len(token_ids))]:
        inputs = model_inputs(token_ids[start:end], start, torch.tensor([[2, 0]]), BLOCK_SIZE)
        steps.append(model.logits(model.forward(inputs)))
    return torch.cat(steps)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A function that writes a checkpoint of two layers once, and returns its path and its logits without FP8."""

    @cache
    def write(name, form=None):
        path = tmp_path_factory.mktemp(name)
        make_checkpoint(replace(KINDS[name], fields={**KINDS[name].fields, "num_hidden_layers": 2}), path)
        if form is None:
            return path, logits(path)
        quantize_checkpoint(path, form)
        return path, logits(path / "widened")

    return write


def assert_close_in_fp8(ours, theirs, exact, *, share=0.5):
    """Both are FP8: they differ by a share of what they are off the exact numbers."""
    assert ours.isfinite().all()
    assert (ours - theirs).norm() < share * (theirs - exact).norm()
    assert (ours - exact).norm() < 1.3 * (theirs - exact).norm()


@pytest.mark.parametrize(
    ("name", "form", "num_segments"),
    [("llama", "per token", 2), ("llama", "static", 1), ("gemma3", "static", 2)],
)
def test_fused_quantisation_computes_what_separate_launches_compute(
    name, form, num_segments, written, monkeypatch
):
    path, exact = written(name, FORMS[form])
    monkeypatch.setattr(paged_attention, "choose_num_segments", lambda *_: num_segments)
    with launched_variants() as variants:
        ours = logits(path)
    names = {variant[0] for variant in variants}
    # The prompt is never split.
    assert ("quantize_fp8" in names) == (form == "per token")
    assert ("merge_segments_kernel" in names) == (num_segments == 2)
    assert_close_in_fp8(ours, logits(path, TorchBackend), exact)


BLOCKS = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}


def write_blocks(path, model_type="llama", **fields):
    write_checkpoint(model_type, path, num_hidden_layers=2, **BLOCKS, **fields)
    quantize_checkpoint(path, "fp8-block-128")


def test_scales_of_blocks(tmp_path):
    """A decode multiplies what is not quantised, a prompt of more than 16 tokens what is."""
    write_blocks(tmp_path)
    exact = logits(tmp_path / "widened")
    with launched_variants() as variants:
        ours = logits(tmp_path)
    names = {variant[0] for variant in variants}
    assert names >= {"fp8_linear_few"}
    assert "block_fp8_linear_many" not in names
    assert (ours - exact).norm() < 1e-3 * exact.norm()
    with launched_variants() as variants:
        many = logits(tmp_path, token_ids=LONGER)
    assert {variant[0] for variant in variants} >= {"block_fp8_linear_many", "quantize_fp8_blocks"}
    exact = logits(tmp_path / "widened", token_ids=LONGER)
    assert 1e-3 * exact.norm() < (many - exact).norm() < 0.1 * exact.norm()


def test_ranks_have_their_part_of_the_blocks(tmp_path):
    write_blocks(tmp_path, num_attention_heads=4, num_key_value_heads=2)
    ranks = run_threads(
        2, lambda group: logits(tmp_path, sharding=Sharding(group.rank, 2), communicator=group)
    )
    assert torch.equal(*ranks)
    exact = logits(tmp_path / "widened")
    assert (ranks[0] - exact).norm() < 1e-3 * exact.norm()


def test_experts_with_scales_of_blocks(tmp_path):
    write_blocks(tmp_path, "qwen3_moe", moe_intermediate_size=256)
    exact = logits(tmp_path / "widened")
    with launched_variants() as variants:
        ours = logits(tmp_path)
    assert "gate_up_experts" in {variant[0] for variant in variants}
    assert (ours - exact).norm() < 1e-3 * exact.norm()
    ranks = run_threads(
        2, lambda group: logits(tmp_path, sharding=Sharding(group.rank, 2), communicator=group)
    )
    assert torch.equal(*ranks)
    assert (ranks[0] - exact).norm() < 1e-3 * exact.norm()


def test_a_rank_that_cuts_blocks_widens_and_says_so(tmp_path, caplog):
    """Half of 384 features are a block and a half, of dense layers and of experts."""
    for model_type, fields in (("llama", {}), ("qwen3_moe", {"moe_intermediate_size": 384})):
        path = tmp_path / model_type
        path.mkdir()
        write_blocks(path, model_type, **fields)
        caplog.clear()
        with caplog.at_level("INFO", logger="argosy.models"):
            ranks = run_threads(
                2, lambda group, path=path: logits(path, sharding=Sharding(group.rank, 2), communicator=group)
            )
        assert (
            "is widened, and others may be: this rank's inputs begin or end within a block of 128"
            in caplog.text
        )
        exact = logits(path / "widened")
        assert (ranks[0] - exact).norm() < 1e-3 * exact.norm()


def test_experts_and_router_get_what_is_not_quantised(written):
    path, exact = written("qwen3-moe-mixed", FORMS["per token"])
    ours = logits(path)
    assert (
        0 < (ours - exact).norm() < 0.5 * exact.norm()
    )  # other experts are chosen where two are equally good


@pytest.mark.parametrize("form", FORMS)
def test_squared_relus_quantise_what_the_next_product_reads(form, tmp_path):
    kinds = ["full_attention", "mlp", "mlp"]
    write_checkpoint("nemotron_h", tmp_path, layers_block_type=kinds)
    exact = logits(tmp_path)
    quantize_checkpoint(tmp_path, FORMS[form])
    with launched_variants() as variants:
        ours = logits(tmp_path)
    names = {variant[0] for variant in variants}
    assert ("activation_and_mul_fp8" in names) == (form == "per token")
    assert ("quantize_fp8" in names) == (form == "per token"), "of attention's outputs"
    assert_close_in_fp8(ours, logits(tmp_path, TorchBackend), exact)


def test_weights_that_are_quantised_online(written):
    path, exact = written("llama")
    ours, theirs = (
        logits(path, backend, method=OnlineFp8LinearMethod(quantize_fp8))
        for backend in (TritonBackend, TorchBackend)
    )
    assert_close_in_fp8(ours, theirs, exact)


def test_ranks_quantise_their_part_of_the_inputs(written):
    path, exact = written("llama", FORMS["per token"])
    ranks = run_threads(2, lambda group: logits(path, sharding=Sharding(group.rank, 2), communicator=group))
    assert torch.equal(*ranks)
    # Each rank's part of a row has a scale of its own, and so other rounding errors of the same size.
    assert_close_in_fp8(ranks[0], logits(path), exact, share=1.2)
