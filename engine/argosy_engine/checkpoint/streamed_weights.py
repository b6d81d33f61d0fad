"""StreamedWeights: a checkpoint's tensors on their way from files to a GPU, without a copy of the model in host memory.

Threads read the tensors that the model is going to take, in its order, into a few page-locked buffers (`StagedReader`);
from there they are copied on a stream of their own, while further ones are read and while the device converts and
quantises what has arrived. Several read at once, because one read at a time leaves a disk or a network file system
idle. Of tensors that are divided by rows a rank reads its part only. A CPU maps the files instead
(`SafetensorsWeights`): there a copy would be one too many.

Memory is bounded by the buffers, whatever the sizes of the files. The file must stay as it is: one that ends early or
changes during the load is an error, as it would be a wrong model.
"""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from argosy_engine.checkpoint.shards import (
    ByteRanges,
    StoredTensor,
    byte_ranges,
    checkpoint_shards,
    chunks,
    has_valid_size,
    read_header,
)
from argosy_engine.checkpoint.weights import DTYPES, SafetensorsWeights, WeightPlan
from argosy_engine.errors import ConfigError
from argosy_engine.model_configs.sharding import Shard

BUFFER_BYTES = 8 << 20
"""Large enough for a disk's and a bus's full speed."""

NUM_BUFFERS = 8
"""Of page-locked memory: as many as are read at a time, and as many again that are copied or wait for it."""

NUM_THREADS = 4
"""Reads at a time."""


class CopyEvent(Protocol):
    """The end of a copy."""

    def synchronize(self) -> None:
        """Wait for it."""
        ...


class WeightCopies(Protocol):
    """Copies from page-locked memory to the device, beside its other work."""

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Allocate page-locked memory, uint8 [num_bytes]."""
        ...

    def begin(self) -> None:
        """Let later copies start after what the device was given before: their targets' memory may be in use."""
        ...

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> CopyEvent:
        """Start a copy. `source` must not change until its end."""
        ...

    def finish(self) -> None:
        """Let the device's later work start after all copies."""
        ...


