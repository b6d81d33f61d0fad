"""Transformers wrapper: the text part of a model with parts for images, video or sound, as transformers computes it.

The wrapper's own class runs, without the parts that no text needs: they are taken away before anything is loaded, so
that embedding, masks, positions and output head are what they are in transformers.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    PreTrainedModel,
)

from argosy_engine.errors import ConfigError

_HOLDS_CAUSAL_MODEL = frozenset({"Llama4ForConditionalGeneration"})
"""Wrappers that only give embeddings to a whole causal model, which is served alone."""


def wrapper_class(hf_config: Any) -> type[PreTrainedModel] | None:
    """Return transformers' class of a wrapper's config, without the parts that are not served; None if it has none.

    Instances name these parts in `unserved_parts`.
    """
    mappings: tuple[Any, ...] = (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING)
    found = next((each for mapping in mappings if (each := mapping.get(type(hf_config), None))), None)
    if found is None:
        return None

    def initialise(self: PreTrainedModel, config: Any, *args: Any, **kwargs: Any) -> None:
        found.__init__(self, config, *args, **kwargs)
        self.__dict__["unserved_parts"] = _take_away(self)

    return type(found.__name__, (found,), {"__init__": initialise, "__module__": found.__module__})


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


def _take_away(model: PreTrainedModel) -> tuple[str, ...]:
    """Remove all modules beside those on the way to the decoder; return their names."""
    head = model.get_output_embeddings()
    decoder = text_model(model) if type(model).__name__ in _HOLDS_CAUSAL_MODEL else _decoder(model)
    names = {module: name for name, module in model.named_modules()}
    removed: list[str] = []

    def prune(module: nn.Module) -> None:
        for name, child in list(module.named_children()):
            if child is decoder:
                continue
            if decoder in set(child.modules()):
                prune(child)
            elif head not in set(child.modules()):
                removed.append(names[child])
                delattr(module, name)

    prune(model.base_model)  # of a wrapper without a body, all that is beside the causal model
    return tuple(removed)


def _decoder(model: PreTrainedModel) -> nn.Module:
    """
    Raises:
        ConfigError: there is no decoder, or no output head.
    """
    decoder = model.get_decoder()
    if not isinstance(decoder, nn.Module) or decoder is model or model.get_output_embeddings() is None:
        raise ConfigError(f"{type(model).__name__} has no decoder and output head of its own")
    return decoder
