"""Beam search, `--logits-processors`, `--max-logprobs` and `--logprobs-mode` over HTTP."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from argosy_engine import LLM, BeamSearchParams
from processes import Server, free_port, running
from within_rounding import within_rounding

TESTS = Path(__file__).parents[1]
PROMPT = "Tell me about the red lantern and the sea."
MESSAGES = [{"role": "user", "content": "Who are you?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port = free_port()
    arguments = [
        "argosy_engine.api.serve", "builtin://tiny", "--threads", "1", "--dtype", "float32", "--port", str(port),
        "--logits-processors", "logits_processor:OnlyToken", "probe_processors:Faulty",
        "--max-logprobs", "12", "--logprobs-mode", "processed_logprobs",
    ]  # fmt: skip
    folders = [str(TESTS.parent / "examples"), str(TESTS / "support"), os.environ.get("PYTHONPATH", "")]
    log = tmp_path_factory.mktemp("serve") / "log"
    with running(arguments, log, port=port, env={"PYTHONPATH": os.pathsep.join(folders)}) as up:
        yield up


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{server.url}/v1", timeout=60) as client:
        yield client


def complete(http: httpx.Client, **fields: Any) -> Any:
    response = http.post("/completions", json={"prompt": PROMPT, "max_tokens": 6, "temperature": 0, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def refused(http: httpx.Client, path: str = "/completions", status: int = 400, **fields: Any) -> Any:
    what = {"prompt": PROMPT} if path == "/completions" else {"messages": MESSAGES}
    response = http.post(path, json={**what, "max_tokens": 6, **fields})
    assert response.status_code == status, response.text
    return response.json()["error"]


def test_a_request_addresses_a_processor(http: httpx.Client) -> None:
    fields: dict[str, Any] = {"ignore_eos": True, "return_token_ids": True}
    plain = complete(http, **fields)["choices"][0]["token_ids"]
    answer = complete(http, n=2, temperature=1.0, vllm_xargs={"only_token": 77}, **fields)
    assert [choice["token_ids"] for choice in answer["choices"]] == [[77] * 6] * 2
    assert complete(http, **fields)["choices"][0]["token_ids"] == plain != [77] * 6


@pytest.mark.parametrize(
    ("xargs", "status", "says"),
    [
        ({"only_token": "x"}, 400, "only_token must be a token id"),
        ({"only_token": 1 << 40}, 500, "OnlyToken failed on this request"),
        ({"harmless": 1, "fail_in": "apply"}, 500, "Faulty failed on this request"),
        ({"fail_in": "validate_params"}, 500, "Faulty failed on this request"),
        ({"harmless": {"not": "scalar"}}, 400, "Expected"),
        ({"harmless": 1 << 70}, 400, "JSON"),
        ({f"k{number}": 1 for number in range(65)}, 400, "<= 64"),
    ],
)
def test_refusals_of_extra_arguments_give_the_reason(
    http: httpx.Client, xargs: dict[str, Any], status: int, says: str
) -> None:
    assert says in refused(http, status=status, vllm_xargs=xargs)["message"]
    assert complete(http)["choices"][0]["finish_reason"]


def test_max_logprobs_bounds_both_kinds(http: httpx.Client) -> None:
    answer = complete(http, logprobs=12, prompt_logprobs=12)
    assert all(len(best) >= 12 for best in answer["choices"][0]["logprobs"]["top_logprobs"])
    for field in ("logprobs", "prompt_logprobs"):
        for count in (13, -1):
            error = refused(http, **{field: count})
            assert error["param"] == field
            assert "--max-logprobs" in error["message"]
    assert refused(http, "/chat/completions", logprobs=True, top_logprobs=13)["param"] == "top_logprobs"


def test_processed_logprobs_are_those_of_what_was_drawn_from(http: httpx.Client) -> None:
    logprobs = complete(http, temperature=0.5, top_k=1, seed=3, logprobs=2)["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == pytest.approx([0.0] * len(logprobs["tokens"]), abs=1e-6)


def test_beam_search_equals_the_offline_one(http: httpx.Client) -> None:
    llm = LLM("builtin://tiny", dtype="float32", threads=1, max_num_seqs=16, max_model_len=256)
    params = BeamSearchParams(beam_width=4, max_tokens=6, length_penalty=0.3)
    (offline,) = llm.beam_search(PROMPT, params)
    num_prompt = len(llm.renderer.render_prompt(PROMPT).token_ids)
    llm.close()
    answer = complete(
        http, use_beam_search=True, n=2, best_of=4, length_penalty=0.3, logprobs=1, return_token_ids=True
    )
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    for choice, sequence in zip(answer["choices"], offline.sequences, strict=False):
        assert choice["token_ids"] == sequence.tokens[num_prompt:]
        assert (choice["text"], choice["finish_reason"]) == (sequence.text, sequence.finish_reason)
        assert sum(choice["logprobs"]["token_logprobs"]) == pytest.approx(sequence.cum_logprob, abs=1e-3)
    usage = answer["usage"]
    assert usage["prompt_tokens"] == num_prompt
    assert usage["completion_tokens"] == sum(len(choice["token_ids"]) for choice in answer["choices"])


def test_beam_search_of_a_chat_and_of_a_batch(http: httpx.Client) -> None:
    fields = {"use_beam_search": True, "n": 3, "max_tokens": 40}
    chat = http.post("/chat/completions", json={"messages": MESSAGES, "logprobs": True, **fields}).json()
    assert len({choice["message"]["content"] for choice in chat["choices"]}) == 3
    assert all(choice["logprobs"]["content"] for choice in chat["choices"])
    prompts = [PROMPT, "The capital of"]
    batch = complete(http, prompt=prompts, **{**fields, "max_tokens": 5})["choices"]
    alone = [
        choice["text"]
        for prompt in prompts
        for choice in complete(http, prompt=prompt, **{**fields, "max_tokens": 5})["choices"]
    ]
    assert [choice["text"] for choice in batch] == alone


@pytest.mark.parametrize("path", ["/completions", "/chat/completions"])
def test_a_streamed_beam_search_has_the_choices_of_the_whole_answer(http: httpx.Client, path: str) -> None:
    source = {"prompt": [PROMPT, "The capital of"], "logprobs": 1}
    if path == "/chat/completions":
        source = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1}
    ask = {"use_beam_search": True, "n": 2, "max_tokens": 6, "return_token_ids": True, **source}
    whole = http.post(path, json=ask).json()
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    streamed = http.post(path, json={**ask, **options})
    assert streamed.status_code == 200, streamed.text
    assert streamed.text.endswith("data: [DONE]\n\n")
    chunks = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    said: dict[int, list[str]] = {}
    for chunk in chunks:
        assert chunk["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
        for choice in chunk["choices"]:
            shown = choice["delta"] if "delta" in choice else {"content": choice["text"]}
            said.setdefault(choice["index"], []).append(shown.get("reasoning", "") + shown.get("content", ""))
    for choice in whole["choices"]:
        shown = choice["message"] if "message" in choice else {"content": choice["text"]}
        text = (shown.get("reasoning") or "") + (shown["content"] or "")
        assert "".join(said[choice["index"]]) == text
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        (last,) = (part for part in parts if part["token_ids"])  # the end comes after the text
        assert last["token_ids"] == choice["token_ids"]
        assert last["logprobs"] == within_rounding(choice["logprobs"])
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_the_end_token_is_shown_where_asked_for(http: httpx.Client) -> None:
    ask = {"use_beam_search": True, "n": 2, "max_tokens": 60, "messages": MESSAGES, "length_penalty": 0.0}
    hidden, shown = (
        http.post("/chat/completions", json={**ask, "include_stop_str_in_output": flag}).json()["choices"]
        for flag in (False, True)
    )
    ended = [index for index, choice in enumerate(hidden) if choice["finish_reason"] == "stop"]
    assert ended
    for index in ended:
        short, long = (choices[index]["message"]["content"] for choices in (hidden, shown))
        assert long.startswith(short)
        assert long[len(short) :] == "<|im_end|>"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"logprobs": 1, "logprob_token_ids": [5]}, "logprob_token_ids"),
        ({"stop": ["x"]}, "stop"),
        ({"top_p": 0.5}, "top_p"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
        ({"echo": True}, "echo"),
        ({"n": 7}, "n"),
        ({"best_of": 7}, "best_of"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 500}, "best_of"),
        ({"length_penalty": 11}, "length_penalty"),
        ({"max_tokens": 1 << 20}, "max_tokens"),
    ],
)
def test_parameters_that_beam_search_does_not_support_are_refused(
    http: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    assert refused(http, use_beam_search=True, **fields)["param"] == param


def test_best_of_and_length_penalty_are_of_beam_search(http: httpx.Client) -> None:
    assert refused(http, best_of=3)["param"] == "best_of"
    assert refused(http, length_penalty=0.5)["param"] == "length_penalty"
