"""Weights that are read ahead and copied: on a CPU, with copies that are made as late as they may be."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from argosy_engine.attention.torch_attn import TorchBackend
from argosy_engine.checkpoint import streamed_weights
from argosy_engine.checkpoint.streamed_weights import NUM_BUFFERS, StreamedWeights
from argosy_engine.checkpoint.weights import SafetensorsWeights, WeightPlan
from argosy_engine.errors import ConfigError
from argosy_engine.layers.layer_factory import LayerFactory
from argosy_engine.layers.linear_method import LinearMethod, SchemeLinearMethod
from argosy_engine.model_configs.sharding import WHOLE, Shard, Sharding
from argosy_engine.models import registry
from argosy_engine.models.config_file import load_model_config
from argosy_engine.models.loader import plan_weights
from fp8_checkpoints import quantize_checkpoint
from packed_checkpoints import FORMATS, pack_checkpoint
from random_checkpoints import KINDS, make_checkpoint
from thread_ranks import run_threads
from transformers_checkpoints import write_checkpoint

CPU = torch.device("cpu")
BUFFER_BYTES = 10_000
"""Most matrices of the small models are several pieces, and none is a whole number of pieces."""


class LateCopy:
    """A copy that is made when it is awaited."""

    def __init__(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self._source, self._target = source, target
        self._expected = source.clone()
        self._lock = threading.Lock()
        self._is_done = False

    def synchronize(self) -> None:
        with self._lock, torch.inference_mode():
            if not self._is_done:
                assert torch.equal(self._source, self._expected), "the buffer was filled again too early"
                self._target.copy_(self._source)
                self._is_done = True


class LateCopies:
    """WeightCopies on a CPU."""

    def __init__(self) -> None:
        self.pinned_bytes: list[int] = []
        self._open: list[LateCopy] = []

    def pinned(self, num_bytes: int) -> torch.Tensor:
        self.pinned_bytes.append(num_bytes)
        return torch.full((num_bytes,), 0x5A, dtype=torch.uint8)

    def begin(self) -> None:
        assert not self._open

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> LateCopy:
        self._open.append(LateCopy(source, target))
        return self._open[-1]

    def finish(self) -> None:
        for copy in self._open:
            copy.synchronize()
        self._open = []


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed_weights, "BUFFER_BYTES", BUFFER_BYTES)


def open_weights(
    path: Path, sharding: Sharding = WHOLE, dtype: torch.dtype = torch.float32
) -> tuple[StreamedWeights, WeightPlan, LateCopies]:
    config = load_model_config(path)
    prefix = registry.model_class(config.architecture).checkpoint_prefix
    copies = LateCopies()
    is_wrapped = config.wrapper is not None
    weights = StreamedWeights(path, dtype, CPU, prefix=prefix, copies=copies, is_wrapped=is_wrapped)
    return weights, plan_weights(config, dtype, sharding), copies


def taken(
    weights: SafetensorsWeights, path: Path, sharding: Sharding = WHOLE, method: LinearMethod | None = None
) -> dict[str, torch.Tensor]:
    """Build the model and return what it took, by name."""
    config = load_model_config(path)
    tensors: dict[str, torch.Tensor] = {}
    take = weights.take

    def recorded(
        name: str, *shape: int, dtype: torch.dtype | None = None, shard: Shard | None = None
    ) -> torch.Tensor:
        tensor = take(name, *shape, dtype=dtype, shard=shard)
        tensors[name] = tensor.clone()
        return tensor

    weights.take = recorded  # type: ignore[method-assign]
    factory = LayerFactory(weights, TorchBackend(weights.dtype), 64, method, sharding)
    with torch.inference_mode():
        registry.model_class(config.architecture)(config, factory)
    return tensors


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert list(ours) == list(theirs)
    for name, tensor in ours.items():
        assert tensor.dtype is theirs[name].dtype
        assert torch.equal(tensor.float(), theirs[name].float()), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [None, 0, 1])
@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "qwen3-moe", "gemma3", "mistral3", "qwen3-next", "qwen3.5"]
)
def test_a_model_gets_the_tensors_of_the_files(
    name: str, rank: int | None, dtype: torch.dtype, tmp_path: Path
) -> None:
    if name in KINDS:
        make_checkpoint(KINDS[name], tmp_path)
    else:  # a model for images, of which the text part is read
        write_checkpoint(name, tmp_path)
    sharding = WHOLE if rank is None else Sharding(rank, 2)
    weights, plan, copies = open_weights(tmp_path, sharding, dtype)
    read: list[int] = []
    weights.on_read = read.append
    with torch.inference_mode(), weights.reading(plan):
        ours = taken(weights, tmp_path, sharding)
    config = load_model_config(tmp_path)
    prefix = registry.model_class(config.architecture).checkpoint_prefix
    mapped = SafetensorsWeights(tmp_path, dtype, CPU, prefix=prefix, is_wrapped=config.wrapper is not None)
    assert_same(ours, taken(mapped, tmp_path, sharding))
    assert sum(read) == weights.stored_bytes(plan)
    assert max(read) <= BUFFER_BYTES  # however large a tensor is
    assert weights.num_bytes == mapped.num_bytes
    assert 0 < len(copies.pinned_bytes) <= NUM_BUFFERS
    assert max(copies.pinned_bytes) <= BUFFER_BYTES


@pytest.mark.parametrize("sharding", [WHOLE, Sharding(1, 2)], ids=["whole", "rank"])
@pytest.mark.parametrize(
    "form", ["compressed-tensors-channel", "modelopt", "gptq-4-order", "awq", "nvfp4-pack"]
)
def test_quantised_weights_and_their_scales(form: str, sharding: Sharding, tmp_path: Path) -> None:
    make_checkpoint(KINDS["llama"], tmp_path)
    if form in FORMATS:
        pack_checkpoint(tmp_path, form)
    else:
        quantize_checkpoint(tmp_path, form)
    config = load_model_config(tmp_path)
    assert config.quantization is not None
    weights, plan, _ = open_weights(tmp_path, sharding)
    method = SchemeLinearMethod(config.quantization)
    with torch.inference_mode(), weights.reading(plan):
        ours = taken(weights, tmp_path, sharding, method)
    mapped = SafetensorsWeights(tmp_path, torch.float32, CPU, prefix="model.")
    assert_same(ours, taken(mapped, tmp_path, sharding, method))


def test_another_order_than_planned_gives_the_same(tmp_path: Path) -> None:
    make_checkpoint(KINDS["llama"], tmp_path)
    weights, plan, _ = open_weights(tmp_path)
    mapped = SafetensorsWeights(tmp_path, torch.float32, CPU, prefix="model.")
    names = list(plan.shapes)
    with torch.inference_mode(), weights.reading(plan):
        for name in [*names[5::-1], *names[7:], names[6]]:
            ours = weights.take(name, *plan.shapes[name])
            assert torch.equal(ours, mapped.take(name, *plan.shapes[name])), name


def weight_file(path: Path) -> Path:
    return path / "model.safetensors"


def reader_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("weight reader")]


def test_a_file_that_is_cut_off_is_an_error_that_names_file_and_tensor(tmp_path: Path) -> None:
    make_checkpoint(KINDS["llama"], tmp_path)
    weights, plan, _ = open_weights(tmp_path)
    file = weight_file(tmp_path)
    os.truncate(file, file.stat().st_size - 1)
    message = rf"{file} ends before the end of tensor model\.\S+: .* download it"
    with weights.reading(plan), pytest.raises(ConfigError, match=message):
        taken(weights, tmp_path)
    assert reader_threads() == []


def test_a_file_that_changes_meanwhile_is_an_error_that_names_file_and_tensor(tmp_path: Path) -> None:
    make_checkpoint(KINDS["llama"], tmp_path)
    weights, plan, _ = open_weights(tmp_path)
    file, names = weight_file(tmp_path), list(plan.shapes)
    with weights.reading(plan):
        weights.take(names[0], *plan.shapes[names[0]])
        os.utime(file, (1, 1))
        with pytest.raises(ConfigError, match=f"{file} was changed while tensor {names[1]} was read"):
            weights.take(names[1], *plan.shapes[names[1]])
    assert reader_threads() == []


def test_a_load_that_is_given_up_leaves_no_thread(tmp_path: Path) -> None:
    make_checkpoint(KINDS["llama"], tmp_path)
    weights, plan, _ = open_weights(tmp_path)
    with weights.reading(plan):
        assert reader_threads()
    assert reader_threads() == []


def test_ranks_read_side_by_side(tmp_path: Path) -> None:
    make_checkpoint(KINDS["qwen3-moe"], tmp_path)

    def load(rank: int) -> int:
        sharding = Sharding(rank, 2)
        weights, plan, _ = open_weights(tmp_path, sharding)
        with torch.inference_mode(), weights.reading(plan):
            taken(weights, tmp_path, sharding)
        return weights.num_bytes

    parts = run_threads(2, lambda group: load(group.rank))
    _, plan, _ = open_weights(tmp_path)
    assert all(part < plan.num_bytes for part in parts)
