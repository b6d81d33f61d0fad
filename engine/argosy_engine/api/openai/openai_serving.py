"""OpenAIServing: what the generation endpoints share: model names, making the core's requests, errors for clients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

from argosy_engine.api.openai.answer_bounds import bound_answer
from argosy_engine.api.openai.beam_choices import beam_choices
from argosy_engine.errors import (
    EngineBusy,
    EngineDead,
    InvalidRequest,
    PromptTooLong,
    RequestFailed,
    ResourceBusy,
)
from argosy_engine.frontend.async_llm import AsyncLLM
from argosy_engine.frontend.input_processor import check_generates
from argosy_engine.frontend.outputs import GenerationOutput
from argosy_engine.frontend.render_pool import RenderPool
from argosy_engine.frontend.renderer import TokenizedPrompt
from argosy_engine.frontend.request_params import asks_max_tokens
from argosy_engine.messages.core_messages import EngineCoreRequest
from argosy_protocol.errors import (
    ApiError,
    BadRequest,
    ContextLengthExceeded,
    InternalError,
    NotFound,
    ResourceUnavailable,
    Unavailable,
)
from argosy_protocol.openai import (
    MAX_CHOICES,
    ChatCompletionRequest,
    GenerationRequest,
    ModelCard,
    ModelList,
)

_Request = TypeVar("_Request", bound=GenerationRequest)
_SHOWN_NAMES = 8
"""Names that the error about an unknown model lists."""


class OpenAIServing:
    """The model that this engine serves.

    Args:
        names: model names that clients may use; the first is the canonical one.
        takes_any_name: whether clients may use any other name, too.
        generates: whether it is served to generate, and not for pooling.
        created: what clients are told of when the model was created, in seconds since the epoch.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        names: Sequence[str],
        *,
        takes_any_name: bool = False,
        generates: bool = True,
        created: int = 0,
        root: str = "",
    ) -> None:
        self.llm = llm
        self._generates = generates
        self.names = tuple(names)
        self._takes_any_name = takes_any_name
        self._answers_as: str | None = None
        self.tenant = ""
        self.render_pool = RenderPool()
        self._created = created
        self._root = root or self.names[0]

    def models(self) -> ModelList:
        return ModelList(data=[self._card(name) for name in self.names])

    def model(self, name: str) -> ModelCard:
        """
        Raises:
            NotFound: this engine does not serve that model.
        """
        return self._card(self.check_model(name))

    def _card(self, name: str) -> ModelCard:
        limit = self.llm.config.max_model_len
        return ModelCard(id=name, created=self._created, root=self._root, max_model_len=limit)

    def answering_as(self, name: str | None, tenant: str = "") -> OpenAIServing:
        """Return a copy for one request that a router has sent.

        Args:
            name: the model name that the client used; None if it is one of the engine's own.
            tenant: the request's tenant (`headers.TENANT`).
        """
        serving = copy.copy(self)
        serving._answers_as = name
        serving.tenant = tenant
        return serving

    def check_model(self, name: str) -> str:
        """Return the name to answer with; an empty name means the canonical one, as in vLLM.

        Raises:
            NotFound: this engine does not serve that model.
        """
        if self._answers_as is not None:
            return self._answers_as
        if not name:
            return self.names[0]
        if name not in self.names and not self._takes_any_name:
            raise NotFound(
                f"the model {name[:128]!r} does not exist here; this engine serves {self._shown_names()}",
                param="model",
                code="model_not_found",
            )
        return name

    def _shown_names(self) -> str:
        shown = ", ".join(repr(name) for name in self.names[:_SHOWN_NAMES])
        more = len(self.names) - _SHOWN_NAMES
        return f"{shown} and {more} more" if more > 0 else shown

    async def prepare(
        self, render: Callable[[_Request], Sequence[TokenizedPrompt]], request: _Request, size: int
    ) -> tuple[Sequence[TokenizedPrompt], list[EngineCoreRequest]]:
        """Render a request's prompts and make the core's requests of them, in a thread if the body is large.

        A beam search makes its requests itself (`generate`).

        Args:
            size: of the request's body, in bytes; it bounds prompts and grammars.

        Raises:
            ApiError, EngineError: see `to_api_error`.
        """

        def work(request: _Request) -> tuple[Sequence[TokenizedPrompt], list[EngineCoreRequest]]:
            prompts = render(request)
            return prompts, [] if request.use_beam_search else self.core_requests(prompts, request)

        if not self._generates:
            check_generates(self.llm.config)  # before a template that such a model may lack
        self.llm.queue_limits.check(request.n or 1)
        return await self.render_pool.run(size, work, request, self.tenant)

    async def prepare_bounded_chat(
        self, chat: ChatCompletionRequest, size: int
    ) -> tuple[TokenizedPrompt, list[EngineCoreRequest]]:
        """Render a chat as `prepare` does, and bound its `max_tokens` by the room that the prompt leaves.

        For APIs whose clients set the field without knowing the model; an answer that ends at the context's end says so
        in their terms. So it is with `thinking_token_budget`, which a model that does not reason keeps anyhow, and one
        whose reasoning cannot be bounded does not get.
        """
        renderer = self.llm.renderer
        if not renderer.bounds_thinking:
            chat.thinking_token_budget = None

        def render(chat: ChatCompletionRequest) -> list[TokenizedPrompt]:
            prompt = renderer.render_chat(chat)
            if chat.max_tokens is not None:
                room = renderer.config.max_model_len - len(prompt.token_ids)
                chat.max_tokens = max(1, min(chat.max_tokens, room))
            return [prompt]

        (prompt,), requests = await self.prepare(render, chat, size)
        return prompt, requests

    async def generate(
        self,
        prompts: Sequence[TokenizedPrompt],
        requests: Sequence[EngineCoreRequest],
        request: GenerationRequest,
    ) -> list[GenerationOutput]:
        """Generate all choices of all prompts (`prepare`), and return them complete."""
        if request.use_beam_search:
            return await beam_choices(self.llm, prompts, request, tenant=self.tenant)
        return await self.llm.collect(requests, request.n or 1)

    def tool_report(
        self,
        chat: ChatCompletionRequest,
        api: Literal["chat_completions", "responses", "other"],
        *,
        is_stream: bool,
    ) -> Callable[[bool], None] | None:
        """Return what to call when a choice ends, with whether it calls a tool; None if the chat has no tools."""
        if not chat.tools:
            return None

        def report(has_calls: bool) -> None:
            for observer in self.llm.observers:
                observer.on_tools_parsed(has_calls, is_stream, api)

        return report

    def core_requests(
        self, prompts: Sequence[TokenizedPrompt], request: GenerationRequest
    ) -> list[EngineCoreRequest]:
        """Make the core's requests, `n` for each prompt. Thread-safe; linear in the request's text.

        Raises:
            BadRequest, InvalidRequest: fields contradict each other, or are out of bounds.
        """
        n = request.n or 1
        count = len(prompts) * n
        if count > MAX_CHOICES:
            raise BadRequest(f"{len(prompts)} prompts times n={n} exceed {MAX_CHOICES} choices", param="n")
        resumed = (
            [choice.token_ids for choice in request.resume.choices] if request.resume is not None else []
        )
        if resumed and len(resumed) != count:
            raise BadRequest(f"resume must have one entry for each of {count} choices", param="resume")
        if request.stream and request.prompt_logprobs is not None:
            raise BadRequest("prompt_logprobs cannot be streamed", param="prompt_logprobs")
        params = self.llm.input_processor.sampling_params(request, len(prompts))
        if params.structured_outputs is not None and params.structured_outputs.relaxed:
            for observer in self.llm.observers:
                observer.on_relaxed(params.structured_outputs.relaxed)
        core_requests = [
            core_request
            for index, prompt in enumerate(prompts)
            for core_request in self.llm.input_processor.process_inputs(
                prompt,
                params,
                cache_salt=request.cache_salt,
                priority=request.priority,
                resume=resumed[index * n : index * n + n],
                tenant=self.tenant,
                data_parallel_rank=request.data_parallel_rank,
                asks_max_tokens=asks_max_tokens(request),
            )
        ]
        bound_answer(core_requests, n, request)
        return core_requests

    def close(self) -> None:
        """Drop the prompts that are not rendered yet."""
        self.render_pool.close()


def to_api_error(error: Exception) -> ApiError:
    """Translate an engine error for clients; an unexpected one becomes a 500 without details."""
    match error:
        case ApiError():
            return error
        case PromptTooLong():
            return ContextLengthExceeded(str(error), param=error.param)
        case InvalidRequest():
            return BadRequest(str(error), param=error.param)
        case ResourceBusy():
            return ResourceUnavailable(f"{error}; retry later", retry_after_s=error.retry_after_s)
        case EngineBusy():
            return Unavailable(f"{error}; retry later", retry_after_s=error.retry_after_s)
        case RequestFailed():
            return InternalError(str(error))
        case RecursionError():
            return BadRequest("the request is nested too deeply")
        case EngineDead():
            return Unavailable("the engine is not running; retry", retry_after_s=1.0)
        case _:
            return InternalError("internal error")
