"""BenchServeArgs: the flags of `argosy bench serve`, with the names of `vllm bench serve`."""

from __future__ import annotations

import math
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct

from argosy_engine.benchmarks.benchmark_command import BenchmarkError
from argosy_engine.benchmarks.load_generator import ENDPOINTS, Backend, RampUp, RampUpStrategy
from argosy_engine.benchmarks.prompt_datasets import DatasetArgs, Seed, Text
from argosy_protocol.program.flags import Flag

GENERATION_METRICS: Final = ("ttft", "tpot", "itl", "e2el")
QUEUE_METRICS: Final = ("client_queue_time", "e2el_including_client_queue")
GOODPUT_METRICS: Final = ("ttft", "tpot", "e2el")
Pairs = Annotated[tuple[Text, ...], Meta(max_length=256)]
_PORTS: Final = Meta(ge=1, le=65535, description="port of the server")


class SamplingArgs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters of each request; the server's default where one is left out."""

    temperature: Annotated[
        Annotated[float, Meta(ge=0.0, le=100.0)] | None,
        Meta(description="0 is greedy"),
        Flag(group="sampling"),
    ] = None
    top_p: Annotated[
        Annotated[float, Meta(gt=0.0, le=1.0)] | None,
        Meta(description="probability of the tokens to sample from"),
        Flag(group="sampling"),
    ] = None
    top_k: Annotated[
        Annotated[int, Meta(ge=-1, le=1 << 24)] | None,
        Meta(description="number of tokens to sample from"),
        Flag(group="sampling"),
    ] = None
    min_p: Annotated[
        Annotated[float, Meta(ge=0.0, le=1.0)] | None,
        Meta(description="least probability, as a share of the most probable token's"),
        Flag(group="sampling"),
    ] = None
    frequency_penalty: Annotated[
        Annotated[float, Meta(ge=-100.0, le=100.0)] | None,
        Meta(description="per occurrence of a token in the output"),
        Flag(group="sampling"),
    ] = None
    presence_penalty: Annotated[
        Annotated[float, Meta(ge=-100.0, le=100.0)] | None,
        Meta(description="on tokens that the output has"),
        Flag(group="sampling"),
    ] = None
    repetition_penalty: Annotated[
        Annotated[float, Meta(gt=0.0, le=100.0)] | None,
        Meta(description="on tokens of prompt and output"),
        Flag(group="sampling"),
    ] = None

    def fields(self) -> dict[str, float]:
        """Return the parameters that were given, by their names in a request."""
        return {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}


