"""Tokens of the core that wait for later ones: which may, in which order they are sent, and for how long."""

from __future__ import annotations

import copy
import random
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from argosy_engine.core.proc.core_handle import client_addresses
from argosy_engine.core.proc.core_process import CoreProcess
from argosy_engine.core.proc.output_router import HOLD_S, HOLD_TOKENS_S, MAX_HELD, HeldOutputs
from argosy_engine.frontend.observer import Observer, RequestTimings
from argosy_engine.frontend.output_processor import GenerationOutput, OutputCollector, OutputProcessor
from argosy_engine.frontend.tokenizer import Tokenizer
from argosy_engine.messages import (
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
from argosy_engine.params import SamplingParams
from argosy_engine.sample.token_logprobs import TokenLogprobs


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


def decoded(messages: list[bytes]) -> list[EngineCoreOutputs]:
    return [msgspec.msgpack.decode(message, type=EngineCoreOutputs) for message in messages]


def sent(held: HeldOutputs, client: int, message: EngineCoreOutputs) -> list[EngineCoreOutputs]:
    return decoded(held.pass_on(client, message))


@pytest.mark.parametrize(
    ("message", "num_held"),
    [
        (step("a", "streamed"), 1),
        (step("streamed"), 0),
        (step("unknown"), 0),
        (step(), 0),
        (step("a", residency=ResidencyDelta(stored=[ChunkEnd(7, 10)])), 1),
        (step("a", utility=UtilityOutput(1)), 1),
        (EngineCoreOutputs(dead="out of memory"), 0),
        (EngineCoreOutputs([*step("b").outputs, FIRST]), 1),
        (EngineCoreOutputs([*step("b").outputs, LAST]), 1),
        (EngineCoreOutputs([*step("b").outputs, FAILED]), 1),
    ],
    ids=str,
)
def test_what_a_reader_waits_for_is_sent_at_once(message: EngineCoreOutputs, num_held: int) -> None:
    held = HeldOutputs(1, Clock())
    for each in (request("a"), request("b"), request("streamed", final_only=False)):
        held.add(each)
    message = copy.deepcopy(message)
    expected = msgspec.structs.replace(message, outputs=message.outputs[:])
    del expected.outputs[:num_held]
    (passed,) = sent(held, 0, message)
    assert passed == expected
    assert passed.timestamp == 0.0


def test_requests_that_have_ended_are_forgotten() -> None:
    held = HeldOutputs(1, Clock())
    held.add(request("a"))
    held.add(request("b"))
    assert not sent(held, 0, step("a", "b"))
    statistics, last = sent(held, 0, EngineCoreOutputs([copy.deepcopy(LAST)]))
    assert not statistics.outputs
    assert [output.new_token_ids for output in last.outputs] == [[9, 9]]
    assert sent(held, 0, step("a"))
    held.remove(["b", "unknown"])
    assert sent(held, 0, step("b"))[-1] == step("b")
    assert held.take(0) == []


def test_what_is_held_is_due_after_an_interval_and_bounded() -> None:
    clock = Clock()
    held = HeldOutputs(2, clock)
    held.add(request("a"))
    held.add(request("b"))
    assert held.wait_s is None
    times = []
    for _ in range(MAX_HELD):
        times.append(clock.now)
        assert not sent(held, 1, step("a"))
        clock.now += HOLD_S / MAX_HELD / 2
    assert not sent(held, 0, step("b"))
    assert len(sent(held, 1, step("a"))) == MAX_HELD + 1
    assert not sent(held, 1, step("a"))
    assert held.wait_s == pytest.approx(HOLD_S / 2)
    assert not held.is_due
    clock.now += HOLD_S
    assert held.is_due
    assert held.wait_s == 0
    (statistics,) = decoded(held.take_due(1))
    assert not statistics.outputs
    assert len(held.take_due(0)) == 1
    assert held.wait_s == pytest.approx(times[0] + HOLD_TOKENS_S - clock.now)
    assert not held.is_due
    assert not sent(held, 1, step("a"))
    clock.now = times[0] + HOLD_TOKENS_S
    assert held.is_due
    statistics, tokens = decoded(held.take_due(1))
    assert (statistics.outputs, statistics.stats) == ([], SchedulerStats(1))
    (output,) = tokens.outputs
    assert output.new_token_ids == [9] * (MAX_HELD + 3)
    assert [each.timestamp for each in output.held_steps[:MAX_HELD]] == times
    assert held.take_due(1) == []
    assert held.take_due(0) == []
    assert held.wait_s == pytest.approx(HOLD_S / 2)  # younger ones, of the other client
    assert len(held.take(0)) == 1
    assert held.wait_s is None
    assert not held.is_due


class Progress(Observer):
    """Tokens of each request and when they came, as observers hear of them."""

    def __init__(self) -> None:
        self.seen: dict[int, list[tuple[int, float, bool]]] = {}

    def on_tokens(self, timings: RequestTimings, count: int, now: float, is_first: bool) -> None:
        self.seen.setdefault(timings.num_prompt, []).append((count, now, is_first))


@pytest.mark.parametrize("seed", range(50))
async def test_outputs_and_latencies_are_those_of_tokens_that_were_not_held(
    tokenizer: Tokenizer, seed: int
) -> None:
    """Steps of three requests, two of which are read at their end, with preemptions and several tokens of a step."""
    rng, clock = random.Random(seed), Clock()
    held = HeldOutputs(1, clock)
    ways = [(OutputProcessor(tokenizer), Progress()) for _ in range(2)]
    collectors: dict[tuple[int, str], OutputCollector] = {}
    for number, name in enumerate("abs", 1):
        made = EngineCoreRequest(
            name, [7] * number, SamplingParams(max_tokens=99), 0.0, final_only=name != "s"
        )
        held.add(made)
        for way, (processor, progress) in enumerate(ways):
            processor.observers = [progress]
            collectors[way, name] = OutputCollector()
            processor.add_request(made, 0, queue=collectors[way, name]).timings.last_token = 1.0
    running = {"a": 0, "b": 0, "s": 0}
    while running:
        outputs = []
        for name, num_steps in list(running.items()):
            if rng.random() < 0.3:  # it is not scheduled
                continue
            token_ids = [rng.randrange(300, 900) for _ in range(rng.randint(1, 3))]
            running[name] = num_steps + 1
            is_last = num_steps and rng.random() < 0.1
            is_prefill = not num_steps or rng.random() < 0.1
            outputs.append(
                EngineCoreOutput(
                    name,
                    token_ids,
                    FinishReason.LENGTH if is_last else None,
                    prefill_stats=PrefillStats(0, 0.0, 0.0) if is_prefill else None,
                    logprobs=[TokenLogprobs([each], [-0.5], 1) for each in token_ids],
                )
            )
            if is_last:
                del running[name]
        ways[0][0].process_outputs(copy.deepcopy(outputs), clock.now)
        messages = held.pass_on(0, EngineCoreOutputs(outputs, SchedulerStats(1)))
        clock.now += rng.choice((0.001, 0.02))
        if held.is_due:
            messages += held.take(0)
        for message in decoded(messages):
            # Messages that are not held are processed when they are sent, here without delay.
            sent_at = message.timestamp or clock.now
            ways[1][0].process_outputs(message.outputs, sent_at)
    seen = [progress.seen for _, progress in ways]
    for number in (1, 2, 3):
        without, with_holding = (each[number] for each in seen)
        assert [each[0] for each in with_holding] == [each[0] for each in without]
        assert [each[2] for each in with_holding] == [each[2] for each in without]
        # What is sent at once is processed up to one turn of the clock later.
        for one, other in zip(without, with_holding, strict=True):
            assert one[1] <= other[1] <= one[1] + 0.02
    for name in "abs":
        merged = [GenerationOutput(0), GenerationOutput(0)]
        for way in range(2):
            for output in await collectors[way, name].take():
                merged[way].merge(output)
        assert merged[0] == merged[1]
        assert merged[0].finish_reason == "length"


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
    names = ["a", "a", "s", "a", "a"]
    for request_id in names:
        process.output_queue.put(step(request_id))
    sender = threading.Thread(target=process.process_output_socket)
    sender.start()
    decoder = msgspec.msgpack.Decoder(EngineCoreOutputs)
    received = [
        decoder.decode(ours.recv()) for _ in (*names, "tokens")
    ]  # the last ones come after the interval
    assert [len(message.outputs) for message in received] == [0, 0, 1, 0, 0, 1]
    assert [message.timestamp > 0 for message in received] == [True, True, False, True, True, False]
    assert received[2].outputs == step("s").outputs
    (tokens,) = received[-1].outputs
    assert (tokens.request_id, tokens.new_token_ids) == ("a", [9] * 4)
    assert [each.timestamp for each in tokens.held_steps] == [m.timestamp for m in received if m.timestamp]
    process.output_queue.put(step("a"))
    process.output_queue.put(None)
    assert not decoder.decode(ours.recv()).outputs
    (rest,) = decoder.decode(ours.recv()).outputs
    assert rest.new_token_ids == [9]
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


def test_requests_are_aborted_while_their_tokens_are_sent() -> None:
    """The input thread removes requests at any moment of the output thread's work, whose failure would end the core."""

    class Hurried(Clock):
        def __call__(self) -> float:
            self.now += HOLD_TOKENS_S / 8
            return self.now

    held, ends = HeldOutputs(1, Hurried()), threading.Event()
    ids = [str(number) for number in range(64)]

    def abort() -> None:
        while not ends.is_set():
            for each in ids:
                held.remove([each])
                held.add(request(each))

    aborting = threading.Thread(target=abort)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    aborting.start()
    try:
        for _ in range(300):
            held.pass_on(0, step(*ids))
            held.take_due(0)
    finally:
        ends.set()
        aborting.join()
        sys.setswitchinterval(interval)
