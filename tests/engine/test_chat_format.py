"""Choices of /v1/chat/completions made of a model's text: calls, finish reasons, usage."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import tokenizers

from argosy_engine.api.endpoints.chat import ChatFormat
from argosy_engine.checkpoint.model_folder import resolve_model
from argosy_engine.frontend.output_processor import GenerationOutput
from argosy_engine.frontend.renderer import Renderer
from argosy_engine.resolved_config import ParserConfig, RequestDefaults
from argosy_protocol.openai import ChatChunkChoice
from chat_requests import chat

PING = {"type": "function", "function": {"name": "ping"}}
CALLS = "".join(
    f'<tool_call>\n{{"name": "ping", "arguments": {{"n": {n}}}}}\n</tool_call>\n' for n in range(3)
)
NAMED = {"type": "function", "function": {"name": "ping"}}


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    config = SimpleNamespace(
        model_path=resolve_model("builtin://tiny"),
        request_defaults=RequestDefaults(),
        model_name="m",
        vocab_size=1024,
        max_model_len=4096,
        pooling=None,
    )
    return Renderer(config)  # type: ignore[arg-type]


def formatted(renderer: Renderer, **fields: object) -> ChatFormat:
    request = chat(messages=[{"role": "user", "content": "Hi"}], **fields)
    return ChatFormat(renderer, request, "r", "m", renderer.render_chat(request), 1)


def outputs(renderer: Renderer, text: str, *, in_parts: bool) -> list[GenerationOutput]:
    """Return a model's text as the outputs of its run, one or one per token."""
    ids = renderer.tokenizer.encode(text, add_special_tokens=False).ids
    if not in_parts:
        return [GenerationOutput(0, text, ids, "stop", num_output_tokens=len(ids))]
    texts = [renderer.tokenizer.decode([token], skip_special_tokens=False) for token in ids]
    assert "".join(texts) == text
    last = len(ids) - 1
    return [
        GenerationOutput(0, piece, [token], "stop" if n == last else None, num_output_tokens=n + 1)
        for n, (token, piece) in enumerate(zip(ids, texts, strict=True))
    ]


def joined_calls(deltas: list[ChatChunkChoice]) -> list[dict[str, Any]]:
    """Return the calls of a stream, as clients put them together."""
    calls: list[dict[str, Any]] = []
    for call in (call for delta in deltas for call in delta.delta.tool_calls):
        if call.index == len(calls):
            assert call.type == "function"
            calls.append({"id": call.id, "name": call.function.name, "arguments": ""})
        else:
            assert (call.id, call.type, call.function.name) == (None, None, None)
        assert call.index == len(calls) - 1
        calls[-1]["arguments"] += call.function.arguments
    return calls


def calls_and_reason(renderer: Renderer, *, stream: bool, **fields: object) -> tuple[list[str], str | None]:
    made = formatted(renderer, tools=[PING], **fields)
    parts = outputs(renderer, CALLS, in_parts=stream)
    if stream:
        deltas = [delta for part in parts for delta in made.deltas(part)]
        return [call["arguments"] for call in joined_calls(deltas)], deltas[-1].finish_reason
    (choice,) = made.response(parts).choices
    return [call.function.arguments for call in choice.message.tool_calls], choice.finish_reason


