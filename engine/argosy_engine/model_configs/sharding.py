"""Which part of a model one rank has: of each tensor (tensor parallel) and of the layers (pipeline parallel). No torch.

Attention is divided by heads, an MLP by its intermediate features, embedding and output head by tokens. The first
projection of a block computes a part of the features (column parallel), the last one multiplies that part, and the
partial results are summed over the ranks (row parallel). If there are fewer KV heads than ranks, several ranks hold the
same one. Design: Megatron-LM (arXiv 1909.08053), vLLM's `layers/linear.py`.

Of a pipeline, the first stage also has the embedding, the last one the final norm and the output head, with the
embedding if they are tied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from argosy_engine.attention.params import AttentionParams, DeltaNetParams, MambaParams


class Shard(NamedTuple):
    """Part of a tensor: ranges of indices along one dimension, one after the other."""

    dim: int
    ranges: tuple[range, ...]

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the part of a tensor."""
        size = sum(len(each) for each in self.ranges)
        return (*whole[: self.dim], size, *whole[self.dim + 1 :])


@dataclass(frozen=True, slots=True)
class Sharding:
    """The part of every layer that one of `size` tensor-parallel ranks has."""

    rank: int = 0
    size: int = 1
    has_whole_experts: bool = False
    """Whether a rank has some of the experts (`--enable-expert-parallel`), rather than a part of each."""
    data_rank: int = 0
    """Rank among `data_size` engine cores that divide the experts among them, and have all else each."""
    data_size: int = 1

    @property
    def divides_experts(self) -> bool:
        """Whether other ranks have other experts, or parts of them."""
        return self.size * self.data_size > 1

    def part(self, count: int) -> range:
        """Return the rank's part of features or heads, whose number `check_tensor_parallel` has checked."""
        assert count % self.size == 0
        size = count // self.size
        return range(self.rank * size, (self.rank + 1) * size)

    def _shared_part(self, count: int) -> range:
        """Return the rank's part of what several ranks have the same of if there is less of it than ranks."""
        replicas = max(self.size // count, 1)
        return Sharding(self.rank // replicas, self.size // replicas).part(count)

    def qkv(self, params: AttentionParams) -> tuple[range, range, range]:
        """Return the rank's features of q, k and v, each counted from its first."""
        heads = self.part(params.num_heads), self._shared_part(params.num_kv_heads)
        q, kv = (_scaled(each, params.head_dim) for each in heads)
        return q, kv, kv

    def delta_net(self, params: DeltaNetParams) -> tuple[range, range, range]:
        """Return the rank's channels of q, k and v of a Gated DeltaNet, each counted from its first."""
        keys = _scaled(self.part(params.num_key_heads), params.key_dim)
        return keys, keys, _scaled(self.part(params.num_value_heads), params.value_dim)

    def mamba(self, params: MambaParams) -> tuple[range, range]:
        """Return the rank's elements of all heads of a Mamba-2 layer, and those of B, which are those of C, too: of the
        groups that its heads use."""
        heads = _scaled(self.part(params.num_heads), params.head_dim)
        return heads, _scaled(self._shared_part(params.num_groups), params.state_size)

    def tokens(self, vocab_size: int) -> range:
        """Return the rank's tokens. The last rank may have fewer than the others."""
        size = -(-vocab_size // self.size)
        return range(self.rank * size, min((self.rank + 1) * size, vocab_size))

    def experts(self, num_experts: int) -> range:
        """Return the experts of which the rank has a part or the whole. Ranks may have one more than others."""
        if not self.has_whole_experts:
            return range(num_experts)
        place, count = self.data_rank * self.size + self.rank, self.data_size * self.size
        return range(place * num_experts // count, (place + 1) * num_experts // count)


WHOLE = Sharding()
"""The only rank has everything."""


def _scaled(indices: range, factor: int) -> range:
    return range(indices.start * factor, indices.stop * factor)


@dataclass(frozen=True, slots=True)
class Stage:
    """One of `size` stages."""

    index: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.size - 1

    def layers(self, count: int) -> range:
        """Return the stage's layers, of a model of `count`.

        If they cannot be divided evenly, stages before the last have one more, because the last also samples.
        """
        each, more = divmod(count, self.size)
        first = self.size - 1 - more
        """The first stage that has one more; the last never has."""
        start = self.index * each + min(max(self.index - first, 0), more)
        return range(start, start + each + (first <= self.index < self.size - 1))


WHOLE_MODEL = Stage()
"""The only stage has everything."""


def all_stages(size: int) -> list[Stage]:
    """Return the stages of a pipeline, in their order."""
    return [Stage(index, size) for index in range(size)]
