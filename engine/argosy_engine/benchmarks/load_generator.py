"""Load generator: sends the requests of a run as their arrivals say, at most so many at once, and times the answers.

Owns: request rate, burstiness and ramp-up, the limit of requests that run at once, the clock of the run, the request's
JSON, and reading an answer's events. Must not know: flags, and figures over many requests.

Invariants: every request ends as a `RequestFuncOutput`; one that fails says why in `error`, and ends nothing else. All
outputs are returned, in the order of the requests. Arrival times never decrease, and without a ramp-up the last one is
at `count / rate`, so that runs with different seeds offer the same load.
"""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec
import numpy as np

from argosy_engine.benchmarks.prompt_datasets import SampleRequest
from argosy_engine.benchmarks.streaming_http import HttpFailure, NoConnection, StreamingHttp

Backend = Literal["openai", "openai-chat", "openai-embeddings", "argosy", "vllm"]
ENDPOINTS: Final[dict[str, str]] = {
    "openai": "/v1/completions",
    "argosy": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
    "openai-embeddings": "/v1/embeddings",
}
"""Backend -> its endpoint. A path that is given must end alike, but for the version."""
MAX_LINE_BYTES: Final = 16 << 20
MAX_JSON_BYTES: Final = 256 << 20
"""Size of an answer that is not streamed; a batch of embeddings is large."""
_MAX_REFUSAL_BYTES: Final = 64 << 10
_MAX_ERROR_CHARS: Final = 500


