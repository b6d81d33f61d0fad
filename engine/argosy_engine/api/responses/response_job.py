"""ResponseJob: one response from its request to its end: rendered, generated, and formatted as items and events.

Owns: the order of these steps, and what is stored of the response. Must not know: HTTP, where responses are stored.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

import msgspec

from argosy_engine.api.openai.chat_format import ChatFormat
from argosy_engine.api.openai.choice_stream import MAX_INLINE_TOKENS
from argosy_engine.api.openai.openai_serving import OpenAIServing
from argosy_engine.api.responses.response_events import RawMessages, ResponseEvents
from argosy_engine.frontend.outputs import GenerationOutput
from argosy_engine.frontend.request_params import num_logprobs
from argosy_engine.messages.core_messages import EngineCoreRequest
from argosy_protocol.errors import ApiError
from argosy_protocol.response_history import StoredResponse
from argosy_protocol.response_object import ID_PREFIX, ResponseObject, begun_response
from argosy_protocol.responses import ResponsesRequest
from argosy_protocol.responses_chat import TranslatedResponse


class ResponseJob:
    """One response.

    Args:
        requests: what the core is asked for: one sequence.
        events: formats its outputs.
        items: the conversation before it, encoded (`response_history`); empty if it is not stored.
    """

    def __init__(
        self,
        serving: OpenAIServing,
        requests: list[EngineCoreRequest],
        events: ResponseEvents,
        items: list[msgspec.Raw],
    ) -> None:
        self._llm = serving.llm
        self._requests = requests
        self._items = items
        self.events = events

    @classmethod
    async def prepare(
        cls,
        serving: OpenAIServing,
        request: ResponsesRequest,
        translated: TranslatedResponse,
        response_id: str,
        size: int,
        items: list[msgspec.Raw],
    ) -> ResponseJob:
        """Render the chat.

        Args:
            translated: what `request` stands for.
            response_id: also the ids of items and calls derive from it; clients expect 64 characters at most.
            size: of the request's body and of the conversation that it continues, in bytes.

        Raises:
            ApiError, EngineError: see `openai_serving.to_api_error`.
        """
        chat = translated.chat
        model = serving.check_model(chat.model)
        num_logprobs("top_logprobs", request.top_logprobs, serving.llm.config)  # even if none are asked for
        prompt, requests = await serving.prepare_bounded_chat(chat, size)
        renderer = serving.llm.renderer
        chat_format = ChatFormat(
            renderer,
            chat,
            response_id.removeprefix(ID_PREFIX),
            model,
            prompt,
            1,
            report_tools=serving.tool_report(chat, "responses", is_stream=request.stream),
        )
        params = requests[0].sampling_params
        begun = begun_response(
            request, response_id, model, int(time.time()), params.temperature, params.top_p
        )
        raw = None
        if request.enable_response_messages:
            raw = RawMessages(renderer.tokenizer)
            begun = msgspec.structs.replace(begun, input_messages=[raw.message(prompt.token_ids)])
        return cls(serving, requests, ResponseEvents(chat_format, begun, translated.tools, raw), items)

    @property
    def response(self) -> ResponseObject:
        return self.events.response

    def record(self) -> StoredResponse:
        """Return what is stored of the response as it is by now."""
        return StoredResponse(msgspec.Raw(msgspec.json.encode(self.response)), self._items)

    async def complete(self) -> ResponseObject:
        """Generate the response, and return it.

        Raises:
            EngineError: see `AsyncLLM.generate`.
        """
        if self._requests[0].sampling_params.logprobs is not None:  # which only deltas assign to texts
            async with aclosing(self._outputs()) as outputs:
                async for output in outputs:
                    await self._formatted(output)
            return self.response
        (output,) = await self._llm.collect(self._requests)
        await self._formatted(output)
        return self.response

    async def stream(
        self, to_api_error: Callable[[Exception], ApiError]
    ) -> AsyncGenerator[Sequence[bytes], None]:
        """Generate the response, and yield its events, those of one output together.

        The first ones come with the first output: until then an error is raised, and has a status. Afterwards an error
        ends the response, and its last event tells of it.

        Args:
            to_api_error: translates errors for clients.
        """
        has_begun = False
        try:
            async with aclosing(self._outputs()) as outputs:
                async for output in outputs:
                    if not has_begun:
                        has_begun = True
                        yield self.events.begin()
                    added = await self._formatted(output)
                    if added:
                        yield added
        except Exception as error:
            if not has_begun:
                raise
            if self.events.is_over:
                return
            failed = self.events.failed(to_api_error(error))
        else:
            return
        yield failed

    async def _outputs(self) -> AsyncGenerator[GenerationOutput, None]:
        async with aclosing(self._llm.generate(self._requests)) as stream:
            async for outputs in stream:
                for output in outputs:
                    yield output

    async def _formatted(self, output: GenerationOutput) -> list[bytes]:
        if len(output.token_ids) + len(output.logprobs) <= MAX_INLINE_TOKENS:
            return self.events.of(output)
        return await asyncio.to_thread(self.events.of, output)
