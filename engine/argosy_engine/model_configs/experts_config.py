"""Mixtures of experts as configs describe them: how a router's logits choose experts, and how a checkpoint stores the
experts. No torch."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from argosy_engine.model_configs.model_config import Positive, Size

Count = Annotated[int, Meta(ge=1, le=4096)]
ExpertLayer = Literal["gate", "up", "down"]
EXPERT_LAYERS: tuple[ExpertLayer, ...] = ("gate", "up", "down")
ExpertActivation = Literal["silu", "gelu_pytorch_tanh", "swigluoai", "relu2"]
"""What an expert makes of its gate and up projections: silu(gate) * up, gelu(gate) * up by the approximation with tanh,
or gpt-oss' (up + 1) * gate * sigmoid(1.702 gate), of gates of at most 7 and ups within 7; the names are vLLM's. Experts
with relu2 have no gate: relu(up) ** 2 (Nemotron-H)."""


class RoutingSpec(Struct, frozen=True, kw_only=True):
    """Which experts a token takes, and with which weights."""

    num_experts: Count
    experts_per_token: Count
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """What logits become: the softmax over all experts, or the sigmoid of each (DeepSeek-V3, arXiv 2412.19437). The
    experts of the highest scores are taken, and these are their weights."""
    normalises: bool = False
    """Whether a token's weights are scaled to sum to 1; for softmax this is the softmax over the chosen experts."""
    epsilon: Annotated[float, Meta(gt=0.0, lt=1.0)] = 1e-20
    """Added to the sum that they are divided by to be scaled so."""
    scaling: Positive = 1.0
    """Factor on the weights."""
    scales_inputs: bool = False
    """Whether weights are factors on what experts get, instead of on what they give (Llama 4)."""
    has_expert_scales: bool = False
    """Whether a token's weights are multiplied by a number per expert (Gemma 4)."""
    has_correction: bool = False
    """Whether a number per expert is added to scores where experts are chosen, and to weights not (arXiv
    2408.15664)."""
    num_groups: Count = 1
    groups_per_token: Count = 1
    """A token takes experts of this many groups of consecutive ones, those of the highest scores."""
    group_score: Literal["best", "best_two"] = "best_two"
    """Of a group: the score of its best expert (DeepSeek-V2), or the sum of its best two (V3)."""

    def __post_init__(self) -> None:
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok {self.experts_per_token} exceeds num_experts {self.num_experts}"
            )
        if self.num_experts % self.num_groups:
            raise ValueError(f"n_group {self.num_groups} does not divide the {self.num_experts} experts")
        if self.groups_per_token > self.num_groups:
            raise ValueError(f"topk_group {self.groups_per_token} exceeds n_group {self.num_groups}")
        size = self.num_experts // self.num_groups
        if self.groups_per_token * size < self.experts_per_token:
            raise ValueError(
                f"topk_group {self.groups_per_token} groups of {size} experts have fewer than num_experts_per_tok "
                f"{self.experts_per_token}"
            )
        if self.has_groups and self.group_score == "best_two" and size < 2:
            raise ValueError(f"n_group {self.num_groups}: groups of one expert have no best two")

    @property
    def has_groups(self) -> bool:
        """Whether groups rule out experts."""
        return self.groups_per_token < self.num_groups

    @property
    def is_plain(self) -> bool:
        """Whether the highest logits decide, and weights are their softmax."""
        return self.scores == "softmax" and not self.has_correction and not self.has_groups


class ExpertNames(Struct, frozen=True, kw_only=True):
    """How a checkpoint calls the experts of a layer, after the prefix of its MLP.

    Either each expert's projections by themselves, or all experts' in two tensors.
    """

    experts: str = "experts."
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    """Of one expert, after `experts` and its number."""
    stacked: tuple[str, str] | None = None
    """After `experts`: gate and up of all, [num_experts, 2 * inner, hidden], and down, [num_experts, hidden, inner]."""
    or_stacked: tuple[str, str] | None = None
    """The same, of families of which some checkpoints have these and others each expert's (`checkpoint.stored_tensors`
    finds out); None: all checkpoints are alike."""
    is_transposed: bool = False
    """Whether the last two dimensions of those are exchanged (gpt-oss)."""
    may_be_transposed: bool = False
    """Whether they are in some checkpoints (Qwen3-VL), which their shapes tell: no two sizes are equal."""
    is_interleaved: bool = False
    """Whether gates and ups take turns, instead of all gates before all ups (gpt-oss)."""
    biases: tuple[str, str] | None = None
    """Of those, [num_experts, 2 * inner] and [num_experts, hidden]; None: there are none."""
    router: str = "gate"
    """The router's linear layer."""
    correction: str = "gate.e_score_correction_bias"
    """See `RoutingSpec.has_correction`; [num_experts], maybe with dimensions of size 1."""
    scales: str = ""
    """See `RoutingSpec.has_expert_scales`; [num_experts]."""

    def of(self, layer: ExpertLayer) -> str:
        return {"gate": self.gate, "up": self.up, "down": self.down}[layer]


class ExpertsConfig(Struct, frozen=True, kw_only=True):
    """The mixtures of experts of a decoder."""

    routing: RoutingSpec
    inner: Size
    """Intermediate size of one expert."""
    is_sparse: tuple[bool, ...]
    """Of each layer; the others have a gated MLP."""
    activation: ExpertActivation = "silu"
    names: ExpertNames = ExpertNames()
    has_router_bias: bool = False
    has_float32_router: bool = False
    """Whether routers compute in float32 in every dtype: in bfloat16 a few tokens in a hundred get other experts."""
    mlp: str = "mlp."
    """What an MLP is called in its layer."""
    shared_size: Annotated[int, Meta(ge=0, le=1 << 24)] = 0
    """Intermediate size of the MLP that all tokens take besides; 0: there is none."""
    shared: str = "shared_experts"
    """Its name in the sparse MLP."""
    has_shared_gate: bool = False
    """Whether its output is multiplied by the sigmoid of another linear layer's, called like it with `_gate`."""
    latent_size: Annotated[int, Meta(ge=0, le=1 << 24)] = 0
    """Elements of what experts get and give, between two linear layers that they share (Nemotron 3 Super); 0: they get
    the hidden states."""

    def divided_sizes(self, of_others: dict[str, int], has_whole_experts: bool) -> dict[str, int]:
        """Add to the sizes of a decoder's other parts what `ModelConfig.divided_sizes` returns for these."""
        sizes = dict(of_others)
        if not has_whole_experts:
            sizes["moe_intermediate_size"] = self.inner
        if self.shared_size:
            sizes["intermediate size of shared experts"] = self.shared_size
        if all(self.is_sparse):
            del sizes["intermediate_size"]  # of dense layers
        return sizes
