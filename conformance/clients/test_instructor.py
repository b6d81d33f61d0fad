"""instructor: Pydantic models from chats, by its modes of asking."""

from __future__ import annotations

from typing import Any, Literal

import instructor
import openai
import pytest
from pydantic import BaseModel, Field

MESSAGES: list[Any] = [{"role": "user", "content": "I am happy."}]
ASKED: dict[str, Any] = {
    "model": "tiny",
    "messages": MESSAGES,
    "temperature": 0,
    "max_tokens": 400,
    "max_retries": 0,
}


class Mood(BaseModel):
    """The mood of a text."""

    mood: Literal["good", "bad"]
    level: int = Field(ge=0, le=9)


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA])
def test_an_answer_is_a_pydantic_model(base_url: str, mode: instructor.Mode) -> None:
    with openai.OpenAI(base_url=base_url, api_key="none") as sdk:
        client = instructor.from_openai(sdk, mode=mode)
        assert isinstance(client.chat.completions.create(response_model=Mood, **ASKED), Mood)


async def test_partial_answers_are_streamed(base_url: str) -> None:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none") as sdk:
        client = instructor.from_openai(sdk, mode=instructor.Mode.JSON_SCHEMA)
        partial = [
            mood async for mood in client.chat.completions.create_partial(response_model=Mood, **ASKED)
        ]
    assert len(partial) > 1
    assert partial[-1].mood in ("good", "bad")