@pytest.mark.parametrize("stream", [False, True])
def test_without_parallel_calls_the_first_one_is_returned(renderer: Renderer, stream: bool) -> None:
    calls, reason = calls_and_reason(renderer, stream=stream, parallel_tool_calls=False)
    assert [json.loads(call) for call in calls] == [{"n": 0}]
    assert reason == "tool_calls"
    calls, reason = calls_and_reason(renderer, stream=stream)
    assert [json.loads(call)["n"] for call in calls] == [0, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_call_finishes_with_stop(renderer: Renderer, stream: bool) -> None:
    assert calls_and_reason(renderer, stream=stream, tool_choice=NAMED)[1] == "stop"
    assert calls_and_reason(renderer, stream=stream, tool_choice="required")[1] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_off_keeps_the_arguments_so_far(renderer: Renderer, stream: bool) -> None:
    cut = CALLS[: CALLS.index("}")]
    made = formatted(renderer, tools=[PING], tool_choice=NAMED)
    *parts, last = outputs(renderer, cut, in_parts=stream)
    last.finish_reason = "length"
    if stream:
        deltas = [delta for part in (*parts, last) for delta in made.deltas(part)]
        content, reason = "".join(delta.delta.content or "" for delta in deltas), deltas[-1].finish_reason
        (arguments,) = [call["arguments"] for call in joined_calls(deltas)]
    else:
        (choice,) = made.response([last]).choices
        content, reason = choice.message.content or "", choice.finish_reason
        (arguments,) = [call.function.arguments for call in choice.message.tool_calls]
    assert (arguments, content, reason) == ('{"n": 0', "", "length")


@pytest.mark.parametrize("tool_choice", ["auto", "required", NAMED])
def test_a_streamed_call_begins_before_its_arguments(renderer: Renderer, tool_choice: Any) -> None:
    made = formatted(renderer, tools=[PING], tool_choice=tool_choice)
    call = (
        '<tool_call>\n{"name": "ping", "arguments": {"city": "Llanfairpwllgwyngyll", "n": 1}}\n</tool_call>'
    )
    parts = [GenerationOutput(0, char, [7]) for char in call]
    deltas = [delta for part in parts for delta in made.deltas(part)]
    first, *later = [call for delta in deltas for call in delta.delta.tool_calls]
    assert (first.index, first.type, first.function.name) == (0, "function", "ping")
    assert first.function.arguments in ("", '{"')
    assert len(later) > 20
    (joined,) = joined_calls(deltas)
    assert json.loads(joined["arguments"]) == {"city": "Llanfairpwllgwyngyll", "n": 1}


def test_a_resumed_stream_goes_on_in_the_arguments(renderer: Renderer) -> None:
    undisturbed = formatted(renderer, tools=[PING])
    parts = outputs(renderer, CALLS, in_parts=True)
    said = [[delta.delta for delta in undisturbed.deltas(part)] for part in parts]
    for cut in range(1, len(parts)):
        continued = formatted(renderer, tools=[PING])
        parts[cut].resumed_text = "".join(part.text for part in parts[:cut])
        assert [[delta.delta for delta in continued.deltas(part)] for part in parts[cut:]] == said[cut:]
        parts[cut].resumed_text = ""


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_beyond_the_first_adds_nothing(renderer: Renderer, stream: bool) -> None:
    """Without `parallel_tool_calls` neither the call nor its arguments reach the client."""
    made = formatted(renderer, tools=[PING], parallel_tool_calls=False)
    parts = outputs(renderer, CALLS, in_parts=stream)
    if stream:
        found = [call["arguments"] for call in joined_calls([d for part in parts for d in made.deltas(part)])]
    else:
        found = [call.function.arguments for call in made.response(parts).choices[0].message.tool_calls]
    assert found == ['{"n": 0}']


def kimi_call(number: int) -> str:
    return f"<|tool_call_begin|>functions.ping:{number}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"


@pytest.mark.parametrize("resumed", [0, 2, 3])
def test_ids_that_a_model_repeats_become_unique(resumed: int) -> None:
    """Also in a stream that is resumed after some of the calls."""
    config = SimpleNamespace(
        model_path=resolve_model("builtin://tiny"),
        request_defaults=RequestDefaults(),
        model_name="m",
        vocab_size=1024,
        max_model_len=4096,
        pooling=None,
    )
    kimi = Renderer(config, ParserConfig(tool_call_parser="kimi_k2"))  # type: ignore[arg-type]
    texts = [kimi_call(number) for number in (1, 1, 2, 2, 0)]
    made = formatted(kimi, tools=[PING])
    before = "".join(texts[:resumed])
    deltas = made.deltas(GenerationOutput(0, "".join(texts[resumed:]), [7], "stop", resumed_text=before))
    ids = [call.id for delta in deltas for call in delta.delta.tool_calls]
    assert ids == [f"functions.ping:{number}" for number in (1, 2, 3, 4, 0)][resumed:]


def test_a_message_has_all_fields_of_openai(renderer: Renderer) -> None:
    response = formatted(renderer).response(outputs(renderer, "Hello.", in_parts=False))
    message = msgspec.to_builtins(response)["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Hello.", "refusal": None, "annotations": ()}


@pytest.mark.parametrize("begun", [True, False])
def test_an_echoed_answer_begins_with_the_assistant_s_last_message(renderer: Renderer, begun: bool) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    if begun:
        messages.append({"role": "assistant", "content": "Well, "})
    request = chat(messages=messages, echo=True, add_generation_prompt=not begun)
    made = ChatFormat(renderer, request, "r", "m", renderer.render_chat(request), 1)
    expected = "Well, " if begun else ""
    opening = made.opening(None)
    assert opening is not None
    assert opening.choices[0].delta.content == expected
    response = made.response(outputs(renderer, "hello.", in_parts=False))
    assert response.choices[0].message.content == f"{expected}hello."


@pytest.mark.parametrize("stream", [False, True])
def test_usage_counts_reasoning_tokens(renderer: Renderer, stream: bool) -> None:
    thought = "Small talk, so a greeting."
    made = formatted(renderer)
    parts = outputs(renderer, f"<think>\n{thought}\n</think>\n\nHello.", in_parts=stream)
    if stream:
        for part in parts:
            made.deltas(part)
        count = made.num_reasoning_tokens
    else:
        details = made.response(parts).usage.completion_tokens_details
        assert details is not None
        count = details.reasoning_tokens
    assert count == len(renderer.tokenizer.encode(f"\n{thought}\n", add_special_tokens=False).ids)


def counted(made: ChatFormat, parts: list[GenerationOutput], *, stream: bool) -> int:
    if stream:
        for part in parts:
            made.deltas(part)
    else:
        made.response(parts)
    return made.num_reasoning_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_end_the_reasoning_are_no_part_of_it(renderer: Renderer, stream: bool) -> None:
    thought = "I ask thrice, with <tool_call> marks."
    parts = outputs(renderer, f"<think>{thought}{CALLS}", in_parts=stream)
    count = len(renderer.tokenizer.encode(thought, add_special_tokens=False).ids)
    assert counted(formatted(renderer, tools=[PING]), parts, stream=stream) == count
    assert counted(formatted(renderer), parts, stream=stream) > count, "without tools all of it is reasoning"


def test_a_resumed_stream_counts_the_reasoning_before_a_call(renderer: Renderer) -> None:
    thought, call = "I ask", CALLS.splitlines(keepends=True)[:3]
    before, after = (
        renderer.tokenizer.encode(text, add_special_tokens=False).ids
        for text in (f"<think>{thought}{call[0]}", "".join(call[1:]))
    )
    made = formatted(renderer, tools=[PING], resume={"created": 1, "choices": [{"token_ids": before}]})
    resumed = f"<think>{thought}{call[0]}"
    made.deltas(GenerationOutput(0, "".join(call[1:]), after, "stop", resumed_text=resumed))
    assert made.num_reasoning_tokens == len(renderer.tokenizer.encode(thought, add_special_tokens=False).ids)


def renderer_with(path: Path, special_tokens: list[str], parsers: ParserConfig) -> Renderer:
    """Return a renderer for a model whose tokenizer has these tokens, too."""
    shutil.copytree(resolve_model("builtin://tiny"), path, dirs_exist_ok=True)
    tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens(special_tokens)
    tokenizer.save(str(path / "tokenizer.json"))
    config = SimpleNamespace(
        model_path=str(path),
        request_defaults=RequestDefaults(),
        model_name="m",
        vocab_size=2048,
        max_model_len=4096,
        pooling=None,
    )
    return Renderer(config, parsers)  # type: ignore[arg-type]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "thought"),
    [
        ("Here is my thought process:\nI greet. Here is my response: Hello, then.", "I greet. "),
        ("Here's my thought process: Hm.\n\nHere's my response:\nHello.", " Hm."),
        ('Here\'s my thought process:Hm.\nHere is my response:<|tool_call|>[{"name": "ping"}]', "Hm."),
        ("Here is my thought process: Hm, what", " Hm, what"),
        ("Hello.", ""),
    ],
)
def test_reasoning_that_sentences_mark_is_counted_by_its_text(
    text: str, thought: str, stream: bool, tmp_path: Path
) -> None:
    """Their tokens depend on what stands before them, and there are two of each."""
    granite = renderer_with(
        tmp_path, [], ParserConfig(tool_call_parser="granite", reasoning_parser="granite")
    )
    made = formatted(granite, tools=[PING])
    count = len(granite.tokenizer.encode(thought, add_special_tokens=False).ids)
    assert counted(made, outputs(granite, text, in_parts=stream), stream=stream) == count
    assert not made.is_reasoning


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    """A renderer for a model that writes the Harmony format."""
    marks = ("start", "channel", "message", "end", "call", "return", "constrain")
    parsers = ParserConfig(tool_call_parser="openai", reasoning_parser="openai_gptoss")
    return renderer_with(tmp_path_factory.mktemp("model"), [f"<|{mark}|>" for mark in marks], parsers)