@dataclass(slots=True)
class RequestFuncOutput:
    """What one request measured. Times are seconds; the names are vLLM's."""

    success: bool = False
    error: str = ""
    """Why it failed; empty if it did not."""
    status: int = 0
    """The HTTP status; 0 if there was none."""
    start_time: float = 0.0
    """When it was sent, by `time.perf_counter`."""
    client_queue_time: float = 0.0
    """Time from its arrival until it was sent, spent waiting for --max-concurrency."""
    ttft: float = 0.0
    """From sending to the first token."""
    itl: list[float] = field(default_factory=list)
    """Times between the events with tokens. A server may send several tokens in one event."""
    latency: float = 0.0
    """From sending to the last token, or to the whole answer if there is no stream."""
    prompt_len: int = 0
    """Tokens of the prompt: the server's count, or the data set's if the server tells none."""
    output_tokens: int = 0
    """Tokens of the answer by the server's count; the number of events if it tells none."""
    num_input_sequences: int = 1
    generated_text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTemplate:
    """What the requests of a run have in common."""

    backend: Backend
    path: str
    model: str
    ignore_eos: bool = False
    logprobs: int | None = None
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the body, sampling parameters included. They win over ours."""

    @property
    def is_streamed(self) -> bool:
        return self.backend != "openai-embeddings"

    def body(self, sample: SampleRequest, model: str | None = None) -> bytes:
        """Return the JSON of a request.

        Args:
            model: instead of the template's, such as an adapter's name.
        """
        fields: dict[str, Any] = {"model": model or self.model}
        if self.backend == "openai-embeddings":
            fields["input"] = sample.prompt
        else:
            if self.backend == "openai-chat":
                fields["messages"] = [{"role": "user", "content": sample.prompt}]
                fields["max_completion_tokens"] = sample.expected_output_len
                if self.logprobs is not None:
                    fields |= {"logprobs": True, "top_logprobs": self.logprobs}
            else:
                fields["prompt"] = sample.prompt
                fields["max_tokens"] = sample.expected_output_len
                if self.logprobs is not None:
                    fields["logprobs"] = self.logprobs
            if self.ignore_eos:
                fields["ignore_eos"] = True
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        return msgspec.json.encode({**fields, **self.extra_body})


async def send_request(
    client: StreamingHttp, template: RequestTemplate, sample: SampleRequest, body: bytes
) -> RequestFuncOutput:
    """Send one request and time its answer.

    Args:
        body: the JSON that `template.body` made of the sample.
    """
    reader = _Events(sample) if template.is_streamed else _Document(sample)
    headers = {"x-request-id": sample.request_id} if sample.request_id else None
    output = reader.output
    output.start_time = time.perf_counter()
    try:
        output.status = await client.request("POST", template.path, reader.receive, body, headers)
    except NoConnection as error:
        reader.fail(f"no connection: {error}")
    except HttpFailure as error:
        reader.fail(str(error))
    else:
        reader.finish()
    return output


class _Answer:
    """An answer that arrives: what `_Events` and `_Document` have in common, the text of a refusal."""

    def __init__(self, sample: SampleRequest) -> None:
        self.output = RequestFuncOutput(prompt_len=sample.prompt_len)
        self._refusal = b""

    def fail(self, message: str) -> None:
        self.output.success = False
        self.output.error = self.output.error or message[:_MAX_ERROR_CHARS]

    def refuse(self, data: bytes) -> None:
        """Take bytes of an answer with another status than 200."""
        self._refusal += data[: _MAX_REFUSAL_BYTES - len(self._refusal)]

    def is_refused(self) -> bool:
        """Whether the answer was a refusal, which fails the request with its text."""
        if self.output.status != 200:
            self.fail(f"HTTP {self.output.status}: {error_message(self._refusal)}")
            return True
        return False


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_DECODER = msgspec.json.Decoder(_Chunk)


class _Events(_Answer):
    """A stream of server-sent events. Those that arrive together have the same time."""

    def __init__(self, sample: SampleRequest) -> None:
        super().__init__(sample)
        self._tail = b""
        self._texts: list[str] = []
        self._first = self._last_choice = self._last_token = 0.0
        self._num_events = 0

    def receive(self, status: int, now: float, data: bytes) -> None:
        if status != 200:
            self.refuse(data)
            return
        *lines, self._tail = (self._tail + data).split(b"\n") if self._tail else data.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(now, line[5:])
        if len(self._tail) > MAX_LINE_BYTES:
            raise HttpFailure(f"an event is larger than {MAX_LINE_BYTES} bytes")

    def finish(self) -> None:
        """Turn the times into latencies after the last byte."""
        output = self.output
        if self.is_refused() or output.error:
            return
        if not self._last_choice:
            self.fail("the answer has no tokens; is the endpoint the backend's, and does it stream?")
            return
        output.success = True
        output.ttft = (self._first or self._last_choice) - output.start_time
        output.latency = self._last_choice - output.start_time
        output.generated_text = "".join(self._texts)
        if not output.output_tokens:
            output.output_tokens = self._num_events

    def _event(self, now: float, data: bytes) -> None:
        if b"[DONE]" in data[:8]:
            return
        try:
            chunk = _DECODER.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self.fail(f"an event cannot be read: {error}")
            return
        if chunk.error is not None:
            self.fail(f"the stream ended: {_error_text(chunk.error)}")
        if chunk.usage is not None:
            self.output.output_tokens = chunk.usage.completion_tokens or self.output.output_tokens
            self.output.prompt_len = chunk.usage.prompt_tokens or self.output.prompt_len
        if not chunk.choices:
            return
        self._last_choice = now
        if self._has_token(chunk.choices):
            self._num_events += 1
            if self._first:
                self.output.itl.append(now - self._last_token)
            else:
                self._first = now
            self._last_token = now

    def _has_token(self, choices: Sequence[_Choice]) -> bool:
        """Keep the text; return whether there is a token. A chat's first event names the role only, its last the
        reason of the end. A completion's token may have no text yet."""
        has_token = False
        for choice in choices:
            delta = choice.delta
            if delta is None:
                if choice.text:
                    self._texts.append(choice.text)
                has_token |= bool(choice.text) or choice.finish_reason is None
            else:
                text = delta.content or delta.reasoning_content or delta.reasoning or delta.refusal
                if text:
                    self._texts.append(text)
                has_token |= bool(text or delta.tool_calls)
        return has_token


class _Document(_Answer):
    """One JSON document, of which the usage counts."""

    def __init__(self, sample: SampleRequest) -> None:
        super().__init__(sample)
        self.output.num_input_sequences = len(sample.prompt) if isinstance(sample.prompt, list) else 1
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self._last = 0.0

    def receive(self, status: int, now: float, data: bytes) -> None:
        self._last = now
        if status != 200:
            self.refuse(data)
            return
        self._num_bytes += len(data)
        if self._num_bytes > MAX_JSON_BYTES:
            raise HttpFailure(f"the answer is larger than {MAX_JSON_BYTES} bytes")
        self._pieces.append(data)

    def finish(self) -> None:
        """Read the document after the last byte."""
        output = self.output
        if self.is_refused():
            return
        try:
            chunk = msgspec.json.decode(b"".join(self._pieces), type=_Chunk)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self.fail(f"the answer cannot be read: {error}")
            return
        if chunk.error is not None:
            self.fail(_error_text(chunk.error))
            return
        if chunk.usage is not None:
            output.prompt_len = chunk.usage.prompt_tokens or output.prompt_len
        output.success = True
        output.latency = self._last - output.start_time


