"""Every series of /metrics changes when what it counts happens, on a real server."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from processes import Server, free_port, running, wait_until

pytestmark = pytest.mark.timeout(300)

PROMPT = "Tell me of the sea and of the ships that went there. " * 4
LONG_PROMPT = PROMPT * 15
FOREVER = {"model": "tiny", "prompt": PROMPT, "max_tokens": 3000, "ignore_eos": True, "temperature": 0}
ENDED = "vllm:request_success_total"
DEFERRED = "vllm:num_requests_waiting_by_reason", "deferred"
EXEMPT = {
    "vllm:cache_config_info",
    "argosy_engine_info",
    "argosy_engine_stalled_requests_total",
    "argosy_engine_framed_images_total",
    "argosy_engine_slow_clients_total",
    "argosy_engine_encoder_cache_hits_total",
    "argosy_engine_encoder_cache_queries_total",
    "vllm:mm_cache_hits_total",
    "vllm:mm_cache_queries_total",
    "argosy_engine_dropped_tools_total",
    "argosy_engine_relaxed_tool_schemas_total",
    "argosy_engine_skipped_content_total",
    "vllm:admission_rejections_total",
    "vllm:sleep_mode_operations_in_flight",
    "vllm:tool_call_parser_invocations_total",
}
"""Constants, what is over before it is scraped, and what moves only when the engine is broken (tests of the watchdog
break it), full (test_waiting_reasons), asked with tools (below), or has clients that do not read
(test_client_disconnects), send images (test_served_images) or replay what no model here reads
(test_responses_server)."""

LABELS = ("finished_reason", "sleep_state", "reason", "source", "operation")
Series = dict[tuple[str, str], float]
"""(name, finished_reason, sleep_state, reason, source or operation) -> value; buckets and creation times left out."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Room for two running requests, and less of it in the KV cache than they need."""
    port = free_port()
    arguments = (
        "argosy_engine.api.serve", "builtin://tiny", "--served-model-name", "tiny", "--threads", "1",
        "--max-num-seqs", "2", "--max-model-len", "3500", "--num-gpu-blocks-override", "250", "--watermark", "0",
        "--port", str(port), "--admin-api-key", "admin",
    )  # fmt: skip
    with running(arguments, tmp_path_factory.mktemp("metrics") / "log", port=port) as up:
        yield up


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers={"authorization": "Bearer admin"}, timeout=300) as plain:
        yield plain


def scrape(http: httpx.Client) -> Series:
    return {
        (
            sample.name,
            next((sample.labels[label] for label in LABELS if label in sample.labels), ""),
        ): sample.value
        for family in text_string_to_metric_families(http.get("/metrics").text)
        for sample in family.samples
        if not sample.name.endswith(("_bucket", "_created"))
    }


def complete(http: httpx.Client, **changes: object) -> httpx.Response:
    return http.post("/v1/completions", json={**FOREVER, "max_tokens": 4, **changes})


def abandon(server: Server) -> None:
    """Reads the beginning of a stream and leaves."""
    with (
        httpx.Client(base_url=server.url, timeout=60) as http,
        http.stream("POST", "/v1/completions", json={**FOREVER, "stream": True}) as response,
    ):
        next(response.iter_lines())


def until_idle(http: httpx.Client) -> None:
    wait_until(lambda: scrape(http)["vllm:num_requests_running", ""] == 0, "the engine to be idle")


def test_a_client_that_leaves_counts_as_aborted_once(server: Server, http: httpx.Client) -> None:
    before = scrape(http)
    abandon(server)
    wait_until(lambda: scrape(http)[ENDED, "abort"] > before[ENDED, "abort"], "the abort to be counted")
    until_idle(http)
    after = scrape(http)
    changed = {
        name: after[name] - before[name] for name in after if name[0] == ENDED and after[name] != before[name]
    }
    assert changed == {(ENDED, "abort"): 1}
    latencies = ("vllm:e2e_request_latency_seconds_count", ""), ("vllm:request_generation_tokens_count", "")
    assert all(after[name] == before[name] for name in latencies), "a part says nothing about whole requests"
    name = "vllm:prompt_tokens_total", ""
    assert after[name] > before[name], "its prompt was computed"


def test_all_choices_of_a_request_that_is_left_count(server: Server, http: httpx.Client) -> None:
    before = scrape(http)
    body = {**FOREVER, "stream": True, "n": 3, "temperature": 1}
    with http.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    wait_until(lambda: scrape(http)[ENDED, "abort"] == before[ENDED, "abort"] + 3, "three aborts")
    until_idle(http)


def test_a_request_that_the_core_refuses_counts_as_an_error(http: httpx.Client) -> None:
    before = scrape(http)
    assert complete(http, structured_outputs={"grammar": "root ::= nothing"}).status_code == 400
    after = scrape(http)
    assert after[ENDED, "error"] == before[ENDED, "error"] + 1
    assert (
        after["vllm:e2e_request_latency_seconds_count", ""]
        == before["vllm:e2e_request_latency_seconds_count", ""]
    )


