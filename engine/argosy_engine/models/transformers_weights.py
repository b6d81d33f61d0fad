"""Transformers weights: loads a checkpoint into a model of transformers' by transformers' own loader, which knows how
names have changed and experts are joined.

Quantised weights reach that loader widened: it asks for each tensor when it needs it, and gets what our own linear
layers would take (`layers.fp8_linear`, `layers.widened_linear`). So every family that transformers can load is loaded
from FP8 as well, at the memory of unquantised weights.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from argosy_engine.attention.backend import AttentionBackend
from argosy_engine.checkpoint.safetensors_header import StoredTensor, read_shards
from argosy_engine.checkpoint.stored_tensors import SCORE, check_further_layers, check_label_head
from argosy_engine.checkpoint.weights import DummyWeights, SafetensorsWeights
from argosy_engine.distributed.communicator import Communicator
from argosy_engine.errors import ConfigError
from argosy_engine.layers.linear import LinearSpec
from argosy_engine.layers.quantization import planned_linear_method
from argosy_engine.layers.widened_linear import take_mxfp4
from argosy_engine.model_configs.encoder_config import EncoderConfig
from argosy_engine.model_configs.transformers_config import TransformersConfig
from argosy_engine.model_configs.wrapper_config import text_name, without_parts
from argosy_engine.models.transformers_attention import STEP
from argosy_engine.models.transformers_classes import (
    hf_config,
    model_class,
    text_model,
    without_other_parts,
)
from argosy_engine.models.transformers_encoder import TransformersEncoder
from argosy_engine.models.transformers_model import TransformersModel, probe_prompts, reference_outputs
from argosy_engine.models.transformers_plan import divide

_PLAIN = frozenset({"F64", "F32", "F16", "BF16"})
_WHOLE = frozenset({"BOOL", "I32", "I64"})
"""Of masks and positions, which some checkpoints have."""
_SCALE = re.compile(r"(.*\.weight)(_scale|_scale_inv)")
_UNUSED_SCALE = re.compile(r".*\.(input_scale|[kvq]_scale|[kv]_proj\.output_scale)")
"""Scales of inputs and of an FP8 KV cache, neither of which is in FP8 here."""
_HEADS = re.compile(r"(lm_head|score)\.(weight|bias)")
"""Of decoders, which those that pool do not load."""
_ENCODER_HEADS = re.compile(
    r"(\w+\.)?(cls|lm_head|head|decoder|classifier|pre_classifier|pooler|vocab_\w+|generator_\w+|discriminator_\w+)"
    r"\..+|(.*\.)?position_ids"
)
"""Of encoders; the last are numbers from 0, which old checkpoints store."""
_MXFP4 = re.compile(r"(.*)_(blocks|scales)")


def load_transformers(
    path: Path,
    config: TransformersConfig,
    backend: AttentionBackend,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int | None,
    communicator: Communicator | None = None,
    on_loaded: Callable[[float], None] = lambda _: None,
) -> tuple[TransformersModel | TransformersEncoder, dict[str, int]]:
    """Load a model by transformers' own loader; return it, and the number of elements of each tensor, by name.

    Args:
        seed: of random weights, which no checkpoint is read for; None: the checkpoint's.
        communicator: of the ranks among which the model is divided; None: it is whole.
        on_loaded: called with the share of the parameters that have been read, after each.

    Raises:
        ConfigError: the checkpoint lacks tensors, has others than the model, or is quantised in another way than its
            config says.
    """
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    attention = "eager" if isinstance(config, EncoderConfig) and config.runs_alone else STEP
    of_config = hf_config(config, attention)
    built = model_class(config, of_config)
    parts: dict[str, Any] = {"attn_implementation": attention}
    if isinstance(config, EncoderConfig) and _takes_pooling_layer(built):
        parts["add_pooling_layer"] = False
    if config.wrapper is not None:
        built = without_other_parts(built)
    if seed is not None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = built._from_config(of_config, dtype=dtype, **parts)
    else:
        model = _read(path, config, built, of_config, dtype, parts, on_loaded)
    model = (model if config.wrapper is None else text_model(model)).eval().requires_grad_(False)
    expected = None
    if communicator is not None:
        expected = [reference_outputs(model, config, prompt) for prompt in probe_prompts(config)]
        divide(model, communicator)
    model = model.to(device)
    elements = {name: parameter.numel() for name, parameter in model.named_parameters()}
    if isinstance(config, EncoderConfig):
        return TransformersEncoder(config, model), elements
    head = _label_head(path, config, model, device, seed)
    size = 1 if communicator is None else communicator.size
    return TransformersModel(config, model, backend, head, expected, size), elements


def _takes_pooling_layer(built: type[PreTrainedModel]) -> bool:
    return "add_pooling_layer" in inspect.signature(built.__init__).parameters


def _label_head(
    path: Path, config: TransformersConfig, model: PreTrainedModel, device: torch.device, seed: int | None
) -> torch.Tensor | None:
    """Read the head of a decoder that classifies, float32 [num_labels, hidden_size]; None: it embeds, or generates.

    Raises:
        ConfigError: the checkpoint has none, or one with a bias, which transformers' classes have not.
    """
    spec = config.pooling
    if spec is None or spec.task == "embed":
        return None
    if seed is not None:
        num_rows = 1 if spec.is_two_way else spec.num_labels
        return DummyWeights(torch.float32, device, seed).take(SCORE, num_rows, config.hidden_size)
    weights = SafetensorsWeights(path, torch.float32, device, prefix="")
    stored = _stored_tensors(path, config)
    if spec.label_token_ids:
        name, rows = "lm_head.weight", list(spec.label_token_ids)
        embedding: Any = model.get_input_embeddings()
        if name in stored:
            head = weights.take(name, config.vocab_size, config.hidden_size)[rows]
        elif config.tie_word_embeddings:
            head = embedding.weight[rows].float()
        else:
            raise _misfit(path, name, "is missing, which classifier_from_token needs")
        return head[1:] - head[:1] if spec.is_two_way else head
    check_label_head(path, config, stored)
    if "score.bias" in stored:
        raise _misfit(path, "score.bias", "is a bias of the labels' head")
    shape = spec.num_labels, config.hidden_size
    if tuple(stored[SCORE].shape) != shape:
        raise _misfit(path, SCORE, f"is {stored[SCORE].shape}, for {spec.num_labels} labels")
    return weights.take(SCORE, *shape)


def _read(
    path: Path,
    config: TransformersConfig,
    built: type[PreTrainedModel],
    of_config: Any,
    dtype: torch.dtype,
    parts: dict[str, Any],
    on_loaded: Callable[[float], None],
) -> PreTrainedModel:
    """Load a checkpoint into a model on the CPU."""
    source: dict[str, Any] = {"use_safetensors": True, "local_files_only": True}
    where: str | None = str(path)
    if config.quantization is not None:
        source, where = {"state_dict": _widened_tensors(path, config, dtype)}, None
    else:
        _check_unquantised(path, config)
    try:
        with _counted(on_loaded):
            loaded: Any = built.from_pretrained(
                where,
                config=of_config,
                dtype=dtype,
                ignore_mismatched_sizes=True,  # named below
                output_loading_info=True,
                **parts,
                **source,
            )
    except ConfigError:
        raise
    except Exception as error:  # whatever its loader raises
        reason = str(error).strip()[:600]
        raise ConfigError(f"transformers cannot load {path}: {type(error).__name__}: {reason}") from error
    model, info = loaded
    if config.wrapper is not None:
        read = dict.fromkeys(info.get("unexpected_keys") or ())
        info = {**info, "unexpected_keys": without_parts(read, config.unserved_parts).keys()}
    if config.pooling is not None:
        heads = _ENCODER_HEADS if isinstance(config, EncoderConfig) else _HEADS
        unused = [name for name in info.get("unexpected_keys") or () if not heads.fullmatch(name)]
        info = {**info, "unexpected_keys": unused}
    _check_tensors(path, info)
    if config.wrapper is None and not isinstance(config, EncoderConfig):
        check_further_layers(path, config, _stored_tensors(path, config))  # transformers drops some by number
    checked: PreTrainedModel = model
    return checked


@dataclass(frozen=True, slots=True)
class _Lazy:
    """Stands for a tensor that transformers' loader reads by `[...]`, as one of a safetensors file."""

    read: Callable[[], torch.Tensor]
    shape: tuple[int, ...]

    def __getitem__(self, _: Any) -> torch.Tensor:
        return self.read()

    def get_shape(self) -> list[int]:
        return list(self.shape)


