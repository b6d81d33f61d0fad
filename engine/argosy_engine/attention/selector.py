"""Attention backends: the registry, and the choice between them with a reason for each that was passed over. No torch.

`argosy doctor` and the worker choose with the same function. To add a backend: a module that implements
`backend.AttentionBackend`, and an entry here with what it cannot serve.

Versions of flash-attn are separate programs with separate calls: version 2 is the package `flash-attn`, version 3
(Hopper) is built from the folder `hopper` of its repository, version 4 (Hopper and Blackwell) is the package
`flash-attn-4`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from argosy_engine.attention.params import AttentionParams, LatentAttentionParams, LayerParams
from argosy_engine.errors import ConfigError
from argosy_engine.native.build import NativeUnavailable, usable_variant

if TYPE_CHECKING:
    import torch

    from argosy_engine.attention.backend import AttentionBackend


AUTO = "auto"

BIDIRECTIONAL_BACKENDS = ("cpu", "triton", "torch")
"""Backends in which tokens may attend to later ones (`AttentionMetadata.key_ends`)."""

_NO_LATENTS = "it computes no multi-head latent attention"
_ONE_PAGE = "it needs layers with the same number and size of KV heads"

_MAX_CPU_HEAD_DIM = 256
_MAX_CPU_GROUP = 48
"""Query heads per KV head that the CPU kernels support: the rows of a tile."""
MAX_TRITON_HEAD_DIM = 512
_MAX_FLASH_HEAD_DIM = 256
MAX_LATENT_DIM = 512
MAX_LATENT_ROPE_DIM = 128
MAX_TRITON_GROUP = 64
"""Query heads per KV head that the Triton kernels support: the rows of a tile."""
WIDE_TRITON_HEAD_DIM = 256
MAX_TRITON_WIDE_GROUP = 16
"""The same of larger heads than these."""


class AttentionNeeds(NamedTuple):
    """What a backend has to serve."""

    device: str
    """`cpu` or `cuda`."""
    dtype: str
    """`float32`, `bfloat16` or `float16`."""
    block_size: int
    layers: Sequence[LayerParams]
    has_fp8_kv_cache: bool = False
    has_key_ends: bool = False
    """Whether tokens of an image attend to all of it, where a backend of `BIDIRECTIONAL_BACKENDS` is chosen."""

    @property
    def plain_layers(self) -> list[AttentionParams]:
        return [layer for layer in self.layers if isinstance(layer, AttentionParams)]

    @property
    def has_strided_blocks(self) -> bool:
        """Whether layers keep different numbers of bytes, so that blocks of their caches are strided."""
        return len({layer.num_kv_heads * layer.head_dim for layer in self.plain_layers}) > 1

    @property
    def latent_layers(self) -> list[LatentAttentionParams]:
        return [layer for layer in self.layers if isinstance(layer, LatentAttentionParams)]


class BackendChoice(NamedTuple):
    name: str
    refused: Mapping[str, str]
    """The backends that would have been preferred, and why each cannot serve."""

    @property
    def uses_triton(self) -> bool:
        """See `AttentionBackend`."""
        return self.name in ("triton", "flash_attn")

    def __str__(self) -> str:
        reasons = "; ".join(f"not {name}: {reason}" for name, reason in self.refused.items())
        return f"{self.name} ({reasons})" if reasons else self.name


def select_backend(
    needs: AttentionNeeds, forced: str = AUTO, unavailable: Mapping[str, str] | None = None
) -> BackendChoice:
    """Choose the first backend that can serve, in order of preference, or check the forced one.

    Args:
        forced: `--attention-backend`.
        unavailable: backends that were found not to work in this process, with the reason.

    Raises:
        ConfigError: the forced backend cannot serve, or none can.
    """
    if needs.has_fp8_kv_cache and needs.latent_layers:
        raise ConfigError(
            "--kv-cache-dtype: no attention backend keeps the latents of multi-head latent attention in FP8; use auto"
        )
    refused: dict[str, str] = {}
    for name, backend in _BACKENDS.items():
        if forced not in (AUTO, name):
            continue
        reason = (unavailable or {}).get(name) or backend.refusal(needs)
        if reason is None:
            return BackendChoice(name, refused)
        refused[name] = reason
    raise ConfigError(
        f"--attention-backend {forced} cannot serve this model here: {refused[forced]}; use --attention-backend {AUTO}"
        if forced in refused
        else f"--attention-backend {forced} is not known; there is: {', '.join((AUTO, *_BACKENDS))}"
    )


def backend_names() -> list[str]:
    """Return the names of all backends, in order of preference."""
    return list(_BACKENDS)


def load_backend(name: str, dtype: torch.dtype, *, has_fp8_kv_cache: bool = False) -> AttentionBackend:
    """Import a backend that `select_backend` has chosen.

    Args:
        dtype: of the activations.
    """
    module, _, function = _BACKENDS[name].factory.partition(":")
    factory = getattr(import_module(f"argosy_engine.attention.{module}"), function)
    return factory(dtype, has_fp8_kv_cache=True) if has_fp8_kv_cache else factory(dtype)


def _refuse_cpu(needs: AttentionNeeds) -> str | None:
    if needs.device != "cpu":
        return "it computes on CPUs only"
    if needs.dtype not in ("float32", "bfloat16"):
        return f"it computes in float32 or bfloat16, not {needs.dtype}"
    if needs.has_fp8_kv_cache:
        return "it keeps keys and values in the model's dtype only (--kv-cache-dtype auto)"
    if needs.latent_layers:
        return _NO_LATENTS
    try:
        variant = usable_variant()
    except NativeUnavailable as unavailable:
        return str(unavailable)
    lanes = variant.lanes
    if needs.block_size % lanes:
        return f"--block-size {needs.block_size} is not a multiple of {lanes}, this CPU's vector length"
    for layer in needs.plain_layers:
        if layer.head_dim % lanes or layer.head_dim > _MAX_CPU_HEAD_DIM:
            return f"a head size of {layer.head_dim} is not a multiple of {lanes} up to {_MAX_CPU_HEAD_DIM}"
        if layer.num_heads // layer.num_kv_heads > _MAX_CPU_GROUP:
            return f"more than {_MAX_CPU_GROUP} query heads share a KV head"
    return _ONE_PAGE if needs.has_strided_blocks else None


def _refuse_triton(needs: AttentionNeeds) -> str | None:
    if needs.device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return "it computes on GPUs; on a CPU only in Triton's interpreter (TRITON_INTERPRET=1), for tests"
    if needs.device != "cuda" and needs.dtype != "float32":
        return f"Triton's interpreter computes wrongly in {needs.dtype}; use --dtype float32 there"
    if find_spec("triton") is None:
        return "triton is not installed"
    for latent in needs.latent_layers:
        if latent.kv_lora_rank > MAX_LATENT_DIM or latent.qk_rope_head_dim > MAX_LATENT_ROPE_DIM:
            return (
                f"a kv_lora_rank of {latent.kv_lora_rank} is more than {MAX_LATENT_DIM}, or a qk_rope_head_dim of "
                f"{latent.qk_rope_head_dim} more than {MAX_LATENT_ROPE_DIM}"
            )
    for layer in needs.plain_layers:
        if layer.head_dim > MAX_TRITON_HEAD_DIM:
            return f"a head size of {layer.head_dim} is more than {MAX_TRITON_HEAD_DIM}"
        if layer.head_dim > WIDE_TRITON_HEAD_DIM and (needs.device, needs.dtype) == ("cuda", "float32"):
            return (
                f"a head size of {layer.head_dim} is more than {WIDE_TRITON_HEAD_DIM}, its limit in float32"
            )
        largest = MAX_TRITON_GROUP if layer.head_dim <= WIDE_TRITON_HEAD_DIM else MAX_TRITON_WIDE_GROUP
        if layer.num_heads // layer.num_kv_heads > largest:
            return f"more than {largest} query heads share a KV head of {layer.head_dim} elements"
    return None


def _refuse_flash_attn(needs: AttentionNeeds) -> str | None:
    if needs.device != "cuda":
        return "it computes on GPUs only"
    if needs.dtype not in ("bfloat16", "float16"):
        return f"it computes in bfloat16 or float16, not {needs.dtype}"
    if needs.has_fp8_kv_cache:
        return "it keeps keys and values in the dtype of the activations, not in FP8"
    if needs.latent_layers:
        return _NO_LATENTS
    if needs.has_strided_blocks:
        return _ONE_PAGE
    if (reason := _refuse_triton(needs)) is not None:  # whose kernel writes the cache
        return reason
    for layer in needs.plain_layers:
        if layer.has_sinks:
            return "it computes no attention sinks"
        if layer.has_alibi:
            return "it computes no position biases (ALiBi)"
        if layer.chunk_size is not None:
            return f"it computes no attention in chunks of {layer.chunk_size} tokens"
        if layer.head_dim % 8 or layer.head_dim > _MAX_FLASH_HEAD_DIM:
            return f"a head size of {layer.head_dim} is not a multiple of 8 up to {_MAX_FLASH_HEAD_DIM}"
    versions = installed_versions()
    if not versions:
        return "flash-attn is not installed (pip install flash-attn)"
    if versions == (2,) and needs.block_size != V2_PAGE_SIZE:
        return f"flash-attn 2 needs --block-size {V2_PAGE_SIZE}, not {needs.block_size}"
    return None


V2_PAGE_SIZE = 256
"""Tokens of which a page of version 2 holds a multiple, and so the only `--block-size` that it can serve."""


def installed_versions() -> tuple[int, ...]:
    """Return the installed versions. Only looks for files, because an import takes seconds and starts CUDA."""
    found = []
    package = find_spec("flash_attn")
    folders = [Path(folder) for folder in package.submodule_search_locations or ()] if package else []
    if any((folder / "flash_attn_interface.py").is_file() for folder in folders):
        found.append(2)
    if find_spec("flash_attn_interface") is not None:
        found.append(3)
    if any((folder / "cute").is_dir() for folder in folders):
        found.append(4)
    return tuple(found)


def version_for(capability: tuple[int, int], installed: Collection[int]) -> int | None:
    """Return the version to use on a device of this compute capability, or None if none of the installed can."""
    by_major = {8: (2,), 9: (3, 4, 2), 10: (4, 2), 11: (4, 2)}
    return next((version for version in by_major.get(capability[0], (2,)) if version in installed), None)


def _refuse_nothing(needs: AttentionNeeds) -> str | None:
    return None


class _Backend(NamedTuple):
    refusal: Callable[[AttentionNeeds], str | None]
    """Returns why the backend cannot serve, or None. Neither imports torch nor starts a device."""
    factory: str
    """module:callable in this package; makes the backend for a dtype."""


_BACKENDS: Mapping[str, _Backend] = {
    "cpu": _Backend(_refuse_cpu, "cpu_attn:CpuBackend"),
    "triton": _Backend(_refuse_triton, "triton_attn:TritonBackend"),
    "torch": _Backend(_refuse_nothing, "torch_attn:TorchBackend"),
    "flash_attn": _Backend(_refuse_flash_attn, "flash_attn:FlashAttnBackend"),
}
"""In order of preference. `torch` serves everything, so those after it must be asked for."""
