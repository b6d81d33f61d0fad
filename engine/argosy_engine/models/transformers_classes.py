"""Which class of transformers' is a checkpoint's, what of it is served, and how tensor-parallel ranks divide it.

Of a model with parts for images, video or sound the wrapper's own class runs, without the parts that no text needs:
they are taken away before anything is loaded, so that embedding, masks, positions and output head are what they are in
transformers.

A model's `tp_plan` names a style for modules and parameters (transformers' `distributed.tensor_parallel`). Each rank
loads the whole model on the CPU, keeps its part, and our communicator exchanges what the styles ask for. The embedding,
an output head that is tied to it, and what a size does not divide behind a gathered output stay whole: every rank
computes them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
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

from argosy_engine.distributed.parallel_state import Communicator, LocalCommunicator
from argosy_engine.errors import OTHER_ENGINES, ConfigError
from argosy_engine.model_configs.transformers_config import EncoderConfig, TransformersConfig

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
        return _named(wrapper_class(of_config), config, of_config)
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


def wrapper_class(hf_config: Any) -> type[PreTrainedModel] | None:
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


def text_modules(model: PreTrainedModel) -> list[tuple[nn.Module, str]]:
    """Return a wrapper's decoder and output head, each as its parent and its name there."""
    head = model.get_output_embeddings()
    if type(model).__name__ in _HOLDS_CAUSAL_MODEL:
        wanted = {id(text_model(model))}
    else:
        wanted = {id(_decoder(model)), id(head)}
    return [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if id(child) in wanted
    ]


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


_COLWISE = frozenset({"colwise", "colwise_gather_output", "colwise_rep"})
_GATHERED = frozenset({"colwise_gather_output", "colwise_rep"})
_ROWWISE = frozenset({"rowwise", "rowwise_split_input", "rowwise_rep"})
_SPLIT_INPUT = frozenset({"rowwise_split_input", "rowwise_rep"})
_WHOLE = frozenset(
    {
        "embedding_rowwise", "embedding_colwise", "local_params", "mla_kv_a_proj", "replicate",
        "replicated_with_grad_allreduce",
    }
)  # fmt: skip
"""Styles with which every rank computes a module as it is; what some do to gradients does not matter here."""


class PlannedRank(LocalCommunicator):
    """Stands for one of several ranks of which no other runs, to find out the shapes of what it computes."""

    def __init__(self, size: int) -> None:
        self.size = size

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat([x] * self.size, dim=dim)


def divide(model: PreTrainedModel, communicator: Communicator) -> None:
    """Keep a rank's part of a whole model, in place.

    Raises:
        ConfigError: it has no plan, or one with styles or sizes that are not supported.
    """
    plan: Mapping[str, str] = dict(model.tp_plan or {})
    embedding: Any = model.get_input_embeddings()
    for name, module in list(model.named_modules()):
        if (style := plan.get(_pattern(name))) is None or isinstance(module, nn.Embedding):
            continue
        if isinstance(module, nn.Linear):
            if style in _GATHERED and (
                module.weight is embedding.weight or module.out_features % communicator.size
            ):
                continue
            _replace(model, name, _divided(name, module, style, communicator))
        elif style in ("moe_tp_experts", "all_reduce"):
            module.register_forward_hook(lambda _, __, output: communicator.all_reduce(output.contiguous()))
        elif style == "moe_identity_expert":
            module.register_forward_pre_hook(lambda _, inputs: (inputs[0] / communicator.size, *inputs[1:]))
        elif style not in _WHOLE:
            raise ConfigError(f"its plan has the style {style!r} for {name}, which is not supported")
    for name, parameter in list(model.named_parameters()):
        if (style := plan.get(_pattern(name))) is not None:
            part = _part_of_parameter(name, parameter, style, communicator)
            _replace(model, name, nn.Parameter(part, requires_grad=False))