def _stored_tensors(path: Path, config: TransformersConfig) -> dict[str, StoredTensor]:
    """Return the headers of the tensors that the model may read, by their names in the files."""
    stored = {name: tensor for shard in read_shards(path) for name, tensor in shard.tensors.items()}
    return stored if config.wrapper is None else without_parts(stored, config.unserved_parts)


def _check_unquantised(path: Path, config: TransformersConfig) -> None:
    """
    Raises:
        ConfigError: a weight is quantised, which transformers' loader would take for numbers.
    """
    for name, tensor in _stored_tensors(path, config).items():
        if tensor.dtype not in _PLAIN and (name.endswith(".weight") or tensor.dtype.startswith("F8")):
            raise _misfit(path, name, f"is {tensor.dtype}, and config.json has no quantization_config")


def _widened_tensors(path: Path, config: TransformersConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the tensors of a quantised checkpoint by name, which are read and widened when they are asked for.

    Raises:
        ConfigError: a tensor is quantised in another way than config.json says, or lacks its scale.
    """
    quantization = config.quantization
    assert quantization is not None
    is_wrapped = config.wrapper is not None
    stored = _stored_tensors(path, config)
    weights = SafetensorsWeights(path, dtype, torch.device("cpu"), prefix="", is_wrapped=is_wrapped)
    method = planned_linear_method(config)
    is_mxfp4 = quantization.method == "mxfp4"
    suffix = "_scale_inv" if quantization.block is not None and quantization.method == "fp8" else "_scale"
    found: dict[str, Any] = {}

    def linear(layer: str, shape: tuple[int, ...]) -> _Lazy:
        spec = LinearSpec({layer: shape[0]}, shape[1])
        return _Lazy(lambda: method.take_weight(weights, spec), shape)

    def experts(name: str, shape: tuple[int, ...]) -> _Lazy:
        count, rows, blocks, half = shape
        whole = count, rows, blocks * half * 2
        return _Lazy(lambda: take_mxfp4(weights, name, whole, None).transpose(1, 2), (count, whole[2], rows))

    for name, tensor in stored.items():
        own = text_name(name) if is_wrapped else name
        if own is None or _UNUSED_SCALE.fullmatch(name):
            continue
        if (scale := _SCALE.fullmatch(name)) is not None:
            if scale[1] not in stored or stored[scale[1]].dtype in _PLAIN:
                raise _misfit(path, name, "is the scale of a weight that is not quantised")
            continue
        if is_mxfp4 and (packed := _MXFP4.fullmatch(name)) is not None and tensor.dtype == "U8":
            if packed[2] == "blocks":
                _check_mxfp4(path, name, tensor, stored)
                found[packed[1]] = experts(own.removesuffix("_blocks"), tuple(tensor.shape))
            continue
        if tensor.dtype in _PLAIN or tensor.dtype in _WHOLE:
            found[name] = weights.slice_of(own)
            continue
        layer = own.removesuffix(".weight")
        if tensor.dtype != "F8_E4M3" or is_mxfp4 or len(tensor.shape) != 2 or layer == own:
            raise _misfit(path, name, f"is {tensor.dtype} {tensor.shape}")
        if not quantization.quantises(layer):
            raise _misfit(path, name, "is F8_E4M3, and config.json says that it is not quantised")
        if name + suffix not in stored:
            raise _misfit(path, name, f"is F8_E4M3, and there is no {name}{suffix}")
        found[name] = linear(layer, tuple(tensor.shape))
    return found


def _check_mxfp4(
    path: Path,
    name: str,
    tensor: StoredTensor,
    stored: Mapping[str, StoredTensor],
) -> None:
    scales = stored.get(name.removesuffix("_blocks") + "_scales")
    if len(tensor.shape) != 4 or scales is None or scales.shape != tensor.shape[:3]:
        raise _misfit(path, name, f"is {list(tensor.shape)}, and its scales do not fit it")


def _misfit(path: Path, name: str, fault: str) -> ConfigError:
    return ConfigError(
        f"the tensors of {path} do not fit its config.json: {name} {fault}, which is not supported; take a checkpoint "
        "whose quantization_config says how each tensor is stored, or the unquantised one"
    )


@contextmanager
def _counted(on_loaded: Callable[[float], None]) -> Iterator[None]:
    """Report how far transformers' loader is, by the hook of its progress bar, which is not shown."""

    def bar(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return counted(args[0]) if args and hasattr(args[0], "__len__") else factory(*args, **kwargs)

    def counted(items: Collection[Any]) -> Iterator[Any]:
        for index, each in enumerate(items, 1):
            yield each
            on_loaded(index / len(items))

    before = transformers.utils.logging.set_tqdm_hook(bar)
    try:
        yield
    finally:
        transformers.utils.logging.set_tqdm_hook(before)


def _check_tensors(path: Path, info: Mapping[str, Any]) -> None:
    faults = []
    for kind, meaning in (
        ("missing_keys", "lacks"),
        ("unexpected_keys", "has what the model does not use:"),
        ("mismatched_keys", "has in another shape"),
        ("error_msgs", "cannot be read:"),
    ):
        if found := sorted(str(each) for each in info.get(kind) or ()):
            more = f" and {len(found) - 5} more" if len(found) > 5 else ""
            faults.append(f"{meaning} {', '.join(found[:5])}{more}")
    if faults:
        raise ConfigError(
            f"the checkpoint in {path} does not fit its config.json: it {'; it '.join(faults)}; copy the whole "
            "checkpoint, of the architecture that config.json names"
        )
