"""LangChain's ChatOpenAI: invoke, stream, structured output, and a chain of tool calls."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, SecretStr


class Mood(BaseModel):
    """The mood of a text."""

    mood: Literal["good", "bad"]


@tool
def get_weather(city: str) -> dict[str, str]:
    """Get the current weather in a city."""
    return {"city": city, "weather": "sunny"}


@pytest.fixture
def chat(base_url: str) -> ChatOpenAI:
    return ChatOpenAI(
        model="tiny", base_url=base_url, api_key=SecretStr("none"), temperature=0, max_completion_tokens=300,
        max_retries=0,
    )  # fmt: skip


def test_a_chat_is_the_same_whole_and_streamed(chat: ChatOpenAI) -> None:
    whole = chat.invoke("Hello!")
    chunks = list(chat.stream("Hello!", stream_usage=True))
    assert whole.content
    assert "".join(str(chunk.content) for chunk in chunks) == whole.content
    assert whole.usage_metadata is not None
    used = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert used[-1]["output_tokens"] == whole.usage_metadata["output_tokens"]


async def test_a_batch_is_answered_concurrently(chat: ChatOpenAI) -> None:
    answers = await chat.abatch(["Hello!", "What is 2 + 2?"])
    assert [bool(answer.content) for answer in answers] == [True, True]
    assert [chunk.content async for chunk in chat.astream("Hello!")]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_is_a_pydantic_model(
    chat: ChatOpenAI, method: Literal["json_schema", "function_calling"]
) -> None:
    assert isinstance(chat.with_structured_output(Mood, method=method).invoke("I am happy."), Mood)


def test_a_bound_tool_is_called_and_its_result_is_used(chat: ChatOpenAI) -> None:
    bound = chat.bind_tools([get_weather])
    messages: list[BaseMessage] = [HumanMessage("What is the weather in Paris?")]
    answer: Any = bound.invoke(messages)
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == [
        ("get_weather", {"city": "Paris"})
    ]
    result = get_weather.invoke(answer.tool_calls[0])
    assert isinstance(result, ToolMessage)
    final = bound.invoke([*messages, answer, result])
    assert isinstance(final, AIMessage)
    assert not final.tool_calls
    assert "sunny" in str(final.content)


def test_completions(base_url: str) -> None:
    model = OpenAI(model="tiny", base_url=base_url, api_key=SecretStr("none"), temperature=0, max_tokens=5)
    assert model.invoke("Once upon a time") == "".join(model.stream("Once upon a time"))
