"""Weights: the source from which a model's constructor takes its tensors, by name and shape.

There are three sources: `WeightPlan` records what the model asks for, `SafetensorsWeights` reads a checkpoint, and
`DummyWeights` draws random numbers. Safetensors is the only supported format, because it cannot carry code. Files are
memory-mapped, and each tensor is read when the model takes it, so peak memory is the model plus one (fused) tensor. A
tensor-parallel rank reads only its part. For GPUs `streamed_weights` reads ahead.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from xxhash import xxh64_intdigest

from argosy_engine.checkpoint.shards import checkpoint_shards
from argosy_engine.checkpoint.stored_tensors import HEAD, NO_HEAD, NO_SCORE, SCORE
from argosy_engine.errors import ConfigError
from argosy_engine.model_configs.model_config import may_not_read
from argosy_engine.model_configs.sharding import Shard
from argosy_engine.model_configs.wrapper_config import text_tensors

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES = {
    **_FLOATS,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}
"""Dtypes that a layer may take, by their names in safetensors."""
_Source = TypeVar("_Source")
_MAX_BYTES = 64 << 10
_MAX_NAMED = 6
"""Tensor names that an error message lists for each kind of fault."""


class Weights(ABC):
    """Source of a model's tensors.

    Attributes:
        num_bytes: bytes of the tensors taken so far, in the engine's dtype.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self.num_bytes = 0

    @abstractmethod
    def take(
        self, name: str, *shape: int, dtype: torch.dtype | None = None, shard: Shard | None = None
    ) -> torch.Tensor:
        """Return the tensor on the engine's device.

        Args:
            shape: of the whole tensor.
            dtype: of the tensor in the checkpoint, which is not converted. None: any floating point dtype, converted
                to the engine's.
            shard: the part to return; None: the whole.
        """

    @abstractmethod
    def take_scale(
        self,
        name: str,
        count: int | tuple[int, ...],
        shard: Shard | None = None,
        *,
        is_signed: bool = False,
    ) -> torch.Tensor:
        """Return scale factors, or other numbers that keep their precision, float32, on the engine's device.

        The checkpoint may store them in any floating point dtype, and with dimensions of size 1.

        Args:
            count: number of scales, or their shape.
            shard: the part to return; None: the whole.
            is_signed: whether they may be 0 or less.

        Raises:
            ConfigError: not all of them are finite, or greater than 0.
        """

    def find(
        self, name: str, *shape: int, dtype: torch.dtype, shard: Shard | None = None
    ) -> torch.Tensor | None:
        """Return a tensor that not every checkpoint has, as `take` does; None: this one has not."""
        return None

    def take_bytes(self, name: str) -> torch.Tensor:
        """Return a small tensor of bytes, uint8, on the CPU; empty where there is no checkpoint.

        Raises:
            ConfigError: it is none, or of more than 64 KiB.
        """
        return torch.empty(0, dtype=torch.uint8)

    def find_scale(self, names: Sequence[str]) -> torch.Tensor | None:
        """Return the first of these scales that the checkpoint has, float32 [1] on the engine's device.

        Raises:
            ConfigError: it is not one number that is finite and greater than 0.
        """
        return None


