"""How large an answer may become, without a server."""

from __future__ import annotations

from typing import Any

import pytest

from argosy_engine.frontend.input_processor import MAX_VALUES, bound_answer, bound_beams
from argosy_engine.messages import EngineCoreRequest
from argosy_engine.params import SamplingParams
from argosy_protocol.errors import BadRequest
from argosy_protocol.openai import BatchChatCompletionRequest, ChatCompletionRequest, CompletionRequest

PROMPT = list(range(1000))


def call(count: int, max_tokens: int, logprobs: int | None) -> list[EngineCoreRequest]:
    params = SamplingParams(max_tokens=max_tokens, logprobs=logprobs)
    return [EngineCoreRequest(f"{index}", PROMPT, params, 0.0) for index in range(count)]


def refused(requests: list[EngineCoreRequest], n: int, request: Any) -> BadRequest | None:
    try:
        bound_answer(requests, n, request)
    except BadRequest as error:
        return error
    return None


@pytest.mark.parametrize("field", ["echo", "return_token_ids"])
def test_choices_that_repeat_their_prompt(field: str) -> None:
    largest = MAX_VALUES // len(PROMPT)
    asked, plain = CompletionRequest(prompt="", **{field: True}), CompletionRequest(prompt="")
    for n in (1, largest):
        assert refused(call(largest, 1, None), n, asked) is None
        assert refused(call(largest + n, 1, None), n, plain) is None
        error = refused(call(largest + n, 1, None), n, asked)
        assert error is not None
        assert error.param == field
        assert f"{(largest + n) * len(PROMPT)} tokens" in error.message
    assert (
        refused(call(largest + 1, 1, None), 1, ChatCompletionRequest(messages=[], return_token_ids=True))
        is None
    )


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_log_probabilities_of_what_the_client_lets_several_choices_generate(kind: str) -> None:
    def request(**fields: Any) -> ChatCompletionRequest | CompletionRequest:
        if kind == "chat":
            return ChatCompletionRequest(messages=[], **fields)
        return CompletionRequest(prompt="", **fields)

    room = MAX_VALUES // (8 * 21)
    assert refused(call(8, room, 20), 8, request(max_tokens=room)) is None
    error = refused(call(8, room + 1, 20), 8, request(max_tokens=room + 1))
    assert error is not None
    assert error.param == "max_tokens"
    assert f"at most {room}," in error.message
    for count, logprobs, stream in ((1, 20, False), (8, None, False), (8, 20, True)):
        requests = call(count, 10 * room, logprobs)
        assert refused(requests, count, request(max_tokens=10 * room, stream=stream)) is None
        assert {each.sampling_params.max_tokens for each in requests} == {10 * room}


def test_a_default_of_max_tokens_is_lowered() -> None:
    chat = ChatCompletionRequest(messages=[])
    requests = call(8, 1 << 20, 20)
    bound_answer(requests, 8, chat)
    assert {each.sampling_params.max_tokens for each in requests} == {MAX_VALUES // (8 * 21)}
    short = call(8, 5, 20)
    bound_answer(short, 8, chat)
    assert {each.sampling_params.max_tokens for each in short} == {5}


def test_a_default_is_not_lowered_to_a_few_tokens() -> None:
    for logprobs in (MAX_VALUES // 100, MAX_VALUES):
        error = refused(call(2, 1 << 20, logprobs), 2, ChatCompletionRequest(messages=[]))
        assert error is not None
        assert ("set max_tokens" in error.message) == (logprobs < MAX_VALUES)


def test_a_default_is_not_lowered_below_min_tokens() -> None:
    room = MAX_VALUES // (8 * 21)
    for min_tokens in (room, room + 1):
        requests = call(8, 1 << 20, 20)
        for each in requests:
            each.sampling_params = each.sampling_params.replace(min_tokens=min_tokens)
        error = refused(requests, 8, ChatCompletionRequest(messages=[], min_tokens=min_tokens))
        assert (error is None) == (min_tokens == room)


def test_events_that_wait_for_many_tokens_are_bounded_as_whole_answers() -> None:
    room = MAX_VALUES // (8 * 21)
    for interval, max_tokens, is_refused in (
        (room, 1 << 20, False),
        (room + 1, 1 << 20, True),
        (1 << 20, room, False),
        (1 << 20, room + 1, True),
    ):
        chat = ChatCompletionRequest(messages=[], stream=True, stream_interval=interval)
        error = refused(call(8, max_tokens, 20), 8, chat)
        assert (error is not None) == is_refused
        if error is not None:
            assert error.param == "stream_interval"
            assert f"at most {room}" in error.message
    wide = call(2, 1 << 20, MAX_VALUES)
    assert refused(wide, 2, ChatCompletionRequest(messages=[], stream=True)) is None


def refused_beams(prompts: list[int], width: int, max_tokens: int, logprobs: int | None, request: Any) -> Any:
    try:
        return bound_beams(prompts, width, max_tokens, logprobs, request)
    except BadRequest as error:
        return error


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_beam_search_holds_is_bounded_streamed_or_not(stream: bool) -> None:
    def request(**fields: Any) -> ChatCompletionRequest:
        return ChatCompletionRequest(messages=[], use_beam_search=True, stream=stream, **fields)

    room = MAX_VALUES // (2 * 4 * 21)
    two = [5, 5]
    assert refused_beams(two, 4, room, 20, request(max_tokens=room)) == room
    error = refused_beams(two, 4, room + 1, 20, request(max_tokens=room + 1))
    assert error.param == "max_tokens"
    assert f"at most {room}," in error.message
    assert "stream" not in error.message
    assert refused_beams(two, 4, room + 1, 20, request()) == room
    assert refused_beams(two, 4, room + 1, None, request(max_tokens=room + 1)) == room + 1
    assert refused_beams([5], 1, MAX_VALUES, 20, request(max_tokens=MAX_VALUES)) == MAX_VALUES


def test_beams_that_repeat_their_prompt() -> None:
    largest = MAX_VALUES // 2000
    for n, is_refused in ((largest, False), (largest + 1, True)):
        request = CompletionRequest(prompt="", n=n, use_beam_search=True, return_token_ids=True)
        error = refused_beams([1000, 1000], n, 1, None, request)
        assert isinstance(error, BadRequest) == is_refused
        assert getattr(error, "param", None) == ("return_token_ids" if is_refused else None)


def test_a_batch_of_chats_is_not_told_to_stream() -> None:
    room = MAX_VALUES // (8 * 21)
    batch = BatchChatCompletionRequest(messages=[], max_tokens=room + 1)
    error = refused(call(8, room + 1, 20), 1, batch)
    assert error is not None
    assert "stream" not in error.message
    assert f"set max_tokens to at most {room}, or reduce" in error.message
