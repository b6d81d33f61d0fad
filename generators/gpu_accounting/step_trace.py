"""StepTrace: records every operation of a step that reaches the device: launches, copies, and waits for the device.

Torch's operations are seen by a dispatch mode, our kernels by `recorded_launches`. An operation of torch counts as one
launch, although some (a sort, a softmax of long rows) take several: the count is a lower bound for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from argosy_engine.triton_kernels.launch import Launch, recorded_launches
from gpu_accounting.fake_device import FakeRuntime
from gpu_accounting.traffic import launch_bytes

Kind = Literal["launch", "copy to device", "copy to host", "blocking copy"]

_FREE = frozenset(
    {
        "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "lift_fresh", "alias",
        "_unsafe_view", "_reshape_alias", "view", "set_", "resize_",
    }
)  # fmt: skip
"""Operations that launch nothing, beside those whose result is a view."""
_READS_ROWS = frozenset(
    {"embedding", "index_select", "index", "gather", "index_put_", "index_copy_", "index_add_"}
)
"""Operations that read or write the indexed part of their first argument only."""


class HiddenSync(AssertionError):
    """The host asked for a value that the device computes, so that it would wait."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation on the device."""

    phase: str
    kind: Kind
    name: str
    """Of our kernel, or of torch's operation."""
    shapes: tuple[Any, ...]
    """Shapes of its tensors; of a launch of ours also the grid and the other arguments."""
    num_bytes: int
    """Read and written."""


class StepTrace(TorchDispatchMode):
    """Records while it is active, within `recording`."""

    def __init__(self, runtime: FakeRuntime) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.phase = ""
        self.seq_lens: Sequence[int] = ()
        """Tokens of each request after the step, which attention's traffic depends on."""
        self._runtime = runtime
        self.launches: list[Launch] = []
        """Of our kernels, in the last recording."""
        self._num_seen = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        with recorded_launches() as launches, self:
            self.launches, self._num_seen = launches, 0
            yield
            self._note_launches()

    def enter(self, phase: str) -> None:
        """Attribute what follows to a phase."""
        self._note_launches()
        self.phase = phase

    def note_replay(self, size: int) -> None:
        """Record the replay of a CUDA graph of `size` requests: one launch from the host's point of view."""
        self._note_launches()
        self.operations.append(Operation("forward", "launch", "cuda graph", (size,), 0))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._note_launches()
        name = func.overloadpacket.__name__
        inputs = _tensors((args, kwargs))
        try:
            out = func(*args, **(kwargs or {}))
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise HiddenSync(f"{name} waits for the device") from error
        if name in _FREE or func.namespace == "prim" or _is_view(func):
            return out
        outputs = _tensors(out)
        devices = {tensor.device.type for tensor in (*inputs, *outputs) if tensor.dim() or tensor.is_cuda}
        if "cuda" in devices:
            self._note(
                name, inputs, outputs, args, crosses=name in ("copy_", "_to_copy") and "cpu" in devices
            )
        return out

    def _note(
        self,
        name: str,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        args: Sequence[Any],
        *,
        crosses: bool,
    ) -> None:
        kind: Kind = "launch"
        if crosses:
            kind = "blocking copy"
            if self._runtime.is_copying:
                kind = "copy to device" if outputs[0].is_cuda else "copy to host"
        shapes = tuple(tuple(tensor.shape) for tensor in inputs)
        self.operations.append(
            Operation(self.phase, kind, name, shapes, _traffic(name, inputs, outputs, args))
        )

    def _note_launches(self) -> None:
        for launch in self.launches[self._num_seen :]:
            shapes = tuple(
                (key, tuple(value.shape) if isinstance(value, torch.Tensor) else value)
                for key, value in launch.arguments.items()
            )
            num_bytes = launch_bytes(launch, self.seq_lens)
            self.operations.append(
                Operation(self.phase, "launch", launch.name, (launch.grid, shapes), num_bytes)
            )
        self._num_seen = len(self.launches)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


def _is_view(func: Any) -> bool:
    returned = func._schema.returns
    return bool(returned) and all(
        each.alias_info is not None and not each.alias_info.is_write for each in returned
    )


def _traffic(
    name: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], args: Sequence[Any]
) -> int:
    if name == "copy_":
        return _size(inputs[0]) + _size(inputs[1])
    if name in ("fill_", "zero_"):
        return _size(inputs[0])
    if name in _READS_ROWS:
        others = sum(map(_size, inputs[1:]))
        moved = _size(inputs[-1]) if name.endswith("_") else 2 * sum(map(_size, outputs))
        return others + moved
    return sum(map(_size, inputs)) + sum(map(_size, outputs))


def _size(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements; of an expanded one, those of its storage."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())
