"""`argosy bench serve` against a mock endpoint and against a small engine."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from argosy_engine.benchmarks import endpoint_check
from argosy_engine.benchmarks.bench_serve import main
from loopback_certificate import issue_certificate
from mock_openai import Document, Events, MockOpenAI, Question, completion_events
from processes import Server
from scripted_http import Asked, Reply, ScriptedHttp
from served_engine import KEY

SHORT = ["--skip-tokenizer-init", "--random-input-len", "4", "--random-output-len", "3", "--disable-tqdm"]
SUMMARIES = {
    f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl")
}
KEYS = {
    "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate",
    "burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens",
    "total_output_tokens", "request_throughput", "request_goodput", "output_throughput",
    "total_token_throughput", "latencies", "queue_times", "max_output_tokens_per_s",
    "max_concurrent_requests",
}  # fmt: skip
"""Of vllm.benchmarks.serve 0.32 without --save-detailed; its `rtfx` is of speech."""
DETAILS = {"input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors"}


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def bench(server: MockOpenAI, *flags: str) -> int:
    return main(["--base-url", server.url, *SHORT, *flags])


def saved(server: MockOpenAI, folder: Path, *flags: str) -> dict[str, Any]:
    """Run and return the saved result."""
    where = ["--save-result", "--result-dir", str(folder / "new"), "--result-filename", "r.json"]
    assert bench(server, *where, *flags) == 0
    return json.loads((folder / "new" / "r.json").read_text())


def test_a_result_has_the_keys_of_vllm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MockOpenAI() as server:
        result = saved(server, tmp_path, "--num-prompts", "6", "--metadata", "version=1", "gpu=none")
    assert set(result) == KEYS | SUMMARIES | {"version", "gpu"}
    assert (result["completed"], result["failed"]) == (6, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (42, 18)
    assert (result["request_rate"], result["request_goodput"], result["tokenizer_id"]) == ("inf", None, None)
    assert result["model_id"] == "mock"
    assert result["output_throughput"] == pytest.approx(18 / result["duration"])
    printed = capsys.readouterr()
    assert "Successful requests:                     6" in printed.out
    assert "--model is not given: mock, the first of" in printed.err


def test_details_are_saved_on_demand(tmp_path: Path) -> None:
    with MockOpenAI() as server:
        result = saved(
            server, tmp_path, "--num-prompts", "3", "--save-detailed", "--goodput", "ttft:1e9", "e2el:0",
            "--percentile-metrics", "ttft,e2el", "--metric-percentiles", "50,99.9",
        )  # fmt: skip
    assert set(result) >= DETAILS
    assert result["generated_texts"] == ["t0 t1 t2 "] * 3
    assert [len(itl) for itl in result["itls"]] == [2] * 3
    assert (result["input_lens"], result["output_lens"], result["errors"]) == ([7] * 3, [3] * 3, [""] * 3)
    assert result["request_goodput"] == 0
    assert {"p50_ttft_ms", "p99.9_e2el_ms"} <= set(result)
    assert "mean_itl_ms" not in result


def test_results_are_appended_as_lines(tmp_path: Path) -> None:
    with MockOpenAI() as server:
        for _ in range(2):
            flags = ["--append-result", "--num-prompts", "1", "--result-filename", str(tmp_path / "all.json")]
            assert bench(server, *flags) == 0
    lines = (tmp_path / "all.json").read_text().splitlines()
    assert [json.loads(line)["completed"] for line in lines] == [1, 1]


def test_the_file_is_named_after_the_run(tmp_path: Path) -> None:
    with MockOpenAI() as server:
        flags = [
            "--model",
            "org/a b",
            "--served-model-name",
            "mock",
            "--num-prompts",
            "2",
            "--request-rate",
            "1000",
        ]
        assert bench(server, *flags, "--save-result", "--plot", "--result-dir", str(tmp_path)) == 0
    names = sorted(path.name for path in tmp_path.iterdir())
    assert [name[:21] for name in names] == ["openai-1000.0qps-a_b-"] * 2
    assert [name.rpartition(".")[2] for name in names] == ["html", "json"]
    assert "<svg" in (tmp_path / names[0]).read_text()


def test_a_failed_request_ends_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = iter([Document({"error": {"message": "slow down"}}, 429)] * 2 + [Events([], is_whole=False)])

    def answer(question: Question) -> Document | Events:
        return next(answers, None) or completion_events(question)

    with MockOpenAI(answer) as server:
        result = saved(server, tmp_path, "--num-prompts", "10", "--max-concurrency", "2")
    assert (result["completed"], result["failed"]) == (7, 3)
    errors = capsys.readouterr().err
    assert "2 failed: HTTP 429: slow down" in errors
    assert "1 failed: the server closed the connection" in errors


def test_no_answer_at_all_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    with MockOpenAI(lambda _: Document({"error": {"message": "full"}}, 503)) as server:
        assert bench(server, "--num-prompts", "3") == 1
    printed = capsys.readouterr()
    assert "3 failed: HTTP 503: full" in printed.err
    assert "no request was answered" in printed.err
    assert "Failed requests:                         3" in printed.out


def test_concurrency_is_limited_and_used() -> None:
    with MockOpenAI(together=3) as server:
        assert bench(server, "--num-prompts", "12", "--max-concurrency", "3") == 0
        assert server.peak == 3
        assert server.connections <= 5  # one asked for the models


def test_without_a_limit_everything_is_sent_at_once() -> None:
    with MockOpenAI(together=40) as server:
        assert bench(server, "--num-prompts", "40") == 0


def test_the_limit_of_open_files_is_raised_for_the_connections() -> None:
    with MockOpenAI(together=100) as server:
        bench_serve = [sys.executable, "-m", "argosy", "bench", "serve", "--base-url", server.url, *SHORT]
        low = ["sh", "-c", 'ulimit -S -n 64 && exec "$@"', "sh", *bench_serve, "--num-prompts", "100"]
        done = subprocess.run(low, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Failed requests:                         0" in done.stdout
    assert "benchmark" not in done.stderr  # --disable-tqdm


def test_warm_ups_are_not_counted(tmp_path: Path) -> None:
    with MockOpenAI() as server:
        result = saved(
            server, tmp_path, "--num-prompts", "2", "--num-warmups", "3", "--ready-check-timeout-sec", "9"
        )
        prompts = [body["prompt"] for body in server.bodies]
    assert result["completed"] == 2
    assert len(prompts) == 6
    assert len(set(prompts)) == 2


def test_a_completion_asks_for_what_the_flags_say() -> None:
    with MockOpenAI() as server:
        flags = ["--num-prompts", "1", "--temperature", "0", "--top-k", "5", "--logprobs", "2"]
        more = ["--extra-body", '{"user": "me"}', "--request-id-prefix", "r-", "--header", "x-a=b=c"]
        assert bench(server, *flags, *more) == 0
        (question,) = server.calls
    body = dict(question.body)
    assert len(body.pop("prompt").split()) == 4
    assert body == {
        "model": "mock", "max_tokens": 3, "temperature": 0, "top_k": 5, "logprobs": 2, "user": "me",
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    assert question.path == "/v1/completions"
    assert (question.headers["x-request-id"], question.headers["x-a"]) == ("r-0", "b=c")


def test_a_chat_is_asked_as_openai_wants_it() -> None:
    with MockOpenAI() as server:
        assert bench(server, "--backend", "openai-chat", "--num-prompts", "1", "--no-ignore-eos") == 0
        (question,) = server.calls
    body = dict(question.body)
    (message,) = body.pop("messages")
    assert message["role"] == "user"
    assert body == {
        "model": "mock", "max_completion_tokens": 3, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    assert question.path == "/v1/chat/completions"


def test_embeddings_are_measured_per_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(question: Question) -> Document:
        vectors = [{"index": index, "embedding": [0.5]} for index in range(len(question.body["input"]))]
        return Document({"data": vectors, "usage": {"prompt_tokens": 11, "total_tokens": 11}})

    with MockOpenAI(answer) as server:
        flags = ["--backend", "openai-embeddings", "--num-prompts", "4", "--random-batch-size", "2"]
        result = saved(server, tmp_path, *flags)
        assert [sorted(body) for body in server.bodies] == [["input", "model"]] * 2
    assert (result["completed"], result["total_input_sequences"], result["total_input_tokens"]) == (2, 4, 22)
    assert result["mean_e2el_ms"] > 0
    assert "ttfts" not in result
    printed = capsys.readouterr().out
    assert "Input throughput (inputs/s):" in printed
    assert "TTFT" not in printed


def test_adapters_take_turns() -> None:
    with MockOpenAI() as server:
        flags = ["--lora-modules", "a", "b", "--lora-assignment", "round-robin", "--max-concurrency", "1"]
        assert bench(server, "--num-prompts", "4", *flags) == 0
        assert [body["model"] for body in server.bodies] == ["a", "b", "a", "b"]


def test_a_ramp_up_is_saved(tmp_path: Path) -> None:
    with MockOpenAI() as server:
        flags = ["--ramp-up-strategy", "linear", "--ramp-up-start-rps", "100", "--ramp-up-end-rps", "1000"]
        result = saved(server, tmp_path, "--num-prompts", "5", *flags)
    assert (result["ramp_up_strategy"], result["ramp_up_start_rps"], result["ramp_up_end_rps"]) == (
        "linear", 100, 1000,
    )  # fmt: skip


def test_a_key_of_the_environment_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
    with MockOpenAI(key="sk-1") as server:
        assert bench(server, "--num-prompts", "1") == 0
        assert bench(server, "--num-prompts", "1", "--header", "Authorization=Bearer sk-2") == 1


def test_flags_of_vllm_that_ask_for_nothing_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with MockOpenAI() as server:
        flags = ["--trust-remote-code", "--tokenizer_mode", "auto", "--probe-request-rate", "0"]
        assert bench(server, "--num-prompts", "1", *flags) == 0
    errors = capsys.readouterr().err
    assert "argosy bench serve: --trust-remote-code has no effect: a checkpoint's code is never run" in errors
    assert "--tokenizer-mode has no effect" in errors


@pytest.mark.parametrize("insecure", [True, False])
def test_a_certificate_is_verified(
    insecure: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(asked: Asked) -> Reply:
        if asked.method == "GET":
            return Reply(200, b'{"data": [{"id": "m"}]}')
        return Reply(200, b'data: {"choices": [{"text": "a"}]}\n\n')

    with ScriptedHttp(answer, tls=issue_certificate(tmp_path)) as server:
        flags = ["--base-url", server.url, *SHORT, "--num-prompts", "4", *(["--insecure"] * insecure)]
        assert main(flags) == (0 if insecure else 1)
        assert bool(server.asked) is insecure
    if not insecure:
        error = capsys.readouterr().err
        assert "certificate verify failed" in error
        assert "; --insecure believes any certificate\n" in error


def test_a_base_url_may_end_in_v1() -> None:
    with MockOpenAI() as server:
        assert main(["--base-url", f"{server.url}/v1/", *SHORT, "--num-prompts", "1"]) == 0


def test_a_server_without_a_list_of_models_can_be_measured() -> None:
    with MockOpenAI(models=None) as server:
        assert bench(server, "--model", "gpt", "--num-prompts", "1") == 0


def refusing(question: Question) -> Document:
    return Document({"error": {"message": "no such model"}}, 404)


@pytest.mark.parametrize(
    ("server", "flags", "error"),
    [
        (MockOpenAI(key="sk-1"), [], "refuses: HTTP 401: no such key; set OPENAI_API_KEY, or give --header"),
        (MockOpenAI(models=[]), [], "lists no models; give --model"),
        (MockOpenAI(models=None), [], "lists no models; give --model"),
        (
            MockOpenAI(refusing),
            ["--model", "other"],
            "does not answer 'other': HTTP 404: no such model; the server has the models mock; give one of them",
        ),
        (
            MockOpenAI(lambda _: Document({"error": {"message": "ignore_eos?"}}, 400)),
            ["--ready-check-timeout-sec", "600"],
            "HTTP 400: ignore_eos?; a server that does not know ignore_eos needs --no-ignore-eos",
        ),
        (
            MockOpenAI(refusing),
            ["--ready-check-timeout-sec", "600"],
            "does the server have /v1/completions? --endpoint and --backend choose another API",
        ),
    ],
    ids=["key", "no models", "no listing", "unknown model", "ignore_eos", "no endpoint"],
)
def test_a_server_that_cannot_be_used_is_explained(
    server: MockOpenAI, flags: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with server:
        assert bench(server, "--num-prompts", "1", *flags) == 1
    text = capsys.readouterr().err
    assert error in text.splitlines()[-1]
    assert text.splitlines()[-1].startswith("argosy bench serve: http://127.0.0.1:")


def test_a_wrong_address_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as silent:  # bound, so that nobody else gets the port, and not listening
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        assert main(["--port", str(port), *SHORT]) == 1
    text = capsys.readouterr().err
    assert text.startswith(f"argosy bench serve: no server at http://127.0.0.1:{port}: ")
    assert "give its --base-url, or --host and --port" in text
    assert text.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--request-rate", "0"], "--request-rate: must be a number above 0"),
        (["--request-rate", "nan"], "--request-rate"),
        (["--max-concurrency", "0"], "--max-concurrency: must be a whole number from 1"),
        (["--base-url", "localhost:8000"], "'localhost:8000' is not an http:// or https:// URL"),
        (["--endpoint", "/v1/responses"], "--endpoint /v1/responses is not one of --backend openai"),
        (["--endpoint", "/v1/chat/completions"], "needs --backend openai-chat"),
        (["--backend", "openai-chat", "--endpoint", "/v1/completions"], "which ends in /chat/completions"),
        (["--dataset-name", "sharegpt"], "--dataset-name sharegpt needs --dataset-path FILE"),
        (["--dataset-path", "x"], "--dataset-path is of no use to --dataset-name random"),
        (["--num-prompts", "0"], "--num-prompts 0 takes all lines of --dataset-name custom"),
        (["--random-range-ratio", "1"], "must be at least 0 and below 1"),
        (["--random-range-ratio", "[]"], "is neither a number nor"),
        (["--random-batch-size", "2"], "needs --backend openai-embeddings"),
        (["--header", "x"], "--header 'x' must be KEY=VALUE"),
        (["--header", "a b=c"], "'a b' is not a header"),
        (["--metadata", "=x"], "--metadata '=x' must be KEY=VALUE"),
        (["--goodput", "itl:3"], "--goodput itl:3: give ttft, tpot, e2el with milliseconds"),
        (["--goodput", "ttft:x"], "'x' is not a number"),
        (["--percentile-metrics", "ttft,tbt"], "there is no metric 'tbt'"),
        (["--metric-percentiles", "101"], "'101' is not a number from 0 to 100"),
        (["--timeline-itl-thresholds", "1"], "give two numbers"),
        (["--ramp-up-start-rps", "1"], "need --ramp-up-strategy"),
        (["--ramp-up-strategy", "linear"], "needs --ramp-up-start-rps and --ramp-up-end-rps"),
        (["--ramp-up-strategy", "linear", "--request-rate", "2"], "exclude each other"),
        (
            ["--ramp-up-strategy", "linear", "--ramp-up-start-rps", "2", "--ramp-up-end-rps", "1"],
            "must not exceed",
        ),
        (
            ["--ramp-up-strategy", "exponential", "--ramp-up-start-rps", "0", "--ramp-up-end-rps", "1"],
            "above 0",
        ),
        (["--extra-body", "{"], "--extra-body is not JSON"),
        (["--profile"], "--profile is not supported: there is no profiler"),
        (["--probe-request-rate", "2"], "--probe-request-rate is not supported: run a second client"),
        (["--nonsense"], "unknown argument --nonsense"),
        (["--request-rat", "1"], "did you mean --request-rate?"),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_one_line_with_the_remedy(
    flags: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(flags)
    except SystemExit as ending:
        code = int(ending.code or 0)
    text = capsys.readouterr().err
    assert code == 2
    assert error in text
    assert text.startswith("argosy bench serve: ")
    assert text.count("\n") == 1


def test_a_result_that_cannot_be_saved_is_refused_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("x")
    with MockOpenAI() as server:
        assert bench(server, "--save-result", "--result-dir", str(tmp_path / "file" / "in")) == 2
        assert server.bodies == []
    assert "give another --result-dir" in capsys.readouterr().err


def test_an_unknown_tokenizer_is_an_error_if_it_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    short = [flag for flag in SHORT if flag != "--skip-tokenizer-init"]
    with MockOpenAI() as server:
        asked = ["--base-url", server.url, *short, "--num-prompts", "1"]
        assert main([*asked, "--tokenizer", "/nowhere"]) == 2
        assert "no tokenizer for '/nowhere'" in capsys.readouterr().err
        assert main(asked) == 0
        assert "no tokenizer for 'mock' here, so prompts are made of words" in capsys.readouterr().err
        assert len(server.bodies) == 1


@pytest.mark.parametrize("tokenizes", [True, False])
def test_prompts_are_cut_to_their_length_in_the_servers_tokens(
    tokenizes: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The mock has two tokens for each word, and the prompts are made of four words."""
    with MockOpenAI(tokenizes=tokenizes) as server:
        assert bench(server, "--num-prompts", "30") == 0
        lengths = {len(body["prompt"].split()) for body in server.bodies}
        assert len(server.bodies) == 30
    assert lengths == ({2} if tokenizes else {4})
    assert ("one token per word, as far as is known" in capsys.readouterr().err) is not tokenizes


