"""`argosy serve builtin://tiny` as users meet it: real processes, real sockets, the OpenAI SDK."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import httpx
import openai
import pytest

from argosy_protocol.headers import (
    MODEL_NAME,
    RESPONSE_ID,
    TELEMETRY_CONTENT_TYPE,
    TELEMETRY_PATH,
)
from argosy_protocol.telemetry import FrameReader, Hello, Load, Snapshot, Stored, unpack_u32
from forked_serves import serve_each
from processes import Server, answers, children, free_port, running, wait_until
from served_engine import AUTHORIZED, KEY, SERVE_TINY

pytestmark = pytest.mark.timeout(300)

RESUME = {"created": 1, "choices": [{"token_ids": [5]}]}
FOREVER = {"model": "tiny", "prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def client(tiny_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tiny_server.url}/v1", api_key=KEY, max_retries=0) as sdk:
        yield sdk


@pytest.fixture
def http(tiny_server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tiny_server.url, headers=AUTHORIZED, timeout=60) as plain:
        yield plain


def metric(http: httpx.Client, name: str) -> float:
    found = re.search(rf"^vllm:{name}\{{[^}}]*\}} (\S+)$", http.get("/metrics").text, re.MULTILINE)
    assert found, name
    return float(found[1])


MESSAGES = [{"role": "user", "content": "Hello!"}]


def test_streamed_and_unary_answers_agree(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, max_tokens=24)  # type: ignore[arg-type]
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=MESSAGES, temperature=0, max_tokens=24, stream=True,  # type: ignore[arg-type]
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == (whole.choices[0].message.content or "")
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_usage_in_every_chunk_comes_only_with_include_usage(http: httpx.Client) -> None:
    def usages(path: str, body: dict[str, object], **options: bool) -> list[object]:
        # So many tokens that a reader which lags behind does not get all of them in one chunk.
        asked = {"model": "tiny", "max_tokens": 64, "ignore_eos": True, "stream": True, **body}
        asked["stream_options"] = options
        lines = http.post(path, json=asked).text.splitlines()
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert len(chunks) > 1
        return [chunk["usage"] for chunk in chunks]

    for path, body in (
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/completions", {"prompt": "A"}),
    ):
        alone = usages(path, body, continuous_usage_stats=True)
        assert set(alone) == {None}
        both = usages(path, body, continuous_usage_stats=True, include_usage=True)
        counts = [usage["completion_tokens"] for usage in both]  # type: ignore[index]
        assert counts == sorted(counts)
        assert counts[-1] > 0
        assert all(usage["prompt_tokens"] > 0 for usage in both)  # type: ignore[index]


def test_the_second_request_reports_cached_tokens(client: openai.OpenAI) -> None:
    messages = [{"role": "system", "content": "The code is 4711. " * 20}, *MESSAGES]
    usages = [
        client.chat.completions.create(model="tiny", messages=messages, max_tokens=2).usage  # type: ignore[arg-type]
        for _ in range(2)
    ]
    cached = [
        usage.prompt_tokens_details.cached_tokens for usage in usages if usage and usage.prompt_tokens_details
    ]
    assert cached[0] == 0
    assert cached[1] > 50


def test_completions_batches_choices_and_seeds(client: openai.OpenAI) -> None:
    def run(seed: int) -> list[str]:
        answer = client.completions.create(
            model="alias", prompt=["One", "Two"], n=2, max_tokens=8, seed=seed, temperature=1.5
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert answer.usage is not None
        assert answer.usage.completion_tokens <= 32
        return [choice.text for choice in answer.choices]

    first = run(5)
    assert run(5) == first
    assert run(6) != first
    assert first[0] != first[1]


def test_a_seeded_stream_equals_a_seeded_answer_under_load(client: openai.OpenAI) -> None:
    def ask(stream: bool) -> str:
        answer = client.completions.create(
            model="tiny", prompt="Tell", max_tokens=20, seed=9, temperature=1.0, stream=stream
        )
        return "".join(c.choices[0].text for c in answer) if stream else answer.choices[0].text

    alone = ask(False)
    with httpx.Client(headers=AUTHORIZED, timeout=60) as other:
        url = str(client.base_url) + "completions"
        with other.stream("POST", url, json={**FOREVER, "stream": True}) as busy:
            assert busy.status_code == 200
            assert ask(True) == alone


def test_stop_strings_and_length(client: openai.OpenAI) -> None:
    full = client.completions.create(
        model="tiny", prompt="Count", max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
    )
    assert full.choices[0].finish_reason == "length"
    text = full.choices[0].text
    stop = text[4:7]
    cut = client.completions.create(
        model="tiny",
        prompt="Count",
        max_tokens=12,
        temperature=0,
        stop=[stop],
        extra_body={"ignore_eos": True},
    )
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_a_stop_token_is_not_shown(client: openai.OpenAI) -> None:
    def ask(**extra: object) -> tuple[str, str | None]:
        answer = client.chat.completions.create(
            model="tiny", messages=MESSAGES, temperature=0, max_tokens=60, extra_body=extra  # type: ignore[arg-type]
        )  # fmt: skip
        return answer.choices[0].message.content or "", answer.choices[0].finish_reason

    text, reason = ask()
    assert reason == "stop"
    assert ask(skip_special_tokens=False) == (text, "stop")
    shown, _ = ask(skip_special_tokens=False, include_stop_str_in_output=True)
    assert shown == text + "<|im_end|>"


def test_token_ids_cover_every_chunk(http: httpx.Client) -> None:
    body = {
        "model": "tiny",
        "prompt": "Count",
        "max_tokens": 9,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    whole = http.post("/v1/completions", json=body).json()
    ids: list[int] = []
    with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                ids += json.loads(line[6:])["choices"][0]["token_ids"]
    assert ids == whole["choices"][0]["token_ids"]
    assert len(ids) == 9


def test_tool_calls_have_openai_shape_or_stay_text(client: openai.OpenAI) -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
    ask = {"role": "user", "content": "What is the weather in Paris?"}
    answer = client.chat.completions.create(
        model="tiny", messages=[ask], tools=[tool], temperature=0, max_tokens=80
    )  # type: ignore[list-item]
    choice = answer.choices[0]
    if choice.finish_reason == "tool_calls":
        assert choice.message.tool_calls
        for call in choice.message.tool_calls:
            assert call.id.startswith("call_")
            json.loads(call.function.arguments)  # type: ignore[union-attr]
    else:
        assert not choice.message.tool_calls


def test_errors_have_the_id_of_their_request(http: httpx.Client) -> None:
    for path, body in (("/v1/completions", {"prompt": "x", "n": 0}), ("/v1/nowhere", {})):
        answer = http.post(path, json=body, headers={"x-request-id": "mine"})
        assert answer.status_code in (400, 404)
        assert answer.headers["x-request-id"] == "mine"
        assert "x-request-id" not in http.post(path, json=body, headers={"x-request-id": "a b"}).headers


def test_a_path_names_the_methods_that_it_takes(http: httpx.Client) -> None:
    answer = http.get("/v1/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize("stream", [False, True])
def test_response_ids_are_those_of_the_router_s_request(http: httpx.Client, stream: bool) -> None:
    """All attempts of a router share them; the id of each attempt is echoed in the header only."""
    headers = {"x-request-id": "attempt-1", RESPONSE_ID: "job-1"}
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 2, "stream": stream}
    answer = http.post("/v1/completions", json=body, headers=headers)
    assert answer.headers["x-request-id"] == "attempt-1"
    assert '"id":"cmpl-job-1"' in answer.text
    unsafe = http.post("/v1/completions", json=body, headers={**headers, RESPONSE_ID: '"},{"'})
    assert '"id":"cmpl-attempt-1"' in unsafe.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Once", "max_tokens": 2}),
        ("/v1/completions", {"prompt": "Once", "max_tokens": 2, "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "stream": True},
        ),
        ("/v1/embeddings", {"input": "x"}),
    ],
)
def test_answers_have_the_name_that_a_router_s_client_used(
    http: httpx.Client, path: str, body: dict[str, object]
) -> None:
    for name in ("org/Tiny", "kleine Größe", 'a"b'):
        headers = {MODEL_NAME: quote(name, safe="/:")}
        answer = http.post(path, json={**body, "model": "whatever the client wrote"}, headers=headers)
        assert answer.status_code == 200
        answers = re.findall(r"^(?:data: )?(\{.*\})$", answer.text, re.MULTILINE)
        assert {json.loads(one)["model"] for one in answers} == {name}
    assert http.post(path, json={**body, "model": "org/Tiny"}).status_code == 404


def test_models(client: openai.OpenAI) -> None:
    assert [card.id for card in client.models.list()] == ["tiny", "alias"]
    assert client.models.retrieve("alias").id == "alias"


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/v1/chat/completions", {"model": "nope", "messages": MESSAGES}, 404, "model_not_found"),
        ("/v1/chat/completions", {"model": "tiny", "messages": []}, 400, None),
        ("/v1/completions", {"model": "tiny", "prompt": [70000]}, 400, None),
        ("/v1/completions", {"model": "tiny", "prompt": ""}, 400, None),
        ("/v1/completions", {"model": "tiny", "prompt": [5] * 5000}, 400, "context_length_exceeded"),
        (
            "/v1/completions",
            {"model": "tiny", "prompt": "x", "max_tokens": 5000},
            400,
            "context_length_exceeded",
        ),
        ("/v1/completions", {"model": "tiny", "prompt": "x", "n": 129}, 400, "less_than_equal"),
        ("/v1/completions", {"model": "tiny", "prompt": ["x"] * 20, "n": 128}, 400, None),
        ("/v1/completions", {"model": "tiny", "prompt": "x", "min_p": 1.2}, 400, "less_than_equal"),
        ("/v1/completions", {"model": "tiny", "prompt": "x", "logit_bias": {"60000": 1}}, 400, None),
        ("/v1/completions", {"model": "tiny", "prompt": "x", "stop_token_ids": [60000]}, 400, None),
        ("/v1/completions", {"model": "tiny", "prompt": "x", "allowed_token_ids": [60000]}, 400, None),
        ("/v1/completions", {"model": "tiny", "prompt": "x", "min_tokens": 20}, 400, None),
        ("/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 0}, 400, None),
        ("/v1/completions", {"model": "tiny", "prompt": "x", "stream": True, "resume": RESUME}, 400, None),
        (
            "/v1/completions",
            {"model": "tiny", "prompt": "x", "stream": True, "prompt_logprobs": 1},
            400,
            None,
        ),
        (
            "/v1/chat/completions",
            {"model": "tiny", "messages": MESSAGES, "top_logprobs": 2},
            400,
            None,
        ),
        ("/v1/completions", {"model": "tiny", "prompt": "\ud800"}, 400, None),
        ("/v1/nothing", {}, 404, None),
        ("/v1/v1/chat/completions", {}, 404, None),
        ("/v1/models", {}, 405, None),
    ],
)
def test_errors_have_openai_shape(
    http: httpx.Client, path: str, body: dict[str, object], status: int, code: object
) -> None:
    response = http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code


def test_bad_requests_cost_nothing(http: httpx.Client) -> None:
    wait_until(lambda: metric(http, "num_requests_running") == 0, "the end of earlier requests")
    for body in (b"{", b"[" * 100_000, b"\xff\xfe", b'{"prompt": 1e400}'):
        response = http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400, response.text
    assert (
        http.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"}).status_code == 400
    )
    assert (
        http.post("/v1/completions", json={"model": "tiny", "prompt": "ok", "max_tokens": 1}).status_code
        == 200
    )


def test_everything_but_the_public_paths_needs_the_key(tiny_server: Server) -> None:
    for path in ("/health", "/ready", "/version", "/metrics"):
        assert httpx.get(tiny_server.url + path).status_code == 200
    for method, path in (
        ("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", TELEMETRY_PATH), ("GET", "/load"), ("GET", "/docs"),
        ("GET", "/openapi.json"), ("GET", "//v1/models"), ("GET", "/health/../v1/models"), ("OPTIONS", "/v1/models"),
    ):  # fmt: skip
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {KEY}"}):
            response = httpx.request(method, tiny_server.url + path, headers=headers)
            assert response.status_code == 401, path
            assert response.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_aborts_its_request(
    tiny_server: Server, http: httpx.Client, stream: bool
) -> None:
    body = json.dumps({**FOREVER, "stream": stream}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", tiny_server.port)) as raw:
        raw.sendall(head.encode() + body)
        wait_until(lambda: metric(http, "num_requests_running") == 1, "the request to run")
    wait_until(lambda: metric(http, "num_requests_running") == 0, "the abort to reach the core")
    wait_until(lambda: metric(http, "kv_cache_usage_perc") == 0, "the blocks to be given back")


def test_telemetry_tells_hello_snapshot_and_what_is_stored(http: httpx.Client) -> None:
    reader = FrameReader()
    with http.stream("GET", TELEMETRY_PATH) as response:
        assert response.headers["content-type"] == TELEMETRY_CONTENT_TYPE
        frames = []
        asked = False
        for data in response.iter_raw():
            frames += list(reader.feed(data))
            if any(isinstance(frame, Load) for frame in frames) and not asked:
                asked = True
                prompt = "Sing of lighthouses and of gulls. " * 30
                answer = httpx.post(
                    str(response.url.copy_with(path="/v1/completions")),
                    json={"model": "tiny", "prompt": prompt, "max_tokens": 1},
                    headers=http.headers,
                    timeout=60,
                ).json()
            if any(isinstance(frame, Stored) for frame in frames):
                break
    assert isinstance(frames[0], Hello)
    assert frames[0].model == "tiny"
    assert isinstance(frames[1], Snapshot)
    assert frames[1].first
    stored = next(frame for frame in frames if isinstance(frame, Stored))
    tokens = list(unpack_u32(stored.tokens))
    assert len(tokens) == -(-len(prompt) // 256)
    assert tokens == sorted(tokens)
    assert answer["usage"]["prompt_tokens"] - 16 <= tokens[-1] <= answer["usage"]["prompt_tokens"]


def test_telemetry_tells_how_many_sequences_yield_slots(http: httpx.Client) -> None:
    reader = FrameReader()
    call = {**FOREVER, "n": 3, "stream": True}
    with http.stream("GET", TELEMETRY_PATH) as telemetry, http.stream("POST", "/v1/completions", json=call):
        loads: list[Load] = []
        for data in telemetry.iter_raw():
            loads += [frame for frame in reader.feed(data) if isinstance(frame, Load)]
            # The sequences begin one by one.
            if any(load.num_yielding >= 3 for load in loads) or len(loads) > 600:
                break
    assert max(load.num_yielding for load in loads) == 3


def test_metrics_have_vllm_names(http: httpx.Client) -> None:
    text = http.get("/metrics").text
    for name in (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total",
        "prefix_cache_hits_total", "generation_tokens_total", "prompt_tokens_total", "num_preemptions_total",
        "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket",
        "e2e_request_latency_seconds_bucket", "request_success_total", "cache_config_info",
    ):  # fmt: skip
        assert f"vllm:{name}{{" in text, name


def test_the_size_of_the_kv_cache_is_a_label(http: httpx.Client) -> None:
    (line,) = re.findall(r"^vllm:cache_config_info\{(.*)\} 1.0$", http.get("/metrics").text, re.MULTILINE)
    labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
    tokens = int(labels["num_gpu_blocks"]) * int(labels["block_size"])
    assert int(labels["kv_cache_size_tokens"]) == tokens
    assert float(labels["kv_cache_max_concurrency"]) == pytest.approx(tokens / 4096, abs=0.01)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_answer_reports_the_load_to_a_balancer_that_asks(http: httpx.Client, path: str) -> None:
    def load(form: str) -> str | None:
        body = {"model": "tiny", "max_tokens": 2, "prompt": "A"}
        if "chat" in path:
            body = {"model": "tiny", "max_tokens": 2, "messages": MESSAGES}
        answer = http.post(path, json=body, headers={"endpoint-load-metrics-format": form})
        assert answer.status_code == 200
        return answer.headers.get("endpoint-load-metrics")

    text, as_json = load("TEXT"), load("json")
    assert text is not None
    assert as_json is not None
    figures = dict(part.removeprefix("named_metrics.").split("=") for part in text[5:].split(", "))
    assert text.startswith("TEXT ")
    assert set(figures) == set(json.loads(as_json.removeprefix("JSON "))["named_metrics"])
    assert float(figures["kv_cache_usage_perc"]) >= 0
    assert figures["num_requests_waiting"] == "0.0"
    assert load("BIN") is None


def test_the_start_up_table_accounts_for_the_time(tiny_server: Server) -> None:
    log = tiny_server.log.read_text()
    for phase in ("import torch", "weights", "kv cache", "ready"):
        assert re.search(rf"^  {phase}\s+[\d.]+ s$", log, re.MULTILINE), phase


# Processes of their own, because these tests end them.


@contextmanager
def serving(tmp_path: Path) -> Iterator[Server]:
    port = free_port()
    arguments = [*SERVE_TINY, "--served-model-name", "tiny", "--port", str(port)]
    with running(arguments, tmp_path / "log", port=port) as server:
        yield server


@contextmanager
def streaming(server: Server, **fields: object) -> Iterator[Iterator[str]]:
    """The lines of an answer that has begun."""
    body = {**FOREVER, "stream": True, **fields}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        yield lines


def events(lines: Iterator[str]) -> list[str]:
    return [line for line in lines if line.startswith("data: ")]


def test_sigterm_finishes_running_requests_and_a_second_one_aborts_them(tmp_path: Path) -> None:
    with (
        serving(tmp_path) as server,
        streaming(server) as forever,
        streaming(server, max_tokens=300) as short,
    ):
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not answers(server.url + "/ready"), "not ready any more")
        finished = events(short)
        server.process.send_signal(signal.SIGTERM)
        aborted = events(forever)
        assert server.process.wait(30) == 0
    assert finished[-1] == "data: [DONE]"
    assert json.loads(finished[-2][6:])["choices"][0]["finish_reason"] == "length"
    assert json.loads(aborted[-2][6:])["error"]["type"] == "service_unavailable"


def test_a_killed_core_fails_its_requests_and_ends_the_server(tmp_path: Path) -> None:
    with serving(tmp_path) as server, streaming(server) as lines:
        (core,) = children(server.process.pid)
        os.kill(core, signal.SIGKILL)
        failed = events(lines)
        assert server.process.wait(30) == 1
    assert json.loads(failed[-2][6:])["error"]["type"] == "service_unavailable"


def test_wrong_usage_is_one_line_and_exit_code_2() -> None:
    messages = {
        ("/nonexistent",): "is no directory",
        ("builtin://huge",): "unknown built-in model 'huge'; there is: tiny",
        (
            "builtin://tiny",
            "--max-model-len",
            "100000",
        ): "exceeds the model's 4096 positions: give at most 4096",
        ("builtin://tiny", "--max-model-lenn", "100"): "did you mean --max-model-len?",
        ("builtin://tiny", "--max-num-seqs", "0"): "--max-num-seqs",
        ("builtin://tiny", "--device", "cuda"): "no CUDA device",
    }
    port = str(free_port())
    outcomes = serve_each([[*arguments, "--port", port] for arguments in messages])
    wrong = {
        " ".join(arguments): outcome
        for (arguments, message), outcome in zip(messages.items(), outcomes, strict=True)
        if outcome.returncode != 2 or message not in outcome.stderr or "Traceback" in outcome.stderr
    }
    assert not wrong
