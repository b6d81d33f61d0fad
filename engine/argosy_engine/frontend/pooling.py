"""Pooling: the core's requests for vectors of prompts, and offline pooling, on which `LLM.encode` is built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from argosy_engine.core.proc.core_client import SyncClient
from argosy_engine.errors import InvalidRequest
from argosy_engine.frontend.input_processor import InputProcessor
from argosy_engine.frontend.outputs import log_failures
from argosy_engine.frontend.renderer import TokenizedPrompt
from argosy_engine.messages.core_messages import EngineCoreRequest, FinishReason
from argosy_engine.model_configs.pooling_spec import PoolingSpec
from argosy_engine.params.pooling_params import PoolingParams
from argosy_engine.params.sampling_params import SamplingParams
from argosy_engine.resolved_config import ResolvedConfig

MAX_TOKEN_NUMBERS = 1 << 21
"""Limit on the numbers of a request, or offline of a prompt, whose tokens all have a vector: some 40 MB of JSON."""
_TINY = 1e-12
"""Smallest length of a vector that a cosine is divided by."""


@dataclass(slots=True)
class PoolingOutput:
    data: list[Any] = field(default_factory=list)
    """The vector, in float32; of tasks for tokens a list of vectors, one for each token of the prompt."""

    @property
    def embedding(self) -> list[float]:
        return self.data

    @property
    def probs(self) -> list[float]:
        """What a model that classifies has made of the prompt: one number per label."""
        return self.data

    @property
    def score(self) -> float:
        """The number of a pair of texts, or of a prompt for a model with one label.

        Raises:
            ValueError: there are several.
        """
        if len(self.data) != 1:
            raise ValueError(f"{len(self.data)} values are no score")
        return self.data[0]


@dataclass(slots=True)
class PoolingRequestOutput:
    """Result of one prompt. The names are vLLM's."""

    prompt_token_ids: list[int]
    outputs: PoolingOutput
    num_cached_tokens: int = 0
    error: str | None = None
    """Why there is no vector."""


def pooling_request(
    input_processor: InputProcessor,
    prompt: TokenizedPrompt,
    params: PoolingParams,
    *,
    cache_salt: str | None = None,
    priority: int = 0,
    tenant: str = "",
    data_parallel_rank: int | None = None,
) -> EngineCoreRequest:
    """Make the core's request.

    The scheduler treats it as a prompt with one output token, which is discarded.

    Args:
        params: those that are not given are the model's own.

    Raises:
        InvalidRequest: the prompt is empty or too long, the model does something else, or it has no vectors of so many
            dimensions.
    """
    config = input_processor.config
    params = resolved_params(params, config.pooling or PoolingSpec())
    params.check_dimensions(config.embedding_size, config.is_matryoshka, config.matryoshka_dimensions)
    check_token_numbers(config, params, len(prompt.token_ids))
    one_token = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    (request,) = input_processor.process_inputs(
        prompt,
        one_token,
        cache_salt=cache_salt,
        priority=priority,
        tenant=tenant,
        data_parallel_rank=data_parallel_rank,
        asks_max_tokens=False,  # a prompt of full length leaves no room
        is_pooling=True,
    )
    request.pooling_params = params.replace(second_text=prompt.second_text)
    return request


def check_token_numbers(config: ResolvedConfig, params: PoolingParams, num_tokens: int) -> None:
    """Check that prompts with so many tokens do not make too many numbers.

    Args:
        params: resolved.

    Raises:
        InvalidRequest: each token has a vector, and they have more than `MAX_TOKEN_NUMBERS` numbers.
    """
    if not params.is_token_wise:
        return
    spec = config.pooling or PoolingSpec()
    size = spec.num_labels if spec.task == "classify" else params.dimensions or config.embedding_size
    if num_tokens * size > MAX_TOKEN_NUMBERS:
        raise InvalidRequest(
            f"{num_tokens} tokens with {size} numbers each are more than {MAX_TOKEN_NUMBERS} numbers; send at most "
            f"{MAX_TOKEN_NUMBERS // size} tokens at once",
            param="input",
        )


