"""Model loading: plan the weights, check the checkpoint's headers against the plan, read, and report progress."""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch

from argosy_engine.attention.backend import AttentionBackend
from argosy_engine.attention.selector import load_backend
from argosy_engine.attention.torch_attn import TorchBackend
from argosy_engine.checkpoint.shards import read_shards
from argosy_engine.checkpoint.stored_tensors import (
    check_further_layers,
    with_stored_experts,
    with_stored_layers,
)
from argosy_engine.checkpoint.streamed_weights import CudaCopies, StreamedWeights
from argosy_engine.checkpoint.weights import DummyWeights, SafetensorsWeights, WeightPlan, Weights
from argosy_engine.distributed.parallel_state import Communicator
from argosy_engine.errors import ConfigError
from argosy_engine.layers.experts import TokenExchange
from argosy_engine.layers.layer_compiler import LayerCompiler
from argosy_engine.layers.layer_factory import ImageRotary, LayerFactory
from argosy_engine.layers.linear_method import linear_method, planned_linear_method
from argosy_engine.model_configs.model_config import ModelConfig
from argosy_engine.model_configs.quantization_config import what_becomes
from argosy_engine.model_configs.sharding import WHOLE, WHOLE_MODEL, Sharding, Stage
from argosy_engine.model_configs.transformers_config import WIDENS, EncoderConfig, TransformersConfig
from argosy_engine.model_configs.vision_config import VisionSpec
from argosy_engine.model_configs.wrapper_config import without_parts
from argosy_engine.models import registry
from argosy_engine.models.decoder import PooledModel
from argosy_engine.models.registry import CausalLM

if TYPE_CHECKING:
    from argosy_engine.models.image_encoder import ImageEncoder

logger = logging.getLogger("argosy.models")