def test_every_series_moves(server: Server, http: httpx.Client) -> None:
    """A series that stays at zero whatever happens misleads whoever reads a dashboard."""
    seen: Series = {}

    def look() -> Series:
        now = scrape(http)
        for name, value in now.items():
            seen[name] = max(seen.get(name, 0.0), value)
        return now

    repetition = {"max_pattern_size": 2, "min_count": 4}
    assert complete(http).status_code == 200  # length
    assert complete(http, stop=[" "], max_tokens=100).status_code == 200
    assert (
        complete(http, allowed_token_ids=[40], repetition_detection=repetition, max_tokens=99).status_code
        == 200
    )
    assert complete(http, structured_outputs={"grammar": "root ::= nothing"}).status_code == 400
    abandon(server)
    # Two of these prompts nearly fill the KV cache, so that one of them is soon preempted.
    prompts = [f"{number} {LONG_PROMPT}" for number in range(3)]
    crowd = threading.Thread(target=complete, args=(http,), kwargs={"max_tokens": 300, "prompt": prompts})
    crowd.start()
    while crowd.is_alive():
        look()
    for level in (1, 2):
        assert http.post("/sleep", params={"level": level}).status_code == 200
        look()
    assert http.post("/wake_up").status_code == 200
    look()
    exempt = {name for name in seen if name[0] in EXEMPT} | {
        DEFERRED
    }  # grammars compile faster than it is scraped
    still = sorted(name for name, value in seen.items() if not value and name not in exempt)
    assert not still


def test_requests_aborted_by_sleep_are_counted(server: Server, http: httpx.Client) -> None:
    before = scrape(http)
    with (
        httpx.Client(base_url=server.url, timeout=60) as reader,
        reader.stream("POST", "/v1/completions", json={**FOREVER, "stream": True}) as response,
    ):
        next(response.iter_lines())
        assert http.post("/sleep", params={"level": 1}).status_code == 200
        assert scrape(http)[ENDED, "abort"] == before[ENDED, "abort"] + 1
    assert http.post("/wake_up").status_code == 200


def test_choices_of_a_prompt_count_as_one_call_with_the_longest_of_them(http: httpx.Client) -> None:
    until_idle(http)
    before = scrape(http)
    answer = complete(http, prompt=["a", "b"], n=2, max_tokens=7, temperature=1).json()
    assert answer["usage"]["completion_tokens"] == 28
    after = scrape(http)

    def growth(name: str, part: str) -> float:
        return after[f"vllm:{name}_{part}", ""] - before[f"vllm:{name}_{part}", ""]

    assert (growth("request_params_n", "count"), growth("request_params_n", "sum")) == (2, 4)
    assert growth("request_max_num_generation_tokens", "count") == 2
    assert growth("request_max_num_generation_tokens", "sum") == 14
    assert (growth("request_params_max_tokens", "count"), growth("request_params_max_tokens", "sum")) == (
        4,
        28,
    )
    assert growth("request_num_preemptions", "count") == 4
    sources = {
        name: after[name] - before[name] for name in after if name[0] == "vllm:prompt_tokens_by_source_total"
    }
    assert sum(sources.values()) == growth_of_prompts(before, after)


def growth_of_prompts(before: Series, after: Series) -> float:
    return after["vllm:prompt_tokens_total", ""] - before["vllm:prompt_tokens_total", ""]


TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}},
}
CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Hello!"}],
    "max_tokens": 64,
    "temperature": 0,
}


@pytest.mark.parametrize("is_stream", [False, True])
def test_choices_of_requests_with_tools_count_by_whether_they_call_one(
    http: httpx.Client, is_stream: bool
) -> None:
    mode = "streaming" if is_stream else "non_streaming"

    def counted() -> dict[tuple[str, str], float]:
        families = text_string_to_metric_families(http.get("/metrics").text)
        (family,) = [each for each in families if each.name == "vllm:tool_call_parser_invocations"]
        return {
            (sample.labels["request_type"], sample.labels["outcome"]): sample.value
            for sample in family.samples
            if sample.name.endswith("_total") and sample.labels["mode"] == mode
        }

    before = counted()
    bodies = (
        ("/v1/chat/completions", {**CHAT, "tools": [TOOL], "tool_choice": "required"}),
        ("/v1/chat/completions", {**CHAT, "tools": [TOOL], "max_tokens": 1, "n": 2}),
        ("/v1/chat/completions", CHAT),
        ("/v1/responses", {"model": "tiny", "input": "Hello!", "tools": [{"type": "function", "name": "f"}]}),
        ("/v1/messages", {**CHAT, "tools": [{"name": "f", "input_schema": {"type": "object"}}]}),
    )
    for path, body in bodies:
        assert http.post(path, json={**body, "stream": is_stream}).status_code == 200
    after = counted()
    changed = {key: after[key] - before[key] for key in after}
    assert changed["chat_completions", "tool_call"] == 1
    assert changed["chat_completions", "no_tool_call"] == 2
    for api in ("responses", "other"):
        assert changed[api, "tool_call"] + changed[api, "no_tool_call"] == 1
