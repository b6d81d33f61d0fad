"""Choices found by beam search, for requests with `use_beam_search`.

`n` is the beam width, or a larger `best_of` of /v1/completions. As in vLLM a stream has each choice in one piece, since
until its end a search knows none, and each round is a request per beam, in metrics as well. Fields that have no effect
on a beam search are refused, where vLLM ignores them: the search ranks whole continuations by the model's own
probabilities, and ends them at the model's end of sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from argosy_engine.api.openai.answer_bounds import bound_beams
from argosy_engine.errors import InvalidRequest
from argosy_engine.frontend.async_llm import AsyncLLM
from argosy_engine.frontend.beam_search import (
    BeamSearch,
    BeamSearchBatch,
    BeamSearchParams,
    max_output_tokens,
)
from argosy_engine.frontend.outputs import GenerationOutput
from argosy_engine.frontend.renderer import TokenizedPrompt
from argosy_engine.frontend.request_params import num_logprobs
from argosy_engine.params.sampling_params import SamplingParams
from argosy_protocol.openai import MAX_CHOICES, CompletionRequest, GenerationRequest

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stop": (None, []),
    "stop_token_ids": (None, []),
    "top_p": (None, 1.0),
    "top_k": (None, 0, -1),
    "min_p": (None, 0.0),
    "presence_penalty": (None, 0.0),
    "frequency_penalty": (None, 0.0),
    "repetition_penalty": (None, 1.0),
    "logit_bias": (None, {}),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "min_tokens": (None, 0),
    "repetition_detection": (None,),
    "thinking_token_budget": (None, -1),
    "logprob_token_ids": (None, []),
    "resume": (None,),
    "prompt_logprobs": (None,),
    "vllm_xargs": (None, {}),
    "structured_outputs": (None,),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto", "none"),
    "echo": (None, False),
}
"""Fields that have no effect on a beam search, and the values with which they are accepted."""


async def beam_choices(
    llm: AsyncLLM, prompts: Sequence[TokenizedPrompt], request: GenerationRequest, *, tenant: str = ""
) -> list[GenerationOutput]:
    """Search the `n` best continuations of each prompt; return them best first, as the choices of one call.

    Args:
        tenant: the tenant that the tokens are computed for.

    Raises:
        InvalidRequest: out of bounds, too long, or has a field that a beam search does not support.
        BadRequest: the answer may become too large (`bound_beams`).
        EngineError: see `AsyncLLM.generate`.
    """
    n, width = request.n or 1, _width(request)
    _check(request, len(prompts) * width)
    sampling = llm.input_processor.sampling_params(request)
    logprobs = num_logprobs("logprobs", sampling.logprobs, llm.config)
    rooms = [max_output_tokens(llm.input_processor, prompt, sampling.max_tokens) for prompt in prompts]
    room = bound_beams([len(prompt.token_ids) for prompt in prompts], width, max(rooms), logprobs, request)
    params = [_params(request, sampling, width, min(room, own)) for own in rooms]
    batch = BeamSearchBatch(
        prompts,
        [
            BeamSearch(prompt.token_ids, own, llm.config.eos_token_ids, logprobs)
            for prompt, own in zip(prompts, params, strict=True)
        ],
    )
    round_params = params[0].round_params(llm.config, logprobs or 0)
    num_cached: list[int] = []
    while beams := batch.beams:
        results = await _next_tokens(llm, beams, round_params, request, tenant)
        num_cached = num_cached or [result.num_cached_tokens for result in results]
        batch.advance(result.logprobs[0] for result in results)
    found = batch.best(llm.renderer.tokenizer, n, skip_special_tokens=request.skip_special_tokens)
    outputs = []
    for index, (prompt, sequences) in enumerate(zip(prompts, found, strict=True)):
        for choice, sequence in enumerate(sequences):
            token_ids = sequence.tokens[len(prompt.token_ids) :]
            output = GenerationOutput(
                index * n + choice, sequence.text or "", token_ids, sequence.finish_reason
            )
            output.num_prompt_tokens, output.num_cached_tokens = len(prompt.token_ids), num_cached[index]
            output.num_output_tokens, output.logprobs = len(token_ids), sequence.logprobs
            outputs.append(output)
    return outputs


def _params(
    request: GenerationRequest, sampling: SamplingParams, width: int, max_tokens: int
) -> BeamSearchParams:
    return BeamSearchParams(
        beam_width=width,
        max_tokens=max_tokens,
        ignore_eos=request.ignore_eos,
        temperature=sampling.temperature,
        length_penalty=request.length_penalty,
        include_stop_str_in_output=request.include_stop_str_in_output,
    )


async def _next_tokens(
    llm: AsyncLLM,
    beams: Sequence[TokenizedPrompt],
    params: SamplingParams,
    request: GenerationRequest,
    tenant: str,
) -> list[GenerationOutput]:
    """Generate one token of each beam, with its alternatives."""
    requests = [
        core_request
        for beam in beams
        for core_request in llm.input_processor.process_inputs(
            beam,
            params,
            cache_salt=request.cache_salt,
            priority=request.priority,
            tenant=tenant,
            data_parallel_rank=request.data_parallel_rank,
        )
    ]
    return await llm.collect(requests)


def _width(request: GenerationRequest) -> int:
    """Return the beam width."""
    n = request.n or 1
    best_of = request.best_of if isinstance(request, CompletionRequest) else None
    if best_of is not None and best_of < n:
        raise InvalidRequest(f"best_of must be at least n ({n})", param="best_of")
    return n if best_of is None else best_of


def _check(request: GenerationRequest, num_beams: int) -> None:
    if num_beams > MAX_CHOICES:
        raise InvalidRequest(f"prompts times beams exceed {MAX_CHOICES}", param="beam_width")
    for field, neutral in _NEUTRAL.items():
        if getattr(request, field, None) not in neutral:
            raise InvalidRequest(f"{field} cannot be combined with use_beam_search", param=field)
