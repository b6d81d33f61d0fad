"""The architectures there are: name in config.json -> the family's config class and model class.

A family's module is imported when a checkpoint asks for it, so that start-up pays for one family only.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

from argosy_engine.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from argosy_engine.attention.metadata import AttentionMetadata
    from argosy_engine.models.config import ModelConfig
    from argosy_engine.models.weights import Weights


class CausalLM(Protocol):
    """A model over a step's flattened batch of T tokens. Weights are taken in the constructor, each exactly once.

    `max_positions` is the length of position tables that are computed rather than loaded.
    """

    checkpoint_prefix: ClassVar[str]
    """of the base model's tensors; checkpoints of the base model alone lack it"""
    ignored_tensors: ClassVar[Sequence[str]]
    """patterns of names that checkpoints carry and the computation does not need"""

    def __init__(self, config: ModelConfig, weights: Weights, max_positions: int) -> None: ...

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: Sequence[torch.Tensor],
        meta: AttentionMetadata,
    ) -> torch.Tensor:
        """Hidden states [T, hidden_size] of token_ids [T] at positions [T], before the final norm.

        kv_cache: of each layer, [2, num_blocks, block_size, num_kv_heads, head_dim].
        """
        ...

    def last_hidden_state(self, hidden: torch.Tensor) -> torch.Tensor:
        """The final norm over hidden [R, hidden_size]: what pooling averages and the head multiplies."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [R, vocab_size] of hidden [R, hidden_size]; call it with the rows that are sampled only."""
        ...


class _Family(NamedTuple):
    """module:class of each, below argosy_engine.models"""

    config: str
    model: str


_LLAMA = _Family("llama_config:LlamaConfig", "decoder:Decoder")
_GEMMA = _Family("gemma_config:GemmaConfig", "gemma:Gemma")
_FAMILIES = {
    "GPT2LMHeadModel": _Family("gpt2_config:GPT2Config", "gpt2:GPT2"),
    "Gemma2ForCausalLM": _GEMMA,
    "Gemma3ForCausalLM": _GEMMA,
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "OPTForCausalLM": _Family("opt_config:OPTConfig", "opt:OPT"),
    "Qwen2ForCausalLM": _LLAMA,
    "Qwen3ForCausalLM": _LLAMA,
    "Qwen3MoeForCausalLM": _Family("llama_config:Qwen3MoeConfig", "qwen3_moe:Qwen3Moe"),
}


def config_class(architecture: str) -> type[ModelConfig]:
    """
    Raises:
        ConfigError: no such architecture; the message lists what there is.
    """
    family = _FAMILIES.get(architecture)
    if family is None:
        raise ConfigError(
            f"architecture {architecture} is not supported; there is: {', '.join(sorted(_FAMILIES))}"
        )
    return _load(family.config)


def model_class(architecture: str) -> type[CausalLM]:
    """The model of an architecture that `config_class` knows."""
    return _load(_FAMILIES[architecture].model)


def architectures() -> list[str]:
    return sorted(_FAMILIES)


def _load(target: str) -> type:
    module, _, name = target.partition(":")
    return getattr(import_module(f"argosy_engine.models.{module}"), name)
