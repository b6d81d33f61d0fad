"""Sampling fields on both endpoints, through the OpenAI SDK's types, streamed and not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from argosy_protocol.headers import IN_COMMENTS, RESUME
from processes import Server
from served_engine import AUTHORIZED, KEY
from within_rounding import ROUNDING, within_rounding

MESSAGES: Any = [{"role": "user", "content": "Tell me about the sea."}]
PROMPT = "Tell me about the red lantern and the sea, and then of the harbor."


@pytest.fixture
def client(tiny_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tiny_server.url}/v1", api_key=KEY, max_retries=0) as sdk:
        yield sdk


@pytest.fixture
def http(tiny_server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tiny_server.url, headers=AUTHORIZED, timeout=60) as plain:
        yield plain


def test_chat_logprobs(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {
        "model": "tiny", "messages": MESSAGES, "max_tokens": 12, "temperature": 0, "logprobs": True, "top_logprobs": 3,
        "extra_body": {"return_token_ids": True, "chat_template_kwargs": {"enable_thinking": False}},
    }  # fmt: skip
    whole = client.chat.completions.create(**ask).choices[0]
    assert whole.logprobs is not None
    content = whole.logprobs.content
    assert content is not None
    assert len(content) == len(whole.token_ids)  # type: ignore[attr-defined]
    visible = [entry for entry in content if not entry.token.startswith("<|")]
    assert bytes(byte for entry in visible for byte in entry.bytes or []).decode() == whole.message.content
    for entry in content:
        best = [other.logprob for other in entry.top_logprobs]
        assert len(best) == 3
        assert best == sorted(best, reverse=True)
        # Greedy: the token is the best one.
        assert (entry.token, entry.logprob) == (entry.top_logprobs[0].token, best[0])
    streamed = []
    for chunk in client.chat.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            streamed += (choice.logprobs.content or []) if choice.logprobs else []
    assert [entry.to_dict() for entry in streamed] == within_rounding([entry.to_dict() for entry in content])
    plain = client.chat.completions.create(**{**ask, "logprobs": None, "top_logprobs": None})
    assert plain.choices[0].logprobs is None
    assert plain.choices[0].message.content == whole.message.content


def test_completion_logprobs_echo_and_offsets(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {
        "model": "tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "logprobs": 2, "echo": True,
        "extra_body": {"ignore_eos": True, "skip_special_tokens": False},
    }  # fmt: skip
    answer = client.completions.create(**ask)
    choice = answer.choices[0]
    assert choice.text.startswith(PROMPT)
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.text_offset is not None
    assert answer.usage is not None
    assert len(logprobs.tokens) == answer.usage.total_tokens
    assert logprobs.token_logprobs[0] is None
    assert logprobs.top_logprobs[0] is None
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert "\ufffd" in token or choice.text[offset:].startswith(token)
    for token, own, best in zip(
        logprobs.tokens[1:], logprobs.token_logprobs[1:], logprobs.top_logprobs[1:], strict=True
    ):
        assert best[token] == own
        assert len(best) in (2, 3)
    chunks = [chunk.choices[0] for chunk in client.completions.create(**ask, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == choice.text
    parts = [chunk.logprobs for chunk in chunks if chunk.logprobs]
    assert [token for part in parts for token in part.tokens or []] == logprobs.tokens
    assert [offset for part in parts for offset in part.text_offset or []] == logprobs.text_offset


@pytest.mark.parametrize("include", [False, True])
def test_tokens_of_a_stop_string_are_reported_after_the_text(http: httpx.Client, include: bool) -> None:
    """As in vLLM: the tokens up to the one that completes it, each with its log probabilities."""
    chat = {"model": "tiny", "messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": False}}
    fields = {"temperature": 0, "max_tokens": 12, "return_token_ids": True}
    free = http.post("/v1/chat/completions", json={**chat, **fields, "logprobs": True}).json()["choices"][0]
    pieces = [entry["token"] for entry in free["logprobs"]["content"]]
    stop = pieces[2][-1] + pieces[3] + pieces[4][:2]
    text = "".join(pieces[:2]) + pieces[2][:-1]
    expected = text + stop if include else text
    fields |= {"stop": stop, "include_stop_str_in_output": include}

    answer = http.post("/v1/chat/completions", json={**chat, **fields, "logprobs": True}).json()
    choice = answer["choices"][0]
    assert (choice["message"]["content"], choice["stop_reason"]) == (expected, stop)
    assert choice["token_ids"] == free["token_ids"][:5]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == pieces[:5]
    assert answer["usage"]["completion_tokens"] == 5
    chunks = events_of(
        http,
        "/v1/chat/completions",
        {**chat, **fields, "logprobs": True, "stream": True, "stream_options": {"include_usage": True}},
    )
    parts = [each for chunk in chunks for each in chunk["choices"]]
    assert "".join(part["delta"].get("content") or "" for part in parts) == expected
    entries = [entry for part in parts for entry in (part.get("logprobs") or {"content": []})["content"]]
    assert [entry["token"] for entry in entries] == pieces[:5]
    assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
    assert chunks[-1]["usage"] == answer["usage"] | {
        "prompt_tokens_details": chunks[-1]["usage"]["prompt_tokens_details"]
    }

    prompt = http.post("/tokenize", json=chat).json()["tokens"]
    body = {"model": "tiny", "prompt": prompt, **fields, "logprobs": 0}
    answer = http.post("/v1/completions", json=body).json()
    choice = answer["choices"][0]
    assert (choice["text"], choice["token_ids"]) == (expected, free["token_ids"][:5])
    assert choice["logprobs"]["tokens"] == pieces[:5]
    # A token that is no part of the text begins at its end or after it.
    beyond = [offset >= len(expected) for offset in choice["logprobs"]["text_offset"]]
    assert beyond == [False, False, False, *([False, False] if include else [True, True])]
    assert answer["usage"]["completion_tokens"] == 5
    parts = [each["choices"][0] for each in events_of(http, "/v1/completions", {**body, "stream": True})]
    assert "".join(part["text"] for part in parts) == expected
    assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
    offsets = [at for part in parts for at in (part["logprobs"] or {"text_offset": []})["text_offset"]]
    assert offsets == choice["logprobs"]["text_offset"]

    body = {
        "model": "tiny",
        "input": MESSAGES,
        "temperature": 0,
        "max_output_tokens": 12,
        "stop": stop,
        "include_stop_str_in_output": include,
        "chat_template_kwargs": {"enable_thinking": False},
        "include": ["message.output_text.logprobs"],
    }
    whole = http.post("/v1/responses", json=body).json()
    last = events_of(http, "/v1/responses", {**body, "stream": True})
    deltas = [event for event in last if event["type"] == "response.output_text.delta"]
    streamed = [entry["token"] for event in deltas for entry in event["logprobs"]]
    for response in (whole, last[-1]["response"]):
        (part,) = response["output"][-1]["content"]
        assert part["text"] == expected
        assert [entry["token"] for entry in part["logprobs"]] == streamed == pieces[: 5 if include else 3]
        assert response["usage"]["output_tokens"] == 5


@pytest.mark.parametrize("stop", ["<|im_end|>", "{end}<|im_end|>"])
def test_a_special_token_in_a_stop_string_is_found_though_the_text_does_not_show_it(
    http: httpx.Client, stop: str
) -> None:
    chat = {"model": "tiny", "messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": False}}
    fields = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    free = http.post("/v1/chat/completions", json={**chat, "temperature": 0, "max_tokens": 64}).json()
    choice = free["choices"][0]
    assert choice["finish_reason"] == "stop"
    said, count = choice["message"]["content"], free["usage"]["completion_tokens"]
    stop = stop.format(end=said[-2:])
    expected = said if stop == "<|im_end|>" else said[:-2]
    fields |= {"stop": [stop]}
    prompt = http.post("/tokenize", json=chat).json()["tokens"]
    for path, body in (
        ("/v1/chat/completions", {**chat, **fields, "max_tokens": count + 8}),
        ("/v1/completions", {"model": "tiny", "prompt": prompt, **fields, "max_tokens": count + 8}),
    ):
        answer = http.post(path, json=body).json()
        (choice,) = answer["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop), path
        assert (choice.get("text") or choice["message"]["content"]) == expected
        assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"] == count
        parts = [each["choices"][0] for each in events_of(http, path, {**body, "stream": True})]
        texts = [part["text"] if "text" in part else part["delta"].get("content") or "" for part in parts]
        assert ("".join(texts), parts[-1]["stop_reason"]) == (expected, stop)
        shown = http.post(path, json={**body, "include_stop_str_in_output": True}).json()["choices"][0]
        assert (shown.get("text") or shown["message"]["content"]) == said + "<|im_end|>"
    body = {"model": "tiny", "input": MESSAGES, "temperature": 0, "ignore_eos": True, "stop": [stop]}
    body |= {"max_output_tokens": count + 8, "chat_template_kwargs": {"enable_thinking": False}}
    for response in (
        http.post("/v1/responses", json=body).json(),
        events_of(http, "/v1/responses", {**body, "stream": True})[-1]["response"],
    ):
        assert response["status"] == "completed"
        assert response["output"][-1]["content"][0]["text"] == expected


def events_of(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = http.post(path, json=body)
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_scoring_a_prompt_generates_nothing(http: httpx.Client) -> None:
    body = {"model": "tiny", "prompt": [PROMPT, "Hello there"], "max_tokens": 0, "echo": True, "logprobs": 1}
    answer = http.post("/v1/completions", json=body).json()
    assert [choice["text"] for choice in answer["choices"]] == body["prompt"]
    assert answer["usage"]["completion_tokens"] == 0
    for choice in answer["choices"]:
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert len(choice["logprobs"]["tokens"]) > 1
        assert choice["finish_reason"] == "length"
    # What the cache holds of the prompt must not make a difference.
    assert http.post("/v1/completions", json=body).json()["choices"] == within_rounding(answer["choices"])


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 20}, {"echo": True, "logprobs": 20}])
@pytest.mark.parametrize("shape", [{"n": 128}, {"n": 1, "num_prompts": 128}])
def test_an_answer_with_too_many_prompt_logprobs_is_refused(
    http: httpx.Client, fields: dict[str, Any], shape: dict[str, int]
) -> None:
    """Each choice repeats the prompt's: a short request would have an answer of gigabytes."""
    prompt = [7] * 2000
    body = {"model": "tiny", "max_tokens": 1, "n": shape["n"], **fields}
    answer = http.post("/v1/completions", json={**body, "prompt": [prompt] * shape.get("num_prompts", 1)})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt_logprobs"
    assert str(2000 * 128 * 21) in answer.json()["error"]["message"]
    few = http.post("/v1/completions", json={**body, "n": 2, "prompt": prompt})
    assert [len(choice["logprobs"]["tokens"]) for choice in few.json()["choices"] if "echo" in fields] in (
        [],
        [2001, 2001],
    )