class _DividedLinear(nn.Module):
    """A rank's part of a linear layer, and what the ranks exchange around it."""

    def __init__(self, inner: nn.Linear, style: str, communicator: Communicator) -> None:
        super().__init__()
        self.inner: Any = inner  # our kernels may replace it
        self._style = style
        self._communicator = communicator

    @property
    def weight(self) -> torch.Tensor:
        weight: torch.Tensor = self.inner.weight
        return weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rank, size = self._communicator.rank, self._communicator.size
        if self._style in _SPLIT_INPUT:
            x = x.chunk(size, dim=-1)[rank]
        out: torch.Tensor = self.inner(x)
        if self._style in _ROWWISE:
            return self._communicator.all_reduce(out.contiguous())
        if self._style in _GATHERED:
            return self._communicator.all_gather(out.contiguous())
        return out


def _divided(name: str, linear: nn.Linear, style: str, communicator: Communicator) -> nn.Module:
    if style in _WHOLE:
        return linear
    weight: torch.Tensor = linear.weight
    bias: torch.Tensor | None = linear.bias
    if style in _COLWISE:
        weight = _part(name, weight, 0, communicator)
        bias = None if bias is None else _part(name, bias, 0, communicator)
    elif style in _ROWWISE:
        weight = _part(name, weight, 1, communicator)
        if communicator.rank:  # the sum over the ranks contains it once
            bias = None
    elif style == "packed_colwise":
        weight = _packed_part(name, weight, 0, communicator)
        bias = None if bias is None else _packed_part(name, bias, 0, communicator)
    else:
        raise ConfigError(f"its plan has the style {style!r} for {name}, which is not supported")
    with torch.device("meta"):
        part = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
    part.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        part.bias = nn.Parameter(bias, requires_grad=False)
    part.training = linear.training
    return _DividedLinear(part, style, communicator)


def _part_of_parameter(
    name: str, parameter: torch.Tensor, style: str, communicator: Communicator
) -> torch.Tensor:
    """Return a rank's part of what a plan names beside whole linear layers: experts' weights, sinks."""
    rows, last = max(parameter.ndim - 2, 0), parameter.ndim - 1
    if style in ("replicate", "replicated_with_grad_allreduce") or (
        parameter.ndim == 1 and style in ("rowwise", "packed_rowwise")
    ):
        return parameter
    match style:
        case "colwise":
            return _part(name, parameter, rows, communicator)
        case "rowwise":
            return _part(name, parameter, last, communicator)
        case "packed_colwise":
            return _packed_part(name, parameter, rows, communicator)
        case "packed_rowwise":
            return _packed_part(name, parameter, last, communicator)
    raise ConfigError(f"its plan has the style {style!r} for {name}, which is not supported")


def _part(name: str, tensor: torch.Tensor, dim: int, communicator: Communicator) -> torch.Tensor:
    if tensor.shape[dim] % communicator.size:
        raise ConfigError(
            f"{name} has {tensor.shape[dim]} features, which {communicator.size} ranks cannot divide"
        )
    return _kept(tensor.detach().chunk(communicator.size, dim)[communicator.rank])


def _packed_part(name: str, tensor: torch.Tensor, dim: int, communicator: Communicator) -> torch.Tensor:
    """Return a rank's part of two halves, such as gate and up."""
    if tensor.shape[dim] % (2 * communicator.size):
        raise ConfigError(
            f"{name} has two times {tensor.shape[dim] // 2} features, which {communicator.size} ranks cannot divide"
        )
    if 0 in tensor.stride():
        return tensor.detach().narrow(dim, 0, tensor.shape[dim] // communicator.size)
    halves = tensor.detach().chunk(2, dim)
    parts = [half.chunk(communicator.size, dim)[communicator.rank] for half in halves]
    return torch.cat(parts, dim)


def _kept(part: torch.Tensor) -> torch.Tensor:
    """Return a copy, so that the whole tensor is freed; not of followed models, whose tensors are one number."""
    return part if 0 in part.stride() else part.contiguous().clone()


def _pattern(name: str) -> str:
    """Return a name as plans have it, with `*` for numbers."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _replace(model: nn.Module, name: str, value: nn.Module | nn.Parameter) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, value)
