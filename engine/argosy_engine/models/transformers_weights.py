"""Loads a checkpoint into a model of transformers', and holds the loaded model against transformers' own attention
before a request is served.

transformers' own loader knows how names have changed and experts are joined. Quantised weights reach it widened: it
asks for each tensor when it needs it, and gets what our own linear layers would take (`layers.linear_method`). So every
family that transformers can load is loaded from FP8 as well, at the memory of unquantised weights.

Of a decoder two short requests are then computed as the engine would: in chunks over what earlier steps have cached,
together in one step, and token by token; of an encoder two prompts in one step, one of them a pair. If logits or states
differ from those that transformers' eager attention gives for each request alone, this engine misunderstands the
architecture, and it is refused rather than served with wrong tokens.
"""

from __future__ import annotations

import inspect
import logging
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from argosy_engine.attention.backend import AttentionBackend, ModelInputs, metadata_of
from argosy_engine.checkpoint.shards import StoredTensor, read_shards
from argosy_engine.checkpoint.stored_tensors import SCORE, check_further_layers, check_label_head
from argosy_engine.checkpoint.weights import DummyWeights, SafetensorsWeights
from argosy_engine.distributed.parallel_state import Communicator
from argosy_engine.errors import OTHER_ENGINES, ConfigError
from argosy_engine.layers.linear import LinearSpec
from argosy_engine.layers.linear_method import SchemeLinearMethod, take_mxfp4
from argosy_engine.layers.scheme_weights import BnbState
from argosy_engine.model_configs.transformers_config import EncoderConfig, TransformersConfig
from argosy_engine.model_configs.weight_schemes import Bnb4Scheme, Scheme
from argosy_engine.model_configs.wrapper_config import text_name, without_parts
from argosy_engine.models.transformers_attention import STEP
from argosy_engine.models.transformers_classes import (
    divide,
    hf_config,
    model_class,
    text_model,
    without_other_parts,
)
from argosy_engine.models.transformers_model import (
    TransformersEncoder,
    TransformersModel,
    probe_prompts,
    reference_outputs,
)

_PLAIN = frozenset({"F64", "F32", "F16", "BF16"})
_WHOLE = frozenset({"BOOL", "I32", "I64"})
"""Of masks and positions, which some checkpoints have."""
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
    if of_config.model_type in _BOUND_IN_PROMPTS:
        for module in model.modules():
            if getattr(module, "time_step_limit", None) == (of_config.time_step_min, math.inf):
                module.time_step_limit = (0.0, math.inf)
    _choose_experts_product(model)
    expected = None
    if communicator is not None:
        expected = [reference_outputs(model, config, prompt) for prompt in probe_prompts(config)]
        divide(model, communicator)
        _choose_experts_product(model)
    model = model.to(device)
    elements = {name: parameter.numel() for name, parameter in model.named_parameters()}
    if isinstance(config, EncoderConfig):
        return TransformersEncoder(config, model), elements
    head = _label_head(path, config, model, device, seed)
    size = 1 if communicator is None else communicator.size
    return TransformersModel(config, model, backend, head, expected, size), elements


_GROUPED_ALIGNMENT = 16
"""torch's grouped product takes matrices whose rows begin at multiples of so many bytes."""


def _choose_experts_product(model: PreTrainedModel) -> None:
    """Have experts computed one after the other if they are of sizes that torch's grouped product does not take."""
    for module in model.modules():
        down = dict(module.named_parameters(recurse=False)).get("down_proj")
        if down is None or down.ndim != 3:
            continue
        if any(size * down.element_size() % _GROUPED_ALIGNMENT for size in down.shape[1:]):
            with suppress(ValueError):  # of a model that computes them in its own way
                model.set_experts_implementation("eager")
        return


_BOUND_IN_PROMPTS = ("nemotron_h", "zamba2")
"""Model types of which transformers bounds step sizes of prompts, and not of decodes, by `time_step_min`. That is where
training draws initial biases from; neither had a bound in training."""


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
    weights: SafetensorsWeights | None = None
    where: str | None = str(path)
    if config.quantization is not None:
        is_wrapped = config.wrapper is not None
        weights = SafetensorsWeights(path, dtype, torch.device("cpu"), prefix="", is_wrapped=is_wrapped)
        source, where = {"state_dict": _widened_tensors(path, config, weights)}, None
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
    if weights is not None:
        unused = [name for name in info.get("unexpected_keys") or () if not weights.is_bias_of_zeros(name)]
        info = {**info, "unexpected_keys": unused}
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


