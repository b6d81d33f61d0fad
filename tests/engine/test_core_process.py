"""Messages to the core process: a malformed one fails at most its own request."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from argosy_engine.core.proc.core_client import addition
from argosy_engine.core.proc.core_process import CoreProcess
from argosy_engine.core.request import Request
from argosy_engine.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    MediaTensor,
    MultimodalFeature,
    RequestType,
    UtilityCall,
    UtilityOutput,
)
from argosy_engine.params import SamplingParams
from argosy_engine.structured.manager import GrammarRequest
from argosy_engine.structured.structured_outputs_params import GrammarSpec


class FakeCore:
    def __init__(self) -> None:
        self.added: list[str] = []
        self.messages: list[EngineCoreRequest] = []
        self.preprocessed: dict[str, threading.Thread] = {}
        self.kv = self
        self.announcer = self

    def take_delta(self) -> None:
        return None

    def preprocess_request(self, message: EngineCoreRequest) -> Request:
        self.preprocessed[message.request_id] = threading.current_thread()
        return Request(message, 4, True)

    def add_request(self, request: EngineCoreRequest, preprocessed: Request) -> None:
        assert preprocessed.request_id == request.request_id
        if request.request_id == "refused":
            raise ValueError("no room for this one")
        self.added.append(request.request_id)
        self.messages.append(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        raise AssertionError("nobody sent a list of ids")

    def call_utility(self, call: UtilityCall) -> UtilityOutput:
        return UtilityOutput(call.call_id, None, call.args)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[CoreProcess]:
    context = zmq.Context()
    made = CoreProcess(tmp_path, 0, context, context)
    made.core = FakeCore()  # type: ignore[assignment]
    yield made
    context.destroy(linger=0)


def handle(process: CoreProcess, kind: bytes, payload: bytes) -> None:
    process.receive(kind, payload)
    process.drain_inputs()


def add(request_id: str, **changed: Any) -> bytes:
    request = EngineCoreRequest(request_id, [1, 2], SamplingParams(), 0.0)
    fields = json.loads(msgspec.json.encode(request))
    return msgspec.msgpack.encode([changed.get(str(index), field) for index, field in enumerate(fields)])


def test_a_request_that_cannot_be_read_is_answered(
    process: CoreProcess, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    handle(process, RequestType.ADD, add("bad prompt", **{"1": "text"}))
    handle(process, RequestType.ADD, add("refused"))
    handle(process, RequestType.ADD, add("good"))
    assert process.core.added == ["good"]  # type: ignore[attr-defined]
    answers = [process.output_queue.get_nowait() for _ in range(2)]
    assert [(out.request_id, out.finish_reason) for message in answers for out in message.outputs] == [  # type: ignore[union-attr]
        ("bad prompt", FinishReason.ERROR),
        ("refused", FinishReason.ERROR),
    ]
    assert process.output_queue.empty()


def test_requests_are_decoded_and_hashed_outside_of_the_busy_loop(tmp_path: Path) -> None:
    context = zmq.Context()
    client = context.socket(zmq.PUSH)
    client.bind(f"ipc://{tmp_path}/input")
    core_context = zmq.Context()
    process = CoreProcess(tmp_path, 0, core_context, core_context)
    process.core = core = FakeCore()  # type: ignore[assignment]
    thread = threading.Thread(target=process.process_input_socket, name="input", daemon=True)
    thread.start()
    client.send_multipart([RequestType.ADD, add("one")])
    client.send_multipart([RequestType.ADD, add("two", **{"1": "no tokens"})])
    client.send_multipart([RequestType.ADD, add("three")])
    while len(core.added) < 2:
        process.wait_for_input()
    assert core.added == ["one", "three"]
    assert core.preprocessed == {"one": thread, "three": thread}
    refusal = process.output_queue.get(timeout=30)
    assert refusal is not None
    assert [output.request_id for output in refusal.outputs] == ["two"]
    client.close(0)
    context.term()


def test_the_sequences_of_a_call_share_their_parameters(tmp_path: Path) -> None:
    context = zmq.Context()
    process = CoreProcess(tmp_path, 0, context, context)
    process.core = core = FakeCore()  # type: ignore[assignment]

    def send(call_id: str, first: int) -> tuple[SamplingParams, GrammarSpec]:
        params = SamplingParams(
            seed=first,
            allowed_token_ids=(first, *range(5000, 9000)),
            logit_bias={5000: 1.0},
            bad_words_token_ids=((5000, 5001),),
            extra_args={"a": "b" * 99},
        )
        request = EngineCoreRequest(
            f"{call_id}{first}{len(core.messages)}",
            [1, 2],
            params,
            0.0,
            call_id=call_id,
            grammar=GrammarRequest(GrammarSpec("regex", f"[a-z]{{{first}}}")),
        )
        handle(process, RequestType.ADD, msgspec.msgpack.encode(request))
        message = core.messages[-1]
        assert msgspec.msgpack.encode(message) == msgspec.msgpack.encode(request)
        assert message.grammar is not None
        return message.sampling_params, message.grammar.spec

    large = ("allowed_token_ids", "logit_bias", "bad_words_token_ids", "extra_args")
    one, spec = send("call", 300)
    other, _ = send("another", 300)
    same, same_spec = send("call", 300)
    assert [getattr(same, name) is getattr(one, name) for name in large] == [True] * 4
    assert same_spec is spec
    assert other.allowed_token_ids is not one.allowed_token_ids
    different, different_spec = send("call", 301)
    assert different.allowed_token_ids != one.allowed_token_ids
    assert different_spec != spec
    context.destroy(linger=0)


def with_images(request_id: str, *sizes: int) -> EngineCoreRequest:
    """Return a request with images of two tensors each, the first of so many bytes."""
    features = [
        MultimodalFeature(
            "image", f"{request_id}-{index}", index, 1, 1,
            inputs={
                "pixel_values": MediaTensor("uint8", (size,), bytes([index]) * size),
                "grid": MediaTensor("int64", (1,), index.to_bytes(8, "little")),
            },
        )
        for index, size in enumerate(sizes)
    ]  # fmt: skip
    return EngineCoreRequest(request_id, [1, 2, 3], SamplingParams(), 0.0, mm_features=features)


def test_tensors_travel_in_frames_of_their_own_and_are_not_copied(tmp_path: Path) -> None:
    context, core_context, encoder = zmq.Context(), zmq.Context(), msgspec.msgpack.Encoder()
    client = context.socket(zmq.PUSH)
    client.bind(f"ipc://{tmp_path}/input")
    process = CoreProcess(tmp_path, 0, core_context, core_context)
    process.core = core = FakeCore()  # type: ignore[assignment]
    threading.Thread(target=process.process_input_socket, daemon=True).start()
    sent = [with_images("one", 3 << 20, 0), with_images("two"), with_images("three", 5)]
    frames = [frame for each in sent for frame in addition(encoder, each)]
    client.send_multipart(frames[:-2], copy=False)
    client.send_multipart(frames[-2:])  # its tensors are in a message of their own
    while len(core.added) < 3:
        process.wait_for_input()
    for ours, theirs in zip(sent, core.messages, strict=True):
        assert all(isinstance(each.data, bytes) for each in tensors(ours)), "the sender's are as they were"
        assert [bytes(each.data) for each in tensors(theirs)] == [each.data for each in tensors(ours)]
        assert [each.shape for each in tensors(theirs)] == [each.shape for each in tensors(ours)]
        assert all(isinstance(each.data, memoryview) for each in tensors(theirs))
    assert len(encoder.encode(sent[0])) > 3 << 20 > 1000 > len(frames[-1])
    client.close(0)
    context.term()


def tensors(request: EngineCoreRequest) -> list[MediaTensor]:
    return [each for feature in request.mm_features for each in feature.inputs.values()]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_frames_that_are_not_those_of_a_request_refuse_it_alone(
    process: CoreProcess, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    encoder = msgspec.msgpack.Encoder()
    *frames, _, payload = addition(encoder, with_images("torn", 7))
    for data in [frames[1], frames[3], b"further"][:count]:
        process.receive(RequestType.TENSOR, data)
    process.receive(RequestType.ADD, payload)
    good = addition(encoder, with_images("good", 7))
    for kind, data in zip(good[::2], good[1::2], strict=True):
        process.receive(kind, data)
    process.drain_inputs()
    assert process.core.added == ["good"]  # type: ignore[attr-defined]
    refusal = process.output_queue.get_nowait()
    assert refusal is not None
    assert [(each.request_id, each.finish_reason) for each in refusal.outputs] == [
        ("torn", FinishReason.ERROR)
    ]
    assert f"{count} frames" in str(refusal.outputs[0].error)
    assert process.output_queue.empty()


@pytest.mark.parametrize("kind", [RequestType.ADD, RequestType.ABORT, RequestType.UTILITY, b"\xff", b""])
@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x93\x01", msgspec.msgpack.encode({"a": 1}), b"[]"])
def test_junk_is_dropped(
    process: CoreProcess, kind: bytes, payload: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    handle(process, kind, payload)
    assert process.output_queue.empty()
    handle(process, RequestType.UTILITY, msgspec.msgpack.encode(UtilityCall(7, "x", [1])))
    answer = process.output_queue.get_nowait()
    assert answer is not None
    assert answer.utility == UtilityOutput(7, None, [1])


def test_a_result_that_cannot_be_sent_is_a_failure_of_its_call(
    process: CoreProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        process.core, "call_utility", lambda call: UtilityOutput(call.call_id, None, {"x": object()})
    )
    handle(process, RequestType.UTILITY, msgspec.msgpack.encode(UtilityCall(7, "x", [])))
    answer = process.output_queue.get_nowait()
    assert answer is not None
    assert answer.utility is not None
    assert (answer.utility.call_id, answer.utility.result) == (7, None)
    assert "cannot be sent" in (answer.utility.failure or "")


def test_a_core_that_loads_weights_sends_heartbeats(
    process: CoreProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Any] = []

    def load(call: UtilityCall) -> UtilityOutput:
        heard.extend(process.output_queue.get(timeout=30) for _ in range(3))
        return UtilityOutput(call.call_id)

    monkeypatch.setattr("argosy_engine.core.proc.core_process.IDLE_HEARTBEAT_S", 0.01)
    monkeypatch.setattr(process.core, "call_utility", load)
    handle(process, RequestType.UTILITY, msgspec.msgpack.encode(UtilityCall(7, "wake_up", [])))
    assert heard == [EngineCoreOutputs()] * 3
    while (answer := process.output_queue.get_nowait()) == EngineCoreOutputs():
        pass
    assert answer is not None
    assert answer.utility == UtilityOutput(7)
    assert process.output_queue.empty()
    assert "heartbeat" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("name", ["process_input_socket", "process_output_socket"])
def test_a_core_does_not_outlive_its_input_and_output_threads(tmp_path: Path, name: str) -> None:
    script = f"""
from pathlib import Path
import zmq
from argosy_engine.core.proc.core_client import addition
from argosy_engine.core.proc.core_process import CoreProcess
context = zmq.Context()
core = CoreProcess(Path({str(tmp_path)!r}), 0, context, context)
context.destroy(linger=0)
core.output_queue.put(object())
core.{name}()
"""
    ended = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert "the thread MainThread died" in ended.stderr