def test_prompt_logprobs_on_both_endpoints(http: httpx.Client) -> None:
    fields = {"model": "tiny", "prompt_logprobs": 1, "max_tokens": 1, "n": 2, "return_token_ids": True}
    chat = http.post("/v1/chat/completions", json={**fields, "messages": MESSAGES}).json()
    completion = http.post("/v1/completions", json={**fields, "prompt": PROMPT}).json()
    for holder in (chat, *completion["choices"]):
        entries, ids = holder["prompt_logprobs"], holder["prompt_token_ids"]
        assert len(entries) == len(ids)
        assert entries[0] is None
        for token_id, entry in zip(ids[1:], entries[1:], strict=True):
            own = entry[str(token_id)]
            assert set(own) == {"logprob", "rank", "decoded_token"}
            assert (own["rank"] == 1) == (len(entry) == 1)


def test_choices_count_their_prompt_once(client: openai.OpenAI) -> None:
    def ask(n: int, seed: int) -> openai.types.chat.ChatCompletion:
        return client.chat.completions.create(
            model="tiny", messages=MESSAGES, n=n, seed=seed, temperature=1.3, max_tokens=9
        )

    three = ask(3, 5)
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    assert three.usage is not None
    total = 0
    for choice, seed in zip(three.choices, (5, 6, 7), strict=True):
        one = ask(1, seed)
        assert one.usage is not None
        assert one.usage.prompt_tokens == three.usage.prompt_tokens
        assert one.choices[0].message == choice.message
        total += one.usage.completion_tokens
    assert three.usage.completion_tokens == total


