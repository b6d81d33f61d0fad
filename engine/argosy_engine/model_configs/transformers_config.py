"""TransformersConfig: the config of a decoder that transformers' modelling code computes, read by transformers' own
config class, with its defaults. No torch.

EncoderConfig: of an encoder for texts (BERT and its like). Each token attends to all tokens of its prompt, so a prompt
is computed whole in one step, and nothing is kept of it.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from msgspec import Meta
from msgspec.structs import replace

from argosy_engine.attention.params import AttentionParams, StateParams
from argosy_engine.errors import OTHER_ENGINES, ConfigError, installation
from argosy_engine.model_configs.model_config import ModelConfig, RawConfig, Size
from argosy_engine.model_configs.model_use import PoolingTask, PoolingType
from argosy_engine.model_configs.quantization_config import check_quantization
from argosy_engine.model_configs.wrapper_config import WRAPPER, is_wrapper

MIN_VERSION = (5, 24)
"""Oldest release of transformers whose modelling code we run: the one that the tests compare with."""
INSTALL = f"install it: {installation('transformers')}"
_MAX_COUNT = 4096
_BOOLEANS = ("attn_temperature_tuning",)
"""Fields of which Llama 4 Scout's config has a 4."""
_COUNTED = re.compile(r"(num|n)_\w*(layers?|heads?|experts?|groups?|blocks?)")
"""Fields that say how often something is built."""

WIDENS = "transformers' modelling code multiplies in the model's dtype"
"""Why its weights are widened."""


class TransformersConfig(ModelConfig, frozen=True, kw_only=True):
    """A causal decoder of transformers'."""

    widens_fp8: ClassVar[bool] = True
    undivided: ClassVar[str | None] = "transformers' modelling code has no stages"

    intermediate_size: Size
    fields: str
    """config.json with the overrides and without what describes quantised weights, as JSON."""
    transformers_version: str
    """Its modelling code determines the tokens, so it is part of the fingerprint."""
    attention: tuple[AttentionParams, ...] = ()
    """What each call of attention computes, once the model was followed (`models.transformers_model`)."""
    calls: tuple[tuple[str, int, int, str | None], ...] = ()
    """Of each call the module's name, the sizes of a query and of a value, and the parameter with the sinks."""

    unserved_parts: tuple[str, ...] = ()
    """Modules of a wrapper that are not built."""
    is_followed: bool = False
    """Whether what it computes was found."""
    state_layers: tuple[StateParams, ...] = ()
    state_calls: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Of each layer with a state the module's name, and the names of what it keeps."""
    numbers_tokens: bool = False
    """Whether the model numbers the tokens of a step by itself, besides the positions that it is given."""

    has_plan: bool = False
    """Whether transformers says how ranks divide the decoder (`base_model_tp_plan`)."""

    @property
    def undivided_layers(self) -> str | None:
        if self.wrapper is not None:
            return "models for images run on one device on transformers' modelling code"
        if not self.has_plan:
            return f"transformers has no plan (base_model_tp_plan) to divide {self.architecture}"
        return None

    @property
    def attention_layers(self) -> tuple[AttentionParams, ...]:
        assert self.is_followed, "the model was not followed"
        positions = self.max_position_embeddings
        return tuple(_within(layer, positions) for layer in self.attention)

    def check_flags(self, quantization: str | None, *, has_fp8_kv_cache: bool) -> None:
        """Check flags that only our own modelling code honours.

        Args:
            quantization: `--quantization`.
            has_fp8_kv_cache: whether `--kv-cache-dtype` asks for one.

        Raises:
            ConfigError: one of them is given.
        """
        run_by = f"{self.architecture} is run by transformers' modelling code"
        check_quantization(self.quantization, quantization)
        if quantization is not None and self.quantization is None:
            raise ConfigError(
                f"{run_by}, and --quantization {quantization} of unquantised weights is not supported with that; leave "
                "out the flag"
            )
        if has_fp8_kv_cache:
            raise ConfigError(f"{run_by}, which has no scales for an FP8 KV cache; use --kv-cache-dtype auto")

    def hf_config(self) -> Any:
        """Return a new config object of transformers'."""
        return read_hf_config(json.loads(self.fields))

    @classmethod
    def fields_of(cls, raw: RawConfig) -> dict[str, Any]:
        architecture = raw["architectures"][0]
        wraps = is_wrapper(raw, architecture)
        if architecture.endswith(WRAPPER) and not wraps:
            raise ConfigError(
                f"architecture {architecture} is not supported: it is no decoder with parts for images, video or "
                f"sound, whose text part could be served; serve a decoder, {OTHER_ENGINES}"
            )
        version = _transformers_version()
        unquantised = without_quantization(dict(raw))
        fields = json.dumps(unquantised, sort_keys=True)
        whole = read_hf_config(unquantised)
        for name in _known_fields(type(whole)):
            raw.get(name)  # so that no override counts as one that changes nothing
        config = whole.get_text_config() if wraps else whole
        if wraps and (
            config is whole or any(getattr(each, "is_encoder_decoder", False) for each in (whole, config))
        ):
            raise ConfigError(
                f"{architecture} has no text part that generates by itself; serve another model, {OTHER_ENGINES}"
            )
        sizes = ("vocab_size", "hidden_size", "num_hidden_layers")
        if getattr(config, "is_encoder_decoder", False) or not all(hasattr(config, size) for size in sizes):
            raise ConfigError(
                f"architecture {architecture} is not supported: it is no decoder of texts alone; serve one, "
                f"{OTHER_ENGINES}"
            )
        heads = _number(config, "num_attention_heads") or 1  # none, where all layers keep states
        hidden = config.hidden_size
        return {
            "vocab_size": config.vocab_size,
            "hidden_size": hidden,
            "intermediate_size": _number(config, "intermediate_size") or 4 * hidden,
            "num_hidden_layers": config.num_hidden_layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": _number(config, "head_dim") or max(hidden // heads, 1),
            "max_position_embeddings": _positions(config),
            "tie_word_embeddings": any(
                getattr(each, "tie_word_embeddings", False) for each in (whole, config)
            ),
            "sliding_windows": (None,) * config.num_hidden_layers,
            "fields": fields,
            "has_plan": bool(getattr(config, "base_model_tp_plan", None)),
            "transformers_version": version,
        }


