"""AttentionParams: the constants of one layer's attention that a model's config determines. LatentAttentionParams: the
same of multi-head latent attention. StateParams: the same of a layer that keeps a state instead of keys and values. No
torch."""

from __future__ import annotations

from math import prod
from typing import Literal

import msgspec
from msgspec import Struct

from argosy_engine.attention.kv_cache_spec import (
    ChunkedAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    RecurrentStateSpec,
    SlidingWindowSpec,
)

WORKSPACE_BYTES = 256 << 20
"""Limit on the gathered keys and values, or the scores, that the torch backend materialises at a time. Exceeded only
where a single request, or a single query, takes more."""


class AttentionParams(Struct, frozen=True, kw_only=True):
    """Constants of one layer's causal, grouped-query attention."""

    num_heads: int
    num_kv_heads: int
    """Divides `num_heads`."""
    head_dim: int
    scale: float
    """Factor on the scores; usually 1 / sqrt(head_dim)."""
    sliding_window: int | None = None
    """Number of tokens that a token attends to, itself included; None: all tokens before it."""
    logit_softcap: float | None = None
    """Scores become cap * tanh(score / cap) (Gemma 2, arXiv 2408.00118)."""
    chunk_size: int | None = None
    """A token attends to those before it in its chunk of this many positions (Llama 4); None: there are no chunks."""
    has_sinks: bool = False
    """Whether each head has a score for no token, `AttentionWeights.sinks` (gpt-oss, arXiv 2309.17453)."""
    has_alibi: bool = False
    """Whether scores fall with the distance, by `AttentionWeights.alibi_slopes` (ALiBi, arXiv 2108.12409)."""

    def of_rank(self, tensor_parallel_size: int) -> AttentionParams:
        """Return the constants of the heads that one of several tensor-parallel ranks computes. All ranks have as many;
        KV heads are replicated if there are fewer than ranks."""
        return msgspec.structs.replace(
            self,
            num_heads=self.num_heads // tensor_parallel_size,
            num_kv_heads=max(self.num_kv_heads // tensor_parallel_size, 1),
        )

    def kv_cache_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Return the shape of the layer's KV cache, [2, num_blocks, block_size, num_kv_heads, head_dim]."""
        return 2, num_blocks, block_size, self.num_kv_heads, self.head_dim

    def kv_cache_spec(self, block_size: int, itemsize: int) -> KVCacheSpec:
        """Return what the layer keeps in a block of `block_size` tokens.

        Args:
            itemsize: bytes per element of a key or value.
        """
        page_bytes = prod(self.kv_cache_shape(1, block_size)) * itemsize
        if self.sliding_window is not None:
            return SlidingWindowSpec(page_bytes, self.sliding_window)
        if self.chunk_size is not None:
            return ChunkedAttentionSpec(page_bytes, self.chunk_size)
        return FullAttentionSpec(page_bytes)


class LatentAttentionParams(Struct, frozen=True, kw_only=True):
    """Constants of one layer's multi-head latent attention (MLA, DeepSeek-V2, arXiv 2405.04434), by the config's names.

    The cache keeps one vector per token, which all heads share: a latent of `kv_lora_rank` elements and a rotated key
    of `qk_rope_head_dim`. A head's key is a product of the latent, beside that rotated key; its value is another
    product of the latent (`backend`).
    """

    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    """Elements of a head's query and key that carry no position."""
    qk_rope_head_dim: int
    """Those that are rotated, the last; elements i and i + half of them are a pair. All heads have the same in their
    keys."""
    v_head_dim: int
    scale: float
    """Factor on the scores."""

    @property
    def qk_head_dim(self) -> int:
        """Elements of a head's query."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cached_dim(self) -> int:
        """Elements that the cache keeps of a token."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def expanded_dim(self) -> int:
        """Elements that are computed per head and token of a prompt's context where it is expanded: what is not rotated
        of keys, keys and values, and the smaller of these in the size of the other."""
        return (
            self.qk_nope_head_dim
            + self.qk_head_dim
            + self.v_head_dim
            + max(self.qk_head_dim, self.v_head_dim)
        )

    def expands(self, num_queries: int) -> bool:
        """Whether that many new tokens of a request attend with fewer operations to keys and values of their own for
        each head, once these are computed, than to the latents.

        Per head and token of context, computing them takes kv_lora_rank * (qk_nope_head_dim + v_head_dim) products,
        and saves (kv_lora_rank - qk_nope_head_dim) + (kv_lora_rank - v_head_dim) for each query.
        """
        own = self.qk_nope_head_dim + self.v_head_dim
        return num_queries * (2 * self.kv_lora_rank - own) > self.kv_lora_rank * own

    def of_rank(self, tensor_parallel_size: int) -> LatentAttentionParams:
        """Return the constants of the heads that one of several tensor-parallel ranks computes. Each keeps all of
        a latent."""
        return msgspec.structs.replace(self, num_heads=self.num_heads // tensor_parallel_size)

    def kv_cache_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Return the shape of the layer's cache, [num_blocks, block_size, kv_lora_rank + qk_rope_head_dim]."""
        return num_blocks, block_size, self.cached_dim

    def kv_cache_spec(self, block_size: int, itemsize: int) -> KVCacheSpec:
        """Return what the layer keeps in a block of `block_size` tokens.

        Args:
            itemsize: bytes per element of a latent.
        """
        return FullAttentionSpec(prod(self.kv_cache_shape(1, block_size)) * itemsize)


LayerParams = AttentionParams | LatentAttentionParams
"""Of a layer that keeps something of every token."""


class StateTensor(Struct, frozen=True):
    """One tensor of a layer's state."""

    shape: tuple[int, ...]
    """Of one request."""
    dtype: Literal["model", "float32"]
    """`model`: the dtype that the model computes in."""
    divided_dim: int | None = None
    """Dimension that tensor-parallel ranks divide among them; None: the layer is not divided."""
    divided_groups: tuple[int, int] = (0, 0)
    """Number and size of groups that end this dimension. Each rank has one at least: several have the same if there are
    more ranks than groups."""

    def of_rank(self, tensor_parallel_size: int) -> StateTensor:
        """Return one rank's part."""
        if self.divided_dim is None:
            return self
        shape, (groups, size) = list(self.shape), self.divided_groups
        divided = shape[self.divided_dim] - groups * size
        own = max(groups // tensor_parallel_size, min(groups, 1))
        shape[self.divided_dim] = divided // tensor_parallel_size + own * size
        return msgspec.structs.replace(self, shape=tuple(shape), divided_groups=(own, size))

    def num_bytes(self, itemsize: int) -> int:
        return prod(self.shape) * (4 if self.dtype == "float32" else itemsize)


class StateParams(Struct, frozen=True):
    """What a layer keeps of all tokens of a request: the last inputs of a convolution, a recurrent state."""

    tensors: tuple[StateTensor, ...]

    def of_rank(self, tensor_parallel_size: int) -> StateParams:
        """Return what the layer keeps on one of several tensor-parallel ranks."""
        return StateParams(tuple(tensor.of_rank(tensor_parallel_size) for tensor in self.tensors))

    def kv_cache_spec(self, itemsize: int) -> RecurrentStateSpec:
        """Return what the layer keeps per request.

        Args:
            itemsize: bytes per element of the model's dtype.
        """
        return RecurrentStateSpec(sum(tensor.num_bytes(itemsize) for tensor in self.tensors))


class DeltaNetParams(Struct, frozen=True, kw_only=True):
    """Constants of a Gated DeltaNet (arXiv 2412.06464): heads with the gated delta rule, behind a short convolution."""

    num_key_heads: int
    """Of queries, too."""
    num_value_heads: int
    """A multiple of `num_key_heads`: so many consecutive ones share queries and keys."""
    key_dim: int
    value_dim: int
    kernel_size: int
    """Tokens that the convolution sees, the newest included."""

    @property
    def num_channels(self) -> int:
        """Of the convolution: of all queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_values

    @property
    def num_values(self) -> int:
        """Elements of the values of all heads."""
        return self.num_value_heads * self.value_dim

    @property
    def state(self) -> StateParams:
        """The last inputs of the convolution, [kernel_size - 1, num_channels], and the heads' states."""
        return StateParams(
            (
                StateTensor((self.kernel_size - 1, self.num_channels), "model", divided_dim=1),
                StateTensor((self.num_value_heads, self.key_dim, self.value_dim), "float32", divided_dim=0),
            )
        )

    def of_rank(self, tensor_parallel_size: int) -> DeltaNetParams:
        """Return the constants of the heads that one of several tensor-parallel ranks computes."""
        return msgspec.structs.replace(
            self,
            num_key_heads=self.num_key_heads // tensor_parallel_size,
            num_value_heads=self.num_value_heads // tensor_parallel_size,
        )


class MambaParams(Struct, frozen=True, kw_only=True):
    """Constants of a Mamba-2 layer (arXiv 2405.21060): heads of a selective state space, behind a short convolution."""

    num_heads: int
    head_dim: int
    num_groups: int
    """Divides `num_heads`: the consecutive heads of a group share B and C."""
    state_size: int
    kernel_size: int
    """Tokens that the convolution sees, the newest included."""
    norm: Literal["after_gate", "before_gate"] | None = "after_gate"
    """RMSNorm of each group's outputs, after or before they are multiplied by silu(z); None: there is only the gate."""
    group_ranks: int = 1
    """Tensor-parallel ranks that share each group. Each has B and C of the group, and some of its heads."""

    @property
    def num_values(self) -> int:
        """Elements of the outputs of all heads, and of z."""
        return self.num_heads * self.head_dim

    @property
    def num_channels(self) -> int:
        """Of the convolution: x of all heads, B and C of all groups."""
        return self.num_values + 2 * self.num_groups * self.state_size

    @property
    def num_inputs(self) -> int:
        """Elements of z, x, B, C and dt."""
        return self.num_values + self.num_channels + self.num_heads

    @property
    def state(self) -> StateParams:
        """The last inputs of the convolution, [kernel_size - 1, num_channels], and the heads' states."""
        return StateParams(
            (
                StateTensor(
                    (self.kernel_size - 1, self.num_channels),
                    "model",
                    divided_dim=1,
                    divided_groups=(self.num_groups, 2 * self.state_size),
                ),
                StateTensor((self.num_heads, self.state_size, self.head_dim), "float32", divided_dim=0),
            )
        )

    def of_rank(self, tensor_parallel_size: int) -> MambaParams:
        """Return the constants of the heads that one of several tensor-parallel ranks computes, and of their groups.
        All ranks have as many; a group is on several ranks if there are fewer groups than ranks."""
        return msgspec.structs.replace(
            self,
            num_heads=self.num_heads // tensor_parallel_size,
            num_groups=max(self.num_groups // tensor_parallel_size, 1),
            group_ranks=max(tensor_parallel_size // self.num_groups, 1),
        )


class ShortConvParams(Struct, frozen=True, kw_only=True):
    """Constants of LFM2's short convolution, which mixes tokens by itself."""

    num_channels: int
    kernel_size: int
    """Tokens that the convolution sees, the newest included."""

    @property
    def state(self) -> StateParams:
        """The last inputs of the convolution, [kernel_size - 1, num_channels]."""
        return StateParams((StateTensor((self.kernel_size - 1, self.num_channels), "model", divided_dim=1),))

    def of_rank(self, tensor_parallel_size: int) -> ShortConvParams:
        """Return the constants of the channels that one of several tensor-parallel ranks computes."""
        return msgspec.structs.replace(self, num_channels=self.num_channels // tensor_parallel_size)
