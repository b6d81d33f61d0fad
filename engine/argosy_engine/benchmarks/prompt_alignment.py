"""Prompt alignment: cuts random prompts to their length in the server's tokens, where those differ from the client's.

Owns: asking `/tokenize` and `/detokenize`, which vLLM has as well. Must not know: how prompts are made. A server
without them leaves the prompts as they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, TypeVar

import msgspec

from argosy_engine.benchmarks.prompt_datasets import SampleRequest
from argosy_engine.benchmarks.streaming_http import HttpFailure, StreamingHttp

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
