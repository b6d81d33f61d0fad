"""What a run asks a server before the load: whether address, key and name are right, and how it tokenises.

A server without `/v1/models` passes, as long as the model is given, and one without `/tokenize` and `/detokenize`,
which vLLM has as well, leaves the prompts as they are. Must not know: the load, and how prompts are made.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, TypeVar

import msgspec

from argosy_engine.benchmarks.benchmark_command import FAILURE, BenchmarkError
from argosy_engine.benchmarks.load_generator import (
    RequestFuncOutput,
    RequestTemplate,
    error_message,
    send_request,
)
from argosy_engine.benchmarks.prompt_datasets import SampleRequest
from argosy_engine.benchmarks.streaming_http import HttpFailure, NoConnection, StreamingHttp

MODELS_PATH = "/v1/models"
RETRY_S = 2.0
"""Between two tries of `wait_until_ready`."""
_MAX_LISTING_BYTES = 16 << 20
_MAX_NAMES = 10
_KEY_REMEDY = "set OPENAI_API_KEY, or give --header 'Authorization=Bearer KEY'"
_FINAL = (400, 401, 403, 404, 405, 422)
"""Statuses that waiting does not change, of a server that answers."""


class _Model(msgspec.Struct):
    id: str


class _Listing(msgspec.Struct):
    data: list[_Model] = []


async def list_models(client: StreamingHttp, timeout_s: float = 0.0) -> list[str] | None:
    """Return the names of the server's models; None if it has no such listing.

    Args:
        timeout_s: how long to try again while nobody answers, or only with an error of the server's.

    Raises:
        BenchmarkError: the server does not answer, or asks for a key.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = deadline - time.monotonic()
        try:
            status, body = await _get(client, MODELS_PATH)
        except NoConnection as error:
            if left_s <= 0:
                raise no_answer(client, str(error)) from None
        except HttpFailure as error:
            if left_s <= 0:
                raise BenchmarkError(
                    f"{client.url} does not answer {MODELS_PATH}: {error}", FAILURE
                ) from None
        else:
            if status < 500 or left_s <= 0:
                return _names(client, status, body)
        await asyncio.sleep(min(RETRY_S, max(left_s, 0.0)))


async def _get(client: StreamingHttp, path: str) -> tuple[int, bytes]:
    pieces: list[bytes] = []

    def receive(_: int, __: float, data: bytes) -> None:
        if sum(map(len, pieces)) + len(data) > _MAX_LISTING_BYTES:
            raise HttpFailure(f"the list of models is larger than {_MAX_LISTING_BYTES} bytes")
        pieces.append(data)

    return await client.request("GET", path, receive), b"".join(pieces)


def _names(client: StreamingHttp, status: int, body: bytes) -> list[str] | None:
    if status in (401, 403):
        raise BenchmarkError(
            f"{client.url} refuses: HTTP {status}: {error_message(body)}; {_KEY_REMEDY}", FAILURE
        )
    if status >= 500:
        raise BenchmarkError(
            f"{client.url} is not ready: HTTP {status}: {error_message(body)}; --ready-check-timeout-sec N waits "
            "for it",
            FAILURE,
        )
    if status != 200:
        return None
    try:
        return [model.id for model in msgspec.json.decode(body, type=_Listing).data]
    except msgspec.MsgspecError:
        return None


def no_answer(client: StreamingHttp, reason: str) -> BenchmarkError:
    remedy = (
        "give its --base-url, or --host and --port; --ready-check-timeout-sec N waits for one that starts"
    )
    if "certificate" in reason:
        remedy = "--insecure believes any certificate"
    return BenchmarkError(f"no server at {client.url}: {reason}; {remedy}", FAILURE)