def _widened_tensors(path: Path, config: TransformersConfig, weights: SafetensorsWeights) -> dict[str, Any]:
    """Return the tensors of a quantised checkpoint by name, which are read and widened when they are asked for.

    Args:
        weights: those of the checkpoint.

    Raises:
        ConfigError: a tensor is quantised in another way than config.json says, or lacks its scale.
    """
    quantization = config.quantization
    assert quantization is not None
    is_wrapped = config.wrapper is not None
    stored = _stored_tensors(path, config)
    quantization = quantization.with_stored_layers(weights.names)
    method = SchemeLinearMethod(quantization)
    unused = tuple(suffix for scheme in quantization.schemes for suffix in scheme.unused)
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
        if own is None or _UNUSED_SCALE.fullmatch(name) or own.endswith(unused):
            continue
        if (place := quantization.stored_tensor(own)) is not None:
            layer, scheme, part = place
            weight, whole = scheme.tensors[0], name.removesuffix(part.suffix)
            main = stored.get(whole + weight.suffix)
            if part != weight:
                if main is None or main.dtype in _PLAIN:
                    raise _misfit(path, name, "is the scale of a weight that is not quantised")
                continue
            if tensor.dtype == weight.dtype and len(tensor.shape) == len(weight.axes):
                shape = _shape(weights, layer, scheme, tensor)
                _check_parts(path, whole, scheme, shape, stored)
                found[whole + ".weight"] = linear(layer, shape)
                continue
        elif tensor.dtype == "F8_E4M3" and own.endswith(".weight") and quantization.schemes:
            raise _misfit(path, name, "is F8_E4M3, and config.json says that it is not quantised")
        if quantization.experts is not None and (packed := _MXFP4.fullmatch(name)) and tensor.dtype == "U8":
            if packed[2] == "blocks":
                _check_mxfp4(path, name, tensor, stored)
                found[packed[1]] = experts(own.removesuffix("_blocks"), tuple(tensor.shape))
            continue
        if tensor.dtype not in _PLAIN and tensor.dtype not in _WHOLE:
            raise _misfit(path, name, f"is {tensor.dtype} {tensor.shape}")
        found[name] = weights.slice_of(own)
    return found


def _shape(weights: SafetensorsWeights, layer: str, scheme: Scheme, tensor: StoredTensor) -> tuple[int, int]:
    """Return the shape [out, in] of a layer's weight."""
    if not isinstance(scheme, Bnb4Scheme):
        return scheme.shape_of(tuple(tensor.shape))
    name = f"{layer}.weight.quant_state.bitsandbytes__{scheme.kind}"
    if name not in weights.names:
        raise _misfit(weights.path, layer + ".weight", f"is U8, and there is no {name}")
    shape = BnbState.of(name, weights.take_bytes(name)).shape
    if scheme.tensors[0].shape(shape) != tuple(tensor.shape):
        raise _misfit(weights.path, layer + ".weight", f"is {tensor.shape}, of a weight {list(shape)}")
    return shape


def _check_parts(
    path: Path, layer: str, scheme: Scheme, shape: tuple[int, int], stored: Mapping[str, StoredTensor]
) -> None:
    """
    Raises:
        ConfigError: a tensor of a quantised layer is missing, or of another shape or dtype than its weight's.
    """
    weight, *others = scheme.tensors
    for part in others:
        name = layer + part.suffix
        if name not in stored:
            if not part.is_optional:
                raise _misfit(path, layer + weight.suffix, f"is {weight.dtype}, and there is no {name}")
        elif part.dtype not in (None, "JSON"):
            found, sizes = stored[name], part.shape(shape)
            if found.dtype != part.dtype or tuple(found.shape) != sizes:
                raise _misfit(path, name, f"is {found.dtype} {found.shape}, not {part.dtype} {list(sizes)}")


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


logger = logging.getLogger(__name__)

_BLOCK_SIZE = 16
_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
"""Difference of logits that is allowed, as a share of their largest value: sums are rounded in another order. A wrong
mask or position gives a difference of the order of the logits."""

_Step = Sequence[tuple[int, int, int]]
"""Row, first and end of each request's tokens."""


@torch.inference_mode()
def probe(
    config: TransformersConfig, model: TransformersModel, dtype: torch.dtype, device: torch.device
) -> None:
    """Compare a model with itself under transformers' own attention and linear layers. From then on it uses ours.

    Raises:
        ConfigError: logits differ, or the model fails.
    """
    prompts = [prompt.to(device) for prompt in probe_prompts(config)]
    try:
        expected = [model.reference(prompt) for prompt in prompts]
        if model.expected is not None:
            expected = [each.to(device) for each in model.expected]
        if model.check_states():  # Mamba's scan in transformers begins without one
            logger.info("prompts in several steps are slow: of all but the first, states take token by token")
        model.use_kernels()
        found = _computed(model, prompts, device)
    except Exception as error:  # whatever a model raises
        raise _failure(config, error) from error
    if config.pooling is None and expected[0].shape[1] != config.vocab_size:
        raise ConfigError(
            f"{config.architecture} has logits of {expected[0].shape[1]} tokens, and its config.json says vocab_size "
            f"{config.vocab_size}; correct it"
        )
    _compare(config, found, expected, dtype)


