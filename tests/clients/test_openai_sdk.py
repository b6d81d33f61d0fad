"""OpenAI's SDK as its guides use it: asynchronous clients, stream helpers, parsed answers, a loop of tool calls."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import openai
import pytest
from openai.types.chat import ParsedChatCompletion
from pydantic import BaseModel, Field

MESSAGES: list[Any] = [{"role": "user", "content": "Hello!"}]
ASKED: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 100}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Mood(BaseModel):
    mood: Literal["good", "bad"]
    level: int = Field(ge=0, le=9)


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as sdk:
        yield sdk


@pytest.fixture
async def async_client(base_url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as sdk:
        yield sdk


async def test_an_asynchronous_client_gets_the_same_answer_whole_and_streamed(
    async_client: openai.AsyncOpenAI,
) -> None:
    whole = await async_client.chat.completions.create(messages=MESSAGES, **ASKED)
    chunks = await async_client.chat.completions.create(
        messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **ASKED
    )
    text, usage = "", None
    async for chunk in chunks:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert text == whole.choices[0].message.content
    assert text
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens  # type: ignore[union-attr]
    completion = await async_client.completions.create(model="tiny", prompt="A", max_tokens=3, n=2)
    assert [choice.index for choice in completion.choices] == [0, 1]
    assert [model.id async for model in async_client.models.list()] == ["tiny"]


async def test_the_stream_helper_accumulates_what_a_whole_answer_has(
    async_client: openai.AsyncOpenAI,
) -> None:
    whole = await async_client.chat.completions.create(messages=MESSAGES, **ASKED)
    async with async_client.chat.completions.stream(messages=MESSAGES, **ASKED) as stream:
        deltas = [event.delta async for event in stream if event.type == "content.delta"]
        final = await stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason


def test_a_parsed_answer_is_a_pydantic_model_whole_and_streamed(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {**ASKED, "messages": MESSAGES, "response_format": Mood, "max_tokens": 400}

    def mood(completion: ParsedChatCompletion[Mood]) -> Mood:
        parsed = completion.choices[0].message.parsed
        assert isinstance(parsed, Mood), completion
        return parsed

    whole = mood(client.chat.completions.parse(**asked))
    with client.chat.completions.stream(**asked) as stream:
        done = [event.parsed for event in stream if event.type == "content.done"]
        assert mood(stream.get_final_completion()) == whole
    assert done == [whole]


@pytest.mark.parametrize("streams", [False, True])
def test_a_loop_of_tool_calls_ends_with_an_answer_from_the_result(
    client: openai.OpenAI, streams: bool
) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    asked: dict[str, Any] = {**ASKED, "tools": [WEATHER], "max_tokens": 300}
    called = []
    for _ in range(3):
        if streams:
            with client.chat.completions.stream(messages=messages, **asked) as stream:
                message: Any = stream.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.parse(messages=messages, **asked).choices[0].message
        messages.append(message.to_dict())
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            called.append((call.function.name, call.function.parsed_arguments))
            result = json.dumps({"city": "Paris", "weather": "sunny"})
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert called == [("get_weather", {"city": "Paris"})]
    assert "sunny" in messages[-1]["content"]


def test_errors_are_the_sdk_s_classes_and_name_the_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(messages=MESSAGES, model="tiny", temperature=3)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(messages=MESSAGES, model="nope")