def without_quantization(raw: RawConfig) -> dict[str, Any]:
    """Return a config of weights that are widened before transformers' loader reads them."""
    return {
        name: without_quantization(value) if name.endswith("_config") and isinstance(value, dict) else value
        for name, value in raw.items()
        if name not in ("quantization_config", "compression_config")
    }


def _known_fields(config_class: Any) -> set[str]:
    """Return the names of the fields that a config class of transformers reads."""
    library = logging.getLogger("transformers")
    level = library.level
    library.setLevel(logging.ERROR)  # it warns of defaults, which are not this model's
    try:
        return {*config_class().to_dict(), *config_class.attribute_map, "rope_scaling", "rope_theta"}
    except Exception:  # classes without defaults that fit each other
        return set()
    finally:
        library.setLevel(level)


def _within(layer: AttentionParams, positions: int) -> AttentionParams:
    """Return the layer without a window or chunks that no request exceeds."""
    if layer.sliding_window is not None and layer.sliding_window >= positions:
        layer = replace(layer, sliding_window=None)
    if layer.chunk_size is not None and layer.chunk_size >= positions:
        layer = replace(layer, chunk_size=None)
    return layer


@functools.cache
def _installed_version() -> str:
    """Return the version of transformers; read once, because an engine's start asks several times, 3 ms each."""
    from importlib.metadata import version

    return version("transformers")


def _transformers_version() -> str:
    """
    Raises:
        ConfigError: transformers is missing or too old.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(f"this model needs transformers' modelling code, which is not installed; {INSTALL}")
    found = _installed_version()
    if tuple(int(part) for part in re.findall(r"\d+", found)[:2]) < MIN_VERSION:
        wanted = ".".join(map(str, MIN_VERSION))
        raise ConfigError(
            f"this model needs transformers {wanted} or later, and {found} is installed; {INSTALL}"
        )
    return found


def read_hf_config(raw: RawConfig) -> Any:
    """Return transformers' config object of a config.json.

    Raises:
        ConfigError: transformers is missing, has no such model_type, or refuses the config, or something would be
            built too often.
    """
    for name, value in _counts(raw):
        if isinstance(value, int) and value > _MAX_COUNT:
            raise ConfigError(f"{name} {value} exceeds {_MAX_COUNT}")
    _transformers_version()
    from transformers import CONFIG_MAPPING

    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        architectures = raw.get("architectures")
        listed: Any = architectures[0] if isinstance(architectures, list) and architectures else architectures
        raise ConfigError(
            f"architecture {listed} is not supported: transformers {_transformers_version()} has no model_type "
            f"{model_type!r}; correct config.json, or serve another model, {OTHER_ENGINES}"
        )
    try:
        return CONFIG_MAPPING[model_type].from_dict(_decoded(dict(raw)))
    except Exception as error:  # whatever its validation raises
        raise ConfigError(f"transformers refuses it: {type(error).__name__}: {str(error)[:300]}") from None


def config_class_name(model_type: str) -> str | None:
    """Return the name of transformers' config class of a `model_type`; None: it has none, or is not installed."""
    if importlib.util.find_spec("transformers") is None:
        return None
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type].__name__ if model_type in CONFIG_MAPPING else None