class WeightPlan(Weights):
    """Records names, shapes and bytes of what a model takes, on the meta device: no memory used, no file read.

    Attributes:
        shapes: of the whole tensors.
        elements: number of elements taken of each.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype, torch.device("meta"))
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.elements: dict[str, int] = {}
        self.shards: dict[str, Shard | None] = {}
        """The part taken of each; None: the whole."""
        self.stored_dtypes: dict[str, torch.dtype] = {}
        """Dtypes of tensors that are taken as they are stored."""
        self.scales: set[str] = set()
        """Names taken by `take_scale`."""
        self.optional: set[str] = set()
        """Names of tensors that the checkpoint may lack."""
        self.documents: set[str] = set()
        """Names taken by `take_bytes`."""

    def take(
        self, name: str, *shape: int, dtype: torch.dtype | None = None, shard: Shard | None = None
    ) -> torch.Tensor:
        self.shapes[name], self.shards[name] = shape, shard
        if dtype is not None:
            self.stored_dtypes[name] = dtype
        taken = shape if shard is None else shard.shape(shape)
        tensor = torch.empty(taken, dtype=dtype or self.dtype, device=self.device)
        self.elements[name] = tensor.numel()
        self.num_bytes += tensor.nbytes
        return tensor

    def take_scale(
        self,
        name: str,
        count: int | tuple[int, ...],
        shard: Shard | None = None,
        *,
        is_signed: bool = False,
    ) -> torch.Tensor:
        shape = _scale_shape(count)
        self.shapes[name], self.shards[name] = shape, shard
        self.scales.add(name)
        tensor = torch.empty(shape if shard is None else shard.shape(shape), device=self.device)
        self.elements[name] = tensor.numel()
        self.num_bytes += tensor.nbytes
        return tensor

    def find(
        self, name: str, *shape: int, dtype: torch.dtype, shard: Shard | None = None
    ) -> torch.Tensor | None:
        self.optional.add(name)
        return self.take(name, *shape, dtype=dtype, shard=shard)

    def take_bytes(self, name: str) -> torch.Tensor:
        self.documents.add(name)
        return super().take_bytes(name)


class DummyWeights(Weights):
    """Random weights of the right shapes, for benchmarks without a checkpoint.

    A tensor depends on the seed, its name and the kind of device only, so ranks take parts of the same model. A GPU
    draws its own, because a CPU would need a minute for 8 billion.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        super().__init__(dtype, device)
        self._seed = seed % (1 << 63)

    def take(
        self, name: str, *shape: int, dtype: torch.dtype | None = None, shard: Shard | None = None
    ) -> torch.Tensor:
        if len(shape) == 1:
            tensor = torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
        else:
            device = self.device if torch.cuda.is_available() else torch.device("cpu")
            generator = torch.Generator(device).manual_seed(xxh64_intdigest(name.encode(), self._seed) >> 1)
            tensor = torch.randn(shape, generator=generator, device=device) * shape[-1] ** -0.5
        if shard is not None:
            tensor = torch.cat([_narrow(tensor, shard.dim, each) for each in shard.ranges], dim=shard.dim)
        tensor = tensor.to(device=self.device, dtype=dtype or self.dtype)
        self.num_bytes += tensor.nbytes
        return tensor

    def take_scale(
        self,
        name: str,
        count: int | tuple[int, ...],
        shard: Shard | None = None,
        *,
        is_signed: bool = False,
    ) -> torch.Tensor:
        shape = _scale_shape(count)
        return torch.ones(shape if shard is None else shard.shape(shape), device=self.device)


