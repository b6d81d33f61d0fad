"""Files of images between processes: what is passed, what is refused, and that nothing is left of those who end."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import mmap
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from argosy_engine.core.proc.media_channel import (
    MediaFile,
    MediaReceiver,
    MediaSender,
    NotPassed,
    attach_tensors,
    detach_tensors,
    file_of,
    file_size,
    write_file,
)
from argosy_engine.messages import MediaTensor, MultimodalFeature, RequestType

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files in memory are Linux's")

INPUTS = {
    "pixel_values": MediaTensor("float32", (3, 5), bytes(range(60))),
    "grid": MediaTensor("int64", (3,), bytes(range(24))),
    "none": MediaTensor("uint8", (0,), b""),
    "mask": MediaTensor("bool", (2,), b"\1\0"),
}


def made() -> MediaFile:
    inputs, descriptor = write_file(INPUTS)
    assert all(each.data == b"" for each in inputs.values())
    return MediaFile.of(descriptor, file_size(inputs))


def feature(file: MediaFile | None = None, name: str = "image") -> MultimodalFeature:
    return MultimodalFeature("image", name, 0, 4, 4, inputs=INPUTS if file is None else file.tensors(INPUTS))


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[MediaSender, MediaReceiver]]:
    senders = [MediaSender(tmp_path, index) for index in range(2)]
    receiver = MediaReceiver(tmp_path, 2)
    for each in senders:
        each.connect()
    yield senders[1], receiver
    for each in senders:
        each.close()
    receiver.close()


def open_files() -> list[str]:
    """Return what the descriptors and mappings of this process have of files of images."""
    gc.collect()
    found = []
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{each}"))
    return [
        each for each in (*found, *Path("/proc/self/maps").read_text().splitlines()) if "argosy-image" in each
    ]


def test_tensors_arrive_in_a_file_that_vanishes_with_its_last_user(
    ends: tuple[MediaSender, MediaReceiver],
) -> None:
    sender, receiver = ends
    sent = [feature(made(), "one"), feature(name="in frames"), feature(made(), "two")]
    bare, frames = detach_tensors(sent, sender)
    kinds, payloads = frames[::2], frames[1::2]
    assert kinds == [RequestType.FILE, *[RequestType.TENSOR] * len(INPUTS), RequestType.FILE]
    assert sum(map(len, payloads[:1])) < 20, "a handle"
    del sent  # the sender may drop an image before the core has read the request
    taken = [
        receiver.receive(data) if kind == RequestType.FILE else data
        for kind, data in zip(kinds, payloads, strict=True)
    ]
    whole = attach_tensors(bare, taken)
    for each in whole:
        assert {name: bytes(tensor.data) for name, tensor in each.inputs.items()} == {
            name: tensor.data for name, tensor in INPUTS.items()
        }
    assert [file_of(each.inputs) is None for each in whole] == [False, True, False]
    assert open_files()
    del whole, taken, each
    assert not open_files()
    assert MediaFile.num_open == 0


def test_tensors_begin_at_multiples_of_64_bytes() -> None:
    file = made()
    whole = memoryview(file)
    starts = [bytes(whole).index(INPUTS[name].data) for name in ("pixel_values", "mask")]
    assert starts == [0, 128]
    assert len(file) == file_size(INPUTS) == 130


def test_a_file_that_was_sent_without_its_request_is_dropped(ends: tuple[MediaSender, MediaReceiver]) -> None:
    sender, receiver = ends
    handles = [sender.send(made()) for _ in range(3)]
    assert handles[2] is not None
    passed = receiver.receive(handles[2])
    with pytest.raises(NotPassed, match="did not come"):
        receiver.receive(handles[2])  # it came once
    del passed
    assert not open_files()


@pytest.mark.parametrize("handle", [b"", b"x" * 11, b"\xff" * 12, bytes(12)])
def test_a_handle_of_no_file_is_refused(ends: tuple[MediaSender, MediaReceiver], handle: bytes) -> None:
    with pytest.raises(NotPassed):
        ends[1].receive(handle)


def test_a_core_that_does_not_read_gets_frames(ends: tuple[MediaSender, MediaReceiver]) -> None:
    (sender, receiver), before = ends, MediaSender.num_framed
    file, handles = made(), []
    while (handle := sender.send(file)) is not None:
        handles.append(handle)
    assert MediaSender.num_framed == before + 1
    bare, frames = detach_tensors([feature(file)], sender)
    assert frames[::2] == [RequestType.TENSOR] * len(INPUTS)
    assert attach_tensors(bare, frames[1::2])[0].inputs == feature(file).inputs
    for handle in handles:
        receiver.receive(handle)
    assert sender.send(file) is not None, "there is room again"


def test_without_a_connection_tensors_travel_in_frames(tmp_path: Path) -> None:
    sender = MediaSender(tmp_path)
    assert sender.send(made()) is None
    sender.connect()
    assert sender.send(made()) is None
    sender.close()


def test_after_the_core_has_ended_tensors_travel_in_frames(ends: tuple[MediaSender, MediaReceiver]) -> None:
    (sender, receiver), before = ends, MediaSender.num_framed
    receiver.close()
    assert sender.send(made()) is None
    assert MediaSender.num_framed == before + 1


def unsealed(seals: int) -> int:
    descriptor = os.memfd_create("argosy-image", os.MFD_ALLOW_SEALING)
    os.write(descriptor, bytes(4096))
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_WRITE, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW])
def test_a_file_that_may_change_is_refused(seals: int) -> None:
    """A process that decodes what a stranger sent could cut it while the core reads, which would kill the core."""
    with pytest.raises(NotPassed, match="not sealed"):
        MediaFile.of(unsealed(seals), 64)
    assert not open_files()


def test_files_that_are_too_short_or_none_are_refused(tmp_path: Path) -> None:
    sealed = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK
    with pytest.raises(NotPassed, match="too short"):
        MediaFile.of(unsealed(sealed), 4097)
    with pytest.raises(NotPassed, match="cannot be mapped"):
        MediaFile.of(os.open(tmp_path, os.O_RDONLY), 1)
    file = MediaFile.of(unsealed(sealed), 64)
    with pytest.raises(NotPassed, match="shorter than its tensors"):
        file.tensors(INPUTS)
    with pytest.raises(TypeError):
        mmap.mmap.resize(file, "x")  # type: ignore[arg-type]


PRODUCER = """
import sys
from pathlib import Path
from argosy_engine.core.proc.media_channel import MediaFile, MediaSender, file_size, write_file
from argosy_engine.messages import MediaTensor