@pytest.mark.parametrize("stream", [False, True])
def test_every_choice_stops_at_its_own_stop_string(client: openai.OpenAI, stream: bool) -> None:
    ask: dict[str, Any] = {
        "model": "tiny", "prompt": [PROMPT, "Once upon a time"], "n": 2, "seed": 3, "temperature": 1.0,
        "max_tokens": 30, "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    free = client.completions.create(**ask)
    letters = [choice.text[9] for choice in free.choices]
    bound = client.completions.create(**ask, stop=letters[:4], stream=stream)
    texts, reasons = [""] * 4, [None] * 4
    for part in bound if stream else [bound]:  # type: ignore[list-item]
        for choice in part.choices:
            texts[choice.index] += choice.text
            assert reasons[choice.index] is None
            reasons[choice.index] = choice.finish_reason  # type: ignore[call-overload]
    for choice, text in zip(free.choices, texts, strict=True):
        end = min(choice.text.index(letter) for letter in letters if letter in choice.text)
        assert text == choice.text[:end]
    assert reasons == ["stop"] * 4


@pytest.mark.parametrize(
    ("fields", "check"),
    [
        ({"logit_bias": {"40": 100}}, lambda ids: ids == [40] * 8),
        ({"allowed_token_ids": [40, 41]}, lambda ids: set(ids) <= {40, 41}),
        ({"allowed_token_ids": [40, 41], "frequency_penalty": 2}, lambda ids: set(ids) == {40, 41}),
        ({"stop_token_ids": [40], "allowed_token_ids": [40]}, lambda ids: ids == [40]),
        ({"stop_token_ids": [40], "logit_bias": {"40": 100}, "min_tokens": 5}, lambda ids: ids.index(40) == 5),
        (
            {"allowed_token_ids": [40], "repetition_detection": {"max_pattern_size": 2, "min_count": 4}},
            lambda ids: ids == [40] * 4,
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("endpoint", ["completions", "chat/completions"])
def test_fields_reach_the_sampler(
    http: httpx.Client, endpoint: str, fields: dict[str, Any], check: Any
) -> None:
    body = {"model": "tiny", "temperature": 0, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
    source = {"prompt": PROMPT} if endpoint == "completions" else {"messages": MESSAGES}
    answer = http.post(f"/v1/{endpoint}", json={**body, **source, **fields})
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert check(choice["token_ids"]), choice
    if "repetition_detection" in fields:
        assert (choice["finish_reason"], choice["stop_reason"]) == ("repetition", "repetition_detected")


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        ("completions", {"prompt": PROMPT, "echo": True}),
        ("completions", {"prompt": PROMPT, "logprobs": 1}),
        ("chat/completions", {"messages": MESSAGES, "logprobs": True}),
        ("chat/completions", {"messages": MESSAGES, "thinking_token_budget": 3}),
        # Text is held back, and comes with the last tokens.
        ("completions", {"prompt": PROMPT, "stop": "\u2029 never is said"}),
        ("chat/completions", {"messages": MESSAGES, "stop": "\u2029 never is said"}),
    ],
)
def test_a_stream_cut_between_chunks_continues_on_another_run(
    http: httpx.Client, endpoint: str, fields: dict[str, Any]
) -> None:
    body: dict[str, Any] = {
        "model": "tiny", "temperature": 2.0, "seed": 21, "max_tokens": 12, "n": 2, "stream": True,
        "stream_options": {"include_usage": True}, "frequency_penalty": 0.4, "ignore_eos": True, **fields,
    }  # fmt: skip
    headers = {RESUME: "1", "x-request-id": "same"}
    first, second = (choice["ids"] for choice in fold(events(http, endpoint, body, headers))[0].values())
    body["stop_token_ids"] = [next(token_id for token_id in first[3:] if token_id not in second)]
    whole = events(http, endpoint, body, headers)
    for choice in (each for event in whole for each in event["choices"]):
        said = choice["text"] if "text" in choice else "".join(filter(None, choice["delta"].values()))
        assert not (said and choice["finish_reason"]), "the end comes after the text"
    for cut in range(1, len(whole)):
        seen = whole[:cut]
        choices: list[dict[str, Any]] = [{"token_ids": []}, {"token_ids": []}]
        for event in seen:
            for choice in event["choices"]:
                choices[choice["index"]]["token_ids"] += choice["token_ids"]
                choices[choice["index"]]["finished"] = choice["finish_reason"] is not None
        resume = {"created": seen[0]["created"] - 100, "choices": choices}
        rest = events(http, endpoint, {**body, "resume": resume}, headers)
        assert fold(seen + rest) == fold(whole), cut
        assert {(event["id"], event["created"]) for event in rest} == {(whole[0]["id"], resume["created"])}


def test_log_probabilities_of_chosen_tokens(http: httpx.Client) -> None:
    chosen = [41, 40, 41, 300]
    body = {"temperature": 0, "max_tokens": 3, "return_tokens_as_token_ids": True, "ignore_eos": True}
    chat = {**body, "messages": MESSAGES, "logprobs": True}

    def entries(**fields: Any) -> list[dict[str, Any]]:
        answer = http.post("/v1/chat/completions", json={**chat, **fields})
        assert answer.status_code == 200, answer.text
        return list(answer.json()["choices"][0]["logprobs"]["content"])

    best = entries(top_logprobs=20)
    for fields in ({}, {"top_logprobs": 2}, {"n": 2}):
        found = entries(logprob_token_ids=chosen, **fields)
        for entry, full in zip(found, best, strict=True):
            known = {other["token"]: other["logprob"] for other in full["top_logprobs"]}
            assert (entry["token"], entry["logprob"]) == within_rounding((full["token"], full["logprob"]))
            shown = [other["token"] for other in entry["top_logprobs"]]
            assert shown == [entry["token"], *(f"token_id:{id_}" for id_ in (41, 40, 300))]
            for other in entry["top_logprobs"]:
                assert other["logprob"] <= known.get(other["token"], min(known.values())) + ROUNDING
    completion = http.post(
        "/v1/completions", json={**body, "prompt": PROMPT, "logprobs": 0, "logprob_token_ids": chosen}
    ).json()
    logprobs = completion["choices"][0]["logprobs"]
    for token, alternatives in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        assert list(alternatives) == [token, "token_id:41", "token_id:40", "token_id:300"]
    for wrong in ({"logprobs": None}, {"logprob_token_ids": [1 << 30]}, {"logprob_token_ids": [1] * 129}):
        refused = http.post("/v1/chat/completions", json={**chat, "logprob_token_ids": chosen, **wrong})
        assert refused.status_code == 400
        assert "logprob_token_ids" in refused.json()["error"]["message"]


def test_a_batch_of_chats_has_the_answer_of_each(http: httpx.Client) -> None:
    chats = [
        MESSAGES,
        [{"role": "user", "content": "Hello"}],
        [*MESSAGES, {"role": "assistant", "content": "It"}],
    ]
    fields = {"temperature": 0, "max_tokens": 30, "logprobs": True, "return_token_ids": True}
    answer = http.post("/v1/chat/completions/batch", json={"messages": chats, **fields})
    assert answer.status_code == 200, answer.text
    batch = answer.json()
    usage = {"prompt_tokens": 0, "completion_tokens": 0}
    assert len(batch["choices"]) == len(chats)
    for index, (chat, choice) in enumerate(zip(chats, batch["choices"], strict=True)):
        alone = http.post("/v1/chat/completions", json={"messages": chat, **fields}).json()
        assert choice == within_rounding({**alone["choices"][0], "index": index})
        for name in usage:
            usage[name] += alone["usage"][name]
    assert usage.items() <= batch["usage"].items()


def test_a_batch_is_refused_like_the_chat_that_is_wrong(http: httpx.Client) -> None:
    def refusal(messages: Any) -> str:
        answer = http.post("/v1/chat/completions/batch", json={"messages": messages})
        assert answer.status_code == 400
        return str(answer.json()["error"]["param"])

    assert refusal([MESSAGES, [{"role": "user", "content": [{"type": "image_url"}]}]]).startswith("messages")
    assert refusal([MESSAGES, [{"role": "user", "content": "word " * 100_000}]]) == "messages"


@pytest.mark.parametrize("budget", [0, 3])
@pytest.mark.parametrize("fields", [{}, {"structured_outputs": {"regex": "[a-z]{4}"}}])
def test_reasoning_ends_at_its_budget(http: httpx.Client, fields: dict[str, Any], budget: int) -> None:
    def token(text: str) -> int:
        (token_id,) = http.post("/tokenize", json={"prompt": text}).json()["tokens"]
        return int(token_id)

    def ask(**more: Any) -> tuple[Any, list[int]]:
        body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 200, "return_token_ids": True}
        answer = http.post("/v1/chat/completions", json={**body, **fields, **more})
        assert answer.status_code == 200, answer.text
        return answer.json(), answer.json()["choices"][0]["token_ids"]

    start, end = token("<think>"), token("</think>")
    free = ask()[1]
    assert free.index(end) - free.index(start) - 1 > 3
    answer, ids = ask(thinking_token_budget=budget)
    assert ids.index(end) - ids.index(start) - 1 == budget
    assert ids[: budget + 1] == free[: budget + 1]
    assert ask(thinking_token_budget=-1)[1] == free
    message = answer["choices"][0]["message"]
    assert message["content"]
    assert bool(message.get("reasoning")) is (budget > 0)
    if fields:
        assert re.fullmatch("[a-z]{4}", message["content"])
    events = http.post(
        "/v1/chat/completions",
        json={
            "messages": MESSAGES, "temperature": 0, "max_tokens": 200, "return_token_ids": True, "stream": True,
            "thinking_token_budget": budget, **fields,
        },
    )  # fmt: skip
    chunks = [json.loads(line[6:]) for line in events.text.splitlines() if line.startswith("data: {")]
    assert [t for c in chunks for choice in c["choices"] for t in choice["token_ids"] or []] == ids


def test_completions_have_a_budget_of_reasoning_too(http: httpx.Client) -> None:
    (end,) = http.post("/tokenize", json={"prompt": "</think>"}).json()["tokens"]
    fields = {"temperature": 0, "max_tokens": 5, "ignore_eos": True, "return_token_ids": True}
    body = {"prompt": "<think>", "thinking_token_budget": 2, **fields}
    answer = http.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["token_ids"][2] == end, answer


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        ("completions", {"prompt": PROMPT, "echo": True, "logprobs": 1}),
        ("chat/completions", {"messages": MESSAGES, "stop": ["zq"], "skip_special_tokens": False}),
    ],
)
def test_token_ids_for_routers_come_in_comments(
    http: httpx.Client, endpoint: str, fields: dict[str, Any]
) -> None:
    body = {
        "model": "tiny",
        "temperature": 2.0,
        "seed": 5,
        "min_tokens": 9,
        "max_tokens": 40,
        "n": 2,
        "stream": True,
        **fields,
    }

    def stream(
        resume: str | None,
    ) -> tuple[list[dict[str, Any]], dict[int, list[int]], dict[int, list[int]]]:
        """Return the events without comments, and the token ids in comments and in chunks."""
        headers = {"x-request-id": "same"} | ({RESUME: resume} if resume else {})
        shown, comments, chunks = [], {0: [], 1: []}, {0: [], 1: []}  # type: ignore[var-annotated]
        for line in http.post(f"/v1/{endpoint}", json=body, headers=headers).text.splitlines():
            if line.startswith(":ids "):
                index, _, ids = line.removeprefix(":ids ").partition(" ")
                if ids:
                    comments[int(index)] += map(int, ids.split(","))
            elif line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                shown.append(event)
                for choice in event["choices"]:
                    chunks[choice["index"]] += choice["token_ids"] or []
            else:
                assert line in ("", "data: [DONE]")
        return shown, comments, chunks

    none: dict[int, list[int]] = {0: [], 1: []}
    plain, comments, chunks = stream(None)
    assert (comments, chunks) == (none, none)
    in_comments, comments, chunks = stream(IN_COMMENTS)
    assert chunks == none
    # The choices' events come in any order, and a reader that lags behind gets several tokens in one.
    assert fold(in_comments) == fold(plain)
    assert scores(in_comments) == within_rounding(scores(plain))
    kinds, expected = ({(*event, *event["choices"][0]) for event in told} for told in (in_comments, plain))
    assert kinds == expected
    assert (none, comments) == stream("1")[1:]
    assert all(len(ids) > 8 for ids in comments.values())


