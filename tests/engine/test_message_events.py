"""A model's text as a message: blocks, stop reasons and usage, whole and streamed."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy_engine.api.endpoints.messages import MessageEvents, MessageFormat, with_id_comments
from argosy_engine.checkpoint.model_folder import resolve_model
from argosy_engine.frontend.output_processor import GenerationOutput
from argosy_engine.frontend.renderer import Renderer
from argosy_engine.resolved_config import RequestDefaults
from argosy_protocol.anthropic import ResumedMessage, as_chat, decode_messages_request
from argosy_protocol.json_limits import MAX_DEPTH
from message_events import message, parsed

TOOL = {"name": "ping", "input_schema": {"type": "object"}}
CALL = '<tool_call>\n{"name": "ping", "arguments": {"n": %d}}\n</tool_call>\n'
THOUGHT = "<think>\nLet me see.\n</think>\n\n"
TEXTS = {
    "nothing": "",
    "text": "It is 7.",
    "a thought": THOUGHT,
    "thought and text": THOUGHT + "It is \u00e9 7.\n",
    "one call": CALL % 1,
    "all": THOUGHT + "I call.\n" + CALL % 1 + CALL % 2,
    "an end in a thought": "<think>\nLet me",
    "an end in a call": "I call <tool_call>\n{",
    "text after a call": CALL % 1 + "and on",
}

CUT = 'I call.\n<tool_call>\n{"name": "ping", "arguments": {"n": [1, 2'


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


def formatted(renderer: Renderer, **fields: Any) -> MessageFormat:
    body = {"model": "m", "max_tokens": 100, "messages": [{"role": "user", "content": "Hi"}], "tools": [TOOL]}
    request = decode_messages_request(json.dumps({**body, **fields}).encode())
    chat = as_chat(request)
    return MessageFormat(renderer, chat, "r", "m", renderer.render_chat(chat), request.max_tokens)


def outputs(pieces: list[str], **last: Any) -> list[GenerationOutput]:
    """One output per piece; a piece is one token. The last has the finish reason."""
    made = [
        GenerationOutput(
            0, piece, [number], num_prompt_tokens=9, num_cached_tokens=4, num_output_tokens=number + 1
        )
        for number, piece in enumerate(pieces)
    ]
    for name, value in {"finish_reason": "stop", **last}.items():
        setattr(made[-1], name, value)
    return made


def streamed(events: list[bytes]) -> dict[str, Any]:
    return message(parsed(b"".join(event + b"\n\n" for event in events)))


def told(renderer: Renderer, text: str, **last: Any) -> dict[str, Any]:
    """The message of a whole text."""
    return msgspec.to_builtins(
        json.loads(msgspec.json.encode(formatted(renderer).message(*outputs([text], **last))))
    )


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_streamed_message_says_what_a_whole_one_says(renderer: Renderer, text: str) -> None:
    events = MessageEvents(formatted(renderer))
    made = streamed([event for output in outputs(list(text) or [""]) for event in events.of(output)])
    whole = told(renderer, text)
    kinds = [block["type"] for block in made["content"]]
    if kinds != ["tool_use", "text"]:  # whole messages have their text before the calls
        assert made["content"] == whole["content"]
    assert (made["stop_reason"], made["id"], made["model"]) == (whole["stop_reason"], whole["id"], "m")
    assert sorted(kinds) == sorted(block["type"] for block in whole["content"])


@given(text=st.sampled_from(sorted(TEXTS.values())), cuts=st.sets(st.integers(1, 60), max_size=8))
def test_text_does_not_depend_on_how_it_was_split(renderer: Renderer, text: str, cuts: set[int]) -> None:
    ends = [*sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    split, fine = MessageEvents(formatted(renderer)), MessageEvents(formatted(renderer))
    some = streamed([event for output in outputs(pieces) for event in split.of(output)])
    most = streamed([event for output in outputs(list(text) or [""]) for event in fine.of(output)])
    if text != TEXTS["text after a call"]:  # what one token adds comes as text, then calls
        assert some["content"] == most["content"]
    assert some["stop_reason"] == most["stop_reason"]


@pytest.mark.parametrize("text", [*TEXTS.values(), CUT], ids=[*TEXTS, "an end in arguments"])
def test_a_stream_continues_after_any_token(renderer: Renderer, text: str) -> None:
    parts = outputs([text[n : n + 3] for n in range(0, len(text), 3)] or [""])
    undisturbed = MessageEvents(formatted(renderer))
    said = [undisturbed.of(output) for output in parts]
    for cut in range(1, len(parts)):
        before = [event for events in said[:cut] for event in events]
        begun = parsed(b"".join(event + b"\n\n" for event in before))
        starts = [e["content_block"]["type"] for e in begun if e["type"] == "content_block_start"]
        ends = sum(e["type"] == "content_block_stop" for e in begun)
        resume = ResumedMessage(
            token_ids=list(range(cut)),
            num_blocks=len(starts),
            open_block=starts[-1] if len(starts) > ends else None,
        )
        body = {"resume": {"token_ids": list(range(cut))}, "stream": True}
        continued = MessageEvents(formatted(renderer, **body), resume)
        after = outputs([text[n : n + 3] for n in range(0, len(text), 3)])[cut:]
        after[0].resumed_text = text[: 3 * cut]
        assert [continued.of(output) for output in after] == said[cut:]


def test_arguments_follow_while_they_are_written(renderer: Renderer) -> None:
    events = MessageEvents(formatted(renderer))
    made = [event for output in outputs(list(CUT), finish_reason="length") for event in events.of(output)]
    told = [event.get("delta", {}) for event in parsed(b"".join(event + b"\n\n" for event in made))]
    pieces = [delta["partial_json"] for delta in told if delta.get("type") == "input_json_delta"]
    assert len(pieces) > 3
    assert "".join(pieces) == '{"n": [1, 2'
    whole = formatted(renderer).message(*outputs([CUT], finish_reason="length"))
    assert json.loads(msgspec.json.encode(whole.content[-1]))["input"] == {}, "what JSON cannot express"


@pytest.mark.parametrize("depth", [MAX_DEPTH, MAX_DEPTH + 1, 2000])
def test_arguments_deeper_than_a_request_may_be_are_an_empty_object(renderer: Renderer, depth: int) -> None:
    deep = '{"n": ' * depth + "1" + "}" * depth
    text = f'<tool_call>\n{{"name": "ping", "arguments": {deep}}}\n</tool_call>'
    (block,) = told(renderer, text)["content"]
    assert (block["name"], block["input"]) == ("ping", json.loads(deep) if depth <= MAX_DEPTH else {})


@pytest.mark.parametrize(
    ("text", "last", "expected"),
    [
        ("x", {}, ("end_turn", None)),
        ("x", {"stop_reason": 7}, ("end_turn", None)),
        ("x", {"stop_reason": "END"}, ("stop_sequence", "END")),
        ("x", {"finish_reason": "length", "num_output_tokens": 100}, ("max_tokens", None)),
        ("x", {"finish_reason": "length"}, ("model_context_window_exceeded", None)),
        (CALL % 1, {}, ("tool_use", None)),
    ],
)
def test_stop_reasons(
    renderer: Renderer, text: str, last: dict[str, Any], expected: tuple[str, str | None]
) -> None:
    whole = told(renderer, text, **last)
    assert (whole["stop_reason"], whole["stop_sequence"]) == expected
    events = MessageEvents(formatted(renderer))
    made = streamed(events.of(*outputs([text], **last)))
    assert (made["stop_reason"], made["stop_sequence"]) == expected


def test_a_call_that_the_request_named_is_a_tool_use(renderer: Renderer) -> None:
    choice = {"type": "tool", "name": "ping"}
    assert formatted(renderer, tool_choice=choice).message(*outputs([CALL % 1])).stop_reason == "tool_use"


def test_thoughts_are_left_out_if_asked(renderer: Renderer) -> None:
    text = TEXTS["thought and text"]
    for thinking in ({"type": "disabled"}, {"type": "adaptive", "display": "omitted"}):
        content = formatted(renderer, thinking=thinking).message(*outputs([text])).content
        assert [type(block).__name__ for block in content] == ["TextBlock"]
        events = MessageEvents(formatted(renderer, thinking=thinking))
        assert [block["type"] for block in streamed(events.of(*outputs([text])))["content"]] == ["text"]


def test_usage_tells_cached_tokens_from_others(renderer: Renderer) -> None:
    ids = renderer.tokenizer.encode(THOUGHT + "x", add_special_tokens=False).ids
    usage = told(renderer, THOUGHT + "x", token_ids=ids, num_output_tokens=len(ids))["usage"]
    thinking = usage.pop("output_tokens_details")["thinking_tokens"]
    assert 0 < thinking < len(ids)
    assert usage == {
        "input_tokens": 5,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": len(ids),
    }


def test_only_the_last_event_of_an_output_has_its_token_ids() -> None:
    assert with_id_comments([b"event: a\ndata: 1", b"event: b\ndata: 2"], [5, 6]) == (
        b":ids 0 \nevent: a\ndata: 1\n\n:ids 0 5,6\nevent: b\ndata: 2"
    )
    assert with_id_comments([], [5]) == b":ids 0 5"
