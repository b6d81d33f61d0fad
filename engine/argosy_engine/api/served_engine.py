"""The engine as its server sees it: its states from loading to drained, and what exists only once it is loaded.

`Engine` owns the states, and the count of accepted requests that a drain waits for. `OpenAIServing` is the loaded
model: its names, and the way of a request to the core. Neither knows routes.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Literal, Protocol, TypeVar

from argosy_engine.api.observability.hot_prefixes import PrefixHits
from argosy_engine.api.observability.metrics import EngineMetrics
from argosy_engine.api.observability.request_records import RecordedOutputs
from argosy_engine.api.observability.telemetry import LoadReport, StatsLog, TelemetryHub
from argosy_engine.api.server_args import ServerArgs
from argosy_engine.errors import InvalidRequest
from argosy_engine.frontend.admission import RenderPool, stop_if_abandoned
from argosy_engine.frontend.async_llm import AsyncLLM, SleepMode
from argosy_engine.frontend.beam_search import beam_choices
from argosy_engine.frontend.chat_template import MAX_ROLES
from argosy_engine.frontend.input_processor import (
    asks_max_tokens,
    bound_answer,
    check_generates,
    check_images,
)
from argosy_engine.frontend.media.processor import ChatImages, image_roles, is_long
from argosy_engine.frontend.observer import Observer
from argosy_engine.frontend.output_processor import GenerationOutput
from argosy_engine.frontend.renderer import TokenizedPrompt
from argosy_engine.messages import EngineCoreRequest
from argosy_protocol.errors import (
    BadRequest,
    NotFound,
    TooManyRequests,
    Unavailable,
)
from argosy_protocol.openai import (
    MAX_CHOICES,
    ChatCompletionRequest,
    GenerationRequest,
    ModelCard,
    ModelList,
)
from argosy_protocol.skipped_content import CHAT_KINDS, Skipped

_Request = TypeVar("_Request", bound=GenerationRequest)

_SHOWN_NAMES = 8
"""Names that the error about an unknown model lists."""


_ASLEEP_RETRY_S = 10.0
"""Retry-After of a sleeping engine. When it wakes up is unknown; the router tries other replicas meanwhile."""

_DEFAULT_OPTIONS = ServerArgs()


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

    async def images_of(self, request: ChatCompletionRequest, size: int) -> tuple[ChatImages | None, int]:
        """Load and process the images of a chat, or of a batch; return them, and the bytes of the body without them.

        Args:
            size: of the request's body, in bytes.

        Raises:
            ApiError, EngineError: as `MediaProcessor.load`.
        """
        if (media := self.llm.input_processor.media) is None:
            return None, size
        in_thread = asyncio.to_thread(image_roles, request) if is_long(request) else None
        roles = image_roles(request) if in_thread is None else await in_thread
        if not roles:
            return None, size

        def seen_roles(request: ChatCompletionRequest) -> list[str]:
            return list(filter(self.llm.renderer.image_roles(request), roles))

        if len(roles) > MAX_ROLES:  # for each, the template is tried
            raise InvalidRequest(f"the messages have {len(roles)} roles; at most {MAX_ROLES}", "messages")
        if request.chat_template is None:
            seen = seen_roles(request)
        else:  # whose time nobody knows
            seen = await self.render_pool.run(size, seen_roles, request, self.tenant)
        images = await media.load(request, self.tenant, seen.__contains__)
        if images is not None and images.num_left_out:
            skipped = Skipped(CHAT_KINDS)
            skipped.add("image_url", images.num_left_out)
            for observer in self.llm.observers:
                observer.on_skipped("chat_completions", skipped)
        return images, size if images is None else max(0, size - images.num_url_chars)

    async def prepare(
        self,
        render: Callable[[_Request, ChatImages | None], Sequence[TokenizedPrompt]],
        request: _Request,
        size: int,
    ) -> tuple[Sequence[TokenizedPrompt], list[EngineCoreRequest]]:
        """Render a request's prompts and make the core's requests of them, in a thread if the body is large.

        A beam search makes its requests itself (`generate`).

        Args:
            size: of the request's body, in bytes; it bounds prompts and grammars.

        Raises:
            ApiError, EngineError: see `to_api_error`.
        """

        def work(request: _Request) -> tuple[Sequence[TokenizedPrompt], list[EngineCoreRequest]]:
            prompts = render(request, images)
            return prompts, [] if request.use_beam_search else self.core_requests(prompts, request)

        if not self._generates:
            check_generates(self.llm.config)  # before a template that such a model may lack
        self.llm.queue_limits.check(request.n or 1)
        images = None
        if isinstance(request, ChatCompletionRequest):
            images, size = await self.images_of(request, size)
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

        def render(chat: ChatCompletionRequest, images: ChatImages | None) -> list[TokenizedPrompt]:
            prompt = renderer.render_chat(chat, images)
            if chat.max_tokens is not None:
                room = renderer.config.max_model_len - len(prompt.token_ids)
                chat.max_tokens = max(1, min(chat.max_tokens, room))
            return [prompt]

        (prompt,), requests = await self.prepare(render, chat, size)
        return prompt, requests

    async def count_tokens(self, chat: ChatCompletionRequest, size: int) -> int:
        """Count the tokens of a chat's prompt, even of one that is too long for the model.

        Args:
            size: of the request's body, in bytes.

        Raises:
            ApiError, EngineError: see `exchange.to_api_error`.
        """
        self.check_model(chat.model)
        images, size = await self.images_of(chat, size)

        def count(chat: ChatCompletionRequest) -> int:
            encoded = self.llm.renderer.encode_chat(chat, images)
            stop_if_abandoned()
            return len(encoded)

        return await self.render_pool.run(size, count, chat, self.tenant)

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
        check_images(core_requests)
        bound_answer(core_requests, n, request)
        return core_requests

    def close(self) -> None:
        """Drop the prompts that are not rendered yet."""
        self.render_pool.close()


class Peers(Protocol):
    """The engine's other API processes, as the first one sees them."""

    async def drain(self) -> None: ...

    async def metric_values(self) -> list[list[float]]: ...

    async def sleep(self, level: int, mode: SleepMode) -> None: ...


