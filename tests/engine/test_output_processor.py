"""The output processor: collectors, several choices, resumed requests and log probabilities."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
import torch
from hypothesis import given, settings

from argosy_engine import LLM
from argosy_engine.api.endpoints.choice_stream import LogprobsFormat, TextOffsets
from argosy_engine.config import EngineArgs
from argosy_engine.core.proc.core_client import InprocClient
from argosy_engine.errors import InvalidRequest, RequestFailed
from argosy_engine.frontend.async_llm import AsyncLLM
from argosy_engine.frontend.chat_template import ChatTemplate
from argosy_engine.frontend.detokenizer import IncrementalDetokenizer
from argosy_engine.frontend.input_processor import InputProcessor, to_sampling_params
from argosy_engine.frontend.output_processor import GenerationOutput, OutputCollector
from argosy_engine.frontend.renderer import Renderer, TokenizedPrompt
from argosy_engine.frontend.tokenizer import Encoded
from argosy_engine.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from argosy_engine.params import SamplingParams
from argosy_engine.parsers.parser_registry import choose_parsers
from argosy_engine.resolved_config import ParserConfig, sampling_defaults
from argosy_engine.sample.token_logprobs import TokenLogprobs
from argosy_protocol.openai import ChatCompletionRequest, ChatMessage, decode_request

EXACT = {"dtype": "float32", "device": "cpu", "threads": 1}
PROMPT = list(range(5, 45))


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("builtin://tiny", **EXACT, num_gpu_blocks_override=256)


@pytest.fixture(scope="module")
def renderer(llm: LLM) -> Renderer:
    return llm.renderer


# Collector


@given(
    outputs=st.lists(
        st.tuples(st.integers(0, 2), st.text(max_size=3), st.lists(st.integers(0, 9), max_size=3)),
        min_size=1,
        max_size=20,
    ),
    reads=st.sets(st.integers(0, 20)),
)
@settings(deadline=None)
def test_a_lagging_reader_loses_nothing(outputs: list[tuple[int, str, list[int]]], reads: set[int]) -> None:
    async def run() -> dict[int, GenerationOutput]:
        collector = OutputCollector()
        got = {index: GenerationOutput(index) for index in range(3)}

        async def read() -> None:
            taken = await collector.take()
            assert len(taken) == len({output.index for output in taken})  # one slot per choice
            for output in taken:
                got[output.index].merge(output)

        waiting = False
        for turn, (index, text, ids) in enumerate(outputs):
            logprobs = [TokenLogprobs([token], [-1.0], 1) for token in ids]
            collector.put(GenerationOutput(index, text, list(ids), logprobs=logprobs, num_output_tokens=turn))
            waiting = True
            if turn in reads:
                await read()
                waiting = False
        if waiting:
            await read()
        return got

    got = asyncio.run(run())
    for index in range(3):
        mine = [(text, ids) for choice, text, ids in outputs if choice == index]
        assert got[index].text == "".join(text for text, _ in mine)
        assert got[index].token_ids == [token for _, ids in mine for token in ids]
        assert [entry.token_ids[0] for entry in got[index].logprobs] == got[index].token_ids


def test_outputs_before_an_error_are_delivered_first() -> None:
    async def run() -> None:
        collector = OutputCollector()
        collector.put(GenerationOutput(0, "a"))
        collector.fail(InvalidRequest("no"))
        assert [output.text for output in await collector.take()] == ["a"]
        with pytest.raises(InvalidRequest):
            await collector.take()

    asyncio.run(run())


async def test_an_output_that_cannot_be_processed_fails_its_request_only(llm: LLM) -> None:
    client = FakeClient(llm)
    engine = AsyncLLM(client, llm.input_processor)  # type: ignore[arg-type]
    good, bad = choices(llm, PROMPT, 1)[0], choices(llm, PROMPT, 1)[0]
    async with aclosing(engine.generate([good])) as stream, aclosing(engine.generate([bad])) as broken:  # type: ignore[type-var]
        first, failing = asyncio.ensure_future(anext(stream)), asyncio.ensure_future(anext(broken))
        await client.arrivals(2)
        client.say(EngineCoreOutput(bad.request_id, [-1]), EngineCoreOutput(good.request_id, [9]))
        assert [output.token_ids for output in await first] == [[9]]
        with pytest.raises(RequestFailed):
            await failing
        assert client.aborted == [bad.request_id]
        assert not engine.is_dead
    await engine.close()


# Choices of one prompt


class FakeClient:
    """A core that does what the test says."""

    def __init__(self, llm: LLM) -> None:
        self.config = llm.config
        self.added: list[EngineCoreRequest] = []
        self.aborted: list[str] = []
        self.queue: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
        self._arrived = asyncio.Semaphore(0)
        self.heard = asyncio.Semaphore(0)
        """Released when an output has been processed."""

    async def add_request(self, request: EngineCoreRequest) -> None:
        self.added.append(request)
        self._arrived.release()

    async def arrivals(self, count: int) -> None:
        """Wait for `count` more requests."""
        for _ in range(count):
            await self._arrived.acquire()

    async def abort_requests(self, request_ids: Iterable[str]) -> None:
        self.aborted += request_ids

    async def outputs(self) -> AsyncIterator[EngineCoreOutputs]:
        while True:
            yield await self.queue.get()
            self.heard.release()

    async def close(self) -> None: ...

    def say(self, *outputs: EngineCoreOutput) -> None:
        self.queue.put_nowait(EngineCoreOutputs(outputs=list(outputs)))


def choices(llm: LLM, prompt: list[int], n: int, **params: Any) -> list[EngineCoreRequest]:
    return llm.input_processor.process_inputs(
        TokenizedPrompt(prompt, []), SamplingParams(n=n, max_tokens=8, **params)
    )


async def test_the_sequences_of_a_call_carry_its_id(llm: LLM) -> None:
    """The core shares slots between calls by it; a call of one sequence needs none."""
    client = FakeClient(llm)
    engine = AsyncLLM(client, llm.input_processor)  # type: ignore[arg-type]
    calls = {
        "choices": (choices(llm, [1, 2], 3), 3),
        "prompts": ([*choices(llm, [1, 2], 1), *choices(llm, [3, 4], 1)], 1),
        "alone": (choices(llm, [1, 2], 1), 1),
    }
    call_ids: dict[str, set[str]] = {}
    for name, (requests, n) in calls.items():
        async with aclosing(engine.generate(requests, n)) as stream:  # type: ignore[type-var]
            first = asyncio.ensure_future(anext(stream))
            await client.arrivals(len(requests))
            call_ids[name] = {request.call_id for request in client.added[-len(requests) :]}
            client.say(*[EngineCoreOutput(request.request_id, [9]) for request in requests])
            await first
    await engine.close()
    assert [len(call_ids[name]) for name in calls] == [1, 1, 1]
    assert call_ids["alone"] == {""}
    assert "" not in call_ids["choices"] | call_ids["prompts"]
    assert call_ids["choices"] != call_ids["prompts"]


async def test_the_first_choice_computes_the_prompt_for_the_others(llm: LLM) -> None:
    client = FakeClient(llm)
    engine = AsyncLLM(client, llm.input_processor)  # type: ignore[arg-type]
    requests = choices(llm, PROMPT, 3, prompt_logprobs=1, seed=7)
    assert [request.sampling_params.prompt_logprobs for request in requests] == [1, None, None]
    assert [request.sampling_params.seed for request in requests] == [7, 8, 9]
    async with aclosing(engine.generate(requests, 3)) as stream:  # type: ignore[type-var]
        first = asyncio.ensure_future(anext(stream))
        client.say()  # an output that is about something else
        await client.arrivals(1)
        assert client.added == requests[:1]
        client.say(EngineCoreOutput(requests[0].request_id, [9]))
        assert [output.index for output in await first] == [0]
        await client.arrivals(2)
        assert client.added == requests
        client.say(EngineCoreOutput(requests[1].request_id, [9], FinishReason.LENGTH))
        await anext(stream)
    # The reader left: what is still running is aborted, what has ended is not.
    assert sorted(client.aborted) == sorted([requests[0].request_id, requests[2].request_id])
    assert engine.num_live == 0
    await engine.close()


async def test_leaving_before_the_prompt_is_computed_starts_no_other_choice(llm: LLM) -> None:
    client = FakeClient(llm)
    engine = AsyncLLM(client, llm.input_processor)  # type: ignore[arg-type]
    requests = choices(llm, PROMPT, 4)
    stream = engine.generate(requests, 4)
    reading = asyncio.ensure_future(anext(stream))
    await client.arrivals(1)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await stream.aclose()  # type: ignore[attr-defined]
    client.say(EngineCoreOutput(requests[0].request_id, [9]))
    client.say()
    await client.heard.acquire()
    await client.heard.acquire()
    assert client.added == requests[:1]
    assert engine.num_live == 0
    await engine.close()


def test_choices_share_the_prompt_and_equal_single_runs(llm: LLM) -> None:
    params = SamplingParams(n=3, max_tokens=12, temperature=3.0, seed=40, logprobs=1, stop=("e",))
    (result,) = llm.generate([PROMPT], params, use_tqdm=False)
    assert [output.index for output in result.outputs] == [0, 1, 2]
    assert len({tuple(output.token_ids) for output in result.outputs}) == 3
    for choice, output in enumerate(result.outputs):
        (alone,) = llm.generate([PROMPT], params.replace(n=1, seed=40 + choice), use_tqdm=False)
        assert (alone.token_ids, alone.text) == (output.token_ids, output.text)
        assert "e" not in output.text
        assert len(output.logprobs) == len(output.token_ids)
    llm.client.core.scheduler.check()


def test_two_of_three_choices_find_the_prompt_in_the_cache() -> None:
    llm = LLM("builtin://tiny", **EXACT, num_gpu_blocks_override=64)
    hits, step = [], llm.client.step

    def counting_step() -> EngineCoreOutputs:
        outputs = step()
        if outputs.stats is not None:
            hits.append(outputs.stats.prefix_cache_hits)
        return outputs

    llm.client.step = counting_step  # type: ignore[method-assign]
    llm.generate([PROMPT], SamplingParams(n=3, max_tokens=2), use_tqdm=False)
    block = llm.config.block_size
    assert sum(hits) == 2 * ((len(PROMPT) - 1) // block * block)


# Resumed runs


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 11},
        {"temperature": 0.9, "seed": 12, "top_p": 0.9, "frequency_penalty": 0.7, "repetition_penalty": 1.3},
        {"temperature": 1.0, "seed": 13, "min_tokens": 9, "bad_words_token_ids": ((9, 10), (16,))},
        {"temperature": 1.0, "seed": 14, "stop": ("th", "s a"), "presence_penalty": 1.0},
    ],
)
def test_a_run_cut_anywhere_and_resumed_equals_the_undisturbed_one(llm: LLM, fields: dict[str, Any]) -> None:
    prompt = llm.renderer.render_text("Tell me about the red lantern and the sea.")
    params = SamplingParams(max_tokens=14, logprobs=1, **fields)
    (whole,) = run(llm, prompt, params, [()])
    cuts = range(1, len(whole.token_ids) + 1)
    rests = run(llm, prompt, params, [whole.token_ids[:cut] for cut in cuts])
    for cut, rest in zip(cuts, rests, strict=True):
        assert rest.token_ids == whole.token_ids[cut:], cut
        assert rest.resumed_text + rest.text == whole.text, cut
        assert (rest.finish_reason, rest.stop_reason) == (whole.finish_reason, whole.stop_reason), cut
        assert rest.num_output_tokens == len(whole.token_ids)
        assert [entry.token_ids[0] for entry in rest.logprobs] == rest.token_ids


def run(
    llm: LLM, prompt: TokenizedPrompt, params: SamplingParams, resumes: list[Any]
) -> list[GenerationOutput]:
    """Runs one request per resume through AsyncLLM, over a core of this process."""

    class Client(FakeClient):
        async def add_request(self, request: EngineCoreRequest) -> None:
            llm.client.add_request(request)

        async def abort_requests(self, request_ids: Iterable[str]) -> None:
            llm.client.abort_requests(request_ids)

        async def outputs(self) -> AsyncIterator[EngineCoreOutputs]:
            while True:
                await asyncio.sleep(0)
                if llm.client.has_work:
                    yield llm.client.step()

    async def main() -> list[GenerationOutput]:
        engine = AsyncLLM(Client(llm), llm.input_processor)  # type: ignore[arg-type]
        requests = [
            llm.input_processor.process_inputs(prompt, params, resume=[resume] if resume else ())[0]
            for resume in resumes
        ]
        merged = [GenerationOutput(index) for index in range(len(requests))]
        async for outputs in engine.generate(requests):
            for output in outputs:
                merged[output.index].merge(output)
        await engine.close()
        return merged

    return asyncio.run(main())


# Stop strings


@settings(max_examples=120, deadline=None)
@given(
    text=st.text(alphabet="abé€😀 ", min_size=1, max_size=24),
    stops=st.lists(st.text(alphabet="abé€😀 ", min_size=1, max_size=4), min_size=1, max_size=3),
    groups=st.lists(st.integers(1, 4), max_size=30),
    include=st.booleans(),
    min_tokens=st.integers(0, 8),
)
def test_stop_strings_wherever_tokens_are_cut(
    renderer: Renderer,
    text: str,
    stops: list[str],
    groups: list[int],
    include: bool,
    min_tokens: int,
) -> None:
    tokenizer = renderer.tokenizer
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    text = tokenizer.decode(ids)

    def feed(sizes: list[int]) -> tuple[str, str | None, int, int]:
        params = SamplingParams(stop=tuple(stops), include_stop_str_in_output=include, min_tokens=min_tokens)
        detokenizer = IncrementalDetokenizer(tokenizer, params, [])
        got, position = "", 0
        for size in [*sizes, len(ids)]:
            piece = ids[position : position + size]
            position += len(piece)
            got += detokenizer.update(piece, position >= len(ids))
            if detokenizer.stop_reason is not None or position >= len(ids):
                break
        num_tokens = min(position, len(ids)) - detokenizer.num_past_stop
        return got, detokenizer.stop_reason, num_tokens, detokenizer.num_unshown

    fed = got, reason, num_tokens, num_unshown = feed(groups)
    assert fed == feed([1] * len(ids))
    # The tokens that are shown have all of the text, and the last one of them has some of it.
    shown = tokenizer.decode(ids[: num_tokens - num_unshown])
    assert shown.startswith(got) or "\ufffd" in shown
    assert num_unshown == 0 or tokenizer.decode(ids[: num_tokens - num_unshown + 1]).startswith(got)
    exempt = 0
    if min_tokens:
        plain = IncrementalDetokenizer(tokenizer, SamplingParams(), [])
        exempt = len(plain.update(ids[:min_tokens], False))
    ends = [
        (end, order, stop)
        for order, stop in enumerate(stops)
        for end in range(max(exempt + 1, len(stop)), len(text) + 1)
        if text[end - len(stop) : end] == stop
    ]
    if not ends:
        assert (got, reason) == (text, None)
        return
    end, _, stop = min(ends)
    assert reason == stop
    assert got == (text[:end] if include else text[: end - len(stop)])


# Log probabilities


@pytest.mark.parametrize("budget", [2048, 16])
def test_logprobs_equal_transformers(random_checkpoint: Any, budget: int) -> None:
    path, model = random_checkpoint("qwen3-tied")
    args = EngineArgs.of(model=str(path), max_num_batched_tokens=budget, block_size=4, **EXACT)
    client = InprocClient(args)
    rng = random.Random(4)
    shared = [rng.randrange(2, 512) for _ in range(30)]
    prompts = [[7], shared, [*shared, 3, 4], shared, [rng.randrange(2, 512) for _ in range(57)]]
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    client.add_request(EngineCoreRequest("warm", shared, SamplingParams(max_tokens=1, seed=1), time.time()))
    for index, prompt in enumerate(prompts):
        client.add_request(EngineCoreRequest(str(index), prompt, params, time.time()))
    tokens: dict[str, list[int]] = {}
    of_output: dict[str, list[TokenLogprobs]] = {}
    of_prompt: dict[str, list[TokenLogprobs]] = {}
    while client.has_work:
        for out in client.step().outputs:
            tokens.setdefault(out.request_id, []).extend(out.new_token_ids)
            of_output.setdefault(out.request_id, []).extend(out.logprobs or [])
            assert not (out.prompt_logprobs and out.request_id in of_prompt)
            of_prompt[out.request_id] = (out.prompt_logprobs or []) + of_prompt.get(out.request_id, [])
    assert of_output["warm"] == of_prompt["warm"] == []
    for index, prompt in enumerate(prompts):
        name = str(index)
        sequence = prompt + tokens[name]
        with torch.inference_mode():
            expected = model(torch.tensor([sequence])).logits[0].float().log_softmax(-1)
        entries = of_prompt[name] + of_output[name]
        assert len(of_prompt[name]) == len(prompt) - 1
        assert len(entries) == len(sequence) - 1
        for position, entry in enumerate(entries):
            row, token = expected[position], sequence[position + 1]
            assert entry.token_ids[0] == token
            assert len(entry.token_ids) == 1 + (2 if position < len(prompt) - 1 else 3)
            torch.testing.assert_close(
                torch.tensor(entry.logprobs), row[entry.token_ids], atol=2e-4, rtol=1e-4
            )
            assert abs(entry.rank - 1 - int((row > row[token]).sum())) <= 1
            best = row.topk(len(entry.token_ids) - 1).values
            torch.testing.assert_close(torch.tensor(entry.logprobs[1:]), best, atol=2e-4, rtol=1e-4)


def test_token_bytes_join_to_the_text(renderer: Renderer) -> None:
    tokenizer = renderer.tokenizer
    text = "Naïve café 😀 costs 5 €\n\tend"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert b"".join(tokenizer.token_bytes(token) for token in ids).decode() == text
    assert tokenizer.token_bytes(renderer.config.vocab_size + 5) == b""
    offsets = TextOffsets(tokenizer, skip_special_tokens=True)
    starts = [offsets.advance(token) for token in ids]
    for token, start in zip(ids, starts, strict=True):
        piece = tokenizer.token_bytes(token)
        if piece.decode("utf-8", "replace").isprintable() and b"\xef\xbf\xbd" not in piece:
            try:
                assert text[start:].startswith(piece.decode())
            except UnicodeDecodeError:
                continue


def test_alternatives_of_a_completion_do_not_hide_each_other(renderer: Renderer) -> None:
    """Parts of characters are all the same as text; OpenAI names them by their bytes."""
    tokenizer = renderer.tokenizer
    parts = [tokenizer.encode(text, add_special_tokens=False).ids for text in ("é", "😀")]
    first, second = parts[0][0], parts[1][0]
    assert tokenizer.token_text(first) == tokenizer.token_text(second) == "\ufffd"
    (space,) = tokenizer.encode(" ", add_special_tokens=False).ids
    missing = [renderer.config.vocab_size + 5, renderer.config.vocab_size + 6]
    ids = [first, second, space, *missing]
    entry = TokenLogprobs([ids[0], *ids], [-1.0, -1.0, -2.0, -3.0, -4.0, -5.0], 1)
    offsets = TextOffsets(tokenizer, skip_special_tokens=True)
    made = LogprobsFormat(tokenizer, as_token_ids=False).completion([entry], offsets, first_token_id=second)
    names = ["bytes:" + "".join(f"\\x{byte:02x}" for byte in tokenizer.token_bytes(each)) for each in ids[:2]]
    assert made.tokens == [names[1], names[0]]
    assert made.top_logprobs == [
        None,
        {names[0]: -1.0, names[1]: -2.0, " ": -3.0, "": -4.0, f"token_id:{missing[1]}": -5.0},
    ]
    assert made.text_offset == [0, 0]


def test_impossible_tokens_are_finite_numbers_in_json(renderer: Renderer) -> None:
    entry = TokenLogprobs([5, 9, 5], [float("-inf"), -0.1, float("-inf")], 2)
    formatted = LogprobsFormat(renderer.tokenizer, as_token_ids=True)
    chat = formatted.chat([entry])
    assert (chat.content[0].logprob, chat.content[0].token) == (-9999.0, "token_id:5")
    offsets = TextOffsets(renderer.tokenizer, skip_special_tokens=True)
    completion = formatted.completion([entry], offsets, first_token_id=4)
    assert completion.top_logprobs == [None, {"token_id:5": -9999.0, "token_id:9": -0.1}]
    assert completion.token_logprobs == [None, -9999.0]
    prompt = formatted.prompt([entry])
    assert prompt[0] is None
    assert prompt[1] is not None
    assert {token: (item.rank, item.logprob) for token, item in prompt[1].items()} == {
        "5": (2, -9999.0),
        "9": (1, -0.1),
    }


# Bad words


def test_bad_words_do_not_appear(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=40, n=4, seed=3, ignore_eos=True)
    text = "Tell me about the sea."
    free = llm.generate([text], params, use_tqdm=False)[0].outputs
    words = sorted({word for output in free for word in output.text.split() if word.isalpha()}, key=len)[-4:]
    assert words
    ids = [llm.renderer.tokenizer.encode(word, add_special_tokens=False).ids for word in words]
    bound = llm.generate([text], params.replace(bad_words=tuple(words)), use_tqdm=False)[0].outputs
    for output in bound:
        for word in ids:
            spans = [output.token_ids[i : i + len(word)] for i in range(len(output.token_ids))]
            assert word not in spans
    with pytest.raises(InvalidRequest, match="1024 tokens"):
        llm.generate([text], params.replace(bad_words=tuple(c * 300 for c in "xyzk")), use_tqdm=False)


def test_auto_tool_choice_can_be_turned_off(llm: LLM) -> None:
    config = msgspec.structs.replace(llm.renderer.config, parsers=ParserConfig(enable_auto_tool_choice=False))
    processor = InputProcessor(config)
    chat = ChatCompletionRequest(
        messages=[ChatMessage(role="user", content="Hi")], tools=[{"function": {"name": "f"}}]
    )
    for choice in (None, "auto"):
        with pytest.raises(InvalidRequest, match="--enable-auto-tool-choice"):
            processor.sampling_params(msgspec.structs.replace(chat, tool_choice=choice))
    for choice in ("none", "required"):
        assert processor.sampling_params(msgspec.structs.replace(chat, tool_choice=choice)).n == 1


def test_parameters_that_were_kept_are_those_of_the_same_fields(llm: LLM) -> None:
    config = llm.renderer.config
    processor, defaults = (
        InputProcessor(config),
        sampling_defaults(Path(config.model_path), config.request_defaults),
    )
    bodies: list[dict[str, Any]] = [
        {}, {"max_tokens": 5}, {"max_tokens": 6}, {"temperature": 0}, {"temperature": 1}, {"top_p": 0.5},
        {"n": 2}, {"seed": 1}, {"seed": 2}, {"stop": "a"}, {"stop": ["a", "b"]}, {"logprobs": True},
        {"min_tokens": 2}, {"ignore_eos": True}, {"logit_bias": {"5": 1.0}}, {"include_reasoning": False},
        {"response_format": {"type": "json_object"}}, {"thinking_token_budget": -1}, {"repetition_penalty": 1.1},
        {"structured_outputs": {"choice": ["a", "b"]}}, {"structured_outputs": {"choice": ["a", "c"]}},
    ]  # fmt: skip
    for _ in range(2):
        for fields in bodies:
            for text in ("one", "another"):
                body = {"model": "m", "messages": [{"role": "user", "content": text}], **fields}
                request = decode_request("chat/completions", json.dumps(body).encode())
                fresh = to_sampling_params(request, defaults, config, 1)
                kept = processor.sampling_params(request)
                assert msgspec.structs.replace(kept, kept_special_token_ids=()) == fresh, fields
    with pytest.raises(InvalidRequest, match="functions is not supported"):
        processor.sampling_params(
            msgspec.structs.replace(
                ChatCompletionRequest(messages=[ChatMessage(role="user", content="Hi")]), functions=1
            )
        )


def test_bad_words_are_tokenised_once_for_all_prompts_of_a_call(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = InputProcessor(llm.renderer.config)
    tokenizer, num_encoded = processor.renderer.tokenizer, 0
    encode = tokenizer.encode

    def counted(text: str, **options: Any) -> Encoded:
        nonlocal num_encoded
        num_encoded += 1
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", counted)
    prompt = processor.renderer.render_prompt([5])
    params = SamplingParams(bad_words=("one", "two"), n=2)
    made = [request for _ in range(8) for request in processor.process_inputs(prompt, params)]
    assert num_encoded == 4
    assert len({request.sampling_params.bad_words_token_ids for request in made}) == 1
    (other,) = processor.process_inputs(prompt, SamplingParams(bad_words=("three",)))
    assert other.sampling_params.bad_words_token_ids != made[0].sampling_params.bad_words_token_ids
    (none,) = processor.process_inputs(prompt, SamplingParams())
    assert none.sampling_params.bad_words_token_ids == ()


@pytest.mark.parametrize(
    ("source", "has_thinking", "is_open"),
    [
        ("{{ messages[0].content }}<think>\n", True, True),
        ("{{ messages[0].content }}<think>\n\n</think>\n", True, None),
        ("{% if enable_thinking %}{% endif %}{{ messages[0].content }}", True, False),
        ("{{ messages[0].content }}", False, None),
    ],
)
def test_thought_is_expected_where_the_template_leaves_room(
    renderer: Renderer,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    has_thinking: bool,
    is_open: bool | None,
) -> None:
    monkeypatch.setattr(renderer, "template", ChatTemplate(source, {}))
    reasoning = renderer.render_chat(
        ChatCompletionRequest(messages=[ChatMessage(role="user", content="Hi")])
    ).reasoning
    assert renderer.has_thinking is has_thinking
    assert (None if reasoning is None else reasoning.is_open) is is_open


@pytest.mark.parametrize(
    ("fields", "is_awaited"),
    [
        ({}, True),
        ({"response_format": {"type": "json_object"}}, False),
        ({"tools": [{"type": "function", "function": {"name": "now"}}], "tool_choice": "required"}, False),
    ],
)
def test_no_grammar_waits_for_reasoning_that_sentences_mark(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], is_awaited: bool
) -> None:
    source = "{{ tools }}{{ messages[0].content }}{# Here is my thought process: Here is my response: #}"
    monkeypatch.setattr(renderer, "template", ChatTemplate(source, {}))
    monkeypatch.setattr(renderer, "parsers", choose_parsers(source, {}))
    request = ChatCompletionRequest(messages=[ChatMessage(role="user", content="Hi")], **fields)
    prompt = renderer.render_chat(request)
    assert renderer.parsers.reasoning_parser_name == "granite"
    assert (prompt.reasoning is not None) is is_awaited
    parsed = renderer.chat_parser(request, prompt).feed(
        "Here is my thought process:a\nHere is my response:b", True
    )
    assert (parsed.reasoning, parsed.content) == ("a", "b")
    assert renderer.render_chat(msgspec.structs.replace(request, thinking_token_budget=-1)) == prompt
    with pytest.raises(InvalidRequest, match="which sentences mark"):
        renderer.render_chat(msgspec.structs.replace(request, thinking_token_budget=3))


class ForgetfulClient(FakeClient):
    """A core that knows some requests only."""

    def __init__(self, llm: LLM) -> None:
        super().__init__(llm)
        self.unknown: list[str] = []

    async def call_utility(self, method: str, request_ids: list[str]) -> list[str]:
        assert method == "unknown_requests"
        return [request_id for request_id in request_ids if request_id in self.unknown]


async def test_a_request_that_the_core_has_lost_is_failed(llm: LLM) -> None:
    """Its end may be in flight, so the core is asked twice, and not about requests that were not sent yet."""
    client = ForgetfulClient(llm)
    engine = AsyncLLM(client, llm.input_processor)  # type: ignore[arg-type]
    kept, lost = choices(llm, PROMPT, 2), choices(llm, PROMPT, 1)
    async with aclosing(engine.generate(kept, 2)) as known, aclosing(engine.generate(lost)) as forgotten:  # type: ignore[type-var]
        waiting, failing = asyncio.ensure_future(anext(known)), asyncio.ensure_future(anext(forgotten))
        await client.arrivals(2)
        client.unknown = [lost[0].request_id, kept[1].request_id]
        assert await engine.fail_lost(silent_s=0.0) == 0
        assert not failing.done()
        assert await engine.fail_lost(silent_s=0.0) == 1
        with pytest.raises(RequestFailed, match="lost"):
            await failing
        assert engine.num_live == 2
        client.say(EngineCoreOutput(kept[0].request_id, [9]))
        assert [output.token_ids for output in await waiting] == [[9]]
    await engine.close()


async def test_a_silence_that_is_short_is_not_asked_about(llm: LLM) -> None:
    client = ForgetfulClient(llm)
    engine = AsyncLLM(client, llm.input_processor)  # type: ignore[arg-type]
    (request,) = choices(llm, PROMPT, 1)
    async with aclosing(engine.generate([request])) as stream:  # type: ignore[type-var]
        waiting = asyncio.ensure_future(anext(stream))
        await client.arrivals(1)
        client.unknown = [request.request_id]
        for _ in range(3):
            assert await engine.fail_lost(silent_s=3600.0) == 0
        client.say(EngineCoreOutput(request.request_id, [9]))
        await waiting
    await engine.close()
