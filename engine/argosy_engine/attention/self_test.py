"""Self-test: a backend computes a small step on the device before it is trusted; a wrong one gives way to the next.

A driver, a compiler or a device may do what no test on another machine has seen. The test runs the shapes of the
model's own layers, prompts and decodes over shuffled blocks, against plain torch in float32.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from msgspec.structs import replace

from argosy_engine.attention.backend import AttentionBackend, AttentionWeights
from argosy_engine.attention.latent import LatentWeights
from argosy_engine.attention.layer import Attention, AttentionLayer, LatentAttention
from argosy_engine.attention.metadata import AttentionMetadata
from argosy_engine.attention.params import AttentionParams, LatentAttentionParams
from argosy_engine.attention.rotary import RotaryEmbedding
from argosy_engine.attention.selector import AUTO, AttentionNeeds, BackendChoice, load_backend, select_backend
from argosy_engine.attention.torch_attn import TorchBackend
from argosy_engine.errors import ConfigError

_MAX_ERROR_RATIO = 2.0
"""How many times torch's error in the same dtype a backend's error may be."""
_FLOOR = 1e-4
"""Error that is always allowed; torch in float32 has none against itself."""
_Step = Sequence[tuple[int, int]]
"""First and end position of the tokens that each of three requests computes."""
_STEPS: Sequence[_Step] = (
    ((0, 37), (0, 90), (0, 5)),
    ((37, 38), (90, 91), (5, 33)),
    ((38, 39), (91, 92), (33, 34)),
)
"""Prompts; two decodes and a chunk; decodes alone, whose kernels have other tiles and split the keys."""
_FIRST_TOKENS: Sequence[_Step] = (((0, 1), (0, 1), (0, 1)),)
_MAX_TOKENS = 96
_TABLE_TOKENS = 1024
"""What the block table has room for, by which kernels choose how far they split the keys of a decode."""
_MAX_WINDOW = 40
"""Longer sliding windows are shortened to this, so that the test sees their ends."""


def working_backend(
    needs: AttentionNeeds,
    forced: str,
    unavailable: Mapping[str, str],
    dtype: torch.dtype,
    device: torch.device,
    test_layers: Callable[[], str | None],
) -> BackendChoice:
    """Choose a backend that passes the self-test on the device. Plain torch is not tested.

    Args:
        forced: `--attention-backend`.
        unavailable: see `select_backend`.
        test_layers: returns why the Triton kernels of the other layers, which come with some backends, must not be
            used, or None.

    Raises:
        ConfigError: the forced backend cannot serve, or fails the test.
    """
    broken = dict(unavailable)
    while True:
        choice = select_backend(needs, forced, broken)
        if choice.name == "torch":
            return choice
        reason = self_test(choice.name, needs, dtype, device)
        if reason is None and load_backend(choice.name, dtype).uses_triton:
            reason = test_layers()
        if reason is None:
            return choice
        if forced != AUTO:
            raise ConfigError(
                f"--attention-backend {forced} fails its test on this device: {reason}; use --attention-backend torch"
            )
        broken[choice.name] = reason


@torch.inference_mode()
def self_test(name: str, needs: AttentionNeeds, dtype: torch.dtype, device: torch.device) -> str | None:
    """Run a backend on the device with the shapes of the model's layers; return why it must not be used, or None.

    Raises:
        ConfigError: the backend has left the device unusable for this process.
    """
    has_fp8 = needs.has_fp8_kv_cache
    for layer in _test_layers(needs, dtype, device):
        for variant in layer.variants:
            try:
                outputs = layer.outputs(load_backend(name, dtype, has_fp8_kv_cache=has_fp8), dtype, variant)
                _synchronize(device)  # a kernel's fault shows here
            except Exception as error:  # whatever a compiler or a driver raise
                reason = f"it failed with {type(error).__name__}: {str(error)[:300]}"
                _check_usable(name, device, reason)
                return reason
            truth, theirs = (
                layer.outputs(TorchBackend(each, has_fp8_kv_cache=has_fp8), each, variant)
                for each in (torch.float32, dtype)
            )
            allowed = _MAX_ERROR_RATIO * _error(theirs, truth) + _FLOOR
            error = _error(outputs, truth)
            if not error <= allowed:  # NaN is an error, too
                return f"it is wrong by {error:.2g} where {allowed:.2g} is allowed ({layer.label})"
    return None


class _Variant(NamedTuple):
    """Whether heads are normed and rotated, which are kernels of their own, and the steps that are computed so."""

    has_norms: bool
    has_rotary: bool
    steps: Sequence[_Step]


_VARIANTS = (
    _Variant(True, True, _STEPS),
    _Variant(False, True, _FIRST_TOKENS),
    _Variant(False, False, _FIRST_TOKENS),
)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _check_usable(name: str, device: torch.device, reason: str) -> None:
    try:
        _synchronize(device)
    except Exception as error:
        raise ConfigError(
            f"attention backend {name} has left {device} unusable: {reason}; start again with --attention-backend torch"
        ) from error


def _error(outputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> float:
    return max(
        float((ours.float() - theirs).abs().max()) for ours, theirs in zip(outputs, truth, strict=True)
    )


def _num_tokens(step: _Step) -> int:
    return sum(end - start for start, end in step)


class _TestLayer(ABC):
    """One layer's random weights and inputs, the same for every backend."""

    label: str
    variants: Sequence[_Variant] = _VARIANTS

    def __init__(self, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._block_size, self._dtype, self._device = block_size, dtype, device
        self._generator = torch.Generator().manual_seed(0)
        blocks = -(-_MAX_TOKENS // block_size)
        self._num_blocks = 3 * blocks
        order = torch.randperm(self._num_blocks, generator=self._generator).to(torch.int32)
        self._table = torch.zeros(3, -(-_TABLE_TOKENS // block_size), dtype=torch.int32)
        self._table[:, :blocks] = order.view(3, blocks)

    @abstractmethod
    def outputs(self, backend: AttentionBackend, dtype: torch.dtype, variant: _Variant) -> list[torch.Tensor]:
        """Compute the steps and return their results."""

    def _drawn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(self._device, self._dtype)

    def _frequencies(self, width: int) -> torch.Tensor:
        return (1e4 ** (-torch.arange(0, width // 2) * 2 / width)).float()

    def _bind_stale(self, attention: AttentionLayer) -> None:
        """Give a layer a cache of stale values, NaN included, which must not reach a result."""
        shape = attention.kv_cache_shape(self._num_blocks, self._block_size)
        attention.bind(torch.full(shape, torch.nan, device=self._device).to(attention.kv_cache_dtype))

    def _metadata(self, step: _Step) -> AttentionMetadata:
        starts = np.array([0, *itertools.accumulate(end - start for start, end in step)], np.int32)
        seq_lens = np.array([end for _, end in step], np.int32)
        rows = torch.tensor([row for row, (start, end) in enumerate(step) for _ in range(start, end)])
        positions = torch.cat([torch.arange(start, end) for start, end in step])
        blocks = self._table[rows, positions // self._block_size]
        slots = blocks.long() * self._block_size + positions % self._block_size
        return AttentionMetadata(
            num_decodes=sum(end - start == 1 for start, end in step),
            query_start_loc=torch.from_numpy(starts).to(self._device),
            seq_lens=torch.from_numpy(seq_lens).to(self._device),
            positions=positions.to(self._device),
            slot_mapping=slots.to(self._device),
            block_table=self._table.to(self._device),
            query_start_loc_cpu=starts,
            seq_lens_cpu=seq_lens,
        )


class _HeadsLayer(_TestLayer):
    """Attention to keys and values of heads."""

    def __init__(
        self, params: AttentionParams, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(block_size, dtype, device)
        window = params.sliding_window and min(params.sliding_window, _MAX_WINDOW)
        self._params = replace(params, sliding_window=window)
        self.label = f"{params.num_heads} heads of {params.head_dim}, {params.num_kv_heads} KV heads"
        width = (params.num_heads + 2 * params.num_kv_heads) * params.head_dim
        self._qkv = [self._drawn(_num_tokens(step), width) for step in _STEPS]
        norms = 1 + torch.rand(2, params.head_dim, generator=self._generator)
        self._norms = norms.to(device, dtype)
        self._sinks = torch.randn(params.num_heads, generator=self._generator).to(device)

    def outputs(self, backend: AttentionBackend, dtype: torch.dtype, variant: _Variant) -> list[torch.Tensor]:
        frequencies = self._frequencies(self._params.head_dim)
        rotary = (
            RotaryEmbedding(frequencies, _MAX_TOKENS, dtype, self._device) if variant.has_rotary else None
        )
        q_norm, k_norm = self._norms.to(dtype) if variant.has_norms else (None, None)
        weights = AttentionWeights(rotary, q_norm, k_norm, 1e-6)
        if self._params.has_sinks:
            weights = weights._replace(sinks=self._sinks)
        if backend.kv_cache_dtype is torch.float8_e4m3fn:
            k_scale, v_scale = torch.tensor([[0.5], [0.25]], device=self._device)
            weights = weights._replace(k_scale=k_scale, v_scale=v_scale)
        attention = Attention(self._params, backend, weights)
        self._bind_stale(attention)
        return [
            attention(qkv[: _num_tokens(step)].to(dtype, copy=True), self._metadata(step))
            for qkv, step in zip(self._qkv, variant.steps, strict=False)
        ]


class _LatentLayer(_TestLayer):
    """Multi-head latent attention."""

    variants = (_Variant(True, True, _STEPS),)

    def __init__(
        self, params: LatentAttentionParams, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(block_size, dtype, device)
        self._params = params
        self.label = (
            f"{params.num_heads} heads, latents of {params.kv_lora_rank} and {params.qk_rope_head_dim}"
        )
        width = params.num_heads * params.qk_head_dim
        self._q, self._compressed = (
            [self._drawn(_num_tokens(step), size) for step in _STEPS] for size in (width, params.cached_dim)
        )
        self._norm = 1 + torch.rand(params.kv_lora_rank, generator=self._generator)
        up = self._drawn(params.num_heads, params.qk_nope_head_dim + params.v_head_dim, params.kv_lora_rank)
        self._kv_b = up * params.kv_lora_rank**-0.5

    def outputs(self, backend: AttentionBackend, dtype: torch.dtype, variant: _Variant) -> list[torch.Tensor]:
        frequencies = self._frequencies(self._params.qk_rope_head_dim)
        rotary = RotaryEmbedding(frequencies, _MAX_TOKENS, dtype, self._device)
        norm = self._norm.to(self._device, self._dtype).to(dtype)
        kv_b = self._kv_b.to(dtype)
        weights = LatentWeights.of_kv_b(kv_b, self._params.qk_nope_head_dim, rotary, norm, 1e-6)
        attention = LatentAttention(self._params, backend, weights)
        self._bind_stale(attention)
        return [
            attention(q.to(dtype, copy=True), compressed.to(dtype), self._metadata(step))
            for q, compressed, step in zip(self._q, self._compressed, variant.steps, strict=True)
        ]


def _test_layers(needs: AttentionNeeds, dtype: torch.dtype, device: torch.device) -> Iterator[_TestLayer]:
    """Yield each kind of the model's layers once."""
    for heads in dict.fromkeys(needs.plain_layers):
        yield _HeadsLayer(heads, needs.block_size, dtype, device)
    for latent in dict.fromkeys(needs.latent_layers):
        yield _LatentLayer(latent, needs.block_size, dtype, device)
