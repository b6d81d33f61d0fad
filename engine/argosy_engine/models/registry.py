"""Registry of our own architectures: maps the name in config.json to the family's config and model classes. All others
are transformers'.

A family's modules are imported only when a checkpoint needs them, which keeps start-up short.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

from argosy_engine.errors import OTHER_ENGINES, ConfigError
from argosy_engine.model_configs.llama_families import DIFFERENCES
from argosy_engine.model_configs.model_config import NotOurs
from argosy_engine.model_configs.transformers_config import EncoderConfig, encoder_task
from argosy_engine.model_configs.wrapper_config import NATIVE_WRAPPERS, WRAPPER

if TYPE_CHECKING:
    import torch

    from argosy_engine.attention.backend import AttentionLayer, ModelInputs
    from argosy_engine.layers.layer_compiler import CompilableLayer
    from argosy_engine.layers.layer_factory import LayerFactory
    from argosy_engine.model_configs.model_config import ModelConfig
    from argosy_engine.model_configs.model_use import ModelImpl, PoolingTask


class CausalLM(Protocol):
    """A model over a step's flattened batch of T tokens. The constructor takes each weight exactly once."""

    checkpoint_prefix: ClassVar[str]
    """Prefix of the base model's tensor names. Checkpoints of the base model alone lack it."""
    ignored_tensors: ClassVar[Sequence[str]]
    """Patterns of tensor names that checkpoints may contain and the model does not use."""

    def __init__(self, config: ModelConfig, factory: LayerFactory) -> None: ...

    @property
    def layers(self) -> Sequence[CompilableLayer]:
        """The decoder layers."""
        ...

    @property
    def attention_layers(self) -> Sequence[AttentionLayer]:
        """The attention of each layer."""
        ...

    def forward(self, inputs: ModelInputs) -> torch.Tensor:
        """Compute hidden states [T, hidden_size], before the final norm. Every attention layer must have its cache
        (`Attention.bind`)."""
        ...

    def last_hidden_state(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the final norm to hidden [R, hidden_size]. Pooling and the output head use the result."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits [R, vocab_size] of hidden [R, hidden_size]. Pass only the rows to sample."""
        ...


class _Family(NamedTuple):
    """Classes of a family, as module:class, and its other architectures."""

    config: str
    """Relative to argosy_engine.model_configs."""
    model: str
    """Relative to argosy_engine.models."""
    base: str
    """Architecture of checkpoints without a head."""
    classifier: str
    """Architecture of those with a head for sequence classification."""


_LLAMA, _GEMMA = ("llama_config:LlamaConfig", "llama:Llama"), ("gemma_config:GemmaConfig", "gemma:Gemma")
_QWEN3_NEXT = "hybrid_config:Qwen3NextConfig", "qwen3_next:Qwen3Next"
_LAYER_NORM = "llama_config:LayerNormConfig", "llama:LayerNormDecoder"
_LFM2 = "hybrid_config:Lfm2Config", "lfm2:Lfm2"
_FALCON = "gpt2_config:FalconConfig", "gpt2:Falcon"
_MAMBA = "hybrid_config:MambaHybridConfig", "mamba_hybrid:MambaHybrid"
_NEMOTRON = "NemotronHForCausalLM"
_DEEPSEEKS = ("DeepseekV2", "DeepseekV3", "Glm4MoeLite")
"""Those of `deepseek_config`."""


def _family(name: str, config: str, model: str) -> _Family:
    return _Family(config, model, f"{name}Model", f"{name}ForSequenceClassification")


_FAMILIES = {
    **{name: _family(name.removesuffix("ForCausalLM"), *_LLAMA) for name in DIFFERENCES},
    **{
        f"{name}ForCausalLM": _family(name, "deepseek_config:DeepseekConfig", "deepseek:Deepseek")
        for name in _DEEPSEEKS
    },
    "BambaForCausalLM": _family("Bamba", *_MAMBA),
    **{f"{name}ForCausalLM": _family(name, *_FALCON) for name in ("Bloom", "Falcon", "Mpt")},
    "FalconH1ForCausalLM": _family("FalconH1", *_MAMBA),
    "GPT2LMHeadModel": _family("GPT2", "gpt2_config:GPT2Config", "gpt2:GPT2"),
    "GemmaForCausalLM": _family("Gemma", "gemma_config:Gemma1Config", _GEMMA[1]),
    "Gemma2ForCausalLM": _family("Gemma2", *_GEMMA),
    "Gemma3ForCausalLM": _family("Gemma3Text", *_GEMMA),
    "Gemma4ForCausalLM": _family("Gemma4Text", "gemma_config:Gemma4Config", "gemma:Gemma4"),
    "Llama4ForCausalLM": _family("Llama4Text", *_LLAMA),
    "GraniteMoeHybridForCausalLM": _family("GraniteMoeHybrid", *_MAMBA),
    "Lfm2ForCausalLM": _family("Lfm2", *_LFM2),
    "Lfm2MoeForCausalLM": _family("Lfm2Moe", *_LFM2),
    _NEMOTRON: _family("NemotronH", _MAMBA[0], "mamba_hybrid:NemotronH"),
    "OPTForCausalLM": _family("OPT", "gpt2_config:OPTConfig", "gpt2:OPT"),
    "XGLMForCausalLM": _family("XGLM", "gpt2_config:XGLMConfig", "gpt2:XGLM"),
    **{
        f"{name}ForCausalLM": _family(name, *_LAYER_NORM)
        for name in ("Cohere", "Cohere2", "StableLm", "Starcoder2")
    },
    "Qwen3NextForCausalLM": _family("Qwen3Next", *_QWEN3_NEXT),
    "Qwen3_5ForCausalLM": _family("Qwen3_5Text", *_QWEN3_NEXT),
    "Qwen3_5MoeForCausalLM": _family("Qwen3_5MoeText", *_QWEN3_NEXT),
}
"""By the architecture that generates."""
_CAUSAL = ("ForCausalLM", "LMHeadModel")
"""Ends of the names of transformers' architectures that generate text."""
_NO_IMPL_ARGOSY = "leave out --model-impl argosy, and transformers' code runs it, if it can"
"""Remedy where only transformers' code may run a model."""
_POOLED: dict[str, PoolingTask] = {"ForSequenceClassification": "classify", "Model": "embed"}
"""Those of the same decoders with another head or none, and what they are for."""
_GENERATING = {
    name: generating
    for generating, family in _FAMILIES.items()
    for name in (generating, family.base, family.classifier)
}
_FORMER = {"MPTForCausalLM": "MptForCausalLM"}
"""Names that checkpoints had before transformers had the family."""
_GENERATING |= _FORMER


def is_native(architecture: str, model_impl: ModelImpl = "auto") -> bool:
    """Whether our own modelling code runs an architecture, rather than transformers'.

    Args:
        model_impl: `--model-impl`.

    Raises:
        ConfigError: neither does; the message lists those of ours.
        NotOurs: transformers' code may, and `model_impl` rules it out.
    """
    if architecture in _GENERATING and model_impl != "transformers":
        return True
    if encoder_task(architecture) is not None and model_impl != "argosy":
        return False
    if architecture in NATIVE_WRAPPERS:
        return False  # the architecture of its text part counts
    if not architecture.endswith((*_CAUSAL, *_POOLED, WRAPPER)):
        raise ConfigError(
            f"architecture {architecture} is not supported; there is: {', '.join(sorted(_FAMILIES))}, their "
            "ForSequenceClassification and their base models, and unless --model-impl argosy is given the same of the "
            f"causal models of transformers' (…ForCausalLM), text parts (…{WRAPPER}) and encoders such as BertModel; "
            f"serve one of these, {OTHER_ENGINES}"
        )
    if model_impl == "argosy":
        raise NotOurs(
            f"{architecture} is not an architecture of argosy's own",
            _NO_IMPL_ARGOSY,
        )
    return False


def decoder_of(architecture: str, model_impl: ModelImpl = "auto") -> str:
    """Return the architecture of the same decoder that generates: of ours, otherwise the architecture itself."""
    return _GENERATING[architecture] if is_native(architecture, model_impl) else architecture


def is_same_decoder(first: str, second: str) -> bool:
    """Whether two architectures differ in their heads alone."""

    if first in _GENERATING or second in _GENERATING:
        return _GENERATING.get(first, first) == _GENERATING.get(second, second)
    return _stem(first) == _stem(second)


def generates(architecture: str) -> bool:
    """Whether an architecture is that of a decoder with an output head."""
    return architecture.endswith(_CAUSAL)


def config_name(architecture: str) -> str:
    """Return what transformers calls a decoder's config class."""
    generating = None if architecture in _FORMER else _GENERATING.get(architecture)
    base = _stem(architecture) if generating is None else _FAMILIES[generating].base.removesuffix("Model")
    return f"{base}Config"


def _stem(architecture: str) -> str:
    """Return an architecture's name without its head."""
    ends = (*_CAUSAL, *_POOLED)
    return next((architecture.removesuffix(end) for end in ends if architecture.endswith(end)), architecture)


def pooling_task(architecture: str) -> PoolingTask | None:
    """Return what an architecture is for if it does not generate; None if it does."""
    if architecture in _GENERATING:
        family = _FAMILIES[_GENERATING[architecture]]
        found: dict[str, PoolingTask] = {family.base: "embed", family.classifier: "classify"}
        return found.get(architecture)
    if architecture.endswith(_CAUSAL):
        return None
    if (task := encoder_task(architecture)) is not None:
        return task
    return next((task for end, task in _POOLED.items() if architecture.endswith(end)), None)


def config_class(architecture: str, model_impl: ModelImpl = "auto") -> type[ModelConfig]:
    """Return the config class of an architecture.

    Raises:
        ConfigError: `is_native`.
    """
    if not is_native(architecture, model_impl):
        if encoder_task(architecture) is not None:
            return EncoderConfig
        return _load("model_configs", "transformers_config:TransformersConfig")
    return _load("model_configs", _FAMILIES[_GENERATING[architecture]].config)


def model_class(architecture: str) -> type[CausalLM]:
    """Return the model class of an architecture of ours."""
    return _load("models", _FAMILIES[_GENERATING[architecture]].model)


def is_of_type(architecture: str, model_type: str) -> bool:
    """Whether a `model_type` of config.json is that of an architecture of ours."""

    if model_type == "kimi_k2":
        return _GENERATING[architecture] == "DeepseekV3ForCausalLM"
    return model_type.replace("_", "") + "config" == config_name(architecture).replace("_", "").lower()


def falls_back(architecture: str, model_impl: ModelImpl) -> bool:
    """Whether transformers' code may run an architecture of ours whose config asks for more than ours computes.

    Of Nemotron-H it lets no step size of a prompt be smaller than `time_step_min`, which the models were not trained
    with: it takes no place that it is not asked to take.
    """
    return model_impl == "auto" and _GENERATING.get(architecture) not in (None, _NEMOTRON)


def remedy_of(architecture: str) -> str:
    """Return what to do where `falls_back` is false, though transformers' code may run the model."""
    if _GENERATING.get(architecture) == _NEMOTRON:
        return (
            "--model-impl transformers runs transformers' code, which lets no step size of a prompt be smaller than "
            "time_step_min"
        )
    return _NO_IMPL_ARGOSY


def architectures() -> list[str]:
    """Return the architectures that generate."""
    return sorted(_FAMILIES)


def _load(package: str, target: str) -> type:
    module, _, name = target.partition(":")
    return getattr(import_module(f"argosy_engine.{package}.{module}"), name)
