"""The shipped folder: loads in transformers as is, is small, and answers."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

SHIPPED = Path(__file__).parents[2] / "models" / "argosy-tiny"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def shipped() -> tuple[Any, Any]:
    return AutoTokenizer.from_pretrained(SHIPPED), AutoModelForCausalLM.from_pretrained(
        SHIPPED
    ).float().eval()


def ask(
    shipped: tuple[Any, Any], *messages: dict[str, str], thinking: bool = False, tools: list | None = None
) -> str:
    tokenizer, model = shipped
    inputs = tokenizer.apply_chat_template(
        list(messages),
        tools=tools,
        add_generation_prompt=True,
        enable_thinking=thinking,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**inputs, max_new_tokens=60)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_the_folder_is_complete_and_small() -> None:
    config = json.loads((SHIPPED / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["max_position_embeddings"] == 4096
    assert config["tie_word_embeddings"] is True
    assert (SHIPPED / "model.safetensors").stat().st_size <= 12_000_000
    assert {
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
        "README.md",
    } <= {path.name for path in SHIPPED.iterdir()}
    assert (SHIPPED / "chat_template.jinja").read_text() == (
        SHIPPED.parent.parent / "training" / "chat_template.jinja"
    ).read_text()


def test_it_has_between_2_and_5_million_parameters(shipped: tuple[Any, Any]) -> None:
    assert 2_000_000 <= shipped[1].num_parameters() <= 5_000_000


def test_it_greets_and_repeats(shipped: tuple[Any, Any]) -> None:
    assert ask(shipped, user("Hello!")) == "Hello! How can I help you?"
    assert ask(shipped, user("Say this is a test")) == "this is a test"


def test_it_remembers_a_name(shipped: tuple[Any, Any]) -> None:
    told = [user("My name is Alice."), assistant("Nice to meet you, Alice!")]
    assert ask(shipped, *told, user("What is my name?")) == "Your name is Alice."


def test_it_calls_a_tool_and_reads_the_result(shipped: tuple[Any, Any]) -> None:
    reply = ask(shipped, user("What is the weather in Paris?"), tools=[WEATHER])
    assert reply == '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def test_it_thinks_first_when_asked_to(shipped: tuple[Any, Any]) -> None:
    reply = ask(shipped, user("Hello!"), thinking=True)
    assert reply.startswith("<think>\n")
    assert reply.endswith("</think>\n\nHello! How can I help you?")


def test_the_template_adds_no_system_message_of_its_own(shipped: tuple[Any, Any]) -> None:
    text = shipped[0].apply_chat_template(
        [user("Hi")], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
