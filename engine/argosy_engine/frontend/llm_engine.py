"""LLMEngine: requests in, outputs out, one step at a time, for callers with a loop of their own. `LLM` is built on it.

    engine = LLMEngine.from_engine_args(EngineArgs.of(model="builtin://tiny"))
    engine.add_request("1", "Once upon a time", SamplingParams(max_tokens=8))
    while engine.has_unfinished_requests():
        for output in engine.step():
            print(output.request_id, output.text, output.finished)

Knows the client's interface, not where the core runs. Request ids are the caller's; the core sees its own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from argosy_engine.config import EngineArgs
from argosy_engine.core.client import InprocClient, SyncClient, SyncMPClient
from argosy_engine.core.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from argosy_engine.errors import InvalidRequest
from argosy_engine.frontend.budget import budget_table
from argosy_engine.frontend.detokenizer import IncrementalDetokenizer
from argosy_engine.frontend.processor import InputProcessor, Prompt
from argosy_engine.frontend.prompts import PromptType, text_or_token_ids
from argosy_engine.sample.params import SamplingParams
from argosy_engine.sample.token_logprobs import TokenLogprobs

logger = logging.getLogger("argosy.frontend")


@dataclass(slots=True)
class CompletionOutput:
    """One choice."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    """Empty while it runs; `error` if the engine could not go on with it."""
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One per token, if asked for."""

    @property
    def cumulative_logprob(self) -> float | None:
        """Of the whole output; None without `logprobs`."""
        return sum(entry.logprobs[0] for entry in self.logprobs) if self.logprobs else None


