"""Parts of `argosy bench`: arrivals, prompts, figures, the progress lines and the drawing."""

from __future__ import annotations

import itertools
import json
import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from argosy_engine.benchmarks.benchmark_command import BenchmarkError, LineProgress
from argosy_engine.benchmarks.load_generator import RampUp, RequestFuncOutput, arrival_times
from argosy_engine.benchmarks.prompt_datasets import (
    DatasetArgs,
    PromptTokenizer,
    WordTokenizer,
    load_tokenizer,
)
from argosy_engine.benchmarks.serving_report import MAX_ROWS, first_errors, page, report, serving_metrics


def rng() -> np.random.Generator:
    return np.random.default_rng(1)


@pytest.fixture(scope="module", params=["words", "builtin://tiny"])
def tokenizer(request: pytest.FixtureRequest) -> PromptTokenizer:
    return WordTokenizer() if request.param == "words" else load_tokenizer(request.param)


def test_an_unlimited_rate_sends_everything_at_once() -> None:
    assert arrival_times(3, math.inf, 1.0, None, rng()) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("burstiness", [0.2, 1.0, 5.0])
def test_a_rate_is_kept_over_the_whole_run(burstiness: float) -> None:
    times = arrival_times(500, 20.0, burstiness, None, rng())
    assert times == sorted(times)
    assert times[-1] == pytest.approx(25.0)
    assert times == arrival_times(500, 20.0, burstiness, None, rng())


def test_burstiness_spreads_the_intervals() -> None:
    """The coefficient of variation of a gamma distribution is 1 / sqrt(shape)."""
    for burstiness in (0.25, 1.0, 16.0):
        gaps = np.diff(arrival_times(20_000, 1.0, burstiness, None, rng()))
        assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.1)
    assert arrival_times(3, 2.0, math.inf, None, rng()) == pytest.approx([0.5, 1.0, 1.5])


@pytest.mark.parametrize(
    ("strategy", "start", "rates"), [("linear", 1.0, [1, 2.5, 4]), ("exponential", 1.0, [1, 2, 4])]
)
def test_a_ramp_up_changes_the_rate_from_request_to_request(
    strategy: Any, start: float, rates: list[float]
) -> None:
    ramp_up = RampUp(strategy, start, 4.0)
    assert ramp_up.rates(3) == pytest.approx(rates)
    times = arrival_times(3, math.inf, math.inf, ramp_up, rng())
    assert np.diff([0.0, *times]) == pytest.approx([1 / rate for rate in rates])


def test_a_ramp_up_from_zero_sends_its_first_request() -> None:
    assert math.isfinite(arrival_times(5, math.inf, 1.0, RampUp("linear", 0.0, 4.0), rng())[-1])


def test_random_prompts_have_the_length_asked_for(tokenizer: PromptTokenizer) -> None:
    args = DatasetArgs(num_prompts=8, random_input_len=40, random_output_len=9, random_prefix_len=20)
    samples = args.samples(tokenizer, 3)
    assert samples == args.samples(tokenizer, 3)
    assert samples != args.samples(tokenizer, 4)
    assert [sample.expected_output_len for sample in samples] == [9] * 8
    for sample in samples:
        assert isinstance(sample.prompt, str)
        assert len(tokenizer.encode(sample.prompt)) == sample.prompt_len
        assert abs(sample.prompt_len + tokenizer.num_special_tokens - 60) <= 2
    assert len({str(sample.prompt) for sample in samples}) == 8
    (first, *others) = (str(sample.prompt) for sample in samples)
    assert all(other[:20] == first[:20] for other in others)


def test_lengths_spread_within_the_ratio() -> None:
    args = DatasetArgs(
        num_prompts=400, random_input_len=100, random_output_len=10,
        random_range_ratio='{"input": 0.5, "output": 0.1}',
    )  # fmt: skip
    samples = args.samples(WordTokenizer(), 0)
    inputs = [sample.prompt_len for sample in samples]
    outputs = {sample.expected_output_len for sample in samples}
    assert 50 <= min(inputs) < 70
    assert 130 < max(inputs) <= 150
    assert outputs == {9, 10, 11}


def test_prompts_of_a_batch_are_one_request() -> None:
    args = DatasetArgs(num_prompts=5, random_input_len=3, random_batch_size=2)
    samples = args.samples(WordTokenizer(), 0)
    assert [(len(sample.prompt), sample.prompt_len) for sample in samples] == [(2, 6), (2, 6), (1, 3)]


def test_prefixes_are_repeated(tokenizer: PromptTokenizer) -> None:
    args = DatasetArgs(
        dataset_name="prefix_repetition", num_prompts=7, prefix_repetition_prefix_len=30,
        prefix_repetition_suffix_len=10, prefix_repetition_num_prefixes=3, output_len=5, disable_shuffle=True,
    )  # fmt: skip
    prompts = [str(sample.prompt) for sample in args.samples(tokenizer, 0)]
    assert len(prompts) == 6
    starts = [prompt[:20] for prompt in prompts]
    assert starts[::2] == starts[1::2]
    assert len(set(starts)) == 3
    assert len(set(prompts)) == 6