def test_a_server_that_is_loading_is_not_said_to_have_no_models(capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedHttp(lambda _: Reply(503, b'{"error": {"message": "loading"}}')) as server:
        assert main(["--base-url", server.url, *SHORT]) == 1
    assert "is not ready: HTTP 503: loading; --ready-check-timeout-sec N waits" in capsys.readouterr().err


def test_a_server_that_is_loading_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_check, "RETRY_S", 0.0)
    answers = iter([Reply(503)] * 3)
    listing = Reply(200, b'{"data": [{"id": "late"}]}')
    tokens = Reply(200, b'data: {"choices": [{"text": "a"}]}\n\n')

    def answer(asked: Asked) -> Reply:
        return next(answers, None) or (listing if asked.method == "GET" else tokens)

    with ScriptedHttp(answer) as server:
        flags = ["--base-url", server.url, *SHORT, "--num-prompts", "1", "--ready-check-timeout-sec", "600"]
        assert main(flags) == 0
        assert server.paths().count("/v1/models") == 4


def test_a_small_engine_is_measured(
    tmp_path: Path, tiny_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    flags = ["--port", str(tiny_server.port), "--tokenizer", "builtin://tiny", "--disable-tqdm"]
    flags += ["--num-prompts", "6"]
    saves = ["--save-result", "--save-detailed", "--result-filename", str(tmp_path / "r.json")]
    for backend in ("argosy", "openai-chat"):
        lengths = ["--input-len", "20", "--output-len", "5", "--backend", backend]
        assert main([*flags, *lengths, *saves, "--max-concurrency", "3"]) == 0
        result = json.loads((tmp_path / "r.json").read_text())
        assert (result["completed"], result["failed"]) == (6, 0)
        assert result["total_output_tokens"] == 30
        assert result["output_lens"] == [5] * 6
        assert all(
            0 < ttft <= latency for ttft, latency in zip(result["ttfts"], result["latencies"], strict=True)
        )
        if backend == "argosy":
            assert all(abs(length - 20) <= 1 for length in result["input_lens"])