def error_message(body: bytes) -> str:
    """Return the message of an error's body, or its first characters if it is not OpenAI's form."""
    try:
        document = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return " ".join(body.decode("utf-8", "replace").split())[:_MAX_ERROR_CHARS] or "no text"
    return _error_text(document.get("error", document) if isinstance(document, dict) else document)


def _error_text(error: object) -> str:
    found = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(found).split())[:_MAX_ERROR_CHARS]


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Outputs of a run, in the order of its requests."""

    outputs: list[RequestFuncOutput]
    duration: float
    """Seconds from the first arrival to the last answer."""
    client_cpu_s: float
    """CPU seconds that this process spent on them, in all threads."""


async def run_load(
    client: StreamingHttp,
    template: RequestTemplate,
    samples: Sequence[SampleRequest],
    arrivals: Sequence[float],
    max_concurrency: int | None = None,
    models: Sequence[str] = (),
    on_done: Callable[[RequestFuncOutput], None] = lambda _: None,
) -> LoadResult:
    """Send each request at its time and wait for all answers.

    Args:
        arrivals: seconds after the start, ascending, one per sample.
        max_concurrency: requests that run at once; others wait here. None: no limit.
        models: one name per sample, instead of the template's model; empty: none.
        on_done: called with each output when it is complete.
    """
    names = models or [template.model] * len(samples)
    # Made before the clock starts, which a large prompt's JSON would hold up.
    bodies = [template.body(sample, name) for sample, name in zip(samples, names, strict=True)]
    limit: AbstractAsyncContextManager[object] = (
        asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()
    )

    async def send(sample: SampleRequest, body: bytes, arrival: float) -> RequestFuncOutput:
        async with limit:
            output = await send_request(client, template, sample, body)
        output.client_queue_time = output.start_time - arrival
        on_done(output)
        return output

    gc.freeze()  # or the collector would stop the clock to look through all prompts
    tasks: list[asyncio.Task[RequestFuncOutput]] = []
    cpu_before, started = time.process_time(), time.perf_counter()
    try:
        for sample, body, arrival in zip(samples, bodies, arrivals, strict=True):
            wait_s = started + arrival - time.perf_counter()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            tasks.append(asyncio.create_task(send(sample, body, time.perf_counter())))
        outputs = list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        gc.unfreeze()
    return LoadResult(outputs, time.perf_counter() - started, time.process_time() - cpu_before)


RampUpStrategy = Literal["linear", "exponential"]


class RampUp(msgspec.Struct, frozen=True):
    """A request rate that grows from the first request to the last."""

    strategy: RampUpStrategy
    start_rps: float
    end_rps: float

    def rates(self, count: int) -> np.ndarray:
        """Return the rate at each request, in requests per second; float64 [count]."""
        progress = np.arange(count) / max(count - 1, 1)
        if self.strategy == "linear":
            return self.start_rps + (self.end_rps - self.start_rps) * progress
        return self.start_rps * (self.end_rps / self.start_rps) ** progress


def arrival_times(
    count: int, rate: float, burstiness: float, ramp_up: RampUp | None, rng: np.random.Generator
) -> list[float]:
    """Return when each request is sent, in seconds after the start.

    Intervals follow a gamma distribution of shape `burstiness` with mean 1 / rate: 1 is a Poisson process, less is more
    bursty, `inf` is even.

    Args:
        count: number of requests, at least 1.
        rate: requests per second; `inf` sends all of them at once. Of no account with `ramp_up`.
        burstiness: above 0.
        ramp_up: rates per request instead of `rate`.
    """
    if ramp_up is None and math.isinf(rate):
        return [0.0] * count
    means = 1.0 / (np.full(count, rate) if ramp_up is None else np.maximum(ramp_up.rates(count), _MIN_RATE))
    intervals = means if math.isinf(burstiness) else rng.gamma(burstiness, means / burstiness)
    times = np.cumsum(intervals)
    if ramp_up is None and times[-1] > 0:
        times *= count / rate / times[-1]
    return times.tolist()


_MIN_RATE = 0.1
"""Requests per second at least: a ramp that starts at 0 would never send its first request."""