_QUIET_S = 1.0
"""Loads shorter than this show no progress, only the final line."""
_LINE_EVERY_S = 5.0
"""Interval between progress lines if standard error is not a terminal."""
_GIB = 1 << 30
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class LoadedImages:
    """What a model sees images by."""

    spec: VisionSpec
    encoder: ImageEncoder | None
    """None on pipeline stages after the first, which has it."""
    rotary: ImageRotary
    """Of a model without M-RoPE it has no tables."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: CausalLM
    elements: dict[str, int]
    """Number of elements that the model took of each tensor, by name."""
    images: LoadedImages | None = None
    """None: only texts are served."""


def complete_config(config: ModelConfig, tensor_parallel_size: int = 1) -> ModelConfig:
    """Return the config with the attention of its layers, which those of our own families tell by themselves.

    Raises:
        ConfigError: transformers' model computes something that this engine does not, or its plan does not divide it
            among so many ranks.
    """
    if not isinstance(config, TransformersConfig):
        return config
    from argosy_engine.models.transformers_follow import check_plan, follow

    config = follow(config)
    if tensor_parallel_size > 1:
        check_plan(config, tensor_parallel_size)
    return config


def plan_weights(
    config: ModelConfig, dtype: torch.dtype, sharding: Sharding = WHOLE, stage: Stage = WHOLE_MODEL
) -> WeightPlan:
    """Return names, shapes and bytes of the weights that a config asks for. Needs no checkpoint."""
    plan = WeightPlan(dtype)
    method = planned_linear_method(config)
    has_head = config.pooling is None
    factory = LayerFactory(
        plan, TorchBackend(dtype), 1, method, sharding, stage=stage, has_output_head=has_head
    )
    _build(config, factory)
    return plan


def _build(config: ModelConfig, factory: LayerFactory) -> CausalLM:
    if config.pooling is not None:
        return PooledModel(config, factory)
    return registry.model_class(config.architecture)(config, factory)


def load_model(
    path: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attention_backend: str,
    has_fp8_kv_cache: bool = False,
    quantization: str | None = None,
    max_positions: int,
    load_format: Literal["auto", "dummy"],
    seed: int,
    sharding: Sharding = WHOLE,
    communicator: Communicator | None = None,
    stage: Stage = WHOLE_MODEL,
    exchange: TokenExchange | None = None,
    compiler: LayerCompiler | None = None,
    on_read: Callable[[int, int], None] | None = None,
    max_step_tokens: int = 0,
) -> LoadedModel:
    """Build the model with its weights on the device.

    Args:
        attention_backend: one that `select_backend` has chosen.
        quantization: `--quantization`.
        max_positions: length of computed position tables.
        seed: seed of dummy weights.
        sharding: the part of every layer that this process has.
        communicator: of the processes that share the model's layers.
        stage: the layers that this process has.
        exchange: of tokens with other engine cores, if the experts are divided among them.
        compiler: compiles parts of the layers.
        on_read: called while weights are read, with the bytes read and their total.
        max_step_tokens: most tokens of a step, if images are served.

    Raises:
        ConfigError: the checkpoint is damaged, its tensors do not match its config, or the model cannot run in `dtype`.
    """
    name = str(dtype).removeprefix("torch.")
    if name in config.refused_dtypes:
        reason = config.refused_dtypes[name]
        raise ConfigError(
            f"{config.architecture} cannot run in {name}: {reason}; use --dtype bfloat16 or float32"
        )
    backend = load_backend(attention_backend, dtype, has_fp8_kv_cache=has_fp8_kv_cache)
    spec = config.vision
    image_rotary = None if spec is None else ImageRotary(spec, max_step_tokens)
    with_images = partial(
        _with_images,
        path=path,
        config=config,
        rotary=image_rotary,
        stage=stage,
        dtype=dtype,
        device=device,
        seed=seed if load_format == "dummy" else None,
    )
    if isinstance(config, TransformersConfig):
        loaded = _load_transformers(
            path,
            config,
            backend,
            dtype=dtype,
            device=device,
            quantization=quantization,
            has_fp8_kv_cache=has_fp8_kv_cache,
            seed=seed if load_format == "dummy" else None,
            compiler=compiler,
            communicator=communicator if sharding.size > 1 else None,
            on_read=on_read,
        )
        return with_images(loaded)
    model_class = registry.model_class(config.architecture)
    reader: SafetensorsWeights | None = None
    if load_format == "dummy":
        if (
            config.quantization is not None and not config.quantization.has_fp8
        ):  # to what is drawn then at once
            config = msgspec.structs.replace(config, quantization=None)
    else:
        config = with_stored_experts(path, config)
        prefix, is_wrapped = model_class.checkpoint_prefix, config.wrapper is not None
        if device.type == "cuda":
            reader = StreamedWeights(
                path, dtype, device, prefix=prefix, copies=CudaCopies(device), is_wrapped=is_wrapped
            )
        else:
            reader = SafetensorsWeights(path, dtype, device, prefix=prefix, is_wrapped=is_wrapped)
        config = with_stored_layers(config, reader.names)
    method = linear_method(
        config,
        quantization,
        dtype=dtype,
        device=device,
        uses_triton=backend.uses_triton,
        is_traceable=compiler is not None,
    )

    def build(weights: Weights) -> CausalLM:
        factory = LayerFactory(
            weights,
            backend,
            max_positions,
            method,
            sharding,
            communicator=communicator,
            stage=stage,
            exchange=exchange,
            compiler=compiler,
            has_output_head=config.pooling is None,
            image_rotary=image_rotary if spec is not None and spec.mrope_section else None,
        )
        return _build(config, factory)

    with torch.inference_mode():
        plan = taken = plan_weights(config, dtype)
        if sharding != WHOLE or stage != WHOLE_MODEL:
            taken = plan_weights(config, dtype, sharding, stage)
        if reader is None:
            return with_images(LoadedModel(build(DummyWeights(dtype, device, seed)), taken.elements))
        reader.check(
            plan,
            [
                *model_class.ignored_tensors,
                *_unused_heads(config),
                *_unused_scales(config),
                *config.unused_tensors,
            ],
        )
        check_further_layers(path, config, reader.names)
        with (
            LoadProgress(reader.stored_bytes(taken), on_read) as progress,
            reader.reading(taken) if isinstance(reader, StreamedWeights) else nullcontext(),
        ):
            reader.on_read = progress.advance
            model = build(reader)
        return with_images(LoadedModel(model, taken.elements))


def _with_images(
    loaded: LoadedModel,
    path: Path,
    config: ModelConfig,
    rotary: ImageRotary | None,
    stage: Stage,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int | None,
) -> LoadedModel:
    """Return a model with its encoder of images, if it has one and this is the first stage.

    Args:
        seed: of random weights; None: the checkpoint's.
    """
    if config.vision is None or rotary is None:
        return loaded
    if not stage.is_first:
        return replace(loaded, images=LoadedImages(config.vision, None, rotary))
    from argosy_engine.models.image_encoder import load_image_encoder

    encoder = load_image_encoder(
        path, config.vision, config.hidden_size, dtype=dtype, device=device, seed=seed
    )
    return loaded if encoder is None else replace(loaded, images=LoadedImages(config.vision, encoder, rotary))


def _load_transformers(
    path: Path,
    config: TransformersConfig,
    backend: AttentionBackend,
    *,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str | None,
    has_fp8_kv_cache: bool,
    seed: int | None,
    compiler: LayerCompiler | None,
    communicator: Communicator | None,
    on_read: Callable[[int, int], None] | None,
) -> LoadedModel:
    """Load a model of transformers', and hold its first steps against its own attention.

    Args:
        seed: of random weights; None: the checkpoint's.
        communicator: of the ranks that share the layers; None: there is one.
    """
    from argosy_engine.models.transformers_model import TransformersEncoder
    from argosy_engine.models.transformers_weights import load_transformers, probe, probe_encoder

    config.check_flags(quantization, has_fp8_kv_cache=has_fp8_kv_cache)
    if config.quantization is not None:
        name = str(dtype).removeprefix("torch.")
        logger.info("%s", what_becomes(config.quantization, name, WIDENS, WIDENS, device.type))
    if compiler is not None:
        raise ConfigError(
            f"{config.architecture} is run by transformers' modelling code, whose layers are not compiled; use "
            "--compilation-config level 0"
        )
    stored = 0 if seed is not None else _stored_bytes(path, config)
    with torch.inference_mode(), LoadProgress(stored, on_read) as progress:
        model, elements = load_transformers(
            path,
            config,
            backend,
            dtype=dtype,
            device=device,
            seed=seed,
            communicator=communicator,
            on_loaded=lambda share: progress.advance(int(share * stored) - progress.done_bytes),
        )
        progress.advance(stored - progress.done_bytes)
        if isinstance(model, TransformersEncoder):
            assert isinstance(config, EncoderConfig)
            probe_encoder(config, model, dtype, device)
        else:
            probe(config, model, dtype, device)
    return LoadedModel(model, elements)


def _stored_bytes(path: Path, config: TransformersConfig) -> int:
    """Return the bytes in the files of what transformers' loader reads."""
    tensors = {name: tensor for shard in read_shards(path) for name, tensor in shard.tensors.items()}
    if config.wrapper is not None:
        tensors = without_parts(tensors, config.unserved_parts)
    return sum(tensor.data_offsets[1] - tensor.data_offsets[0] for tensor in tensors.values())