@dataclass(slots=True)
class RequestOutput:
    """The choices of one prompt, with everything they have so far."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One per prompt token, None for the first, if asked for."""
    num_cached_tokens: int = 0
    error: str | None = None
    """Why a choice ended with `error`."""

    @property
    def finished(self) -> bool:
        return all(output.finish_reason for output in self.outputs)

    @property
    def text(self) -> str:
        """Of the first choice, as the other properties here."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        return self.outputs[0].stop_reason


@dataclass(slots=True)
class _Live:
    """A choice in the core."""

    result: RequestOutput
    output: CompletionOutput
    detokenizer: IncrementalDetokenizer
    siblings: list[EngineCoreRequest]
    """Other choices of the same prompt, which wait for this one to compute it."""


class LLMEngine:
    """
    Args:
        client: from here on this engine's: `close` ends it.
    """

    def __init__(self, client: SyncClient) -> None:
        self.client = client
        self.config = client.config
        self.processor = InputProcessor(client.config)
        self._live: dict[str, _Live] = {}
        """By the core's id."""
        self._core_ids: dict[str, list[str]] = {}
        """Request id -> the core's ids of its choices, until the last of them ends."""

    @classmethod
    def from_engine_args(cls, args: EngineArgs, *, multiprocess: bool = False) -> LLMEngine:
        """Loads the model; the log (`argosy.frontend`, INFO) has what the memory is used for.

        Args:
            multiprocess: the core runs in a process of its own, so that tokenising and stepping overlap.

        Raises:
            ConfigError: the model or an argument cannot work.
        """
        client: SyncClient = SyncMPClient(args) if multiprocess else InprocClient(args)
        try:
            logger.info("memory of %s\n%s", client.config.model_name, budget_table(client.config.memory))
            return cls(client)
        except BaseException:
            client.close()
            raise

    def add_request(
        self, request_id: str, prompt: PromptType | Prompt, params: SamplingParams | None = None
    ) -> None:
        """
        Args:
            request_id: free again once the request is finished or aborted.
            prompt: text, token ids, vLLM's dict with either, or what the processor has made of a chat.

        Raises:
            InvalidRequest: the id is taken, the prompt is empty or too long, or parameters are out of bounds.
        """
        if request_id in self._core_ids:
            raise InvalidRequest(f"a request with id {request_id!r} is running", param="request_id")
        params = params or SamplingParams()
        params.verify()
        made = self.make_prompt(prompt)
        requests = self.processor.core_requests(made, params)
        result = RequestOutput(
            request_id, made.token_ids, [CompletionOutput(choice) for choice in range(params.n)]
        )
        if params.prompt_logprobs is not None:
            result.prompt_logprobs = [None]
        self.client.add_request(requests[0])
        self._core_ids[request_id] = [request.request_id for request in requests]
        for request, output in zip(requests, result.outputs, strict=True):
            detokenizer = IncrementalDetokenizer(
                self.processor.tokenizer, request.sampling_params, request.prompt_token_ids
            )
            self._live[request.request_id] = _Live(result, output, detokenizer, [])
        self._live[requests[0].request_id].siblings = requests[1:]

    def make_prompt(self, prompt: PromptType | Prompt) -> Prompt:
        """Tokens of a text, or token ids checked against the vocabulary.

        Raises:
            InvalidRequest: not a prompt, a token id is beyond the vocabulary, or the text is not valid Unicode.
        """
        if isinstance(prompt, Prompt):
            return prompt
        said = text_or_token_ids(prompt)
        if isinstance(said, str):
            return self.processor.text_prompt(said)
        self.processor.check_token_ids(said)
        return Prompt(said, [])

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Forgets requests; ids that are not running are fine."""
        aborted: list[str] = []
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            aborted += self._core_ids.pop(request_id, ())
        for core_id in aborted:
            self._live.pop(core_id, None)
        if aborted:
            self.client.abort_requests(aborted)

    def has_unfinished_requests(self) -> bool:
        return bool(self._live)

    def step(self) -> list[RequestOutput]:
        """What the next step brought: each request that got tokens or ended, with everything it has so far.

        Raises:
            EngineDead: the core died.
        """
        if not self._live:
            return []
        changed: dict[str, RequestOutput] = {}
        for out in self.client.step().outputs:
            live = self._live.get(out.request_id)
            if live is not None:  # else it was aborted, or a stop string has just ended it
                self._process(out, live)
                changed[live.result.request_id] = live.result
        for result in changed.values():
            if result.finished:
                self._core_ids.pop(result.request_id, None)
        return list(changed.values())

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Calls a public method of every worker; the results by rank (`Executor.collective_rpc`).

        Raises:
            UtilityFailed: there is no such method, it failed, or its time is up.
        """
        call = method, timeout, list(args), dict(kwargs or {})
        return list(self.client.call_utility("collective_rpc", *call))

    def reset_prefix_cache(self) -> bool:
        """Forgets every cached prefix; False, and no effect, while requests hold blocks."""
        return bool(self.client.call_utility("reset_prefix_cache"))

    def sleep(self, level: int = 1) -> None:
        """Gives weights and KV cache back until `wake_up`; requests must be finished.

        Raises:
            UtilityFailed: requests are running, or there is no such level.
        """
        self.client.call_utility("sleep", level)

    def wake_up(self) -> None:
        """Loads the weights again. Raises UtilityFailed if that is impossible; the engine stays asleep."""
        self.client.call_utility("wake_up")

    def close(self) -> None:
        self.client.close()

    def _process(self, out: EngineCoreOutput, live: _Live) -> None:
        """Books one output of a choice."""
        output, detokenizer = live.output, live.detokenizer
        if out.finish_reason is FinishReason.ERROR:
            live.result.error = out.error or "the engine could not run this request"
            output.finish_reason = str(out.finish_reason)
            del self._live[out.request_id]
            for request in live.siblings:
                self._live.pop(request.request_id).output.finish_reason = output.finish_reason
            return
        for request in live.siblings:
            self.client.add_request(request)
        live.siblings = []
        output.token_ids += out.new_token_ids
        output.logprobs += out.logprobs or ()
        output.text += detokenizer.update(
            out.new_token_ids,
            out.finish_reason is not None,
            ends_at_stop_token=out.finish_reason is FinishReason.STOP,
        )
        if out.prefill_stats is not None and output.index == 0:
            live.result.num_cached_tokens = out.prefill_stats.num_cached_tokens
        if out.prompt_logprobs is not None:
            live.result.prompt_logprobs = [None, *out.prompt_logprobs]
        if detokenizer.stop_reason is not None:
            output.finish_reason, output.stop_reason = str(FinishReason.STOP), detokenizer.stop_reason
            if out.finish_reason is None:
                self.client.abort_requests([out.request_id])
        elif out.finish_reason is not None:
            output.finish_reason, output.stop_reason = str(out.finish_reason), out.stop_reason
        if output.finish_reason:
            del self._live[out.request_id]