@torch.inference_mode()
def probe_encoder(
    config: EncoderConfig, model: TransformersEncoder, dtype: torch.dtype, device: torch.device
) -> None:
    """Compare an encoder with itself under transformers' own attention and linear layers. From then on it uses ours.

    Raises:
        ConfigError: states or scores differ, or the model fails.
    """
    prompts = [prompt.to(device) for prompt in probe_prompts(config)]
    types = [torch.zeros_like(prompts[0]), (torch.arange(len(prompts[1]), device=device) > 9).long()]
    step: _Step = [(row, 0, len(prompt)) for row, prompt in enumerate(prompts)]
    try:
        references = [model.reference(*each) for each in zip(prompts, types, strict=True)]
        model.use_kernels()
        blocks = -(-max(map(len, prompts)) // _BLOCK_SIZE)
        tables = torch.zeros(2, blocks, dtype=torch.int32)
        inputs = replace(_inputs(step, prompts, tables, device), token_types=torch.cat(types))
        states = list(model.forward(inputs).float().split([len(prompt) for prompt in prompts]))
        expected, found = [states_ for states_, _ in references], list(states)
        if config.pooling is not None and config.pooling.task == "classify":
            pooled = [each.mean(dim=0) if config.head_pooling == "mean" else each[0] for each in states]
            expected.append(torch.stack([scores for _, scores in references]))
            found.append(model.scores(torch.stack(pooled)))
    except Exception as error:  # whatever a model raises
        raise _failure(config, error) from error
    _compare(config, found, expected, dtype)


def _failure(config: TransformersConfig, error: Exception) -> ConfigError:
    return ConfigError(
        f"{config.architecture} fails in transformers' modelling code: {type(error).__name__}: "
        f"{str(error).strip()[:300]}; serve another model, {OTHER_ENGINES}"
    )


def _compare(
    config: TransformersConfig,
    found: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    dtype: torch.dtype,
) -> None:
    """
    Raises:
        ConfigError: they differ by more than rounding explains.
    """
    if (difference := _difference(found, expected, dtype)) is not None:
        raise ConfigError(
            f"{config.architecture} cannot be served by transformers' modelling code over this engine's KV cache: its "
            f"{'logits' if config.pooling is None else 'states'} differ from those with transformers' own attention by "
            f"{difference}; serve another model, {OTHER_ENGINES}"
        )


def _difference(
    found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], dtype: torch.dtype
) -> str | None:
    """Return by how much logits differ, if that is more than rounding explains."""
    for ours, theirs in zip(found, expected, strict=True):
        if ours.shape != theirs.shape:
            return f"their shape, {tuple(ours.shape)} for {tuple(theirs.shape)}"
        allowed = _TOLERANCE[dtype] * max(float(theirs.abs().max()), 1e-3)
        error = float((ours - theirs).abs().max())
        if not error <= allowed:  # NaN is an error, too
            return f"{error:.2g}, where {allowed:.2g} is allowed"
    return None


def _computed(
    model: TransformersModel, prompts: Sequence[torch.Tensor], device: torch.device
) -> list[torch.Tensor]:
    """Return the logits [T, vocab_size], or states [T, hidden_size], of every prompt, as steps of an engine compute
    them."""
    long, short = (len(prompt) for prompt in prompts)
    half, late = long // 2, max(long - 2, 0)
    steps: list[_Step] = [
        [(0, 0, half)],
        [(0, half, late), (1, 0, short - 2)],  # a chunk over the cache, beside a prompt
        [(0, late, long - 1), (1, short - 2, short - 1)],  # decodes
        [(1, short - 1, short), (0, long - 1, long)],
    ]
    widest = -(-max(long, short) // _BLOCK_SIZE)
    # Blocks in no order, and stale values in them.
    tables = torch.arange(2 * widest).flip(0).view(widest, 2).t().contiguous().to(torch.int32)
    for layer in model.attention_layers:
        shape = layer.kv_cache_shape(2 * widest, _BLOCK_SIZE)
        layer.bind(torch.full(shape, torch.nan, device=device).to(layer.kv_cache_dtype))
    for state in model.state_layers:
        state.bind(
            [
                torch.full((2 * widest, *shape), torch.nan, dtype=dtype, device=device)
                for shape, dtype in state.tensors
            ],
            _BLOCK_SIZE,
        )
    parts: list[list[torch.Tensor]] = [[], []]
    for step in steps:
        hidden = model.forward(_inputs(step, prompts, tables, device))
        logits = model.compared(hidden).split([end - start for _, start, end in step])
        for (row, _, _), part in zip(step, logits, strict=True):
            parts[row].append(part)
    return [torch.cat(each) for each in parts]


def _inputs(
    step: _Step, prompts: Sequence[torch.Tensor], tables: torch.Tensor, device: torch.device
) -> ModelInputs:
    meta = metadata_of(step, tables, _BLOCK_SIZE, device)
    token_ids = torch.cat([prompts[row][start:end] for row, start, end in step])
    return ModelInputs(token_ids=token_ids, positions=meta.positions, meta=meta)
