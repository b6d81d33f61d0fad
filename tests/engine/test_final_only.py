"""Requests whose output is read once it is complete: the same output as in pieces, and few deliveries."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from argosy_engine.errors import EngineDead
from argosy_engine.frontend.observer import Observer, RequestTimings
from argosy_engine.frontend.output_processor import GenerationOutput, OutputCollector, OutputProcessor
from argosy_engine.frontend.tokenizer import Tokenizer
from argosy_engine.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from argosy_engine.params import SamplingParams
from argosy_engine.sample.token_logprobs import TokenLogprobs

PROMPT = list(range(5, 45))


class CountingObserver(Observer):
    """What observers hear of tokens: how many, and whether they are the first."""

    def __init__(self) -> None:
        self.tokens: list[tuple[int, bool]] = []

    def on_tokens(self, timings: RequestTimings, count: int, now: float, is_first: bool) -> None:
        self.tokens.append((count, is_first))


class Delivered(OutputCollector):
    """A collector that counts what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def put(self, output: GenerationOutput) -> bool:
        self.sizes.append(len(output.token_ids))
        return super().put(output)


def request_of(*, final_only: bool, **params: Any) -> EngineCoreRequest:
    sampling = SamplingParams(max_tokens=2048, **params)
    return EngineCoreRequest("a", PROMPT, sampling, 0.0, final_only=final_only)


def steps_of(tokens: list[int], sizes: list[int], reason: FinishReason | None) -> list[EngineCoreOutput]:
    """Cut an output into what steps of these sizes send."""
    steps, start = [], 0
    for size in sizes:
        token_ids = tokens[start : start + size]
        logprobs = [TokenLogprobs([token_id], [-0.5], 1) for token_id in token_ids]
        steps.append(EngineCoreOutput("a", token_ids, logprobs=logprobs))
        start += size
    steps[-1].finish_reason = reason
    return steps


async def run(
    processor: OutputProcessor, request: EngineCoreRequest, steps: list[EngineCoreOutput]
) -> tuple[GenerationOutput, list[int]]:
    """Process the steps; return the complete output, and the number of tokens of each delivery."""
    collector = Delivered()
    processor.add_request(request, 0, queue=collector)
    for step in steps:
        processor.process_outputs([step])
    merged = GenerationOutput(0)
    for output in await collector.take():
        merged.merge(output)
    return merged, collector.sizes


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP, FinishReason.ABORT])
async def test_a_complete_output_equals_one_in_pieces(tokenizer: Tokenizer, reason: FinishReason) -> None:
    rng = random.Random(str(reason))
    for num_steps in (1, 2, 3, 40, 600):
        sizes = [rng.randint(1, 3) for _ in range(num_steps)]
        tokens = [rng.randrange(tokenizer.vocab_size) for _ in range(sum(sizes))]
        processor = OutputProcessor(tokenizer)
        observers = CountingObserver(), CountingObserver()
        processor.observers = [observers[0]]
        whole, deliveries = await run(processor, request_of(final_only=True), steps_of(tokens, sizes, reason))
        processor.observers = [observers[1]]
        pieces, _ = await run(processor, request_of(final_only=False), steps_of(tokens, sizes, reason))
        assert whole == pieces
        assert whole.token_ids == tokens
        assert observers[0].tokens == observers[1].tokens == [(size, i == 0) for i, size in enumerate(sizes)]
        assert len(deliveries) <= 1 + num_steps // 100
        assert not processor.has_unfinished_requests()


async def test_the_reader_of_complete_choices_wakes_once(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    collector = OutputCollector(num_awaited=2)
    for index in range(2):
        request = request_of(final_only=True)
        request.request_id = f"r{index}"
        processor.add_request(request, index, queue=collector)
    reading = asyncio.create_task(collector.take())
    for index, reason in ((0, None), (1, None), (1, FinishReason.LENGTH), (0, None), (0, FinishReason.STOP)):
        assert not reading.done()
        processed = processor.process_outputs([EngineCoreOutput(f"r{index}", [5], reason)])
        assert not processed.is_awaited
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    outputs = await reading
    assert sorted((output.index, len(output.token_ids), output.finish_reason) for output in outputs) == [
        (0, 3, "stop"),
        (1, 2, "length"),
    ]


async def test_the_reader_of_complete_choices_learns_of_a_failure_at_once(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    collector = OutputCollector(num_awaited=2)
    processor.add_request(request_of(final_only=True), 0, queue=collector)
    processor.process_outputs([EngineCoreOutput("a", [5])])
    processor.fail("a", EngineDead("gone"))
    with pytest.raises(EngineDead, match="gone"):
        await collector.take()


async def test_stop_strings_are_found_at_once(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("one two three four", add_special_tokens=False).ids
    processor = OutputProcessor(tokenizer)
    collector = OutputCollector()
    processor.add_request(request_of(final_only=True, stop=("two",)), 0, queue=collector)
    aborted: list[str] = []
    for token_id in tokens[:-1]:
        if not aborted:
            aborted += processor.process_outputs([EngineCoreOutput("a", [token_id])]).reqs_to_abort
    assert aborted == ["a"]
    (output,) = await collector.take()
    assert (output.text.strip(), output.stop_reason) == ("one", "two")


@pytest.mark.parametrize("include", [False, True])
async def test_what_comes_after_a_stop_string_is_no_part_of_the_output(
    tokenizer: Tokenizer, include: bool
) -> None:
    """However many tokens one message has."""
    tokens = tokenizer.encode("one two three four five", add_special_tokens=False).ids
    outputs = []
    for sizes in ([1] * len(tokens), [2] * (len(tokens) // 2) + [len(tokens) % 2], [1, len(tokens) - 1]):
        for reason in (None, FinishReason.LENGTH):
            params: dict[str, Any] = {"stop": ("o th",), "include_stop_str_in_output": include, "logprobs": 0}
            request = request_of(final_only=False, **params)
            steps = steps_of(tokens, [size for size in sizes if size], reason)
            output, _ = await run(OutputProcessor(tokenizer), request, steps)
            outputs.append(output)
    assert outputs[1:] == outputs[:-1]
    assert outputs[0].text == ("one two th" if include else "one tw")
    output = outputs[0]
    assert [entry.token_ids[0] for entry in output.logprobs] == output.token_ids
    assert output.num_output_tokens == len(output.token_ids) < len(tokens)
    assert tokenizer.decode(output.token_ids).startswith("one two th")
    assert not tokenizer.decode(output.token_ids[:-1]).startswith("one two th")


async def test_a_run_that_is_continued_past_its_stop_string_ends_there(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("one two three four", add_special_tokens=False).ids
    processor = OutputProcessor(tokenizer)
    collector = OutputCollector()
    state = processor.add_request(request_of(final_only=True, stop=("two",)), 0, queue=collector)
    assert not state.resume(tokens)
    processor.process_outputs([EngineCoreOutput("a", [], FinishReason.STOP)])
    (output,) = await collector.take()
    assert output.stop_reason == "two"
    assert tokenizer.decode(tokens[: output.num_output_tokens]).endswith("two")