def written(path: Path, value: object) -> str:
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return str(path)


def turns(question: str, answer: str) -> dict[str, object]:
    return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}


def test_conversations_of_a_fitting_length_are_taken_and_repeated(tmp_path: Path) -> None:
    entries = [
        turns("one two three four five", "a b c d e f"),
        turns("short", "a b c d e f"),
        turns("the question is a good one", "no"),
        turns("long " * 1025, "a b c d e f"),
        {"id": "no conversation"},
    ]
    path = written(tmp_path / "shared.json", entries)
    args = DatasetArgs(dataset_name="sharegpt", dataset_path=path, num_prompts=3)
    samples = args.samples(WordTokenizer(), 0)
    assert [(sample.prompt, sample.prompt_len, sample.expected_output_len) for sample in samples] == [
        ("one two three four five", 5, 6)
    ] * 3
    fewer = DatasetArgs(
        dataset_name="sharegpt", dataset_path=path, num_prompts=3, sharegpt_output_len=2, no_oversample=True
    )
    assert sorted(str(sample.prompt)[:3] for sample in fewer.samples(WordTokenizer(), 0)) == ["one", "the"]


def test_custom_prompts_keep_their_order_and_lengths(tmp_path: Path) -> None:
    path = written(
        tmp_path / "p.jsonl", '{"prompt": "a b", "output_tokens": 3}\n\n{"prompt": "c", "output_tokens": 4}\n'
    )
    args = DatasetArgs(
        dataset_name="custom", dataset_path=path, num_prompts=0, custom_output_len=-1, disable_shuffle=True
    )
    samples = args.samples(WordTokenizer(), 0)
    assert [(sample.prompt, sample.prompt_len, sample.expected_output_len) for sample in samples] == [
        ("a b", 2, 3),
        ("c", 1, 4),
    ]


def test_custom_prompts_get_the_chat_template_for_completions_only(tmp_path: Path) -> None:
    path = written(tmp_path / "p.jsonl", '{"prompt": "Hello!"}')
    tiny = load_tokenizer("builtin://tiny")
    args = DatasetArgs(dataset_name="custom", dataset_path=path, num_prompts=1)
    (templated,), (chat,) = args.samples(tiny, 0), args.samples(tiny, 0, is_chat=True)
    assert chat.prompt == "Hello!"
    assert "Hello!" in templated.prompt
    assert templated.prompt != "Hello!"
    assert DatasetArgs(
        dataset_name="custom", dataset_path=path, num_prompts=1, skip_chat_template=True
    ).samples(tiny, 0) == [chat]


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("sharegpt", "[", "is not a ShareGPT file"),
        ("sharegpt", "[]", "has no conversation of a question"),
        ("custom", "", "has no lines such as"),
        ("custom", '{"prompt": "a"}\n{"text": "b"}', "line 2: Object missing required field `prompt`"),
        ("custom", '{"prompt": "a"}', "line 1: needs an output_tokens of at least 1"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, name: Any, text: str, error: str) -> None:
    path = written(tmp_path / "file", text)
    args = DatasetArgs(dataset_name=name, dataset_path=path, num_prompts=1, custom_output_len=-1)
    with pytest.raises(BenchmarkError, match=error):
        args.samples(WordTokenizer(), 0)
    with pytest.raises(BenchmarkError, match="missing: No such file or directory; give the file"):
        DatasetArgs(dataset_name=name, dataset_path=f"{path}-missing").samples(WordTokenizer(), 0)


def output(
    start: float, ttft: float, itl: list[float], tokens: int, queued: float = 0.0
) -> RequestFuncOutput:
    return RequestFuncOutput(
        success=True, start_time=start, ttft=ttft, itl=itl, latency=ttft + sum(itl), prompt_len=10,
        output_tokens=tokens, client_queue_time=queued,
    )  # fmt: skip


def test_the_peak_is_not_below_the_mean() -> None:
    outputs = [output(100.0, 0.9, [0.3], 2)]
    metrics = serving_metrics(outputs, 1.2, (50.0,), {})
    assert metrics.max_output_tokens_per_s == pytest.approx(metrics.output_throughput)