class SafetensorsWeights(Weights):
    """Reads tensors from a checkpoint's safetensors files.

    Args:
        prefix: prefix of the base model's tensor names ("model."). Checkpoints saved from the base model lack it.
        is_wrapped: whether the tensors are those of a wrapper's text part.

    Attributes:
        on_read: called with the number of bytes of the file whenever some have been taken, at least after each tensor.

    Raises (from every method):
        ConfigError: a file is missing, truncated or not safetensors.
    """

    def __init__(
        self, path: Path, dtype: torch.dtype, device: torch.device, *, prefix: str, is_wrapped: bool = False
    ) -> None:
        super().__init__(dtype, device)
        self.path = path
        self._prefix = prefix
        self._is_wrapped = is_wrapped
        self.on_read: Callable[[int], None] = lambda num_bytes: None
        self._files = self._named(_open_checkpoint(path))

    def _named(self, tensors: Mapping[str, _Source]) -> dict[str, _Source]:
        """Return a checkpoint's tensors by the names that the model uses."""
        found = text_tensors(tensors) if self._is_wrapped else dict(tensors)
        if any(name.startswith(self._prefix) for name in found):
            return found
        return {prefixed(name, self._prefix): source for name, source in found.items()}

    def take(
        self, name: str, *shape: int, dtype: torch.dtype | None = None, shard: Shard | None = None
    ) -> torch.Tensor:
        stored = self._read(name, shard)
        tensor = stored.to(device=self.device, dtype=dtype or self.dtype)
        self.num_bytes += tensor.nbytes
        self.on_read(stored.nbytes)
        return tensor

    def take_scale(
        self,
        name: str,
        count: int | tuple[int, ...],
        shard: Shard | None = None,
        *,
        is_signed: bool = False,
    ) -> torch.Tensor:
        stored = self._read_scale(name, _scale_shape(count), is_signed=is_signed)
        if shard is not None:
            stored = torch.cat([_narrow(stored, shard.dim, each) for each in shard.ranges], dim=shard.dim)
        self.on_read(stored.nbytes)
        scale = stored.to(device=self.device, dtype=torch.float32)
        self.num_bytes += scale.nbytes
        return scale

    def find(
        self, name: str, *shape: int, dtype: torch.dtype, shard: Shard | None = None
    ) -> torch.Tensor | None:
        return self.take(name, *shape, dtype=dtype, shard=shard) if name in self._files else None

    def take_bytes(self, name: str) -> torch.Tensor:
        file, stored_name = self._files[name]
        header = file.get_slice(stored_name)
        shape, dtype = header.get_shape(), header.get_dtype()
        if dtype != "U8" or len(shape) != 1 or shape[0] > _MAX_BYTES:
            raise ConfigError(f"{name} of {self.path} is {shape} {dtype}, not bytes of a JSON object")
        return self._read(name)

    def find_scale(self, names: Sequence[str]) -> torch.Tensor | None:
        for name in names:
            if name in self._files:
                return self._read_scale(name, (1,)).to(device=self.device, dtype=torch.float32)
        return None

    def _read_scale(self, name: str, wanted: tuple[int, ...], *, is_signed: bool = False) -> torch.Tensor:
        """Read whole scale factors of a shape as they are stored, on the CPU.

        Raises:
            ConfigError: they are of another shape or dtype, or not all of them are finite, or greater than 0.
        """
        file, stored_name = self._files[name]
        header = file.get_slice(stored_name)
        shape, dtype = header.get_shape(), header.get_dtype()
        if dtype not in _FLOATS or not _is_scale_shape(shape, wanted):
            expected = "x".join(map(str, wanted))
            text = "a scale is one number" if expected == "1" else f"there are {expected} scales"
            raise ConfigError(f"{name} of {self.path} is {list(shape)} {dtype}: {text}")
        stored = self._read(name).reshape(wanted)
        values = stored.float()
        if is_signed:
            if not values.isfinite().all():
                raise ConfigError(f"{name} of {self.path} has numbers that are not finite; download it again")
        elif not (values.isfinite() & (values > 0)).all():
            raise ConfigError(
                f"{name} of {self.path} has scales that are not finite or not greater than 0; quantise again or take "
                "the unquantised checkpoint"
            )
        return stored

    def _read(self, name: str, shard: Shard | None = None) -> torch.Tensor:
        file, stored_name = self._files[name]
        try:
            return file.get_tensor(stored_name) if shard is None else _read_part(file, stored_name, shard)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"cannot read tensor {stored_name} of {self.path}: {error}") from None

    @property
    def names(self) -> Collection[str]:
        """The tensors of the checkpoint, by the names that the model uses."""
        return self._files.keys()

    def slice_of(self, name: str) -> Any:
        """Return safetensors' own reader of a tensor, which reads when it is indexed."""
        file, stored_name = self._files[name]
        return file.get_slice(stored_name)

    def check(self, plan: WeightPlan, ignored: Sequence[str]) -> None:
        """Compare the checkpoint's headers with what the model will take, before any data is read.

        Args:
            ignored: patterns of tensor names that the checkpoint may contain unused.

        Raises:
            ConfigError: tensors are missing, unexpected, of another shape or quantised; the message names them.
        """
        slices = {name: file.get_slice(stored) for name, (file, stored) in self._files.items()}
        missing = [name for name in plan.shapes if name not in slices and name not in plan.optional]
        missing += sorted(plan.documents - slices.keys())
        unexpected = [
            name
            for name in slices
            if name not in plan.shapes
            and name not in plan.documents
            and not any(re.fullmatch(pattern, name) for pattern in ignored)
        ]
        # AutoGPTQ once wrote biases for layers that have none.
        unexpected = [name for name in unexpected if not self.is_bias_of_zeros(name)]
        misshaped, quantised = [], []
        for name, shape in plan.shapes.items():
            if name not in slices:
                continue
            found, dtype = tuple(slices[name].get_shape()), slices[name].get_dtype()
            wanted = plan.stored_dtypes.get(name)
            if dtype not in _FLOATS if wanted is None else DTYPES.get(dtype) is not wanted:
                quantised.append(f"{name} is {dtype}")
            elif not _is_scale_shape(found, shape) if name in plan.scales else found != shape:
                misshaped.append(f"{name} is {list(found)}, not {list(shape)}")
        faults = [
            ("missing", missing),
            ("unexpected", unexpected),
            ("of another shape", misshaped),
            ("quantised or not floating point", quantised),
        ]
        if any(names for _, names in faults):
            text = "; ".join(f"{len(names)} {fault}: {_some(names)}" for fault, names in faults if names)
            if HEAD in missing:
                text += f"; {NO_HEAD}"
            if SCORE in missing:
                text += f"; {NO_SCORE}"
            raise ConfigError(f"the tensors of {self.path} do not fit its config.json: {text}")

    def is_bias_of_zeros(self, name: str) -> bool:
        """Whether a tensor is the bias of a layer in GPTQ, and adds nothing."""
        is_packed = name.endswith(".bias") and name.removesuffix("bias") + "qweight" in self._files
        return is_packed and not bool(self._read(name).any())

    def stored_bytes(self, plan: WeightPlan) -> int:
        """Return the bytes that what the plan takes takes up in the files. Call `check` on the plan first."""
        total = 0
        for name, count in plan.elements.items():
            if name not in self._files:  # an optional one
                continue
            file, stored = self._files[name]
            total += count * DTYPES[file.get_slice(stored).get_dtype()].itemsize
        return total