def events(
    http: httpx.Client, endpoint: str, body: dict[str, Any], headers: dict[str, str]
) -> list[dict[str, Any]]:
    with http.stream("POST", f"/v1/{endpoint}", json=body, headers=headers) as response:
        lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def scores(stream: list[dict[str, Any]]) -> dict[int, list[Any]]:
    """Return the log probabilities of each choice's tokens, and of their alternatives."""
    found: dict[int, list[Any]] = {}
    for event in stream:
        for choice in event["choices"]:
            logprobs = choice.get("logprobs") or {}
            told = found.setdefault(choice["index"], [])
            told += zip(logprobs.get("token_logprobs", ()), logprobs.get("top_logprobs", ()), strict=True)
    return found


def fold(stream: list[dict[str, Any]]) -> Any:
    """What a client has of a stream in the end: per choice text, ids, log probabilities and reason; and usage."""
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for event in stream:
        if event.get("usage"):
            usage = event["usage"]["prompt_tokens"], event["usage"]["completion_tokens"]
        for choice in event["choices"]:
            have = choices.setdefault(
                choice["index"], {"text": "", "ids": [], "tokens": [], "offsets": [], "reason": None}
            )
            delta = choice.get("delta", {})
            have["text"] += choice.get("text") or delta.get("reasoning", "") or ""
            have["text"] += delta.get("content") or ""
            have["ids"] += choice.get("token_ids") or []
            logprobs = choice.get("logprobs") or {}
            have["tokens"] += logprobs.get("tokens") or [
                entry["token"] for entry in logprobs.get("content") or []
            ]
            have["offsets"] += logprobs.get("text_offset") or []
            have["reason"] = choice["finish_reason"] or have["reason"]
    return choices, usage