inputs = {"pixels": MediaTensor("uint8", (1 << 20,), bytes(1 << 20))}
sender = MediaSender(Path(sys.argv[1]))
print("listening", flush=True)
sys.stdin.readline()
sender.connect()
kept = []
while True:
    bare, descriptor = write_file(inputs)
    kept = [*kept[-4:], MediaFile.of(descriptor, file_size(bare))]
    if (handle := sender.send(kept[-1])) is not None:
        sys.stdout.buffer.write(handle)
        sys.stdout.buffer.flush()
"""


@pytest.mark.parametrize("count", [10, pytest.param(200, marks=pytest.mark.full)])
def test_producers_that_are_killed_leave_nothing(count: int, tmp_path: Path) -> None:
    chosen = random.Random(0)
    inputs = {"pixels": MediaTensor("uint8", (1 << 20,), b"")}
    num_taken = 0
    for index in range(count):
        folder = tmp_path / str(index)
        folder.mkdir()
        command = [sys.executable, "-c", PRODUCER, str(folder)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as producer:
            assert producer.stdin is not None
            assert producer.stdout is not None
            producer.stdout.readline()
            receiver = MediaReceiver(folder, 1)
            producer.stdin.write(b"\n")
            producer.stdin.flush()
            for _ in range(chosen.randrange(1, 12)):
                passed = receiver.receive(producer.stdout.read(12))
                assert len(passed.map(inputs)["pixels"].data) == 1 << 20
                num_taken += 1
            producer.send_signal(signal.SIGKILL)  # wherever it is
            producer.wait()
            rest = producer.stdout.read()
            with contextlib.suppress(NotPassed):
                for at in range(0, len(rest) // 12 * 12, 12):
                    receiver.receive(rest[at : at + 12])
            receiver.close()
        del passed
        assert not open_files()
    assert num_taken >= count


def test_a_descriptor_for_which_there_is_no_room_fails_its_request_alone(
    ends: tuple[MediaSender, MediaReceiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = ends
    first, second = sender.send(made()), sender.send(made())
    received = socket.recv_fds

    def without(connection: socket.socket, size: int, count: int) -> tuple[bytes, list[int], int, object]:
        data, descriptors, flags, address = received(connection, size, count)
        for each in descriptors:
            os.close(each)  # as the kernel does beyond the limit
        return data, [], flags, address

    with monkeypatch.context() as patch:
        patch.setattr(socket, "recv_fds", without)
        with pytest.raises(NotPassed, match="too many open files"):
            receiver.receive(first)
    assert receiver.receive(second) is not None