def token_rows(numbers: list[float], num_tokens: int) -> list[list[float]]:
    """Return the vectors of a prompt's tokens, which the core sends one after the other."""
    size = len(numbers) // num_tokens
    return [numbers[start : start + size] for start in range(0, len(numbers), size)]


def resolved_params(params: PoolingParams, spec: PoolingSpec) -> PoolingParams:
    """Return the parameters with the model's own where none are given, as the core wants them.

    Raises:
        InvalidRequest: the model does something else.
    """
    task = params.task or spec.task
    kind = task.removeprefix("token_")
    if kind != spec.task:
        raise InvalidRequest(
            f"task {task} needs a model that is served for it (--convert {kind}); this one is for {spec.task}",
            param="task",
        )
    if kind != "embed" and params.dimensions is not None:
        raise InvalidRequest("dimensions are of embeddings; this model classifies", param="dimensions")
    asked = params.use_activation if params.use_activation is not None else params.normalize
    return params.replace(
        task=task,
        pooling_type=params.pooling_type or spec.pooling_type,
        use_activation=spec.use_activation if asked is None else asked,
        normalize=None,
        dimensions=params.dimensions or spec.dimensions,
    )


def encode(
    client: SyncClient,
    input_processor: InputProcessor,
    prompts: Sequence[TokenizedPrompt],
    params: PoolingParams,
    on_done: Callable[[int], None],
) -> list[PoolingRequestOutput]:
    """Compute vectors of the prompts, batched, in the order given.

    Args:
        on_done: called with a prompt's token count when its vector is computed.

    Raises:
        InvalidRequest: as `pooling_request`; no prompt has run then.
        EngineError: the core could not run a prompt.
    """
    requests = [pooling_request(input_processor, prompt, params) for prompt in prompts]
    results = [PoolingRequestOutput(prompt.token_ids, PoolingOutput()) for prompt in prompts]
    live = {request.request_id: result for request, result in zip(requests, results, strict=True)}
    try:
        for request in requests:
            client.add_request(request)
        while live:
            for out in client.step().outputs:
                result = live.pop(out.request_id, None)
                if result is None:
                    continue  # of another call
                if out.finish_reason is FinishReason.ERROR or out.pooling_output is None:
                    result.error = out.error or "the engine could not run this prompt"
                else:
                    result.outputs.data = out.pooling_output
                    if params.is_token_wise:
                        result.outputs.data = token_rows(out.pooling_output, len(result.prompt_token_ids))
                if out.prefill_stats is not None:
                    result.num_cached_tokens = out.prefill_stats.num_cached_tokens
                on_done(len(result.prompt_token_ids))
    finally:
        # After an error or Ctrl-C no request of this call may remain in the core.
        client.abort_requests(list(live))
    log_failures([result.error for result in results])
    return results


def cosines(queries: Sequence[list[float]], documents: Sequence[list[float]]) -> list[float]:
    """Return the cosine of each document's vector with its query's.

    Args:
        queries: one for all documents, or one for each.
    """
    first, second = np.asarray(queries, np.float32), np.asarray(documents, np.float32)
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    found: list[float] = ((first * second).sum(axis=1) / np.maximum(lengths, _TINY)).tolist()
    return found


def check_scores(config: ResolvedConfig) -> None:
    """
    Raises:
        InvalidRequest: the model does not score pairs of texts.
    """
    if config.pooling is None:
        raise InvalidRequest(
            f"{config.model_name} generates; scores need a model that embeds or classifies, or this one started with "
            "--runner pooling"
        )
    if config.pooling.task == "classify" and config.pooling.num_labels != 1:
        raise InvalidRequest(
            f"scores need a model with one label, and {config.model_name} has {config.pooling.num_labels}; use "
            "/classify"
        )


def joined_scores(query: PoolingRequestOutput, document: PoolingRequestOutput) -> PoolingRequestOutput:
    """Return the result of a pair of texts that were embedded."""
    error = query.error or document.error
    score = [] if error else cosines([query.outputs.data], [document.outputs.data])
    return PoolingRequestOutput(
        query.prompt_token_ids + document.prompt_token_ids,
        PoolingOutput(score),
        query.num_cached_tokens + document.num_cached_tokens,
        error,
    )
