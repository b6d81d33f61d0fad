"""ModelConfig: the parts of a checkpoint's config.json that determine the computation.

`ModelConfig` holds what the worker reads for every model family; a family's subclass adds what only its model reads.
`config_file` reads it from a checkpoint. This module imports neither torch nor transformers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec
from msgspec import Meta, Struct

from argosy_engine.attention.params import (
    AttentionParams,
    LayerParams,
    StateParams,
)
from argosy_engine.errors import ConfigError
from argosy_engine.model_configs.model_use import PoolingSpec
from argosy_engine.model_configs.quantization_config import QuantizationConfig
from argosy_engine.model_configs.vision_config import VisionSpec


def may_not_read(folder: Path, file: Path) -> ConfigError:
    """Return the error for `file`, or a folder above it, that this process has no permission to read.

    Args:
        folder: the model's folder.
    """
    return ConfigError(f"cannot read {file}: {permission_fault(folder)}")


def permission_fault(folder: Path) -> str:
    """Return the fault and its remedy, for errors that name the file themselves."""
    return (
        f"permission denied to user {os.geteuid()}; let its users read the model, in the place that it is stored: "
        f"chmod -R a+rX {folder}"
    )


MAX_CONFIG_BYTES = 16 << 20

Size = Annotated[int, Meta(ge=1, le=1 << 24)]
"""A dimension. The bound is far above any real model and keeps the product of two dimensions within 64 bits."""
LayerCount = Annotated[int, Meta(ge=1, le=4096)]
Positive = Annotated[float, Meta(gt=0.0, le=1e12)]
RawConfig = Mapping[str, Any]
PlainActivation = Literal["relu", "gelu", "gelu_new", "gelu_pytorch_tanh"]
"""Of MLPs without a gate."""


class NotOurs(ConfigError):
    """A config asks a family for what our own code does not compute; transformers' code may.

    Args:
        reason: what that is.
        remedy: ends the message.
    """

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(f"{reason}; {remedy}" if remedy else reason)
        self.reason = reason
        self.remedy = remedy


class ModelConfig(Struct, frozen=True, kw_only=True):
    """A decoder-only transformer as the worker sees it."""

    refused_dtypes: ClassVar[Mapping[str, str]] = {}
    """Maps dtypes that the family cannot run in to the reason."""
    undivided: ClassVar[str | None] = None
    """Why the family cannot be divided among pipeline stages, or devices at all; None: it can."""
    computes_whole_prompts: ClassVar[bool] = False
    """Whether tokens attend to later ones, so that a prompt is computed in one step, and nothing is kept of it."""
    widens_fp8: ClassVar[bool] = False
    """Whether FP8 weights are widened as they are loaded, on every device."""

    architecture: str
    vocab_size: Size
    hidden_size: Size
    num_hidden_layers: LayerCount
    num_attention_heads: Annotated[int, Meta(ge=1, le=4096)]
    num_key_value_heads: Annotated[int, Meta(ge=1, le=4096)]
    head_dim: Annotated[int, Meta(ge=1, le=4096)]
    max_position_embeddings: Size
    """Tokens of the longest sequence, RoPE scaling included."""
    tie_word_embeddings: bool
    dtype: Literal["float32", "bfloat16", "float16"]
    """The checkpoint's dtype."""
    eos_token_ids: tuple[int, ...]
    sliding_windows: tuple[Size | None, ...]
    """Per layer, the number of tokens that a token attends to, itself included; None: all tokens before it."""
    num_multi_token_layers: Annotated[int, Meta(ge=0, le=64)] = 0
    """Layers of the checkpoint after the others, which predict further tokens. They are not used."""
    is_matryoshka: bool = False
    """Whether the leading elements of the model's embeddings are usable embeddings (Matryoshka, arXiv 2205.13147). The
    name is vLLM's; Hugging Face has none."""
    matryoshka_dimensions: Annotated[tuple[Size, ...], Meta(max_length=256)] = ()
    """Embedding lengths that the model was trained for; empty: any length, if `is_matryoshka`."""
    quantization: QuantizationConfig | None = None
    """None: the weights are not quantised."""
    replaced_code: bool = False
    """Whether config.json names code of its own, in whose place ours or transformers' runs."""
    wrapper: str | None = None
    """Architecture of the checkpoint if this is its text part (`wrapper_config`)."""
    vision: VisionSpec | None = None
    """How the checkpoint's encoder sees images; None: only texts are served."""
    pooling: PoolingSpec | None = None
    """What it computes if it is served for pooling; None: it generates."""

    @property
    def undivided_layers(self) -> str | None:
        """Why tensor-parallel ranks cannot divide the layers; None: they can, if sizes allow it."""
        return self.undivided

    @property
    def undivided_stages(self) -> str | None:
        """Why pipeline stages cannot divide the layers; None: they can, if there are enough."""
        return self.undivided

    @property
    def attention_layers(self) -> tuple[LayerParams, ...]:
        """Constants of each layer's attention. A family whose layers differ in more than the window overrides it."""
        positions = self.max_position_embeddings
        return tuple(
            AttentionParams(
                num_heads=self.num_attention_heads,
                num_kv_heads=self.num_key_value_heads,
                head_dim=self.head_dim,
                scale=self.head_dim**-0.5,
                sliding_window=None if window is None or window >= positions else window,
            )
            for window in self.sliding_windows
        )

    @property
    def layers_with_attention(self) -> Sequence[int]:
        """Indices of the layers that `attention_layers` has, in its order."""
        return range(self.num_hidden_layers)

    @property
    def state_layers(self) -> tuple[StateParams, ...]:
        """What each layer keeps that has a state per request instead of keys and values, or beside them."""
        return ()

    @property
    def layers_with_state(self) -> Sequence[int]:
        """Indices of the layers that `state_layers` has, in its order."""
        return ()

    @property
    def num_routed_experts(self) -> int:
        """Number of experts of a mixture-of-experts layer; 0 without one."""
        return 0

    def divided_sizes(self, *, has_whole_experts: bool) -> dict[str, int]:
        """Return the sizes that the number of tensor-parallel ranks has to divide, by their names.

        Args:
            has_whole_experts: whether each expert stays whole.
        """
        sizes = {"num_attention_heads": self.num_attention_heads}
        if (inner := getattr(self, "intermediate_size", None)) is not None:  # not every family has one
            sizes["intermediate_size"] = inner
        return sizes

    @property
    def shared_sizes(self) -> dict[str, int]:
        """The sizes that the number of tensor-parallel ranks has to divide or be a multiple of, by their names. Several
        ranks have the same if there are more of them."""
        return {"num_key_value_heads": self.num_key_value_heads}

    @property
    def multi_token_tensors(self) -> tuple[str, ...]:
        """Patterns of the names of tensors that predict further tokens: the first of those that are called so, then of
        layers after the others."""
        first = self.num_hidden_layers
        numbers = "|".join(str(first + index) for index in range(self.num_multi_token_layers))
        own = r"(model\.)?mtp(_block|_emb_norm|_hidden_norm|_linear_proj)?\..*"  # with what ERNIE 4.5 calls them
        return own, *([rf"model\.layers\.({numbers})\..*"] if numbers else [])

    @property
    def unused_tensors(self) -> tuple[str, ...]:
        """Patterns of the names of tensors that a checkpoint may have and the config says are not used."""
        return self.multi_token_tensors

    def cached_values(self, tensor_parallel_size: int) -> int:
        """Return the number of elements that a layer keeps of a token on one rank."""
        return 2 * max(self.num_key_value_heads // tensor_parallel_size, 1) * self.head_dim

    def expanded_values(self, tensor_parallel_size: int) -> int:
        """Return the number of elements per token that one rank computes of what a layer keeps, before prompts attend
        to it."""
        return 0

    def replicated_elements(self, tensor_parallel_size: int) -> int:
        """Estimate how many elements of a layer's weights a rank holds beyond an equal share: those of KV heads that
        several ranks hold."""
        share = self.num_key_value_heads / tensor_parallel_size
        return int(2 * self.hidden_size * (max(share, 1) - share) * self.head_dim)

    def replicated_state_elements(self, tensor_parallel_size: int) -> int:
        """Estimate the same of a layer with states (`state_layers`)."""
        return 0

    @property
    def pooled_size(self) -> int:
        """Number of elements of the model's last hidden state."""
        return self.hidden_size

    @classmethod
    def fields_of(cls, raw: RawConfig) -> dict[str, Any]:
        """Map config.json to this family's fields, without those that `config_file` fills in for every family.

        `of` checks the values against the fields' types and bounds.

        Raises:
            NotOurs: the config asks for something the model does not compute.
            ConfigError: it is malformed, or asks for what no model computes.
        """
        raise NotImplementedError

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self:
        """Build the config and check it.

        Raises:
            ConfigError: a field is missing, of the wrong type or out of bounds, or fields contradict each other.
        """
        try:
            config = msgspec.convert(fields, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(str(error)) from None
        if config.num_attention_heads % config.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads {config.num_attention_heads} is not a multiple of num_key_value_heads "
                f"{config.num_key_value_heads}"
            )
        if len(config.sliding_windows) != config.num_hidden_layers:
            raise ConfigError(
                f"{len(config.sliding_windows)} layer_types for {config.num_hidden_layers} layers"
            )
        return config


def read_json_value(path: Path) -> Any:
    """Read a JSON file of at most `MAX_CONFIG_BYTES`.

    Raises:
        ConfigError: the file is missing, too large, or not JSON.
    """
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_CONFIG_BYTES} bytes")
        return json.loads(path.read_bytes())
    except PermissionError:
        raise may_not_read(path.parent, path) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; see `read_json_value`.

    Raises:
        ConfigError: the file is missing, too large, or not a JSON object.
    """
    value = read_json_value(path)
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return value


def layer_count(raw: RawConfig, name: str = "num_hidden_layers") -> int:
    """Return the number of layers, checked before anything is allocated per layer.

    Raises:
        ConfigError: the number is missing, not an integer, or out of bounds.
    """
    try:
        return msgspec.convert(raw.get(name), LayerCount)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}: {error}") from None


def times(first: Any, second: Any) -> Any:
    """Multiply two values of config.json, where a text would be repeated, perhaps until the memory is full.

    Raises:
        ConfigError: one of them is not a number.
    """
    for value in (first, second):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"malformed: {str(value)[:80]!r} is not a number")
    return first * second


def flag(raw: RawConfig, name: str, default: bool = False) -> bool:
    """Return a field that is true or false; null is false.

    Raises:
        ConfigError: it is neither, such as the text "false".
    """
    value = raw.get(name, default)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{name} {value!r} is neither true nor false")
    return bool(value)


def sliding_windows_of(
    raw: RawConfig, window: Any, is_sliding: Callable[[int], object] = lambda index: False
) -> tuple[Any, ...]:
    """Return each layer's window, from the config's `layer_types` or else by the family's default.

    Args:
        is_sliding: whether a layer has one by default.

    Raises:
        ConfigError: a layer type is neither full nor sliding attention, or is sliding without a window.
    """
    windows = []
    for kind in raw.get("layer_types") or [
        "sliding_attention" if is_sliding(index) else "full_attention" for index in range(layer_count(raw))
    ]:
        if kind not in ("full_attention", "sliding_attention"):
            raise ConfigError(
                f"layer type {kind!r} is not supported, only full_attention and sliding_attention"
            )
        if kind == "sliding_attention" and window is None:
            raise ConfigError("layer_types has sliding_attention, but sliding_window is not set")
        windows.append(window if kind == "sliding_attention" else None)
    return tuple(windows)


def check_tensor_parallel(
    config: ModelConfig, size: int, enable_expert_parallel: bool, data_parallel_size: int = 1
) -> None:
    """Check that a model can be divided among `size` ranks, and its experts among those of all engine cores.

    Raises:
        ConfigError: it cannot; the message tells the sizes that are possible.
    """
    if config.undivided_layers is not None and (size > 1 or enable_expert_parallel):
        flag = "--enable-expert-parallel" if enable_expert_parallel else f"--tensor-parallel-size {size}"
        raise ConfigError(f"{flag}: {config.undivided_layers}; leave it out, or use --data-parallel-size")
    if enable_expert_parallel and not config.num_routed_experts:
        reason = "has no experts"
        if config.undivided is not None:
            reason = "runs on transformers' modelling code, whose experts are divided like other layers"
        raise ConfigError(f"--enable-expert-parallel: {config.architecture} {reason}; leave it out")
    if (
        enable_expert_parallel
        and data_parallel_size > 1
        and size * data_parallel_size > config.num_routed_experts
    ):
        raise ConfigError(
            f"--enable-expert-parallel with --data-parallel-size {data_parallel_size} divides the experts among "
            f"{size * data_parallel_size} workers, and {config.architecture} has only {config.num_routed_experts}; "
            "use a smaller --data-parallel-size"
        )
    if fault := _why_undivided(config, size, enable_expert_parallel):
        heads = range(1, config.num_attention_heads + 1)
        *sizes, last = [
            str(each) for each in heads if not _why_undivided(config, each, enable_expert_parallel)
        ]
        choices = f"{', '.join(sizes)} or {last}" if sizes else last
        raise ConfigError(f"--tensor-parallel-size {size} cannot divide this model: {fault}; use {choices}")


def _why_undivided(config: ModelConfig, size: int, enable_expert_parallel: bool) -> str | None:
    """Return why a model cannot be divided among `size` ranks."""
    for name, count in config.divided_sizes(has_whole_experts=enable_expert_parallel).items():
        if count % size:
            return f"{name} {count} is not a multiple of it"
    for name, count in config.shared_sizes.items():
        if size % count and count % size:
            return f"{name} {count} is neither a multiple of it nor divides it"
    if enable_expert_parallel and config.num_routed_experts < size:
        return f"it has only {config.num_routed_experts} experts"
    if -(-config.vocab_size // size) * (size - 1) >= config.vocab_size:
        return f"vocab_size {config.vocab_size} is too small"
    return None


def check_pipeline_parallel(config: ModelConfig, size: int) -> None:
    """Check that a model can be divided into `size` stages.

    Raises:
        ConfigError: it has fewer layers, or runs on code that is not divided.
    """
    if config.undivided_stages is not None and size > 1:
        raise ConfigError(
            f"--pipeline-parallel-size {size}: {config.undivided_stages}; leave it out, or use --data-parallel-size"
        )
    if size > config.num_hidden_layers:
        raise ConfigError(
            f"--pipeline-parallel-size {size} exceeds the model's {config.num_hidden_layers} layers; use at most as "
            "many stages as layers"
        )