class CudaCopies:
    """Copies on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def begin(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> CopyEvent:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        return event

    def finish(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


class _OpenFile(NamedTuple):
    path: Path
    fd: int
    state: tuple[int, int]
    """Size, and time of the last change."""


class _Planned(NamedTuple):
    """A tensor that the model is going to take."""

    name: str
    shard: Shard | None
    file: _OpenFile
    stored: StoredTensor
    read: ByteRanges


class StreamedWeights(SafetensorsWeights):
    """Weights of a checkpoint for a device that copies by itself.

    What is taken in another order than planned is read as `SafetensorsWeights` reads it, as are scales.

    Args:
        path, dtype, device, prefix, is_wrapped: see `SafetensorsWeights`.
    """

    def __init__(
        self,
        path: Path,
        dtype: torch.dtype,
        device: torch.device,
        *,
        prefix: str,
        copies: WeightCopies,
        is_wrapped: bool = False,
    ) -> None:
        super().__init__(path, dtype, device, prefix=prefix, is_wrapped=is_wrapped)
        self._copies = copies
        self._planned: deque[_Planned] = deque()
        self._passed: set[str] = set()
        """Names that were taken before their turn."""
        self._reader: StagedReader | None = None

    @contextmanager
    def reading(self, plan: WeightPlan) -> Iterator[None]:
        """Read what a plan takes ahead, in its order. Call `check` first.

        Raises:
            ConfigError: a file is missing or malformed.
        """
        with ExitStack() as stack:
            self._planned = deque(self._locate(plan, stack))
            pieces = [
                Piece(each.file.fd, piece)
                for each in self._planned
                for piece in chunks(each.read.ranges, BUFFER_BYTES)
            ]
            largest = max((len(piece.place) for piece in pieces), default=0)
            buffers = [self._copies.pinned(largest) for _ in range(min(NUM_BUFFERS, len(pieces)))]
            self._reader = stack.enter_context(StagedReader(pieces, buffers, NUM_THREADS))
            try:
                yield
            finally:
                self._reader = None
                self._planned.clear()

    def take(
        self, name: str, *shape: int, dtype: torch.dtype | None = None, shard: Shard | None = None
    ) -> torch.Tensor:
        reader = self._reader
        while reader is not None and self._planned and self._planned[0].name in self._passed:
            self._drop(reader, self._planned.popleft())
        if reader is None or not self._planned or self._planned[0].name != name:
            self._passed.add(name)
            return super().take(name, *shape, dtype=dtype, shard=shard)
        planned = self._planned.popleft()
        assert planned.shard == shard
        stored = self._copied(reader, planned)
        tensor = stored.to(dtype or self.dtype)
        self.num_bytes += tensor.nbytes
        return tensor

    def _copied(self, reader: StagedReader, planned: _Planned) -> torch.Tensor:
        """Return the tensor on the device in the dtype of the file.

        `on_read` is called after each piece, with the piece's share of the part that is returned.
        """
        dtype = DTYPES[planned.stored.dtype]
        tensor = torch.empty(planned.read.shape, dtype=dtype, device=self.device)
        target = tensor.flatten().view(torch.uint8)
        rest = planned.read.rest
        num_wanted = (
            math.prod(planned.read.shape if rest is None else rest.shape(planned.read.shape)) * dtype.itemsize
        )
        self._copies.begin()
        start = 0
        for piece in chunks(planned.read.ranges, BUFFER_BYTES):
            buffer = self._taken(reader, planned)
            copied = self._copies.copy(buffer[: len(piece)], target[start : start + len(piece)])
            reader.give_back(buffer, copied)
            end = start + len(piece)
            self.on_read(end * num_wanted // target.nbytes - start * num_wanted // target.nbytes)
            start = end
        self._copies.finish()
        _check_unchanged(planned)
        if rest is None:
            return tensor
        parts = [tensor.narrow(rest.dim, each.start, len(each)) for each in rest.ranges]
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim=rest.dim)

    def _drop(self, reader: StagedReader, planned: _Planned) -> None:
        for _ in chunks(planned.read.ranges, BUFFER_BYTES):
            reader.give_back(self._taken(reader, planned), None)

    def _taken(self, reader: StagedReader, planned: _Planned) -> torch.Tensor:
        try:
            return reader.take()
        except ShortRead:
            raise ConfigError(
                f"{planned.file.path} ends before the end of tensor {planned.name}: the file is cut off, download it "
                "again"
            ) from None
        except OSError as error:
            raise ConfigError(f"cannot read tensor {planned.name} of {planned.file.path}: {error}") from None

    def _locate(self, plan: WeightPlan, stack: ExitStack) -> Iterator[_Planned]:
        """Yield what the plan takes, but for scales, which are small and looked at by the host."""
        places: dict[str, tuple[_OpenFile, int, StoredTensor]] = {}
        for path, wanted in checkpoint_shards(self.path).items():
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise ConfigError(f"cannot read {path}: {error}") from None
            stack.callback(os.close, fd)
            file = _OpenFile(path, fd, _state(fd))
            data_start, tensors = read_header(path)
            for name, stored in tensors.items():
                if wanted is None or name in wanted:
                    places[name] = file, data_start, stored
        places = self._named(places)
        for name in plan.shapes:
            if name in plan.scales or (name in plan.optional and name not in places):
                continue
            file, data_start, stored = places[name]
            itemsize = DTYPES[stored.dtype].itemsize
            if tuple(stored.shape) != plan.shapes[name] or not has_valid_size(stored, itemsize):
                raise ConfigError(f"{file.path} is malformed at tensor {name}; download it again")
            shard = plan.shards[name]
            yield _Planned(name, shard, file, stored, byte_ranges(stored, data_start, shard))


def _state(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_size, found.st_mtime_ns


def _check_unchanged(planned: _Planned) -> None:
    if _state(planned.file.fd) != planned.file.state:
        raise ConfigError(
            f"{planned.file.path} was changed while tensor {planned.name} was read; start again when it is complete"
        )


class Piece(NamedTuple):
    """Bytes of a file."""

    fd: int
    place: range
    """Offsets in the file, at most as many as a buffer has bytes."""


class ShortRead(Exception):
    """A file ends before a piece."""


class StagedReader:
    """Reads pieces while it is entered.

    Args:
        pieces: in the order in which they will be taken.
        buffers: host memory, uint8; a device can copy from it while the host goes on.
        num_threads: reads at a time.
    """

    def __init__(self, pieces: Sequence[Piece], buffers: Sequence[torch.Tensor], num_threads: int) -> None:
        self._pieces = pieces
        self._changed = threading.Condition()
        self._free: deque[tuple[torch.Tensor, CopyEvent | None]] = deque((each, None) for each in buffers)
        self._read: dict[int, torch.Tensor | Exception] = {}
        self._num_started = self._num_taken = 0
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"weight reader {index}", daemon=True)
            for index in range(min(num_threads, len(pieces)))
        ]

    def __enter__(self) -> StagedReader:
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def take(self) -> torch.Tensor:
        """Wait for the next piece and return the buffer that begins with it; pass it to `give_back` after use.

        Raises:
            ShortRead: the file ends before the piece.
            OSError: it could not be read.
        """
        index = self._num_taken
        self._num_taken += 1
        with self._changed:
            self._changed.wait_for(lambda: index in self._read)
            read = self._read.pop(index)
        if isinstance(read, Exception):
            raise read
        return read

    def give_back(self, buffer: torch.Tensor, copied: CopyEvent | None) -> None:
        """Let a buffer be read into once the copy from it has ended.

        Args:
            copied: end of that copy; None: it was not copied from.
        """
        with self._changed:
            self._free.append((buffer, copied))
            self._changed.notify_all()

    def _end(self) -> None:
        """End the threads that have started. None reads from a file afterwards, so that the files can be closed."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_news)
                if self._is_closed or self._num_started == len(self._pieces):
                    return
                # The buffer comes first: whoever has a piece can read it, and the earliest piece is never left over.
                buffer, copied = self._free.popleft()
                index = self._num_started
                self._num_started += 1
            read: torch.Tensor | Exception = buffer
            try:
                if copied is not None:
                    copied.synchronize()
                _fill(buffer, self._pieces[index])
            except Exception as error:
                read = error
            with self._changed:
                self._read[index] = read
                self._changed.notify_all()

    def _has_news(self) -> bool:
        return self._is_closed or self._num_started == len(self._pieces) or bool(self._free)


def _fill(buffer: torch.Tensor, piece: Piece) -> None:
    view = buffer.numpy().data[: len(piece.place)]
    done = 0
    while done < len(view):
        count = os.preadv(piece.fd, [view[done:]], piece.place.start + done)
        if not count:
            raise ShortRead
        done += count