async def wait_until_ready(
    client: StreamingHttp,
    template: RequestTemplate,
    sample: SampleRequest,
    known: list[str] | None,
    timeout_s: float,
) -> None:
    """Send one request until it is answered.

    Args:
        known: names of the server's models, for the error.
        timeout_s: how long to try. A refusal that cannot change ends it at once.

    Raises:
        BenchmarkError: it was not answered.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        output = await send_request(client, template, sample, template.body(sample))
        if output.success:
            return
        left_s = deadline - time.monotonic()
        if left_s <= 0 or output.status in _FINAL:
            raise explained(client, template, output, known)
        await asyncio.sleep(min(RETRY_S, left_s))


def explained(
    client: StreamingHttp, template: RequestTemplate, output: RequestFuncOutput, known: list[str] | None
) -> BenchmarkError:
    """Return the error of a request that failed, with the remedy for its status."""
    if output.status == 0:
        return no_answer(client, output.error)
    remedy = ""
    if output.status in (401, 403):
        remedy = _KEY_REMEDY
    elif known and template.model not in known:
        more = f" and {len(known) - _MAX_NAMES} more" if len(known) > _MAX_NAMES else ""
        remedy = (
            f"the server has the models {', '.join(known[:_MAX_NAMES])}{more}; give one of them by --model, or by "
            "--served-model-name if --model names the tokenizer"
        )
    elif output.status in (404, 405):
        remedy = f"does the server have {template.path}? --endpoint and --backend choose another API"
    elif output.status in (400, 422) and template.ignore_eos:
        remedy = "a server that does not know ignore_eos needs --no-ignore-eos"
    what = f"{client.url}{template.path} does not answer {template.model!r}: {output.error}"
    return BenchmarkError(f"{what}; {remedy}" if remedy else what, FAILURE)


T = TypeVar("T")
MAX_CONCURRENCY: Final = 16
_MAX_ANSWER_BYTES: Final = 256 << 20


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Text(msgspec.Struct):
    prompt: str


class _NoAnswer(Exception):
    """The server does not tokenise, or not this."""


async def align_prompts(
    client: StreamingHttp, model: str, samples: Sequence[SampleRequest]
) -> tuple[list[SampleRequest], bool]:
    """Return the samples with their lengths in the server's tokens, and whether the server was able to count them.

    A prompt that has more tokens than its `prompt_len` loses its end; one that has fewer stays. Nothing is asked after
    the first prompt if that has the right length.
    """
    if not samples or not isinstance(samples[0].prompt, str):
        return list(samples), False
    try:
        if len(await _tokens(client, model, samples[0].prompt)) == samples[0].prompt_len:
            return list(samples), True
    except _NoAnswer:
        return list(samples), False
    limit = asyncio.Semaphore(MAX_CONCURRENCY)

    async def align(sample: SampleRequest) -> SampleRequest:
        async with limit:
            try:
                return await _aligned(client, model, sample)
            except _NoAnswer:
                return sample

    return list(await asyncio.gather(*map(align, samples))), True


async def _tokens(client: StreamingHttp, model: str, prompt: str) -> list[int]:
    body = {"model": model, "prompt": prompt, "add_special_tokens": False}
    return (await _ask(client, "/tokenize", body, _Tokens)).tokens


async def _aligned(client: StreamingHttp, model: str, sample: SampleRequest) -> SampleRequest:
    assert isinstance(sample.prompt, str)
    ids = await _tokens(client, model, sample.prompt)
    if len(ids) <= sample.prompt_len:
        return replace(sample, prompt_len=len(ids))
    body = {"model": model, "tokens": ids[: sample.prompt_len]}
    return replace(sample, prompt=(await _ask(client, "/detokenize", body, _Text)).prompt)


async def _ask(client: StreamingHttp, path: str, body: object, kind: type[T]) -> T:
    """
    Raises:
        _NoAnswer: the server refuses, or answers something else.
    """
    pieces: list[bytes] = []

    def receive(_: int, __: float, data: bytes) -> None:
        if sum(map(len, pieces)) + len(data) > _MAX_ANSWER_BYTES:
            raise HttpFailure("the answer is too large")
        pieces.append(data)

    try:
        status = await client.request("POST", path, receive, msgspec.json.encode(body))
        if status != 200:
            raise _NoAnswer
        return msgspec.json.decode(b"".join(pieces), type=kind)
    except (HttpFailure, msgspec.MsgspecError) as error:
        raise _NoAnswer from error
