"""Media channel: the tensors of an image between processes of one machine, as a file in memory of which only the
descriptor travels (`--mm-tensor-ipc torch_shm`).

    process that decodes --descriptor--> API process --descriptor--> core

Who makes the tensors writes them once and seals the file, so that nobody can change or shorten it. Every other process
maps it. The descriptor goes over a Unix socket (SCM_RIGHTS) before the request goes over ZMQ, and the request names it
by a number, so that the core never waits for one. Where a descriptor cannot be passed (no room in the socket, too many
files, a core on another machine), the tensors travel in ZMQ frames, as with `direct_rpc`.

Nobody counts readers, and nothing has to be reclaimed: the kernel frees a file with the last descriptor and mapping of
it, which end with their processes, however these end. vLLM passes tensors of torch in a queue of `multiprocessing`
under this name; the tensors of a producer that was killed stay in /dev/shm.

The file has the tensors one after another, each at a multiple of 64 bytes, in the order of their names in the message.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import mmap
import os
import socket
import struct
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from msgspec import structs

from argosy_engine.messages import MediaTensor, MultimodalFeature, RequestType

logger = logging.getLogger("argosy.core")

MAX_FILES: Final = 256
"""Images that one process holds as files. Each takes two descriptors, one of them of the mapping."""
_ALIGNMENT: Final = 64
_SIZES: Final = {"float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1, "int32": 4, "int64": 8, "bool": 1}
_CLIENT: Final = struct.Struct("<I")
_NUMBER: Final = struct.Struct("<Q")
"""Of a file: a message with its descriptor, and what a request says instead of its bytes."""


class NotPassed(Exception):
    """A file did not come, or is none that may be mapped."""


class MediaFile(mmap.mmap):
    """The mapping of a sealed file, private to this process, which also holds the file's descriptor."""

    descriptor: int
    num_open = 0
    """Of this process, those whose mapping is still in use included."""
    _counting = threading.Lock()

    @classmethod
    def of(cls, descriptor: int, size: int) -> Self:
        """Map a file, whose descriptor belongs to the result from now on, and is closed if this fails.

        Raises:
            NotPassed: it is shorter, is not sealed against writing and shortening, or cannot be mapped.
        """
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            if ~seals & (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE) or os.fstat(descriptor).st_size < size:
                raise NotPassed("a file of an image is not sealed, or too short")
            # A shared mapping of a sealed file is refused by Linux before 6.7.
            found = cls(descriptor, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        except (OSError, ValueError) as error:
            os.close(descriptor)
            raise NotPassed(f"a file of an image cannot be mapped: {error}") from None
        except NotPassed:
            os.close(descriptor)
            raise
        found.descriptor = descriptor
        cls._count(1)
        weakref.finalize(found, cls._close, descriptor).atexit = False
        return found

    @classmethod
    def _close(cls, descriptor: int) -> None:
        os.close(descriptor)
        cls._count(-1)

    @classmethod
    def _count(cls, change: int) -> None:
        with MediaFile._counting:
            MediaFile.num_open += change

    def tensors(self, inputs: Mapping[str, MediaTensor]) -> dict[str, MediaTensor]:
        """Return tensors without bytes with those that are in the file.

        Raises:
            NotPassed: it is too short for them.
        """
        places, end = _places(inputs)
        if end > len(self):
            raise NotPassed("a file of an image is shorter than its tensors")
        view = memoryview(self)
        return {
            name: MediaTensor(each.dtype, each.shape, view[places[name] : places[name] + _num_bytes(each)])  # type: ignore[arg-type]
            for name, each in inputs.items()
        }


def file_of(inputs: Mapping[str, MediaTensor]) -> MediaFile | None:
    """Return the file that has an image's tensors; None if they are bytes of this process."""
    first = next(iter(inputs.values()), None)
    owner = None if first is None else getattr(first.data, "obj", None)
    return owner if isinstance(owner, MediaFile) else None


def file_size(inputs: Mapping[str, MediaTensor]) -> int:
    """Return the bytes of the file for tensors, of which the dtypes and shapes count."""
    return _places(inputs)[1]


def _num_bytes(tensor: MediaTensor) -> int:
    return _SIZES[tensor.dtype] * math.prod(tensor.shape)


def _places(inputs: Mapping[str, MediaTensor]) -> tuple[dict[str, int], int]:
    places, end = {}, 0
    for name, each in inputs.items():
        places[name] = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = places[name] + _num_bytes(each)
    return places, end


def write_file(inputs: Mapping[str, MediaTensor]) -> tuple[dict[str, MediaTensor], int]:
    """Write tensors to a file and seal it; return them without bytes, and its descriptor.

    Raises:
        OSError: the system has no memory for it, or no such files.
    """
    places, _ = _places(inputs)
    descriptor = os.memfd_create("argosy-image", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        for name, each in inputs.items():
            data, done = memoryview(each.data).cast("B"), 0
            while done < len(data):
                done += os.pwrite(descriptor, data[done:], places[name] + done)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(descriptor)
        raise
    bare = {name: MediaTensor(each.dtype, each.shape, b"") for name, each in inputs.items()}
    return bare, descriptor


def _address(directory: Path, index: int) -> str:
    return f"{directory}/media{index or ''}"


class MediaSender:
    """A client's end. Not thread-safe; never blocks.

    Args:
        directory: of the core's sockets.
        index: of the client.
    """

    num_framed: ClassVar[int] = 0
    """Images that travelled in frames since their files could not be passed, by all senders of this process."""

    def __init__(self, directory: Path, index: int = 0) -> None:
        self._index = index
        self._socket: socket.socket | None = None
        """The listening one, until `connect`."""
        self._is_connected = False
        self._number = 0
        if sys.platform == "linux":
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._socket.setblocking(False)
            self._socket.bind(_address(directory, index))
            self._socket.listen(1)

    def connect(self) -> None:
        """Take the core's connection, once it is ready; it makes none if files are not to be passed."""
        listener, self._socket = self._socket, None
        if listener is not None:
            with listener, contextlib.suppress(BlockingIOError):
                self._socket, _ = listener.accept()
                self._socket.setblocking(False)
                self._is_connected = True

    def send(self, file: MediaFile) -> bytes | None:
        """Pass a file; return what the request says instead of it, or None if it must travel in frames."""
        number = _NUMBER.pack(self._number)
        if self._socket is not None and self._is_connected:
            try:
                socket.send_fds(self._socket, [number], [file.descriptor], socket.MSG_NOSIGNAL)
            except OSError as error:
                if not MediaSender.num_framed:
                    logger.warning(
                        "images travel in frames when their files cannot be passed to the core: %s", error
                    )
            else:
                self._number += 1
                return _CLIENT.pack(self._index) + number
        MediaSender.num_framed += 1
        return None

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class MediaReceiver:
    """The core's end, of all its clients. Only the thread that reads requests calls it; it never blocks, because a file
    is passed before the request that names it.

    Args:
        directory: of the core's sockets, in which all clients listen.
    """

    def __init__(self, directory: Path, num_clients: int) -> None:
        self._sockets: list[socket.socket] = []
        for index in range(num_clients):
            made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._sockets.append(made)
            made.connect(_address(directory, index))
            made.setblocking(False)

    def close(self) -> None:
        for each in self._sockets:
            each.close()

    def receive(self, handle: Any) -> PassedFile:
        """Take the file that a request names.

        Args:
            handle: what `MediaSender.send` returned.

        Raises:
            NotPassed: it has not come.
        """
        if len(handle) != _CLIENT.size + _NUMBER.size:
            raise NotPassed(f"a file's handle has {len(handle)} bytes")
        (index,), wanted = _CLIENT.unpack_from(handle), bytes(handle[_CLIENT.size :])
        if index >= len(self._sockets):
            raise NotPassed(f"there is no client {index}")
        while True:
            try:
                number, descriptors, _, _ = socket.recv_fds(self._sockets[index], _NUMBER.size, 1)
            except OSError:
                break
            if descriptors and number == wanted:
                return PassedFile(descriptors[0])
            for each in descriptors:  # of a request that was never sent
                os.close(each)
            if number in (b"", wanted):
                break
        raise NotPassed("the file of an image did not come: the process may have too many open files")


class PassedFile:
    """A descriptor that came, until it is mapped; it is closed if it never is."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._closing = weakref.finalize(self, os.close, descriptor)
        self._closing.atexit = False

    def map(self, inputs: Mapping[str, MediaTensor]) -> dict[str, MediaTensor]:
        """Return the tensors that it has.

        Raises:
            NotPassed: it has not as many bytes, or may change.
        """
        if self._closing.detach() is None:
            raise NotPassed("a file of an image is named twice")
        return MediaFile.of(self._descriptor, file_size(inputs)).tensors(inputs)


def detach_tensors(
    features: Sequence[MultimodalFeature], sender: MediaSender | None = None
) -> tuple[list[MultimodalFeature], list[bytes]]:
    """Return features whose tensors have no bytes, and the frames that bring these, in order, a type and a payload
    each: a message with them inside would be copied several times, on the event loop of the sender and by the core,
    between steps.

    Args:
        sender: passes those that are in files.
    """
    frames: list[bytes] = []
    bare = []
    for feature in features:
        file = None if sender is None else file_of(feature.inputs)
        handle = None if file is None or sender is None else sender.send(file)
        if handle is not None:
            frames += (RequestType.FILE, handle)
        else:
            for tensor in feature.inputs.values():
                frames += (RequestType.TENSOR, tensor.data)
        inputs = {name: MediaTensor(each.dtype, each.shape, b"") for name, each in feature.inputs.items()}
        bare.append(structs.replace(feature, inputs=inputs))
    return bare, frames


def attach_tensors(features: Sequence[MultimodalFeature], frames: Sequence[Any]) -> list[MultimodalFeature]:
    """Undo `detach_tensors`.

    Args:
        frames: buffers of the bytes, and what `MediaReceiver.receive` has returned or raised.

    Raises:
        ValueError: there are not as many as tensors.
        NotPassed: a file has not come, has not as many bytes, or may change.
    """
    left = iter(frames)
    whole = []
    for feature in features:
        inputs: dict[str, MediaTensor] = {}
        for name, tensor in feature.inputs.items():
            data = next(left, None)
            if data is None:
                raise ValueError(f"{len(frames)} frames are fewer than the tensors of a request")
            if isinstance(data, NotPassed):
                raise data
            if isinstance(data, PassedFile):
                inputs = data.map(feature.inputs)
                break
            inputs[name] = MediaTensor(tensor.dtype, tensor.shape, data)
        whole.append(structs.replace(feature, inputs=inputs))
    if next(left, None) is not None:
        raise ValueError(f"{len(frames)} frames are more than the tensors of a request")
    return whole
