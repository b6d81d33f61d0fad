"""Transformers classes: which class of transformers' is a checkpoint's, and what of it is served.

Of a model with parts for images, video or sound the wrapper's own class runs, without the parts that no text needs:
they are taken away before anything is loaded, so that embedding, masks, positions and output head are what they are in
transformers.
"""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    PreTrainedModel,
)
from transformers.modeling_layers import GenericForSequenceClassification

from argosy_engine.errors import OTHER_ENGINES, ConfigError
from argosy_engine.model_configs.encoder_config import EncoderConfig
from argosy_engine.model_configs.transformers_config import TransformersConfig

_HOLDS_CAUSAL_MODEL = frozenset({"Llama4ForConditionalGeneration"})
"""Wrappers that only give embeddings to a whole causal model, which is served alone."""


def hf_config(config: TransformersConfig, implementation: str) -> Any:
    """Return transformers' config object, which names our attention function."""
    found = config.hf_config()
    found._attn_implementation = implementation
    for each in (found, found.get_text_config()):
        if config.wrapper is None or not config.tie_word_embeddings:  # of a wrapper either may be tied
            each.tie_word_embeddings = config.tie_word_embeddings
        each.use_cache = False
    return found


def model_class(config: TransformersConfig, of_config: Any) -> type[PreTrainedModel]:
    """Return transformers' class that is run: of a model that pools, the one without a head.

    Raises:
        ConfigError: transformers has no such class, or none that generates of the same decoder.
    """
    kind, architecture = type(of_config), config.architecture
    if isinstance(config, EncoderConfig):
        return _encoder_class(config, of_config)
    if config.wrapper is not None:
        return _named(_wrapper_class(of_config), config, of_config)
    if config.pooling is None:
        return _named(_of(MODEL_FOR_CAUSAL_LM_MAPPING, kind), config, of_config)
    mappings = MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    generating, base, classifier = (_of(mapping, kind) for mapping in mappings)
    is_decoder = generating is not None and not getattr(of_config, "is_encoder_decoder", False)
    known = [each for each in (generating, base, classifier) if each is not None]
    named = next((each for each in known if is_decoder and each.__name__ == architecture), None)
    if named is classifier and named is not None and not issubclass(named, GenericForSequenceClassification):
        raise ConfigError(
            f"{architecture} has a head of its own in transformers, which is not computed; serve another model, "
            f"{OTHER_ENGINES}"
        )
    return _named(None if named is None else base, config, of_config, named)


def _encoder_class(config: EncoderConfig, of_config: Any) -> type[PreTrainedModel]:
    """Return an encoder's class with the head of its labels, or without any."""
    mappings = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, MODEL_MAPPING, MODEL_FOR_MASKED_LM_MAPPING
    classifier, base, masked = (_of(mapping, type(of_config)) for mapping in mappings)
    known = [each for each in (classifier, base, masked) if each is not None]
    named = next((each for each in known if each.__name__ == config.architecture), None)
    classifies = config.pooling is not None and config.pooling.task == "classify"
    if classifies and named is not classifier:
        raise ConfigError(
            f"{config.architecture} has no head for labels: --convert classify needs a model that was trained with one"
        )
    return _named(None if named is None else classifier if classifies else base, config, of_config, named)


def _of(mapping: Any, kind: type) -> type[PreTrainedModel] | None:
    found: type[PreTrainedModel] | None = mapping.get(kind, None)
    return found


def _named(
    found: type[PreTrainedModel] | None,
    config: TransformersConfig,
    of_config: Any,
    named: type[PreTrainedModel] | None = None,
) -> type[PreTrainedModel]:
    """Return the class found.

    Args:
        named: the class that config.json names, if that is another one.

    Raises:
        ConfigError: there is none, or config.json names another.
    """
    if found is None or (named or found).__name__ != config.architecture:
        raise ConfigError(
            f"architecture {config.architecture} is not supported: transformers {transformers.__version__} has none of "
            f"that name for the model_type {of_config.model_type!r}; correct config.json, or serve it with the engine "
            "that it was made for behind Argosy's router"
        )
    return found


def body_of(model: PreTrainedModel, *, has_head: bool = True) -> nn.Module:
    """Return what is below the output head.

    Args:
        has_head: whether the model has one.
    """
    body: Any = model
    if has_head:
        body = getattr(model, model.base_model_prefix, None) or getattr(model, "model", None)
    body = getattr(body, "decoder", body)  # OPT's head calls that one
    if not isinstance(body, nn.Module) or (has_head and body is model):
        raise ConfigError(f"{type(model).__name__} has no body apart from its output head")
    return body


def _wrapper_class(hf_config: Any) -> type[PreTrainedModel] | None:
    """Return transformers' class of a wrapper's config; None if it has none."""
    mappings: tuple[Any, ...] = (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING)
    return next((found for mapping in mappings if (found := mapping.get(type(hf_config), None))), None)


def without_other_parts(wrapper: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return the class without the parts that no text needs."""

    def initialise(self: PreTrainedModel, config: Any, *args: Any, **kwargs: Any) -> None:
        wrapper.__init__(self, config, *args, **kwargs)
        take_away(self)

    return type(wrapper.__name__, (wrapper,), {"__init__": initialise, "__module__": wrapper.__module__})


def forbid_other_parts(model: PreTrainedModel) -> tuple[str, ...]:
    """Let a wrapper raise ConfigError where it runs a part beside its decoder; return the names of these parts."""
    parts = _other_parts(model)
    for name, (parent, child) in parts.items():

        def refuse(*_: Any, part: str = name) -> None:
            raise ConfigError(f"it runs {part} for texts, too")

        getattr(parent, child).register_forward_pre_hook(refuse)
    return tuple(parts)


def take_away(model: PreTrainedModel) -> None:
    """Remove the parts beside a wrapper's decoder."""
    for parent, child in _other_parts(model).values():
        delattr(parent, child)


def text_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return the causal model within a wrapper that holds one whole, otherwise the model itself."""
    if type(model).__name__ not in _HOLDS_CAUSAL_MODEL:
        return model
    head = model.get_output_embeddings()
    return next(
        child
        for child in model.children()
        if isinstance(child, PreTrainedModel) and head in set(child.modules())
    )


def _other_parts(model: PreTrainedModel) -> dict[str, tuple[nn.Module, str]]:
    """Return all modules beside those on the way to the decoder, by name, each as its parent and its name there."""
    head = model.get_output_embeddings()
    decoder = text_model(model) if type(model).__name__ in _HOLDS_CAUSAL_MODEL else _decoder(model)
    names = {module: name for name, module in model.named_modules()}
    found: dict[str, tuple[nn.Module, str]] = {}

    def look(module: nn.Module) -> None:
        for name, child in module.named_children():
            if child is decoder:
                continue
            if decoder in set(child.modules()):
                look(child)
            elif head not in set(child.modules()):
                found[names[child]] = module, name

    look(model.base_model)  # of a wrapper without a body, all that is beside the causal model
    return found


def _decoder(model: PreTrainedModel) -> nn.Module:
    """
    Raises:
        ConfigError: there is no decoder, or no output head.
    """
    decoder = model.get_decoder()
    if not isinstance(decoder, nn.Module) or decoder is model or model.get_output_embeddings() is None:
        raise ConfigError(f"{type(model).__name__} has no decoder and output head of its own")
    return decoder