class _AcceptedRequests:
    """Context in which accepted requests run; each of them enters it."""

    def __init__(self) -> None:
        self.count = 0
        self.none_left = asyncio.Event()
        self.none_left.set()

    def __enter__(self) -> None:
        self.count += 1
        self.none_left.clear()

    def __exit__(self, *_: object) -> None:
        self.count -= 1
        if not self.count:
            self.none_left.set()


class Engine:
    """The application's state. `llm` and what depends on it exist once the model is loaded."""

    def __init__(
        self,
        names: tuple[str, ...],
        *,
        options: ServerArgs = _DEFAULT_OPTIONS,
        spans: Observer | None = None,
        started: int | None = None,
        root: str = "",
    ) -> None:
        """
        Args:
            root: what `/v1/models` calls the model that all names stand for; empty: the first of `names`.
            spans: makes spans of requests; None: nobody does.
            started: when, in seconds since the epoch; None: now.
        """
        self.names = names
        self._root = root
        self.started = int(time.time()) if started is None else started
        """When, in seconds since the epoch; the same in all API processes."""
        self.options = options
        self._spans = spans
        self.peers: Peers | None = None
        """Set in the first of several API processes."""
        self.phase = "starting"
        self.is_draining = False
        self.llm: AsyncLLM | None = None
        self._serving: OpenAIServing | None = None
        self._metrics: EngineMetrics | None = None
        self._load_report: LoadReport | None = None
        self._telemetry: TelemetryHub | None = None
        self._is_warming_up = False
        self._started = asyncio.Event()
        """Set when the start is over: the engine is ready, or drains."""
        self.prefix_hits = PrefixHits()
        """The hottest prefixes, for new replicas."""
        self._accepted = _AcceptedRequests()
        self._closing: list[Callable[[], Awaitable[None]]] = []

    def attach(self, llm: AsyncLLM, *, publishes: bool = True, is_warming_up: bool = False) -> None:
        """Serve a loaded model.

        Args:
            publishes: whether this process tells routers and the log of the cores' load; one of several does.
            is_warming_up: it answers requests, but is not ready before `warmed_up`.
        """
        self._serving = OpenAIServing(
            llm,
            self.names,
            takes_any_name=self.options.any_model_name,
            generates=llm.config.pooling is None,
            created=self.started,
            root=self._root,
        )
        self._metrics = EngineMetrics(llm.config, llm.input_processor.media)
        self._load_report = LoadReport(llm.config.data_parallel_size)
        self.prefix_hits = PrefixHits(block_size=llm.config.block_size)
        llm.observers.extend((self._metrics, self._load_report, self.prefix_hits))
        if self.options.access_log:
            llm.observers.append(RecordedOutputs())
        if self._spans is not None:
            llm.observers.append(self._spans)
        if publishes:
            self._telemetry = TelemetryHub(llm, llm.config)
            llm.observers.append(self._telemetry)
            if not self.options.disable_log_stats:
                llm.observers.append(StatsLog(llm.config.data_parallel_size))
        if self.peers is not None:
            llm.on_sleep = self.peers.sleep
        self.llm = llm
        self._is_warming_up = is_warming_up
        self.phase = "warming up" if is_warming_up else "ready"
        if not is_warming_up:
            self._started.set()

    def warmed_up(self) -> None:
        """Be ready."""
        self._is_warming_up = False
        self._started.set()
        if not self.is_draining:
            self.phase = "ready"

    @property
    def is_ready(self) -> bool:
        is_open = not self.is_draining and not self.is_sleeping and not self._is_warming_up
        return self.llm is not None and is_open and self.is_healthy

    async def wait_started(self, timeout_s: float) -> None:
        """Return once the engine is ready or drains, at the latest after `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._started.wait()

    @property
    def sees_images(self) -> bool:
        """Whether the model gets the images of chats."""
        return self.llm is not None and self.llm.input_processor.media is not None

    @property
    def is_sleeping(self) -> bool:
        return self.llm is not None and self.llm.is_sleeping

    @property
    def status(self) -> str:
        """Status in the body of /ready: loading, warming up, ready, sleeping or draining."""
        return "sleeping" if self.phase == "ready" and self.is_sleeping else self.phase

    @property
    def is_healthy(self) -> bool:
        """Whether the core lives and its loop runs; a core that is still loading counts as healthy."""
        llm = self.llm
        return llm is None or (
            not llm.is_dead and llm.heartbeat_age_s < self.options.engine_iteration_timeout
        )

    @property
    def loaded(self) -> AsyncLLM:
        """The model. Raises Unavailable while it loads or the engine drains; a sleeping engine is loaded."""
        if self.llm is None:
            raise self._loading()
        if self.is_draining:
            raise Unavailable("this engine is shutting down", retry_after_s=1.0)
        return self.llm

    @property
    def serving(self) -> OpenAIServing:
        """The endpoints' model. Raises Unavailable while it loads, and while the engine sleeps or drains."""
        if self.loaded.is_sleeping:
            raise Unavailable("this engine is asleep", retry_after_s=_ASLEEP_RETRY_S)
        assert self._serving is not None
        return self._serving

    def _loading(self) -> Unavailable:
        return Unavailable(f"the model is loading ({self.phase})", retry_after_s=1.0)

    def on_slow_client(self) -> None:
        """Count a client that was disconnected because it did not read its response."""
        if self._metrics is not None:
            self._metrics.on_slow_client()

    async def render_metrics(self) -> bytes:
        """Return the text of the metrics, of all API processes; empty while the model loads."""
        if self._metrics is None or self.llm is None:
            return b""
        self._metrics.set_sleep_level(self.llm.sleep_level)
        return self._metrics.render(() if self.peers is None else await self.peers.metric_values())

    def metric_values(self) -> list[float]:
        """Return this process's part of the metrics (`EngineMetrics.values`)."""
        return [] if self._metrics is None else self._metrics.values()

    def sleep_operation(self, operation: Literal["sleep", "wake"]) -> AbstractContextManager[None]:
        """Measure a block that puts the engine to sleep or wakes it."""
        return nullcontext() if self._metrics is None else self._metrics.sleep_operation(operation)

    def load_headers(self, form: str | None) -> dict[str, str]:
        """Return the headers with the load, in the form that a request asks for."""
        return {} if self._load_report is None else self._load_report.headers(form)

    @property
    def telemetry(self) -> TelemetryHub:
        if self._telemetry is None:
            raise self._loading()
        if not self._telemetry.has_room:
            raise TooManyRequests("too many telemetry readers", retry_after_s=5.0)
        return self._telemetry

    @property
    def num_live(self) -> int:
        """Choices that have not ended; requests, if there are more, whose choices may not have begun."""
        return max(self._accepted.count, self.server_load)

    @property
    def server_load(self) -> int:
        """Choices that have not ended, of all API processes."""
        if self.llm is None:
            return 0
        return self.llm.num_live if self.peers is None else self.llm.queue_limits.num_reqs

    def accepted(self) -> AbstractContextManager[None]:
        """Let `drain` wait for a request that the core may not have yet: its prompts are rendered first, and a beam
        search pauses between two tokens."""
        return self._accepted

    async def drain(self) -> None:
        """Reject new requests, and return when the accepted ones are done, of all API processes."""
        self.is_draining = True
        self._started.set()
        self.phase = "draining"
        if self._telemetry is not None:
            self._telemetry.drain()
        if self.peers is not None:
            await self.peers.drain()
        await asyncio.sleep(0)  # those that were not rejected are counted in this turn of the event loop
        await self._accepted.none_left.wait()
        if self.llm is not None:
            await self.llm.drain()

    def on_close(self, close: Callable[[], Awaitable[None]]) -> None:
        """Call `close` when the engine closes, while the model can still be asked."""
        self._closing.append(close)

    async def close(self) -> None:
        if self._telemetry is not None:
            self._telemetry.close()
        for close in self._closing:
            await close()
        if self._serving is not None:
            self._serving.close()
        if self.llm is not None:
            await self.llm.close()