def _scale_shape(count: int | tuple[int, ...]) -> tuple[int, ...]:
    return (count,) if isinstance(count, int) else count


def _is_scale_shape(found: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether shapes are the same but for dimensions of size 1."""
    return [size for size in found if size != 1] == [size for size in wanted if size != 1]


def _read_part(file: Any, name: str, shard: Shard) -> torch.Tensor:
    """Read part of a tensor of an open file."""
    whole = file.get_slice(name)
    leading = (slice(None),) * shard.dim
    parts = [whole[(*leading, slice(each.start, each.stop))] for each in shard.ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=shard.dim)


def _narrow(tensor: torch.Tensor, dim: int, indices: range) -> torch.Tensor:
    return tensor.narrow(dim, indices.start, len(indices))


def _some(names: list[str]) -> str:
    rest = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def prefixed(name: str, prefix: str) -> str:
    """Return the name that a model uses for a tensor of a checkpoint saved from the base model."""
    return name if name.startswith(("lm_head.", "score.")) else prefix + name


def _open_checkpoint(path: Path) -> dict[str, tuple[Any, str]]:
    """Return (open file, name in it) by tensor name, over all shards."""
    tensors: dict[str, tuple[Any, str]] = {}
    for shard, wanted in checkpoint_shards(path).items():
        file = _open_file(shard)
        names = sorted(file.keys() if wanted is None else wanted.intersection(file.keys()))
        tensors |= {name: (file, name) for name in names}
    return tensors


def _open_file(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        _check_permission(path)  # of which the library says that there is no such file
        raise ConfigError(
            f"cannot read {path}: {error}; the file is cut off or damaged, download it again"
            if path.is_file()
            else f"{path} is missing"
        ) from None


def _check_permission(path: Path) -> None:
    try:
        path.open("rb").close()
    except PermissionError:
        raise may_not_read(path.parent, path) from None
    except OSError:
        return