@pytest.mark.parametrize("in_parts", [False, True])
def test_special_tokens_of_gemma_are_read(in_parts: bool, tmp_path: Path) -> None:
    """Its mark of reasoning is a special token with a word after it."""
    tokens = ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>']
    gemma = renderer_with(
        tmp_path, tokens, ParserConfig(tool_call_parser="gemma4", reasoning_parser="gemma4")
    )
    request = chat(messages=[{"role": "user", "content": "Hi"}], tools=[PING])
    assert {gemma.tokenizer.token_text(id_) for id_ in gemma.parsed_token_ids(request)} == set(tokens)
    text = '<|channel>thought\nI ask.<channel|><|tool_call>call:ping{a:<|"|>b<|"|>}<tool_call|>'
    made = ChatFormat(gemma, request, "r", "m", gemma.render_chat(request), 1)
    if in_parts:
        deltas = [delta.delta for part in outputs(gemma, text, in_parts=True) for delta in made.deltas(part)]
        reasoning = "".join(delta.reasoning or "" for delta in deltas)
        names = [call.function.name for delta in deltas for call in delta.tool_calls or ()]
    else:
        message = made.response(outputs(gemma, text, in_parts=False)).choices[0].message
        assert message.content is None
        reasoning, names = message.reasoning or "", [call.function.name for call in message.tool_calls or ()]
    assert (reasoning.strip(), names) == ("I ask.", ["ping"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "after",
    [
        '<|end|><|start|>assistant<|channel|>commentary to=functions.ping <|constrain|>json<|message|>{"n": 1}<|call|>',
        "<|end|><|start|>assistant<|channel|>commentary<|message|>I ask, then I wait for an answer.<|end|>",
        "<|channel|>final<|message|>A greeting.<|return|>",
    ],
)
def test_messages_after_the_analysis_are_no_reasoning(harmony: Renderer, after: str, stream: bool) -> None:
    thoughts = ["Small talk.", "So a greeting"]
    analysis = "<|end|><|start|>assistant".join(f"<|channel|>analysis<|message|>{text}" for text in thoughts)
    parts = outputs(harmony, analysis + after, in_parts=stream)
    count = sum(len(harmony.tokenizer.encode(text, add_special_tokens=False).ids) for text in thoughts)
    assert counted(formatted(harmony, tools=[PING]), parts, stream=stream) == count


def test_a_resumed_stream_counts_the_reasoning_before_it(renderer: Renderer) -> None:
    ids = renderer.tokenizer.encode("<think>\nOne two", add_special_tokens=False).ids
    made = formatted(renderer, resume={"created": 1, "choices": [{"token_ids": ids}]})
    assert made.num_reasoning_tokens == len(ids) - 1
    made.deltas(GenerationOutput(0, " three", [7]))
    assert made.num_reasoning_tokens == len(ids)


def test_an_answer_without_reasoning_counts_none(renderer: Renderer) -> None:
    made = formatted(renderer, chat_template_kwargs={"enable_thinking": False})
    usage = made.response(outputs(renderer, "Hello <think> x", in_parts=False)).usage
    assert msgspec.to_builtins(usage)["completion_tokens_details"] == {"reasoning_tokens": 0}


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_stays_out_of_the_answer_if_asked(renderer: Renderer, stream: bool) -> None:
    made = formatted(renderer, include_reasoning=False)
    parts = outputs(renderer, "<think>\nSmall talk.\n</think>\n\nHello.", in_parts=stream)
    if stream:
        shown = [delta.delta for part in parts for delta in made.deltas(part)]
        assert "".join(delta.content or "" for delta in shown) == "Hello."
        assert not any(delta.reasoning for delta in shown)
        assert made.num_reasoning_tokens > 0
    else:
        response = made.response(parts)
        assert (response.choices[0].message.content, response.choices[0].message.reasoning) == (
            "Hello.",
            None,
        )
        assert made.num_reasoning_tokens > 0


@pytest.mark.parametrize(
    ("fields", "num_calls"),
    [
        ({}, 1),
        ({"response_format": {"type": "text"}}, 1),
        ({"response_format": {"type": "json_object"}}, 0),
        ({"structured_outputs": {"regex": "a"}}, 0),
        ({"tool_choice": "required"}, 0),
    ],
)
def test_no_call_ends_a_thought_after_which_a_grammar_begins(
    renderer: Renderer, fields: dict[str, object], num_calls: int
) -> None:
    made = formatted(renderer, tools=[PING], **fields)
    (choice,) = made.response(
        outputs(renderer, f"<think>Hm.{CALLS[: len(CALLS) // 3]}", in_parts=False)
    ).choices
    assert len(choice.message.tool_calls) == num_calls
    assert not choice.message.content
