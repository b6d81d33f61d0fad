"""Offline embeddings: computes one vector per prompt. `LLM.encode` and `LLM.embed` are built on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from argosy_engine.core.proc.core_client import SyncClient
from argosy_engine.frontend.input_processor import InputProcessor
from argosy_engine.frontend.outputs import log_failures
from argosy_engine.frontend.renderer import TokenizedPrompt
from argosy_engine.messages.core_messages import EngineCoreRequest, FinishReason
from argosy_engine.params.pooling_params import PoolingParams
from argosy_engine.params.sampling_params import SamplingParams


@dataclass(slots=True)
class PoolingOutput:
    data: list[float] = field(default_factory=list)
    """The vector, in float32."""

    @property
    def embedding(self) -> list[float]:
        return self.data


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
    tenant: str = "",
    data_parallel_rank: int | None = None,
) -> EngineCoreRequest:
    """Make the core's request.

    The scheduler treats it as a prompt with one output token, which is discarded.

    Raises:
        InvalidRequest: the prompt is empty or too long, or the model has no vectors of so many dimensions.
    """
    config = input_processor.config
    params.check_dimensions(config.embedding_size, config.is_matryoshka, config.matryoshka_dimensions)
    one_token = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    (request,) = input_processor.process_inputs(
        prompt, one_token, cache_salt=cache_salt, tenant=tenant, data_parallel_rank=data_parallel_rank
    )
    request.pooling_params = params
    return request


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
                if out.prefill_stats is not None:
                    result.num_cached_tokens = out.prefill_stats.num_cached_tokens
                on_done(len(result.prompt_token_ids))
    finally:
        # After an error or Ctrl-C no request of this call may remain in the core.
        client.abort_requests(list(live))
    log_failures([result.error for result in results])
    return results