def _unused_heads(config: ModelConfig) -> list[str]:
    """Return the patterns of heads to ignore: tied models may store the output head as well, and those that pool may
    have one, or another head than they need."""
    if config.pooling is not None:
        return [r"lm_head\.(weight|bias)", r"score\.(weight|bias)"]
    return [r"lm_head\.weight"] if config.tie_word_embeddings else []


def _unused_scales(config: ModelConfig) -> list[str]:
    """Return the patterns of what quantised checkpoints may have and not every load reads: an FP8 KV cache's scales
    (`LayerFactory`), and of each scheme `Scheme.unused`."""
    if config.quantization is None:
        return []
    unused = {re.escape(suffix) for scheme in config.quantization.schemes for suffix in scheme.unused}
    return [r".*\.([kvq]_scale|[kv]_proj\.output_scale)", *(".*" + suffix for suffix in sorted(unused))]


class LoadProgress:
    """Reports a load's progress: a bar on a terminal, otherwise a log line every few seconds.

    Args:
        total_bytes: sum of all calls to `advance`.
        on_read: called with the bytes so far and their total.
    """

    def __init__(self, total_bytes: int, on_read: Callable[[int, int], None] | None = None) -> None:
        self._on_read = on_read
        self.total_bytes = total_bytes
        self.done_bytes = 0
        self._started = self._last_line = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> LoadProgress:
        self._started = self._last_line = time.monotonic()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        if kind is None:
            seconds = time.monotonic() - self._started
            logger.info("loaded %s of weights in %.1f s", _size(self.done_bytes), seconds)

    def advance(self, num_bytes: int) -> None:
        self.done_bytes += num_bytes
        if self._on_read is not None:
            self._on_read(self.done_bytes, self.total_bytes)
        now = time.monotonic()
        if now - self._started < _QUIET_S:
            return
        if sys.stderr.isatty():
            if self._bar is None:
                self._bar = _start_bar(self.total_bytes)
            self._bar.update(self._bar.tasks[0].id, completed=self.done_bytes)
        elif now - self._last_line >= _LINE_EVERY_S:
            self._last_line = now
            logger.info(
                "loading weights: %s of %s (%.0f %%) after %.0f s",
                _size(self.done_bytes),
                _size(self.total_bytes),
                100 * self.done_bytes / max(self.total_bytes, 1),
                now - self._started,
            )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB" if num_bytes >= _GIB else f"{num_bytes / _MIB:.2f} MiB"


def _start_bar(total_bytes: int) -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TransferSpeedColumn,
    )

    bar = Progress(
        TextColumn("loading weights"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(),
        TimeElapsedColumn(), console=Console(stderr=True), transient=True,
    )  # fmt: skip
    bar.add_task("weights", total=total_bytes)
    bar.start()
    return bar
