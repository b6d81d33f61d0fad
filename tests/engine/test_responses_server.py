"""/v1/responses as OpenAI's SDK meets it: a real engine, whole, streamed, stored and in the background."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from openai.types.responses import FunctionToolParam, Response, ResponseFunctionToolCall
from pydantic import BaseModel

from case_tables import wrong_answers
from processes import Server, wait_until
from response_stream import final_response, parsed_events
from served_engine import AUTHORIZED, KEY, MAX_MODEL_LEN, OTHER_KEY

pytestmark = pytest.mark.timeout(300)

HELLO = "Hello! What can you do?"
WEATHER: FunctionToolParam = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
FOREVER = {"input": "Count", "max_output_tokens": 1900, "temperature": 1, "ignore_eos": True}


@pytest.fixture
def client(tiny_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tiny_server.url}/v1", api_key=KEY, max_retries=0) as sdk:
        yield sdk


@pytest.fixture
def http(tiny_server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tiny_server.url, headers=AUTHORIZED, timeout=60) as plain:
        yield plain


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "input": HELLO, "max_output_tokens": 64, "temperature": 0, **fields}


def test_a_whole_response(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="tiny", input=HELLO, instructions="Be kind.", temperature=0)
    assert answer.status == "completed"
    assert answer.output_text
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.instructions == "Be kind."
    assert answer.usage is not None
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens
    assert Response.model_validate(answer.to_dict()).id == answer.id


def test_a_streamed_response_is_the_whole_one(client: openai.OpenAI, http: httpx.Client) -> None:
    whole = client.responses.create(model="tiny", input=HELLO, temperature=0)
    with client.responses.stream(model="tiny", input=HELLO, temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == whole.output_text
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.output_tokens == whole.usage.output_tokens
    streamed = http.post("/v1/responses", json=body(stream=True))
    assert streamed.headers["content-type"].startswith("text/event-stream")
    made = final_response(parsed_events(streamed.content))
    assert [item["content"] for item in made["output"]] == json.loads(
        json.dumps([item.to_dict()["content"] for item in whole.output])
    )


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "name": "get_weather"}])
def test_a_tool_and_its_result(client: openai.OpenAI, choice: Any) -> None:
    question: Any = {"role": "user", "content": "What is the weather in Paris?"}
    with client.responses.stream(
        model="tiny", input=[question], tools=[WEATHER], tool_choice=choice, temperature=0
    ) as stream:
        calling = stream.get_final_response()
    call = calling.output[-1]
    assert isinstance(call, ResponseFunctionToolCall)
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
    assert all(len(name) <= 64 for name in (calling.id, call.id or "", call.call_id))
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny, 21 degrees."}
    items: Any = [question, *(item.to_dict() for item in calling.output), result]
    for given in ({"input": items}, {"input": [result], "previous_response_id": calling.id}):
        answer = client.responses.create(model="tiny", tools=[WEATHER], temperature=0, **given)
        assert answer.output_text
        assert answer.usage is not None
        assert answer.usage.input_tokens_details.cached_tokens


def test_structured_output_is_parsed(client: openai.OpenAI) -> None:
    class Person(BaseModel):
        name: str

    answer = client.responses.parse(
        model="tiny", input="My name is Tom.", text_format=Person, temperature=0, max_output_tokens=200
    )
    assert isinstance(answer.output_parsed, Person)


def test_log_probabilities(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model="tiny", input=HELLO, include=["message.output_text.logprobs"], top_logprobs=2, temperature=0
    )
    part = answer.output[-1].content[0]  # type: ignore[union-attr, index]
    assert part.logprobs  # type: ignore[union-attr]
    assert "".join(entry.token for entry in part.logprobs).strip() == part.text.strip()  # type: ignore[union-attr]
    assert {len(entry.top_logprobs) for entry in part.logprobs} == {2}  # type: ignore[union-attr]


def test_prompt_and_output_are_shown_raw(http: httpx.Client) -> None:
    whole = http.post("/v1/responses", json=body(enable_response_messages=True)).json()
    streamed = http.post("/v1/responses", json=body(enable_response_messages=True, stream=True))
    for answer in (whole, final_response(parsed_events(streamed.content))):
        (prompt,), (output,) = answer["input_messages"], answer["output_messages"]
        assert HELLO in prompt["message"]
        assert output["message"].endswith(answer["output"][-1]["content"][0]["text"] + "<|im_end|>")
        usage = answer["usage"]
        counts = (len(prompt["tokens"]), len(output["tokens"]))
        assert counts == (usage["input_tokens"], usage["output_tokens"])
    assert "input_messages" not in http.post("/v1/responses", json=body(max_output_tokens=1)).json()


def test_reasoning_is_turned_off(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="tiny", input=HELLO, reasoning={"effort": "none"})
    assert [item.type for item in answer.output] == ["message"]


def test_output_is_bounded(client: openai.OpenAI) -> None:
    short = client.responses.create(model="tiny", input=HELLO, max_output_tokens=2)
    assert short.status == "incomplete"
    assert short.incomplete_details is not None
    assert short.incomplete_details.reason == "max_output_tokens"
    assert client.responses.create(model="tiny", input=HELLO, max_output_tokens=2 * MAX_MODEL_LEN).output


def test_a_conversation_continues_from_a_stored_response(client: openai.OpenAI) -> None:
    first = client.responses.create(model="tiny", input=HELLO, instructions="Be kind.", temperature=0)
    second = client.responses.create(
        model="tiny", input="And what else?", previous_response_id=first.id, temperature=0
    )
    assert second.previous_response_id == first.id
    assert second.instructions is None
    by_hand = client.responses.create(
        model="tiny",
        input=[
            {"role": "user", "content": HELLO},
            *(item.to_dict() for item in first.output),  # type: ignore[list-item]
            {"role": "user", "content": "And what else?"},
        ],
        temperature=0,
    )
    assert second.output_text == by_hand.output_text
    assert second.usage is not None
    assert by_hand.usage is not None
    assert second.usage.input_tokens == by_hand.usage.input_tokens
    referred = client.responses.create(
        model="tiny",
        input=[
            {"role": "user", "content": HELLO},
            *({"type": "item_reference", "id": item.id or ""} for item in first.output),
            {"role": "user", "content": "And what else?"},
        ],
        temperature=0,
    )
    assert referred.output_text == by_hand.output_text
    listed = client.responses.input_items.list(second.id, order="asc", limit=2)
    assert [item.type for item in listed] == ["message", "reasoning", "message", "message"]  # all pages
    newest = client.responses.input_items.list(second.id, limit=1).data[0]
    assert newest.content[0].text == "And what else?"  # type: ignore[union-attr, index]


def test_a_stored_response_is_retrieved_and_deleted(client: openai.OpenAI, tiny_server: Server) -> None:
    answer = client.responses.create(model="tiny", input=HELLO, max_output_tokens=3)
    assert client.responses.retrieve(answer.id).to_dict() == answer.to_dict()
    with openai.OpenAI(base_url=f"{tiny_server.url}/v1", api_key=OTHER_KEY, max_retries=0) as other:
        for use in (other.responses.retrieve, other.responses.delete, other.responses.cancel):
            with pytest.raises(openai.NotFoundError) as missing:
                use(answer.id)
            assert missing.value.type == "invalid_request_error"
        with pytest.raises(openai.NotFoundError):
            other.responses.create(model="tiny", input=HELLO, previous_response_id=answer.id)
        with pytest.raises(openai.NotFoundError):
            other.responses.input_items.list(answer.id)
    with httpx.Client(
        base_url=tiny_server.url, headers={"x-api-key": KEY}
    ) as same:  # as Anthropic's clients send it
        assert same.get(f"/v1/responses/{answer.id}").json()["id"] == answer.id
    with httpx.Client(base_url=tiny_server.url, headers={"authorization": f"bearer  {KEY}"}) as same:
        assert same.get(f"/v1/responses/{answer.id}").json()["id"] == answer.id
    client.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)
    unstored = client.responses.create(model="tiny", input=HELLO, max_output_tokens=3, store=False)
    assert unstored.to_dict()["store"] is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)


def test_ids_cannot_be_guessed(http: httpx.Client) -> None:
    """Not even by whoever chooses the id of the request."""
    lines = {"x-request-id": "mine", "x-argosy-internal-response-id": "mine"}
    answers = [
        http.post("/v1/responses", json=body(max_output_tokens=1, request_id="mine"), headers=lines)
        for _ in range(2)
    ]
    assert {answer.headers["x-request-id"] for answer in answers} == {"mine"}
    names = [answer.json()["id"] for answer in answers]
    assert len(set(names)) == 2
    assert not any("mine" in name for name in names)


def test_a_router_keeps_the_state(http: httpx.Client) -> None:
    lines = {"x-argosy-internal-resolved": "1", "x-argosy-internal-response-id": "chosen"}
    asked = body(max_output_tokens=1, previous_response_id="resp_kept_there", background=True)
    answer = http.post("/v1/responses", json=asked, headers=lines).json()
    assert (answer["id"], answer["previous_response_id"]) == ("resp_chosen", "resp_kept_there")
    assert (answer["status"], answer["store"], answer["background"]) == ("incomplete", True, True)
    assert http.get("/v1/responses/resp_chosen").status_code == 404


def test_a_background_response_is_streamed_again_from_any_event(http: httpx.Client) -> None:
    asked = body(background=True, stream=True)
    with http.stream("POST", "/v1/responses", json=asked) as stream:
        first = parsed_events(next(iter(stream.iter_bytes())).split(b"\n\n")[0] + b"\n\n")[0]
    name = first["response"]["id"]
    assert first["response"]["status"] == "queued"
    events = parsed_events(http.get(f"/v1/responses/{name}?stream=true").content)
    made = final_response(events)
    assert made["status"] == "completed"
    assert http.get(f"/v1/responses/{name}").json() == made
    later = parsed_events(http.get(f"/v1/responses/{name}?stream=true&starting_after=5").content)
    assert later == events[6:]
    unstreamed = http.post("/v1/responses", json=body(max_output_tokens=1)).json()["id"]
    refusal = http.get(f"/v1/responses/{unstreamed}?stream=true")
    assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, "stream")


def test_a_background_response_goes_on_without_its_client(client: openai.OpenAI) -> None:
    queued = client.responses.create(model="tiny", input=HELLO, background=True, temperature=0)
    assert queued.status == "queued"
    assert queued.output == []
    wait_until(lambda: client.responses.retrieve(queued.id).status == "completed", "the response")
    whole = client.responses.create(model="tiny", input=HELLO, temperature=0)
    assert client.responses.retrieve(queued.id).output_text == whole.output_text
    assert client.responses.cancel(queued.id).status == "completed"


@pytest.mark.parametrize("stream", [False, True])
def test_a_background_response_is_cancelled(http: httpx.Client, client: openai.OpenAI, stream: bool) -> None:
    asked = {"model": "tiny", "background": True, "stream": stream, **FOREVER}
    with http.stream("POST", "/v1/responses", json=asked) as begun:
        data = next(iter(begun.iter_bytes()))
        name = parsed_events(data.split(b"\n\n")[0] + b"\n\n")[0]["response"]["id"] if stream else ""
    name = name or json.loads(data)["id"]
    refusal = http.post("/v1/responses", json=body(previous_response_id=name))
    assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, "previous_response_id")
    assert client.responses.cancel(name).status == "cancelled"
    assert client.responses.retrieve(name).status == "cancelled"
    wait_until(lambda: http.get("/load").json() == {"server_load": 0}, "the end of the request")
    assert client.responses.cancel(name).status == "cancelled"


def test_a_background_response_that_is_deleted_ends(http: httpx.Client, client: openai.OpenAI) -> None:
    name = http.post("/v1/responses", json={"model": "tiny", "background": True, **FOREVER}).json()["id"]
    assert http.delete(f"/v1/responses/{name}").json() == {"id": name, "object": "response", "deleted": True}
    wait_until(lambda: http.get("/load").json() == {"server_load": 0}, "the end of the request")
    assert http.get(f"/v1/responses/{name}").status_code == 404
    with pytest.raises(openai.BadRequestError, match="synchronous"):
        client.responses.cancel(client.responses.create(model="tiny", input=HELLO, max_output_tokens=1).id)


REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"model": "nope"}, 404, "model"),
    ({"max_output_tokens": 0}, 400, "max_output_tokens"),
    ({"input": "word " * 4 * MAX_MODEL_LEN}, 400, "input"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]},
        400,
        "input[0].content[0]",
    ),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, 400, "tool_choice"),
    (
        {
            "tools": [{"type": "web_search"}, {"type": "function", "name": "no name"}],
            "tool_choice": "required",
        },
        400,
        "tools[1].name",
    ),
    (
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"$ref": "#/x"}}}},
        400,
        "text.format.schema",
    ),
    ({"conversation": "conv_1"}, 400, "conversation"),
    ({"previous_response_id": "resp_none"}, 404, "previous_response_id"),
    ({"priority": 1}, 400, "priority"),
    ({"top_logprobs": 30}, 400, "top_logprobs"),
    ({"top_logprobs": 30, "include": ["message.output_text.logprobs"]}, 400, "top_logprobs"),
    ({"request_id": "bad id"}, 400, "request_id"),
]


@pytest.mark.parametrize("mode", ["whole", "stream", "background"])
def test_refusals_name_the_field(http: httpx.Client, mode: str) -> None:
    more = {mode: True} if mode != "whole" else {}

    def refusal(fields: dict[str, Any]) -> tuple[int, str, str | None]:
        answer = http.post("/v1/responses", json=body(**fields, **more))
        param = answer.json()["error"]["param"].partition(".json_schema")[0]
        return answer.status_code, param, answer.headers.get("content-type")

    wanted = [(fields, (status, param, "application/json")) for fields, status, param in REFUSED]
    assert wrong_answers((fields, told, refusal(fields)) for fields, told in wanted) == {}


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=-1", "limit=x", "order=up", "after=none"])
def test_pages_are_bounded(http: httpx.Client, query: str) -> None:
    name = http.post("/v1/responses", json=body(max_output_tokens=1)).json()["id"]
    refusal = http.get(f"/v1/responses/{name}/input_items?{query}")
    name, _, value = query.partition("=")
    assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, name)
    if name == "limit":
        assert refusal.json()["error"]["message"] == f"limit must be a number from 1 to 100, not {value!r}"


def test_a_client_that_leaves_ends_its_request(http: httpx.Client) -> None:
    with http.stream("POST", "/v1/responses", json={"model": "tiny", "stream": True, **FOREVER}) as stream:
        next(stream.iter_bytes())
    wait_until(lambda: http.get("/load").json() == {"server_load": 0}, "the end of the request")


def test_an_image_is_refused_by_the_type_that_the_client_gave(http: httpx.Client) -> None:
    image = {"type": "input_image", "image_url": "u"}
    text = {"type": "input_text", "text": "What is this?"}
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": [text, image]}]
    for given, param in (
        ([{"role": "user", "content": [image]}], "input[0].content[0]"),
        (messages, "input[1].content[1]"),
        ([{"role": "user", "content": [image]}, *messages], "input[2].content[1]"),
    ):
        answer = http.post("/v1/responses", json=body(instructions="Answer.", input=given))
        error = answer.json()["error"]
        assert error["param"] == param
        assert "'input_image'" in error["message"]
        assert "'image_url'" not in error["message"]


def test_input_tokens_are_those_of_the_prompt(client: openai.OpenAI, http: httpx.Client) -> None:
    first = client.responses.create(model="tiny", input=HELLO, instructions="Be kind.", tools=[WEATHER])
    counted = client.responses.input_tokens.count(
        model="tiny", input=HELLO, instructions="Be kind.", tools=[WEATHER]
    )
    assert first.usage is not None
    assert counted.to_dict() == {"object": "response.input_tokens", "input_tokens": first.usage.input_tokens}
    second = client.responses.create(model="tiny", input="And you?", previous_response_id=first.id)
    counted = client.responses.input_tokens.count(
        model="tiny", input="And you?", previous_response_id=first.id
    )
    assert second.usage is not None
    assert counted.input_tokens == second.usage.input_tokens
    too_long = client.responses.input_tokens.count(model="tiny", input="word " * 3 * MAX_MODEL_LEN)
    assert too_long.input_tokens > MAX_MODEL_LEN
    for fields, status in (
        ({"model": "absent"}, 404),
        ({"input": [{"id": "msg_x_0"}]}, 404),
        ({"input": 1}, 400),
    ):
        assert http.post("/v1/responses/input_tokens", json=body(**fields)).status_code == status


def test_compaction_is_refused_by_name(http: httpx.Client) -> None:
    answer = http.post("/v1/responses/compact", json=body())
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "not_supported")
    assert "/v1/responses/compact" in answer.json()["error"]["message"]


AGENT_TOOLS: list[dict[str, Any]] = [
    {"type": "namespace", "name": "functions", "tools": [{"type": "custom", "name": "exec"}]},
    {
        "type": "namespace",
        "name": "agents",
        "tools": [{"type": "function", "name": "list", "parameters": {}}],
    },
    {"type": "web_search"},
    {"type": "shiny"},
]
AGENT_HISTORY: list[dict[str, Any]] = [
    {"type": "additional_tools", "role": "developer", "tools": AGENT_TOOLS},
    {"role": "user", "content": HELLO},
    {
        "type": "web_search_call",
        "id": "ws_1",
        "status": "completed",
        "action": {"type": "search", "query": "x"},
    },
    {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"},
    {"type": "custom_tool_call", "call_id": "c", "name": "exec", "namespace": "functions", "input": "ls"},
    {
        "type": "custom_tool_call_output",
        "call_id": "c",
        "output": [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "u"}],
    },
    {"type": "shiny_call", "content": {"deep": [[[]]]}, "arguments": {}},
    {
        "type": "agent_message",
        "author": "/a",
        "recipient": "/",
        "content": [{"type": "input_text", "text": "b"}],
    },
    {"type": "compaction", "encrypted_content": "gAAA"},
]


def skipped(http: httpx.Client) -> dict[str, float]:
    """The kinds that were skipped so far, and how often."""
    text = http.get("/metrics").text
    found = re.findall(
        r'(argosy_engine_(?:skipped|dropped)\w+_total){[^}]*kind="(\w+)"[^}]*} ([1-9].*)', text
    )
    return {f"{name.split('_')[2]} {kind}": float(value) for name, kind, value in found}


@pytest.mark.parametrize("mode", ["whole", "stream"])
def test_what_agents_replay_is_answered_and_what_was_left_out_is_told(http: httpx.Client, mode: str) -> None:
    before = skipped(http)
    answer = http.post(
        "/v1/responses", json=body(input=AGENT_HISTORY, store=False, max_output_tokens=4, **{mode: True})
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-argosy-dropped-tools"] == "other, web_search"
    after = skipped(http)
    assert {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name)} == {
        **{f"skipped {kind}": 1 for kind in ("web_search_call", "reasoning", "input_image", "other")},
        "skipped compaction": 1,
        "dropped web_search": 1,
        "dropped other": 1,
    }
    plain = http.post("/v1/responses", json=body(store=False, max_output_tokens=4))
    assert "x-argosy-dropped-tools" not in plain.headers


@pytest.mark.parametrize(
    ("choice", "type_", "name", "namespace"),
    [
        ({"type": "custom", "name": "exec"}, "custom_tool_call", "exec", "functions"),
        ({"type": "function", "name": "list"}, "function_call", "list", "agents"),
    ],
)
def test_a_chosen_tool_is_called_and_its_call_continued(
    client: openai.OpenAI, choice: Any, type_: str, name: str, namespace: str
) -> None:
    tools: Any = AGENT_TOOLS[:3]
    with client.responses.stream(
        model="tiny", input=HELLO, tools=tools, tool_choice=choice, temperature=0, max_output_tokens=200
    ) as stream:
        events = list(stream)
        calling = stream.get_final_response()
    call = calling.output[-1].to_dict()
    assert (call["type"], call["name"], call["namespace"]) == (type_, name, namespace)
    if type_ == "custom_tool_call":
        deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
        assert "".join(deltas) == call["input"]
    result: Any = {"type": f"{type_}_output", "call_id": call["call_id"], "output": "Done."}
    question: Any = {"role": "user", "content": HELLO}
    items: Any = [question, *(item.to_dict() for item in calling.output), result]
    for given in ({"input": items}, {"input": [result], "previous_response_id": calling.id}):
        answer = client.responses.create(
            model="tiny", tools=tools, temperature=0, max_output_tokens=4, **given
        )
        assert answer.usage is not None
        assert answer.usage.input_tokens_details.cached_tokens
    listed = client.responses.input_items.list(answer.id, order="asc")
    assert [item.type for item in listed.data][-2:] == [type_, f"{type_}_output"]


def test_a_stored_history_is_continued_as_one_that_is_sent_again(http: httpx.Client) -> None:
    first = http.post("/v1/responses", json=body(input=AGENT_HISTORY, max_output_tokens=4)).json()
    more = {"role": "user", "content": "And now?"}
    sent = {"input": [*AGENT_HISTORY, *first["output"], more]}
    counted = [
        http.post("/v1/responses/input_tokens", json={"model": "tiny", **given}).json()["input_tokens"]
        for given in (sent, {"input": [more], "previous_response_id": first["id"]})
    ]
    assert counted[0] == counted[1] > 0


def test_models_are_listed_for_codex_and_for_anthropics_clients(http: httpx.Client) -> None:
    plain = http.get("/v1/models").json()
    assert set(plain) == {"object", "data"}
    codex = http.get("/v1/models", params={"client_version": "0.171.0"}).json()
    assert codex["data"] == plain["data"]
    assert [model["slug"] for model in codex["models"]] == [card["id"] for card in plain["data"]]
    assert codex["models"][0]["context_window"] == MAX_MODEL_LEN
    with anthropic.Anthropic(base_url=str(http.base_url), auth_token=KEY) as client:
        page = client.models.list()
        assert [model.id for model in page] == [card["id"] for card in plain["data"]]
        model = client.models.retrieve(page.data[0].id)
    assert model == page.data[0]
    assert (model.type, model.display_name, model.max_input_tokens) == ("model", model.id, MAX_MODEL_LEN)
    assert model.created_at.timestamp() == plain["data"][0]["created"]