def test_figures_follow_from_the_times() -> None:
    outputs = [
        output(100.0, 0.1, [0.2, 0.2], 3),
        output(100.2, 0.3, [0.1], 4),  # two tokens in each event
        output(101.0, 0.5, [], 1, queued=0.25),
        RequestFuncOutput(error="HTTP 500"),
    ]
    metrics = serving_metrics(outputs, 2.0, (50.0, 99.0), {"ttft": 300.0, "tpot": 150.0})
    assert (metrics.completed, metrics.failed) == (3, 1)
    assert (metrics.total_input, metrics.total_output) == (30, 8)
    assert metrics.request_throughput == 1.5
    assert metrics.output_throughput == 4.0
    assert metrics.total_token_throughput == 19.0
    assert metrics.max_concurrent_requests == 2
    assert metrics.max_output_tokens_per_s == pytest.approx(7.0)
    assert metrics.request_goodput == 0.5  # the first takes too long per token, the third for the first one
    ttft, tpot = metrics.summaries["ttft"], metrics.summaries["tpot"]
    assert (ttft.mean, ttft.median) == pytest.approx((300.0, 300.0))
    assert ttft.std == pytest.approx(math.sqrt(80_000 / 3))
    assert ttft.percentiles == ((50.0, pytest.approx(300.0)), (99.0, pytest.approx(496.0)))
    assert tpot.mean == pytest.approx((200.0 + 100.0 / 3) / 2)  # a single token has no time per further token
    assert metrics.summaries["itl"].mean == pytest.approx(500.0 / 3)
    assert metrics.summaries["e2el"].median == pytest.approx(500.0)
    assert metrics.summaries["e2el_including_client_queue"].mean == pytest.approx((500 + 400 + 750) / 3)


def test_a_run_without_answers_has_figures() -> None:
    metrics = serving_metrics([RequestFuncOutput(error="x")], 1.0, (99.0,), {"e2el": 1.0})
    assert (metrics.completed, metrics.failed, metrics.request_goodput) == (0, 1, 0.0)
    assert metrics.max_concurrent_requests == 0
    assert "P99 TTFT (ms):                           0.00" in report(metrics, ["ttft"])


def test_requests_that_follow_each_other_do_not_count_as_concurrent() -> None:
    metrics = serving_metrics([output(float(at), 0.5, [0.5], 2) for at in range(5)], 5.0, (50.0,))
    assert metrics.max_concurrent_requests == 1


def test_the_report_has_the_lines_of_vllm() -> None:
    metrics = serving_metrics([output(0.0, 0.1, [0.1], 2)], 2.0, (50.0, 99.9), {"ttft": 1.0})
    lines = report(metrics, ["ttft", "itl"], max_concurrency=4, request_rate=2.5).splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    labels = [line[:40].strip() for line in lines if line.rstrip()[-1].isdigit()]
    assert labels == [
        "Successful requests:", "Failed requests:", "Maximum request concurrency:",
        "Request rate configured (RPS):", "Benchmark duration (s):", "Total input tokens:",
        "Total generated tokens:", "Request throughput (req/s):", "Request goodput (req/s):",
        "Output token throughput (tok/s):", "Peak output token throughput (tok/s):",
        "Peak concurrent requests:", "Total token throughput (tok/s):",
        "Mean TTFT (ms):", "Median TTFT (ms):", "P50 TTFT (ms):", "P99.9 TTFT (ms):",
        "Mean ITL (ms):", "Median ITL (ms):", "P50 ITL (ms):", "P99.9 ITL (ms):",
    ]  # fmt: skip


def test_equal_errors_are_counted() -> None:
    errors = ["HTTP 429: slow down", "no connection", "HTTP 429: slow down", ""]
    assert first_errors([RequestFuncOutput(error=error) for error in errors]).splitlines() == [
        "2 failed: HTTP 429: slow down",
        "1 failed: no connection",
    ]
    many = [RequestFuncOutput(error=str(number)) for number in range(15)]
    assert first_errors(many).splitlines()[10:] == ["5 failed for other reasons"]


def test_progress_without_a_terminal_is_a_line_now_and_then() -> None:
    lines: list[str] = []
    clock = itertools.count()  # a second passes with each look at it
    with LineProgress("benchmark", 25, write=lines.append, clock=lambda: float(next(clock))) as shown:
        for number in range(25):
            shown.done(is_failed=number == 3)
    assert lines == [
        "benchmark: 10/25 requests, 1 failed, 10.0 s",
        "benchmark: 20/25 requests, 1 failed, 20.0 s",
        "benchmark: 25/25 requests, 1 failed, 26.0 s",
    ]


class _Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self.fills: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        if tag == "rect":
            self.fills.add(str(dict(attrs)["fill"]))


def test_a_plot_shows_a_run_and_stays_small() -> None:
    steps = [0.001, 0.030, 0.100] * 40
    outputs = [output(number * 0.01, 0.2, steps, 121) for number in range(600)]
    text = page("<model>", "report & more", [*outputs, RequestFuncOutput(error="x")], (25.0, 50.0))
    tags = _Tags(text)
    assert "&lt;model&gt;" in text
    assert "<model>" not in text
    assert tags.counts["svg"] == 5
    assert len(tags.fills) == 4  # waiting, fast, slow, stalled
    assert tags.counts["rect"] <= MAX_ROWS * 51
    assert "script" not in tags.counts
    assert "http" not in text
    assert "nan" not in text


def test_a_plot_of_vectors_and_one_of_failures_can_be_drawn() -> None:
    vectors = [RequestFuncOutput(success=True, latency=0.1, start_time=1.0)]
    assert _Tags(page("m", "", vectors, (25.0, 50.0))).counts["svg"] == 3
    assert "svg" not in _Tags(page("m", "", [RequestFuncOutput(error="x")], (25.0, 50.0))).counts