class BenchServeArgs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is asked of which server, how fast, and what is reported."""

    backend: Annotated[
        Backend, Meta(description="API of the server; argosy and vllm are openai by other names")
    ] = "openai"
    base_url: Annotated[
        Text | None,
        Meta(
            description="address of the server, such as https://api.openai.com, instead of --host and --port"
        ),
        Flag(metavar="URL"),
    ] = None
    host: Annotated[str, Meta(min_length=1, max_length=253, description="host of the server")] = "127.0.0.1"
    port: Annotated[int, _PORTS] = 8000
    endpoint: Annotated[
        Text | None,
        Meta(description="path of the API"),
        Flag(metavar="PATH", default="the backend's, such as /v1/completions"),
    ] = None
    header: Annotated[
        Pairs,
        Meta(description="headers of each request; OPENAI_API_KEY becomes a bearer token without one"),
        Flag(metavar="KEY=VALUE"),
    ] = ()
    insecure: Annotated[bool, Meta(description="believe any certificate of an https:// server")] = False
    model: Annotated[
        Text | None, Meta(description="model to ask for"), Flag(default="the first one that the server lists")
    ] = None
    served_model_name: Annotated[
        Text | None, Meta(description="the server's name of --model, if that is the tokenizer's")
    ] = None
    tokenizer: Annotated[
        Text | None,
        Meta(description="directory or ORG/NAME whose tokenizer measures the prompts"),
        Flag(default="--model"),
    ] = None
    skip_tokenizer_init: Annotated[
        bool, Meta(description="make prompts of words, about one token each, instead of loading a tokenizer")
    ] = False
    lora_modules: Annotated[
        Pairs, Meta(description="names of adapters, one of which each request asks for"), Flag(metavar="NAME")
    ] = ()
    lora_assignment: Annotated[
        Literal["random", "round-robin"], Meta(description="how --lora-modules are chosen")
    ] = "random"

    request_rate: Annotated[
        float,
        Meta(gt=0.0, description="requests per second; inf sends all at once"),
        Flag(metavar="RPS", group="load"),
    ] = math.inf
    burstiness: Annotated[
        float,
        Meta(
            gt=0.0,
            description="shape of the gamma distribution of intervals: 1 is a Poisson process, less is more bursty",
        ),
        Flag(metavar="SHAPE", group="load"),
    ] = 1.0
    max_concurrency: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 20)] | None,
        Meta(description="requests that run at once; others wait in the client"),
        Flag(group="load"),
    ] = None
    ramp_up_strategy: Annotated[
        RampUpStrategy | None,
        Meta(description="let the request rate grow from --ramp-up-start-rps to --ramp-up-end-rps"),
        Flag(group="load"),
    ] = None
    ramp_up_start_rps: Annotated[
        Annotated[float, Meta(ge=0.0, le=1e6)] | None,
        Meta(description="requests per second at first"),
        Flag(group="load"),
    ] = None
    ramp_up_end_rps: Annotated[
        Annotated[float, Meta(gt=0.0, le=1e6)] | None,
        Meta(description="requests per second at last"),
        Flag(group="load"),
    ] = None
    num_warmups: Annotated[
        int,
        Meta(ge=0, le=1 << 20, description="requests like the first one, before the clock starts"),
        Flag(group="load"),
    ] = 0
    ready_check_timeout_sec: Annotated[
        float,
        Meta(ge=0.0, le=86400.0, description="wait so long for an answer to the first prompt; 0 sends none"),
        Flag(group="load"),
    ] = 0.0
    ignore_eos: Annotated[
        bool | None,
        Meta(description="generate the full length"),
        Flag(default="on for random and prefix_repetition", group="load"),
    ] = None
    logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=1 << 20)] | None,
        Meta(description="alternatives per token whose log probabilities to ask for"),
        Flag(group="load"),
    ] = None
    extra_body: Annotated[
        dict[str, Any] | None,
        Meta(description="further fields of each request, as a JSON object"),
        Flag(is_json=True, metavar="JSON", group="load"),
    ] = None
    request_id_prefix: Annotated[
        Annotated[str, Meta(max_length=200)] | None,
        Meta(description="of each request's x-request-id"),
        Flag(default="bench- and random characters", group="load"),
    ] = None

    percentile_metrics: Annotated[
        Text | None,
        Meta(
            description="metrics to report, of ttft, tpot, itl, e2el, client_queue_time, e2el_including_client_queue"
        ),
        Flag(default="ttft,tpot,itl; e2el for embeddings", group="report"),
    ] = None
    metric_percentiles: Annotated[
        Text, Meta(description="percentiles to report, such as 50,90,99"), Flag(group="report")
    ] = "99"
    goodput: Annotated[
        Pairs,
        Meta(
            description="objectives in ms, such as ttft:200 tpot:50 e2el:5000; counts the requests that meet all"
        ),
        Flag(metavar="KEY:VALUE", group="report"),
    ] = ()
    disable_tqdm: Annotated[bool, Meta(description="show no progress"), Flag(group="report")] = False
    save_result: Annotated[bool, Meta(description="save the figures as JSON"), Flag(group="report")] = False
    save_detailed: Annotated[
        bool, Meta(description="with each request's times, text and error"), Flag(group="report")
    ] = False
    append_result: Annotated[
        bool, Meta(description="append the JSON to the file as a further line"), Flag(group="report")
    ] = False
    metadata: Annotated[
        Pairs, Meta(description="further keys of the JSON"), Flag(metavar="KEY=VALUE", group="report")
    ] = ()
    label: Annotated[
        Text | None, Meta(description="prefix of the file's name"), Flag(default="--backend", group="report")
    ] = None
    result_dir: Annotated[
        Text | None,
        Meta(description="directory of the file, made if need be"),
        Flag(metavar="DIR", group="report"),
    ] = None
    result_filename: Annotated[
        Text | None,
        Meta(description="name of the file"),
        Flag(metavar="FILE", default="LABEL-RATEqps-MODEL-TIME.json", group="report"),
    ] = None
    plot: Annotated[
        bool, Meta(description="draw the run as an HTML page beside the file"), Flag(group="report")
    ] = False
    plot_timeline: Annotated[bool, Meta(description="--plot by vLLM's name"), Flag(group="report")] = False
    timeline_itl_thresholds: Annotated[
        Text,
        Meta(description="two times in ms that divide tokens into fast, slow and stalled ones in the plot"),
        Flag(group="report"),
    ] = "25,50"

    seed: Annotated[Seed, Meta(description="of prompts, arrivals and adapters"), Flag(group="load")] = 0
    sampling: SamplingArgs = SamplingArgs()
    data: DatasetArgs = DatasetArgs()

    @property
    def path(self) -> str:
        """The endpoint's path, behind `url`."""
        return self.endpoint or ENDPOINTS[self.backend]

    @property
    def url(self) -> str:
        """The server's address without path. `/v1` at its end, as OpenAI's SDK has it, belongs to the endpoint."""
        if self.base_url is not None:
            url = self.base_url.rstrip("/")
            return url.removesuffix("/v1") if self.path.startswith("/v1/") else url
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def is_pooling(self) -> bool:
        return self.backend == "openai-embeddings"

    @property
    def is_plotted(self) -> bool:
        return self.plot or self.plot_timeline

    @property
    def ramp_up(self) -> RampUp | None:
        if self.ramp_up_strategy is None:
            return None
        return RampUp(self.ramp_up_strategy, self.ramp_up_start_rps or 0.0, self.ramp_up_end_rps or 0.0)

    @property
    def ignores_eos(self) -> bool:
        return self.data.is_random if self.ignore_eos is None else self.ignore_eos

    def check(self) -> None:
        """Reject values and combinations that cannot work.

        Raises:
            BenchmarkError: with the remedy.
        """
        ending = ENDPOINTS[self.backend].removeprefix("/v1")
        if not self.path.startswith("/") or not self.path.endswith(ending):
            raise BenchmarkError(
                f"--endpoint {self.path} is not one of --backend {self.backend}, which ends in {ending}"
            )
        if self.path.endswith("/chat/completions") and self.backend != "openai-chat":
            raise BenchmarkError(f"--endpoint {self.path} needs --backend openai-chat")
        self._check_ramp_up()
        if math.isnan(self.request_rate) or math.isnan(self.burstiness):
            raise BenchmarkError("--request-rate and --burstiness must be numbers above 0, or inf")
        if self.data.random_batch_size > 1 and not self.is_pooling:
            raise BenchmarkError("--random-batch-size needs --backend openai-embeddings")
        pairs(self.header, "header")
        pairs(self.metadata, "metadata")
        self.metrics()
        self.percentiles()
        self.objectives()
        self.itl_thresholds()
        self.data.check()

    def metrics(self) -> tuple[str, ...]:
        """Parse --percentile-metrics.

        Raises:
            BenchmarkError: an unknown name.
        """
        if self.percentile_metrics is None:
            return ("e2el",) if self.is_pooling else ("ttft", "tpot", "itl")
        names = tuple(name.strip() for name in self.percentile_metrics.split(","))
        known = (*GENERATION_METRICS, *QUEUE_METRICS)
        for name in names:
            if name not in known:
                raise BenchmarkError(
                    f"--percentile-metrics: there is no metric {name!r}; give some of {', '.join(known)}"
                )
        return names

    def percentiles(self) -> tuple[float, ...]:
        """Parse --metric-percentiles.

        Raises:
            BenchmarkError: not numbers from 0 to 100.
        """
        return _numbers(self.metric_percentiles, "metric-percentiles", 100.0)

    def itl_thresholds(self) -> tuple[float, float]:
        """Parse --timeline-itl-thresholds, in ms.

        Raises:
            BenchmarkError: not two numbers.
        """
        numbers = _numbers(self.timeline_itl_thresholds, "timeline-itl-thresholds", 1e9)
        if len(numbers) != 2:
            raise BenchmarkError(
                f"--timeline-itl-thresholds {self.timeline_itl_thresholds}: give two numbers, such as 25,50"
            )
        return min(numbers), max(numbers)

    def objectives(self) -> dict[str, float]:
        """Parse --goodput to milliseconds by metric.

        Raises:
            BenchmarkError: an unknown metric, or no number.
        """
        found = {}
        for pair in self.goodput:
            name, _, value = pair.partition(":")
            if name not in GOODPUT_METRICS:
                raise BenchmarkError(
                    f"--goodput {pair}: give {', '.join(GOODPUT_METRICS)} with milliseconds, such as ttft:200"
                )
            found[name] = _number(value, f"goodput {pair}", math.inf)
        return found

    def _check_ramp_up(self) -> None:
        start, end = self.ramp_up_start_rps, self.ramp_up_end_rps
        if self.ramp_up_strategy is None:
            if start is not None or end is not None:
                raise BenchmarkError(
                    "--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy linear or exponential"
                )
            return
        if not math.isinf(self.request_rate):
            raise BenchmarkError(
                "--request-rate and --ramp-up-strategy exclude each other; leave one of them out"
            )
        if start is None or end is None:
            raise BenchmarkError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
        if start > end:
            raise BenchmarkError(f"--ramp-up-start-rps {start:g} must not exceed --ramp-up-end-rps {end:g}")
        if start == 0 and self.ramp_up_strategy == "exponential":
            raise BenchmarkError("--ramp-up-strategy exponential needs a --ramp-up-start-rps above 0")


def pairs(given: tuple[str, ...], flag: str) -> dict[str, str]:
    """Parse KEY=VALUE arguments.

    Raises:
        BenchmarkError: one has no `=`.
    """
    found = {}
    for pair in given:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise BenchmarkError(f"--{flag} {pair!r} must be KEY=VALUE")
        found[key.strip()] = value.strip()
    return found


def _numbers(text: str, flag: str, most: float) -> tuple[float, ...]:
    return tuple(_number(part, f"{flag} {text}", most) for part in text.split(","))


def _number(text: str, flag: str, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 <= value <= most:
        raise BenchmarkError(f"--{flag}: {text!r} is not a number from 0 to {most:g}")
    return value
