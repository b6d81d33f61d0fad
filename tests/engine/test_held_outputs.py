"""Messages of the core that wait for later ones: which may, in which order they are sent, and for how long."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from argosy_engine.core.proc.client_group import client_addresses
from argosy_engine.core.proc.core_process import CoreProcess
from argosy_engine.core.proc.held_outputs import HOLD_S, MAX_HELD, HeldOutputs
from argosy_engine.frontend.observer import Observer, RequestTimings
from argosy_engine.frontend.output_collector import OutputCollector
from argosy_engine.frontend.output_processor import OutputProcessor
from argosy_engine.frontend.tokenizer import Tokenizer
from argosy_engine.messages.core_messages import (
    ChunkEnd,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    ErrorKind,
    FinishReason,
    PrefillStats,
    RequestType,
    ResidencyDelta,
    SchedulerStats,
    UtilityOutput,
)
from argosy_engine.params.sampling_params import SamplingParams


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def request(request_id: str, *, final_only: bool = True) -> EngineCoreRequest:
    return EngineCoreRequest(request_id, [1, 2], SamplingParams(), 0.0, final_only=final_only)


def step(*request_ids: str, **fields: Any) -> EngineCoreOutputs:
    return EngineCoreOutputs(
        [EngineCoreOutput(each, [9]) for each in request_ids], SchedulerStats(1), **fields
    )


FIRST = EngineCoreOutput("a", [9], prefill_stats=PrefillStats(0, 0.0, 0.0))
LAST = EngineCoreOutput("a", [9], FinishReason.LENGTH)
FAILED = EngineCoreOutput("a", [], FinishReason.ERROR, error="no", error_kind=ErrorKind.INTERNAL)


@pytest.mark.parametrize(
    "message",
    [
        step("a", "streamed"),
        step("streamed"),
        step("unknown"),
        step(),
        step("a", residency=ResidencyDelta(stored=[ChunkEnd(7, 10)])),
        step("a", utility=UtilityOutput(1)),
        EngineCoreOutputs(dead="out of memory"),
        EngineCoreOutputs([*step("b").outputs, FIRST]),
        EngineCoreOutputs([*step("b").outputs, LAST]),
        EngineCoreOutputs([*step("b").outputs, FAILED]),
    ],
    ids=str,
)
def test_what_a_reader_waits_for_is_sent_at_once(message: EngineCoreOutputs) -> None:
    held = HeldOutputs(1, Clock())
    for each in (request("a"), request("b"), request("streamed", final_only=False)):
        held.add(each)
    assert not held.can_hold(0, message)
    assert message.timestamp == 0.0


def test_requests_that_have_ended_are_forgotten() -> None:
    held = HeldOutputs(1, Clock())
    held.add(request("a"))
    held.add(request("b"))
    assert held.can_hold(0, step("a", "b"))
    held.can_hold(0, EngineCoreOutputs([LAST]))
    assert not held.can_hold(0, step("a"))
    held.remove(["b", "unknown"])
    assert not held.can_hold(0, step("b"))


def test_held_messages_are_due_after_an_interval_and_bounded_in_number() -> None:
    clock = Clock()
    held = HeldOutputs(2, clock)
    held.add(request("a"))
    assert held.wait_s is None
    for number in range(MAX_HELD):
        message = step("a")
        assert held.can_hold(1, message)
        assert message.timestamp == clock.now
        held.hold(1, b"%d" % number)
        clock.now += HOLD_S / MAX_HELD / 2
    assert not held.can_hold(1, step("a"))
    assert held.can_hold(0, step("a"))
    assert held.wait_s == pytest.approx(HOLD_S / 2)
    assert not held.is_due
    clock.now += HOLD_S
    assert held.is_due
    assert held.wait_s == 0
    assert held.take(1) == [b"%d" % number for number in range(MAX_HELD)]
    assert held.take(1) == []
    assert held.wait_s is None
    assert not held.is_due


class FakeCore:
    """What the input thread needs of a core."""

    def preprocess_request(self, message: EngineCoreRequest) -> None:
        return None


def test_a_process_sends_all_messages_in_order(tmp_path: Path) -> None:
    context: zmq.Context[Any] = zmq.Context()
    ours = context.socket(zmq.PULL)
    ours.bind(client_addresses(tmp_path, 0)[1])
    process = CoreProcess(tmp_path, 0, context, context)
    process.core = FakeCore()  # type: ignore[assignment]
    for each in (request("a"), request("s", final_only=False)):
        process.receive(RequestType.ADD, msgspec.msgpack.encode(each))
    sender = threading.Thread(target=process.process_output_socket)
    sender.start()
    sent = ["a", "a", "s", "a", "a", "a"]
    for request_id in sent:
        process.output_queue.put(step(request_id))
    decoder = msgspec.msgpack.Decoder(EngineCoreOutputs)
    received = [decoder.decode(ours.recv()) for _ in sent]  # the last ones come after the interval
    assert [message.outputs[0].request_id for message in received] == sent
    assert [message.timestamp > 0 for message in received] == [name == "a" for name in sent]
    process.output_queue.put(step("a"))
    process.output_queue.put(None)
    assert decoder.decode(ours.recv()).outputs == step("a").outputs
    sender.join()
    context.destroy(linger=0)


class Times(Observer):
    def __init__(self) -> None:
        self.intervals: list[float] = []

    def on_tokens(self, timings: RequestTimings, count: int, now: float, is_first: bool) -> None:
        if not is_first:
            self.intervals.append(now - timings.last_token)


async def test_latencies_are_those_of_tokens_that_were_not_held(tokenizer: Tokenizer) -> None:
    processor, times = OutputProcessor(tokenizer), Times()
    processor.observers.append(times)
    state = processor.add_request(request("a"), 0, queue=OutputCollector())
    processor.process_outputs([EngineCoreOutput("a", [9])])
    start = state.timings.last_token
    for later in (-0.5, 1.0, 1.25):  # the first one was held while the one before it was on its way
        processor.process_outputs([EngineCoreOutput("a", [9])], start + later)
    assert times.intervals == pytest.approx([0.0, 1.0, 0.25])
