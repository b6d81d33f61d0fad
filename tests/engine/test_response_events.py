"""A model's text as a response of OpenAI's API: items, statuses and usage, whole and streamed."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy_engine.api.endpoints.chat import ChatFormat
from argosy_engine.api.endpoints.response_events import ResponseEvents
from argosy_engine.checkpoint.model_folder import resolve_model
from argosy_engine.frontend.output_processor import GenerationOutput
from argosy_engine.frontend.renderer import Renderer
from argosy_engine.resolved_config import RequestDefaults
from argosy_engine.sample.token_logprobs import TokenLogprobs
from argosy_protocol.errors import InternalError, TooManyRequests
from argosy_protocol.responses import (
    ResponseObject,
    ResponsesRequest,
    begun_response,
    decode_responses_request,
)
from argosy_protocol.responses_chat import translated_response
from response_stream import final_response, parsed_events

TOOL = {"type": "function", "name": "ping", "parameters": {"type": "object"}}
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
LOGPROBS = {"include": ["message.output_text.logprobs"]}


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


def formatted(renderer: Renderer, **fields: Any) -> ResponseEvents:
    body = {"model": "m", "input": "Hi", "tools": [TOOL], **fields}
    request = decode_responses_request(json.dumps(body).encode())
    chat, tools, _ = translated_response(request)
    begun = begun_response(request, "resp_r", "m", 5, 1.0, 0.9)
    chat_format = ChatFormat(renderer, chat, "resp_r", "m", renderer.render_chat(chat), 1)
    return ResponseEvents(chat_format, begun, tools)


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


def streamed(events: ResponseEvents, pieces: list[str], **last: Any) -> dict[str, Any]:
    said = events.begin()
    for output in outputs(pieces, **last):
        said += events.of(output)
    made = final_response(parsed_events(b"".join(said)))
    assert made == plain(events.response)
    return made


def plain(response: ResponseObject) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(msgspec.json.encode(response))
    return made


def whole(renderer: Renderer, text: str, **last: Any) -> dict[str, Any]:
    events = formatted(renderer)
    for output in outputs([text], **last):
        events.of(output)
    return plain(events.response)


def texts(response: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (item["type"], item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        for item in response["output"]
    ]


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_streamed_response_says_what_a_whole_one_says(renderer: Renderer, text: str) -> None:
    made = streamed(formatted(renderer), list(text) or [""])
    expected = whole(renderer, text)
    if text != TEXTS["text after a call"]:  # a whole answer has its text before the calls
        assert texts(made) == texts(expected)
    assert sorted(texts(made)) == sorted(texts(expected))
    for name in ("id", "status", "model", "tools", "error", "incomplete_details"):
        assert made[name] == expected[name]


@given(text=st.sampled_from(sorted(TEXTS.values())), cuts=st.sets(st.integers(1, 60), max_size=8))
def test_text_does_not_depend_on_how_it_was_split(renderer: Renderer, text: str, cuts: set[int]) -> None:
    ends = [*sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    some = texts(streamed(formatted(renderer), pieces))
    most = texts(streamed(formatted(renderer), list(text) or [""]))
    if text == TEXTS["text after a call"]:  # what one token adds comes as text, then calls
        some, most = sorted(some), sorted(most)
    assert some == most


def test_items(renderer: Renderer) -> None:
    thought, message, one, two = whole(renderer, TEXTS["all"])["output"]
    assert thought == {
        "id": "rs_r_0",
        "type": "reasoning",
        "status": "completed",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Let me see."}],
        "encrypted_content": None,
    }
    assert message == {
        "id": "msg_r_1",
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "I call.", "annotations": [], "logprobs": []}],
    }
    assert (one["id"], one["type"], one["name"]) == ("fc_r_2", "function_call", "ping")
    assert json.loads(two["arguments"]) == {"n": 2}
    assert one["call_id"] != two["call_id"]


def test_a_response_repeats_its_request(renderer: Renderer) -> None:
    fields: dict[str, Any] = {
        "instructions": "Be kind.",
        "metadata": {"a": "b"},
        "max_output_tokens": 7,
        "previous_response_id": "resp_p",
        "user": "u",
        "truncation": "auto",
        "tool_choice": {"type": "function", "name": "ping"},
        "parallel_tool_calls": False,
        "store": False,
        "text": {"format": {"type": "json_object"}},
    }
    made = streamed(formatted(renderer, **fields), ["{}"])
    for name in fields.keys() - {"text"}:
        assert made[name] == fields[name]
    assert made["text"] == {"format": {"type": "json_object"}, "verbosity": "medium"}
    assert made["tools"] == [{**TOOL, "description": None, "strict": None}]
    assert (made["object"], made["temperature"], made["top_p"]) == ("response", 1.0, 0.9)


@pytest.mark.parametrize("text", ["It is", "<think>\nLet", THOUGHT])
def test_a_response_that_was_cut_is_incomplete(renderer: Renderer, text: str) -> None:
    made = streamed(formatted(renderer), list(text), finish_reason="length")
    assert made == {**whole(renderer, text, finish_reason="length"), "usage": made["usage"]}
    assert made["status"] == "incomplete"
    assert made["incomplete_details"] == {"reason": "max_output_tokens"}
    assert made["completed_at"] is None
    expected = "completed" if text == THOUGHT else "incomplete"
    assert made["output"][-1]["status"] in (expected, "incomplete")


def test_arguments_follow_while_they_are_written(renderer: Renderer) -> None:
    text = TEXTS["one call"]
    events = formatted(renderer)
    said = events.begin() + [event for output in outputs(list(text)) for event in events.of(output)]
    told = parsed_events(b"".join(said))
    deltas = [e["delta"] for e in told if e["type"] == "response.function_call_arguments.delta"]
    assert len(deltas) > 3
    assert json.loads("".join(deltas)) == {"n": 1}


def test_a_call_that_was_cut_is_incomplete(renderer: Renderer) -> None:
    text = TEXTS["one call"]
    cut = text[: text.index("}")]
    for pieces in (list(cut), [cut]):
        (call,) = streamed(formatted(renderer), pieces, finish_reason="length")["output"]
        assert (call["status"], call["arguments"]) == ("incomplete", '{"n": 1')


def test_arguments_beyond_the_decoder_s_depth_are_answered(renderer: Renderer) -> None:
    arguments = '{"n": ' * 2000 + "1" + "}" * 2000
    text = f'<tool_call>\n{{"name": "ping", "arguments": {arguments}}}\n</tool_call>'
    made = streamed(formatted(renderer), [text[n : n + 500] for n in range(0, len(text), 500)])
    assert texts(made) == [("function_call", arguments)]
    assert made["output"][0]["status"] == "completed"


def test_usage(renderer: Renderer) -> None:
    ids = renderer.tokenizer.encode(THOUGHT + "x", add_special_tokens=False).ids
    usage = whole(renderer, THOUGHT + "x", token_ids=ids, num_output_tokens=len(ids))["usage"]
    thinking = usage.pop("output_tokens_details")["reasoning_tokens"]
    assert 0 < thinking < len(ids)
    assert usage == {
        "input_tokens": 9,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": len(ids),
        "total_tokens": 9 + len(ids),
    }


def test_reasoning_is_left_out_if_asked(renderer: Renderer) -> None:
    made = streamed(formatted(renderer, include_reasoning=False), list(TEXTS["thought and text"]))
    assert [kind for kind, _ in texts(made)] == ["message"]


@pytest.mark.parametrize(
    ("error", "code"),
    [(InternalError("broken"), "server_error"), (TooManyRequests("broken"), "rate_limit_exceeded")],
)
def test_a_failure_ends_the_response(renderer: Renderer, error: Any, code: str) -> None:
    for pieces in ([], ["It is"]):
        events = formatted(renderer)
        said = events.begin() if pieces else []
        for output in outputs([*pieces, "x"])[: len(pieces)]:
            said += events.of(output)
        said += events.failed(error)
        made = final_response(parsed_events(b"".join(said)))
        assert made["status"] == "failed"
        assert made["error"] == {"code": code, "message": "broken"}
        assert texts(made) == [("message", piece) for piece in pieces]
        assert events.is_over


def test_a_cancelled_response_keeps_what_it_has(renderer: Renderer) -> None:
    events = formatted(renderer, background=True)
    said = events.begin()
    assert [event["type"] for event in parsed_events(b"".join(said))] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    events.of(outputs(["It is", "x"])[0])
    made = plain(events.cancelled())
    assert (made["status"], texts(made)) == ("cancelled", [("message", "It is")])
    assert made["output"][0]["status"] == "incomplete"


def test_only_tokens_of_the_text_have_log_probabilities(renderer: Renderer) -> None:
    encoded = renderer.tokenizer.encode(THOUGHT + "It is 7.", add_special_tokens=False)
    pieces = [renderer.tokenizer.token_bytes(token).decode() for token in encoded.ids]
    events = formatted(renderer, top_logprobs=1, **LOGPROBS)
    made = outputs(pieces)
    for output, token in zip(made, encoded.ids, strict=True):
        output.token_ids = [token]
        output.logprobs = [TokenLogprobs([token, token], [-0.5, -0.5], 1)]
    said = events.begin()
    for output in made:
        said += events.of(output)
    message = final_response(parsed_events(b"".join(said)))["output"][-1]
    entries = message["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in entries).strip() == "It is 7."
    assert all(entry["logprob"] == -0.5 and len(entry["top_logprobs"]) == 1 for entry in entries)


@pytest.mark.parametrize("choice", [None, "none", "auto", "required", {"type": "function", "name": "f"}])
def test_the_tool_choice_is_what_was_given_or_auto(choice: Any) -> None:
    request = ResponsesRequest(input="hi", model="m", tool_choice=choice)
    assert begun_response(request, "resp_r", "m", 5, 1.0, 0.9).tool_choice == (choice or "auto")


CLIENT_TOOLS = [
    {"type": "custom", "name": "exec"},
    {"type": "namespace", "name": "git", "tools": [{"type": "function", "name": "log"}]},
    {"type": "tool_search", "execution": "client"},
]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>\n"


def names_of_events(events: list[dict[str, Any]]) -> list[str]:
    """The types of events about items, each once in a row."""
    names = [event["type"].removeprefix("response.") for event in events if "output_index" in event]
    return [name for index, name in enumerate(names) if index == 0 or names[index - 1] != name]


def test_calls_come_back_as_the_client_names_its_tools(renderer: Renderer) -> None:
    text = call("exec", input='say "hi"\n') + call("git__log", n=3) + call("tool_search", query="x")
    for pieces in (list(text), [text]):
        events = formatted(renderer, tools=CLIENT_TOOLS)
        said = events.begin()
        for output in outputs(pieces):
            said += events.of(output)
        made = parsed_events(b"".join(said))
        items = [
            {name: value for name, value in item.items() if name not in ("id", "call_id")}
            for item in plain(events.response)["output"]
        ]
        assert items == [
            {"type": "custom_tool_call", "status": "completed", "name": "exec", "input": 'say "hi"\n'},
            {
                "type": "function_call",
                "status": "completed",
                "name": "log",
                "namespace": "git",
                "arguments": '{"n": 3}',
            },
            {
                "type": "tool_search_call",
                "status": "completed",
                "execution": "client",
                "arguments": {"query": "x"},
            },
        ]
        assert [event["item"] for event in made if event["type"] == "response.output_item.done"] == plain(
            events.response
        )["output"]
        assert names_of_events(made) == [
            *("output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done"),
            *("output_item.done", "output_item.added", "function_call_arguments.delta"),
            *("function_call_arguments.done", "output_item.done", "output_item.added", "output_item.done"),
        ]
        deltas = [e["delta"] for e in made if e["type"] == "response.custom_tool_call_input.delta"]
        assert "".join(deltas) == 'say "hi"\n'
        ids = [item["id"].partition("_")[0] for item in plain(events.response)["output"]]
        assert ids == ["ctc", "fc", "tsc"]
        decode_responses_request(json.dumps({"input": plain(events.response)["output"]}).encode())


@pytest.mark.parametrize("reason", ["length", "stop"])
@pytest.mark.parametrize("cut", range(1, 62, 2))
def test_an_input_that_is_cut_off_is_as_long_as_it_was_streamed(
    renderer: Renderer, cut: int, reason: str
) -> None:
    text = call("exec", input="a\n\u00e9\U0001f600b")[:cut]
    events = formatted(renderer, tools=CLIENT_TOOLS)
    said = events.begin()
    for output in outputs(list(text), finish_reason=reason):
        said += events.of(output)
    made = parsed_events(b"".join(said))
    deltas = "".join(e["delta"] for e in made if e["type"] == "response.custom_tool_call_input.delta")
    calls = [item for item in plain(events.response)["output"] if item["type"] == "custom_tool_call"]
    assert [item["input"] for item in calls] == ([deltas] if calls else [])
    assert "a\n\u00e9\U0001f600b".startswith(deltas.rstrip("\ufffd"))
    assert plain(events.response)["status"] == ("incomplete" if reason == "length" else "completed")
    if reason == "length":
        assert all(item["status"] == "incomplete" or deltas.endswith("b") for item in calls)


def searches(renderer: Renderer, arguments: str) -> tuple[bytes, dict[str, Any]]:
    """The events of a call of a search, and the response."""
    text = f'<tool_call>\n{{"name": "tool_search", "arguments": {arguments}}}\n</tool_call>\n'
    events = formatted(renderer, tools=CLIENT_TOOLS)
    said = events.begin()
    for output in outputs(list(text)):
        said += events.of(output)
    return b"".join(said), plain(events.response)


def test_a_search_is_on_one_line_of_an_event(renderer: Renderer) -> None:
    said, made = searches(renderer, '{\n "query":\r\n "a  b"\n}')
    assert made["output"][0]["arguments"] == {"query": "a  b"}
    assert parsed_events(said)[-1]["response"] == made
    assert all(line.startswith((b"event: ", b"data: ")) for line in said.splitlines() if line)


@pytest.mark.parametrize("value", ["1e400", "[" * 126 + "]" * 126, "[" * 3000 + "]" * 3000])
def test_a_search_that_no_request_may_replay_has_no_arguments(renderer: Renderer, value: str) -> None:
    _, made = searches(renderer, f'{{"query": {value}}}')
    assert made["output"][0]["arguments"] == {}
    decode_responses_request(json.dumps({"model": "m", "input": made["output"]}).encode())
