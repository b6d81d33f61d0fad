"""LLM: offline generation with the core in this process. `LLM(model).generate(prompts)` and `.chat(messages)`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import msgspec

from argosy_engine.config import EngineArgs
from argosy_engine.core.client import InprocClient
from argosy_engine.core.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from argosy_engine.errors import EngineError, InvalidRequest
from argosy_engine.frontend.detokenizer import IncrementalDetokenizer
from argosy_engine.frontend.pooling import PoolingRequestOutput, encode
from argosy_engine.frontend.processor import InputProcessor, Prompt
from argosy_engine.protocol.openai import ChatCompletionRequest
from argosy_engine.sample.params import SamplingParams
from argosy_engine.sample.pooling_params import PoolingParams
from argosy_engine.sample.token_logprobs import TokenLogprobs


@dataclass(slots=True)
class CompletionOutput:
    """One choice."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One per token, if asked for."""

    @property
    def cumulative_logprob(self) -> float | None:
        """Of the whole output; None without `logprobs`."""
        return sum(entry.logprobs[0] for entry in self.logprobs) if self.logprobs else None


@dataclass(slots=True)
class RequestOutput:
    """The finished choices of one prompt."""

    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One per prompt token, None for the first, if asked for."""
    num_cached_tokens: int = 0

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


class LLM:
    """A model, loaded in this process.

    Args:
        model: `builtin://tiny` or a model directory.
        **engine_args: any field of `EngineArgs`.

    Raises:
        ConfigError: the model or an argument cannot work.
    """

    def __init__(self, model: str, **engine_args: Any) -> None:
        self.client = InprocClient(EngineArgs.of(model=model, **engine_args))
        self.config = self.client.config
        self.processor = InputProcessor(self.config)

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes texts or token-id prompts, batched, in the order given.

        Args:
            use_tqdm: vLLM's name for: show a progress bar on a terminal.

        Raises:
            InvalidRequest: a prompt is empty or too long, or parameters are out of bounds.
        """
        return self._run([self._prompt(prompt) for prompt in _as_list(prompts)], sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | None = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers one conversation or a list of them.

        Raises:
            InvalidRequest: malformed messages, or the chat template cannot take them.
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        fields = {"tools": tools, "chat_template_kwargs": chat_template_kwargs}
        prompts = []
        for conversation in conversations:
            try:
                request = msgspec.convert({"messages": conversation, **fields}, ChatCompletionRequest)
            except msgspec.ValidationError as error:
                raise InvalidRequest(str(error), param="messages") from None
            prompts.append(self.processor.chat_prompt(request))
        return self._run(prompts, sampling_params, use_tqdm)

    def encode(
        self,
        prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput]:
        """Makes one vector of each prompt, batched, in the order given.

        Raises:
            InvalidRequest: a prompt is empty or too long, or the model has fewer dimensions than asked for.
        """
        made = [self._prompt(prompt) for prompt in _as_list(prompts)]
        params = pooling_params or PoolingParams()
        with _progress(len(made), use_tqdm) as bar:
            return encode(self.client, self.processor, made, params, lambda tokens: bar.advance(tokens, True))

    def embed(
        self,
        prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput]:
        """`encode` by the name vLLM has for vectors of whole prompts: `.outputs.embedding` of each result."""
        return self.encode(prompts, pooling_params, use_tqdm=use_tqdm)

    def close(self) -> None:
        self.client.close()

    def _prompt(self, prompt: str | Sequence[int]) -> Prompt:
        if isinstance(prompt, str):
            return self.processor.text_prompt(prompt)
        token_ids = list(prompt)
        self.processor.check_token_ids(token_ids)
        return Prompt(token_ids, [])

    def _run(
        self, prompts: list[Prompt], params: SamplingParams | None, use_bar: bool
    ) -> list[RequestOutput]:
        params = params or SamplingParams()
        params.verify()
        results: list[RequestOutput] = []
        live: dict[str, _Live] = {}
        leaders: list[EngineCoreRequest] = []
        for prompt in prompts:
            requests = self.processor.core_requests(prompt, params)
            result = RequestOutput(prompt.token_ids, [CompletionOutput(choice) for choice in range(params.n)])
            if params.prompt_logprobs is not None:
                result.prompt_logprobs = [None]
            for request, output in zip(requests, result.outputs, strict=True):
                detokenizer = IncrementalDetokenizer(
                    self.processor.tokenizer, request.sampling_params, request.prompt_token_ids
                )
                live[request.request_id] = _Live(result, output, detokenizer, [])
            live[requests[0].request_id].siblings = requests[1:]
            leaders.append(requests[0])
            results.append(result)
        try:
            for request in leaders:
                self.client.add_request(request)
            with _progress(len(live), use_bar) as bar:
                while self.client.has_work:
                    for out in self.client.step().outputs:
                        if out.request_id in live:  # else a stop string has just ended it
                            is_finished = self._process(out, live[out.request_id])
                            bar.advance(len(out.new_token_ids), is_finished)
                            if is_finished:
                                del live[out.request_id]
        finally:
            # After an error or Ctrl-C nothing of this call may linger in the core.
            self.client.abort_requests(list(live))
        return results

    def _process(self, out: EngineCoreOutput, live: _Live) -> bool:
        """Books one output; whether it was the last of its choice."""
        if out.finish_reason is FinishReason.ERROR:
            raise EngineError(out.error)
        for request in live.siblings:
            self.client.add_request(request)
        live.siblings = []
        output, detokenizer = live.output, live.detokenizer
        output.token_ids += out.new_token_ids
        output.logprobs += out.logprobs or ()
        output.text += detokenizer.update(out.new_token_ids, out.finish_reason is not None)
        if out.prefill_stats is not None and output.index == 0:
            live.result.num_cached_tokens = out.prefill_stats.num_cached_tokens
        if out.prompt_logprobs is not None:
            live.result.prompt_logprobs = [None, *out.prompt_logprobs]
        if detokenizer.stop_reason is not None:
            output.finish_reason, output.stop_reason = "stop", detokenizer.stop_reason
            if out.finish_reason is None:
                self.client.abort_requests([out.request_id])
            return True
        if out.finish_reason is not None:
            output.finish_reason, output.stop_reason = str(out.finish_reason), out.stop_reason
        return out.finish_reason is not None


class _Bar:
    """Progress over requests, with the rate in tokens per second."""

    def __init__(self, total: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("{task.fields[rate]}"),
        )  # fmt: skip
        self._task = self._progress.add_task("generating", total=total, rate="")
        self._tokens = 0

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, tokens: int, is_finished: bool) -> None:
        self._tokens += tokens
        elapsed = self._progress.tasks[0].elapsed or 1e-9
        self._progress.update(
            self._task, advance=int(is_finished), rate=f"{self._tokens / elapsed:.0f} tok/s"
        )


class _NoBar:
    def advance(self, tokens: int, is_finished: bool) -> None: ...


def _progress(total: int, use_bar: bool) -> AbstractContextManager[_Bar | _NoBar]:
    return _Bar(total) if use_bar and sys.stderr.isatty() else nullcontext(_NoBar())


def _as_list(prompts: Any) -> list[Any]:
    if isinstance(prompts, str):
        return [prompts]
    prompts = list(prompts)
    return [prompts] if prompts and isinstance(prompts[0], int) else prompts
