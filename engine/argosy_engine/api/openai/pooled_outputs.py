"""Pooled outputs: what the endpoints of pooling models share. Prompts pass the same queue and cache as generations."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any, Final, TypeVar, cast

import msgspec
import numpy as np

from argosy_engine.api.openai.openai_serving import OpenAIServing
from argosy_engine.errors import InvalidRequest
from argosy_engine.frontend.outputs import GenerationOutput
from argosy_engine.frontend.pooling import check_token_numbers, pooling_request
from argosy_engine.frontend.renderer import Renderer, TokenizedPrompt
from argosy_engine.messages.core_messages import EngineCoreRequest
from argosy_engine.params.pooling_params import PoolingParams
from argosy_protocol.embeddings import encode_vector
from argosy_protocol.pooling import EncodingFields, PoolingFields, PoolingUsage

_Item = TypeVar("_Item", bound=msgspec.Struct)

_BYTES_PER_TURN: Final = 1 << 20
"""JSON that is written before other requests have their turn: some milliseconds."""


async def pooled_outputs(
    serving: OpenAIServing,
    render: Callable[[Renderer], Sequence[TokenizedPrompt]],
    request: PoolingFields,
    params: PoolingParams,
    size: int,
    place_of: Callable[[int], str] | None = None,
) -> list[GenerationOutput]:
    """Render the prompts of a request, and return their outputs, each with a vector, in the order of the prompts.

    Args:
        size: of the request's body, in bytes.
        place_of: tells for the index of a prompt the field that has it, if not `request.place_of`.

    Raises:
        ApiError, EngineError: see `openai_serving.to_api_error`.
    """
    llm = serving.llm

    def core_request(index: int, prompt: TokenizedPrompt) -> EngineCoreRequest:
        try:
            return pooling_request(
                llm.input_processor,
                prompt,
                params,
                cache_salt=request.cache_salt,
                priority=request.priority,
                tenant=serving.tenant,
                data_parallel_rank=request.data_parallel_rank,
            )
        except InvalidRequest as error:
            if error.param == "prompt":
                error.param = (place_of or request.place_of)(index)
                error.args = (f"{error.param}: {error}",)
            raise

    def work(request: PoolingFields) -> list[EngineCoreRequest]:
        prompts = render(llm.renderer)
        if params.is_token_wise:
            check_token_numbers(llm.config, params, sum(len(prompt.token_ids) for prompt in prompts))
        return [core_request(index, prompt) for index, prompt in enumerate(prompts)]

    llm.queue_limits.check(1)
    requests = await serving.render_pool.run(size, work, request, serving.tenant)
    outputs: list[GenerationOutput | None] = [None] * len(requests)
    async with aclosing(llm.generate(requests)) as results:
        async for batch in results:
            for output in batch:
                outputs[output.index] = output
    done = [output for output in outputs if output is not None and output.embedding is not None]
    assert len(done) == len(requests)
    return done


async def written(items: Iterable[_Item]) -> list[_Item]:
    """Return the items of an answer as JSON that stands for them, made in turns of the event loop: a thousand vectors
    of thousands of numbers are a hundred megabytes."""
    encoded, num_bytes = [], 0
    for item in items:
        text = msgspec.json.encode(item)
        encoded.append(msgspec.Raw(text))
        num_bytes += len(text)
        if num_bytes >= _BYTES_PER_TURN:
            num_bytes = 0
            await asyncio.sleep(0)
    return cast("list[_Item]", encoded)


def vector_of(output: GenerationOutput) -> list[float]:
    assert output.embedding is not None
    return output.embedding


def usage_of(outputs: Sequence[GenerationOutput]) -> PoolingUsage:
    tokens = sum(output.num_prompt_tokens for output in outputs)
    return PoolingUsage(prompt_tokens=tokens, total_tokens=tokens)


def check_encoding(request: EncodingFields) -> None:
    """
    Raises:
        InvalidRequest: vectors are not written in this format.
    """
    if request.encoding_format not in ("float", "base64"):
        raise InvalidRequest(
            f"encoding_format {request.encoding_format} is not supported; there is: float, base64",
            param="encoding_format",
        )
    if request.embed_dtype not in ("float32", "float16", "bfloat16"):
        raise InvalidRequest(
            f"embed_dtype {request.embed_dtype} is not supported; there is: float32, float16, bfloat16",
            param="embed_dtype",
        )


def encoded_vector(vector: list[float], request: EncodingFields) -> list[float] | str:
    """Return a vector as the request wants it: as numbers, or as their bytes in base64."""
    if request.encoding_format == "float":
        return vector
    byte_order = ">" if request.endianness == "big" else "<"
    if request.embed_dtype == "float32" and byte_order == "<":
        return encode_vector(vector, "base64")
    numbers: Any = np.asarray(vector, np.float32)
    if request.embed_dtype == "float16":
        numbers = numbers.astype(f"{byte_order}f2")
    elif request.embed_dtype == "bfloat16":
        numbers = _bfloat16(numbers).astype(f"{byte_order}u2")
    else:
        numbers = numbers.astype(f"{byte_order}f4")
    return base64.b64encode(numbers.tobytes()).decode()


def _bfloat16(numbers: np.ndarray) -> np.ndarray:
    """Return the upper halves of float32 numbers, rounded to even, uint16."""
    bits = numbers.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
