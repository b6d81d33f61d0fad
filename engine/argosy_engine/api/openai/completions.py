"""/v1/completions: turns requests into generations, and their outputs into responses or streams."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from argosy_engine.api.openai.choice_stream import DirectWriter, Prepared, stream_choices, whole_response
from argosy_engine.api.openai.completion_format import CompletionFormat
from argosy_engine.api.openai.openai_serving import OpenAIServing
from argosy_protocol.openai import Completion, CompletionChoice, CompletionRequest


async def completion(
    serving: OpenAIServing, request: CompletionRequest, request_id: str, size: int
) -> Completion:
    """Answer a completion request with one response.

    Args:
        size: of the request's body, in bytes.
    """
    model = serving.check_model(request.model)
    prompts, requests = await serving.prepare(serving.llm.renderer.render_completion, request, size)
    outputs, n = await serving.generate(prompts, requests, request), request.n or 1
    for output in outputs:  # each prompt's log probabilities came with its first choice
        output.prompt_logprobs = outputs[output.index // n * n].prompt_logprobs
    completion_format = CompletionFormat(
        serving.llm.renderer.tokenizer, request, request_id, model, prompts, [()] * len(outputs)
    )
    return await whole_response(outputs, completion_format)


def completion_stream(
    serving: OpenAIServing,
    request: CompletionRequest,
    request_id: str,
    size: int,
    *,
    resumable: bool = False,
    has_id_comments: bool = False,
    direct: DirectWriter | None = None,
) -> AsyncGenerator[bytes, None]:
    """Answer a completion request with the events of a stream of chunks.

    Args:
        size: of the request's body, in bytes.
        resumable: the stream carries the token ids by which another engine can continue it.
        has_id_comments: it carries them in comments, unless the client asks for them in the chunks.
        direct: where events can be written while the stream is waited for.
    """
    has_id_comments = has_id_comments and not request.return_token_ids

    async def prepare() -> Prepared[CompletionChoice, Completion, Completion]:
        model = serving.check_model(request.model)
        prompts, requests = await serving.prepare(serving.llm.renderer.render_completion, request, size)
        resumed = [core_request.resume_token_ids for core_request in requests]
        choice_format = CompletionFormat(
            serving.llm.renderer.tokenizer,
            request,
            request_id,
            model,
            prompts,
            resumed or [[] for _ in range(len(prompts) * (request.n or 1))],
            with_ids=resumable and not has_id_comments,
        )
        return Prepared(prompts, requests, choice_format)

    return stream_choices(serving, request, prepare, has_id_comments=has_id_comments, direct=direct)
