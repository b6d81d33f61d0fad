"""Conversations of natural prompts: what the model is given at each turn."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import evaluate

SHIPPED = Path(__file__).parents[2] / "models" / "argosy-tiny"
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rome"}}}],
}


class Repeater:
    """A model that says the same at every turn, and notes what it was given."""

    def __init__(self, tokenizer: Any, says: str) -> None:
        self.tokenizer, self.said = tokenizer, tokenizer(says, return_tensors="pt")["input_ids"]
        self.given: list[str] = []

    def generate(self, input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
        self.given.append(self.tokenizer.decode(input_ids[0]))
        return torch.cat((input_ids, self.said), 1)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(SHIPPED)


def test_every_message_of_the_user_is_answered_and_thoughts_are_not_sent_back(tokenizer: Any) -> None:
    model = Repeater(tokenizer, "<think>\nHm.\n</think>\n\nFine.")
    case = {"system": "Be brief.", "messages": ["One", "Two"]}
    assert evaluate.replies(tokenizer, model, case, thinking=True) == "<think>\nHm.\n</think>\n\nFine."
    first, second = model.given
    assert first.endswith("<|im_start|>user\nOne<|im_end|>\n<|im_start|>assistant\n")
    assert second.startswith("<|im_start|>system\nBe brief.<|im_end|>\n")
    assert "<|im_start|>assistant\nFine.<|im_end|>\n<|im_start|>user\nTwo" in second


def test_given_calls_and_results_are_not_generated(tokenizer: Any) -> None:
    model = Repeater(tokenizer, "Sunny.")
    case = {"messages": ["Rome?", CALL, {"role": "tool", "content": "sun"}], "tools": ["get_weather"]}
    assert evaluate.replies(tokenizer, model, case, thinking=False) == "Sunny."
    (given,) = model.given
    assert '"name": "get_weather", "arguments": {"city": "Rome"}' in given
    assert "<tool_response>\nsun\n</tool_response>" in given


def test_a_forced_beginning_stands_in_the_last_reply_only_and_is_never_thought_about(tokenizer: Any) -> None:
    model = Repeater(tokenizer, 'Rome"}')
    case = {"messages": ["One", "Two"], "begins": '{"city": "'}
    assert evaluate.replies(tokenizer, model, case, thinking=True) == 'Rome"}'
    first, second = model.given
    assert first.endswith("<think>\n\n</think>\n\n")
    assert second.endswith('<think>\n\n</think>\n\n{"city": "')
