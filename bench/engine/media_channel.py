"""Measure how images get from the process that makes their tensors to the core, by frames and as files, in turns.

    python bench/engine/media_channel.py [--images 64] [--megabytes 4]

Three processes, as in an engine: one makes the tensors and answers like the media server, an API process takes the
answers and adds a request with each, and one reads them like the core, and makes torch tensors of them. Nothing is
computed of the images. The table has wall-clock time and processor time of all three per image; each round measures
both ways, and medians are shown.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq
from results import Values, table

from argosy_engine.core.proc.core_client import addition
from argosy_engine.core.proc.media_channel import MediaReceiver, MediaSender, attach_tensors, write_file
from argosy_engine.messages import EngineCoreRequest, MediaTensor, MultimodalFeature, RequestType
from argosy_engine.params import SamplingParams

WAYS = ("torch_shm", "direct_rpc")


def produce(descriptor: int, way: str, size: int) -> None:
    """Answer each byte that comes with an image."""
    import numpy as np

    from argosy_engine.frontend.media.worker import DONE, ImageResult, answer

    connection = socket.socket(fileno=descriptor)
    pixels = np.arange(size // 4, dtype=np.float32)
    while connection.recv(1):
        inputs = {"pixel_values": MediaTensor("float32", (size // 4,), pixels.view(np.uint8).data)}  # type: ignore[arg-type]
        descriptors = []
        if way == "torch_shm":
            inputs, file = write_file(inputs)
            descriptors = [file]
        answer(connection, DONE, ImageResult([1] * 64, 64, b"", inputs), descriptors)
        for each in descriptors:
            os.close(each)


def read(folder: Path, way: str) -> None:
    """Read requests, and tell the bytes of their tensors."""
    from argosy_engine.worker.image_inputs import _tensor

    context = zmq.Context()
    requests, answers = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    requests.connect(f"ipc://{folder}/input")
    answers.connect(f"ipc://{folder}/output")
    receiver = MediaReceiver(folder, 1) if way == "torch_shm" else None
    answers.send(b"ready")
    decoder = msgspec.msgpack.Decoder(EngineCoreRequest)
    while True:
        frames = requests.recv_multipart(copy=False)
        taken: list[Any] = []
        for kind, payload in zip(frames[::2], frames[1::2], strict=True):
            if kind.bytes == RequestType.FILE:
                assert receiver is not None
                taken.append(receiver.receive(payload.bytes))
            elif kind.bytes == RequestType.TENSOR:
                taken.append(payload.buffer)
            else:
                features = attach_tensors(decoder.decode(payload.bytes).mm_features, taken)
                tensors = [_tensor(each) for feature in features for each in feature.inputs.values()]
                answers.send(str(sum(each.nbytes + int(each[-1]) for each in tensors)).encode())


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(way: str, num_images: int, size: int) -> tuple[float, float]:
    """Return wall-clock and processor milliseconds per image."""
    from argosy_engine.frontend.media.pool import _mapped, _receive_answer
    from argosy_engine.frontend.media.worker import ImageResult

    with tempfile.TemporaryDirectory() as name:
        folder, context = Path(name), zmq.Context()
        requests, answers = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        requests.bind(f"ipc://{folder}/input")
        answers.bind(f"ipc://{folder}/output")
        sender = MediaSender(folder)
        ours, theirs = socket.socketpair()
        own = [sys.executable, __file__, "--role"]
        maker = subprocess.Popen(
            [*own, "produce", str(theirs.fileno()), way, str(size)], pass_fds=[theirs.fileno()]
        )
        core = subprocess.Popen([*own, "read", str(folder), way])
        theirs.close()
        answers.recv()
        sender.connect()
        encoder, pids = msgspec.msgpack.Encoder(), (maker.pid, core.pid, os.getpid())
        begun, used = 0.0, 0.0
        for number in range(num_images + 1):
            if number == 1:  # the first one warms up
                begun, used = time.perf_counter(), sum(map(cpu_seconds, pids))
            ours.sendall(b"j")
            _, answered, descriptors = _receive_answer(ours, time.monotonic() + 60)
            result = _mapped(msgspec.msgpack.decode(answered, type=ImageResult), descriptors)
            feature = MultimodalFeature("image", str(number), 0, 64, 64, inputs=result.inputs)
            request = EngineCoreRequest(
                str(number), result.token_ids, SamplingParams(), 0.0, mm_features=[feature]
            )
            requests.send_multipart(addition(encoder, request, sender), copy=False)
            assert int(answers.recv()) >= size
        wall, cpu = time.perf_counter() - begun, sum(map(cpu_seconds, pids)) - used
        ours.close()
        maker.wait()
        core.kill()
        core.wait()
        sender.close()
        context.destroy(0)
        return 1000 * wall / num_images, 1000 * cpu / num_images


def main() -> None:
    if sys.argv[1:2] == ["--role"]:
        role, *rest = sys.argv[2:]
        produce(int(rest[0]), rest[1], int(rest[2])) if role == "produce" else read(Path(rest[0]), rest[1])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--megabytes", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    size = int(options.megabytes * (1 << 20)) // 4 * 4
    found: Values = {way: {"ms per image": [], "CPU ms per image": []} for way in WAYS}
    for _ in range(options.rounds):
        for way in WAYS:
            wall, cpu = measure(way, options.images, size)
            found[way]["ms per image"].append(wall)
            found[way]["CPU ms per image"].append(cpu)
    print(table(found))


if __name__ == "__main__":
    main()