def _decoded(value: Any) -> Any:
    """Return a value of config.json with the floats that transformers writes as objects, and with booleans that
    published configs have as numbers: transformers refuses those."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {
            name: bool(each) if name in _BOOLEANS and isinstance(each, int) else _decoded(each)
            for name, each in value.items()
        }
    return [_decoded(each) for each in value] if isinstance(value, list) else value


def _counts(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the fields, of nested configs too, that say how often something is built."""
    if isinstance(value, dict):
        for key, each in value.items():
            if isinstance(each, dict):
                yield from _counts(each, key)
            elif _COUNTED.fullmatch(str(key)):
                yield key, each


def _number(config: Any, name: str) -> int | None:
    try:
        value = getattr(config, name, None)
    except Exception:  # a field that differs between layers (Gemma 4)
        return None
    return value if isinstance(value, int) else None


def _positions(config: Any) -> int:
    """Return the tokens of the longest sequence. Frequencies that depend on the longest request of a batch are those of
    short ones, so such a model is served up to the length at which they would change."""
    positions = next(
        (
            found
            for name in ("max_position_embeddings", "max_seq_len", "seq_length", "n_positions")
            if (found := _number(config, name))
        ),
        2048,
    )
    ropes = getattr(config, "rope_parameters", None) or {}
    ropes = ropes.values() if ropes and all(isinstance(each, dict) for each in ropes.values()) else [ropes]
    for rope in ropes:
        if rope.get("rope_type") in ("longrope", "dynamic"):
            positions = min(positions, rope.get("original_max_position_embeddings") or positions)
    return positions


_FAMILIES = (
    *(
        "Bert",
        "Camembert",
        "Deberta",
        "DebertaV2",
        "DistilBert",
        "Electra",
        "EuroBert",
        "Gte",
        "JinaEmbeddingsV3",
    ),
    *("MPNet", "ModernBert", "NomicBert", "Roberta", "XLMRoberta", "XLMRobertaXL"),
)
_TASKS: dict[str, PoolingTask] = {
    "ForSequenceClassification": "classify",
    "Model": "embed",
    "ForMaskedLM": "embed",
}
_TASK_OF = {f"{family}{end}": task for family in _FAMILIES for end, task in _TASKS.items()}
_OFFSET_POSITIONS = frozenset({"camembert", "mpnet", "roberta", "xlm-roberta", "xlm-roberta-xl"})
"""Model types that count positions from behind the padding token's id, so that their last ones are not used."""


class EncoderConfig(TransformersConfig, frozen=True, kw_only=True):
    """An encoder of transformers'."""

    computes_whole_prompts: ClassVar[bool] = True

    windows: tuple[Size | None, ...] = ()
    """Of each call of attention, how many tokens before and after itself a token attends to; None: all."""
    has_token_types: bool = False
    """Whether the tokens of a pair's second text are of another type."""
    first_position: Annotated[int, Meta(ge=0, le=1 << 24)] = 0
    """Of a prompt's first token, where tokens that are padding do not count; 0: they do."""
    padding_id: Annotated[int, Meta(ge=0, le=1 << 24)] = 0
    """The token that counts as padding, if `first_position` is not 0."""
    runs_alone: bool = False
    """Whether its attention is not known from transformers' interface, so that each prompt is a pass of its own."""
    head_pooling: PoolingType = "cls"
    """Which states its head for labels takes."""

    @property
    def undivided_layers(self) -> str | None:
        return "an encoder runs on one device"

    @property
    def attention_layers(self) -> tuple[AttentionParams, ...]:
        return ()

    @classmethod
    def fields_of(cls, raw: RawConfig) -> dict[str, Any]:
        if raw.get("is_decoder"):
            raise ConfigError(
                "is_decoder: an encoder is served for pooling, not to generate; take that field out"
            )
        fields = super().fields_of(raw)
        config = read_hf_config(raw)
        first = padding = 0
        if config.model_type in _OFFSET_POSITIONS:
            # MPNet's is 1 whatever the config says, as in transformers.
            padding = 1 if config.model_type == "mpnet" else config.pad_token_id
            first = padding + 1
        pooling = getattr(config, "classifier_pooling", None)
        return {
            **fields,
            "max_position_embeddings": fields["max_position_embeddings"] - first,
            "first_position": first,
            "padding_id": padding,
            "has_token_types": (getattr(config, "type_vocab_size", None) or 1) > 1,
            "head_pooling": pooling if pooling in ("cls", "mean") else "cls",
        }


def encoder_task(architecture: str) -> PoolingTask | None:
    """Return what an encoder's architecture is for; None if it is none that we know."""
    return _TASK_OF.get(architecture)
