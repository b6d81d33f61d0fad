"""LiteLLM, which gateways are built on: its provider for servers that speak OpenAI's API, and that for vLLM."""

from __future__ import annotations

from typing import Any

import litellm
import pytest

MESSAGES = [{"role": "user", "content": "Hello!"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the current weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]


@pytest.fixture(params=["openai/tiny", "hosted_vllm/tiny"])
def asked(request: pytest.FixtureRequest, base_url: str) -> dict[str, Any]:
    return {
        "model": request.param, "api_base": base_url, "api_key": "none", "temperature": 0, "max_tokens": 100,
        "num_retries": 0,
    }  # fmt: skip


def test_a_chat_is_the_same_whole_and_streamed(asked: dict[str, Any]) -> None:
    whole: Any = litellm.completion(messages=MESSAGES, **asked)
    chunks = list(
        litellm.completion(messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **asked)
    )
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert text
    built: Any = litellm.stream_chunk_builder(chunks)
    assert built.usage.completion_tokens == whole.usage.completion_tokens


async def test_a_tool_is_called_asynchronously(asked: dict[str, Any]) -> None:
    question = [{"role": "user", "content": "What is the weather in Paris?"}]
    answer: Any = await litellm.acompletion(messages=question, tools=TOOLS, **asked)
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Paris"}')


def test_an_error_is_the_class_of_its_status(asked: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError, match="top_p"):
        litellm.completion(messages=MESSAGES, top_p=3, **asked)
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=MESSAGES, **{**asked, "model": asked["model"].replace("tiny", "nope")})
