"""LLM: offline generation with the core in this process. `LLM(model).generate(prompts)` and `.chat(messages)`.

with LLM("builtin://tiny") as llm:
    (output,) = llm.chat([{"role": "user", "content": "Hello!"}])
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import msgspec

from argosy_engine.config import EngineArgs
from argosy_engine.core.proc.core_client import SyncClient
from argosy_engine.errors import EngineError, InvalidRequest
from argosy_engine.frontend.beam_search import (
    BeamSearch,
    BeamSearchBatch,
    BeamSearchOutput,
    BeamSearchParams,
    max_output_tokens,
)
from argosy_engine.frontend.llm_engine import LLMEngine
from argosy_engine.frontend.llm_tokenizer import LLMTokenizer
from argosy_engine.frontend.outputs import CompletionOutput, RequestOutput, log_failures
from argosy_engine.frontend.pooled_prompts import render_pairs, render_texts
from argosy_engine.frontend.pooling import PoolingRequestOutput, check_scores, encode, joined_scores
from argosy_engine.frontend.prompts import PromptType, as_list
from argosy_engine.frontend.renderer import TokenizedPrompt
from argosy_engine.params.pooling_params import PoolingParams
from argosy_engine.params.sampling_params import SamplingParams
from argosy_engine.sample.logits_processor.interface import LogitsProcessor, processor_path
from argosy_engine.vllm_settings import engine_args_of
from argosy_protocol.errors import BadRequest
from argosy_protocol.openai import ChatCompletionRequest
from argosy_protocol.scoring import ScoreRequest

__all__ = ["LLM", "CompletionOutput", "RequestOutput"]


class LLM:
    """A model, loaded in this process or in one of its own. A context manager that closes it.

    Args:
        model: `ORG/NAME` of a Hugging Face hub, a directory, `builtin://tiny`, or another source
            (`argosy_fetcher.source_uri`). Remote models are fetched once, into a store on this machine.
        multiprocess: the engine core gets a process of its own, so that tokenising and stepping overlap. With
            `data_parallel_size` above 1 each core has one, and prompts spread over them.
        logits_processors: classes, or `MODULE:CLASS`, for requests with `SamplingParams.extra_args`.
        **engine_args: any other field of `EngineArgs`, or argument of vLLM's engine: one without effect here is logged
            as a warning.

    Raises:
        ConfigError: the model or an argument cannot work.
        FetchFailed: the model could not be fetched for now.
    """

    def __init__(
        self,
        model: str,
        *,
        multiprocess: bool = False,
        logits_processors: Sequence[str | type[LogitsProcessor]] = (),
        **engine_args: Any,
    ) -> None:
        paths = tuple(processor_path(processor) for processor in logits_processors)
        args = engine_args_of(model=model, logits_processors=paths, **engine_args)
        self._use(LLMEngine.from_engine_args(args, multiprocess=multiprocess))

    @classmethod
    def from_engine_args(cls, args: EngineArgs, *, multiprocess: bool = False) -> LLM:
        """Load the model that engine arguments describe, as a command line gives them.

        Raises:
            ConfigError, FetchFailed: as the constructor.
        """
        llm = cls.__new__(cls)
        llm._use(LLMEngine.from_engine_args(args, multiprocess=multiprocess))
        return llm

    def _use(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.config = engine.config
        self.input_processor = self.engine.input_processor
        self.renderer = self.engine.renderer
        self._request_ids = itertools.count()

    @property
    def client(self) -> SyncClient:
        """The engine's client of its core."""
        return self.engine.client

    def get_tokenizer(self) -> LLMTokenizer:
        """Return the model's tokenizer and chat template. They work after `close`, too."""
        return LLMTokenizer(self.renderer)

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: None = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts (texts, token ids, or vLLM's dicts with either), batched, in the order given.

        A prompt that fails while it runs does not affect the others: its result has `error`, and `finish_reason` is
        "error".

        Args:
            sampling_params: for all prompts, or one for each.
            use_tqdm: show a progress bar on a terminal; the name is vLLM's.
            lora_request, tokenization_kwargs, mm_processor_kwargs: vLLM's, which must be empty here.
            priority: for all prompts, or one for each, as `LLMEngine.add_request` takes it.

        Raises:
            InvalidRequest: a prompt is empty or too long, parameters are out of bounds, or not as many as prompts; an
                argument is not supported.
        """
        _check_unsupported(lora_request, tokenization_kwargs, mm_processor_kwargs)
        return self._run(as_list(prompts), sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        use_tqdm: bool = True,
        lora_request: None = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them.

        Args:
            add_generation_prompt: end the prompt with the beginning of an assistant's message.
            continue_final_message: end the prompt with the last message's content, which the model continues, instead.
                The output has the continuation only. Needs `add_generation_prompt=False`.
            tools: functions that the model may call, as OpenAI's API has them.
            chat_template_kwargs: variables of the model's chat template, such as `enable_thinking`.
            chat_template: instead of the model's; needs an `LLM` with `trust_request_chat_template=True`.
            chat_template_content_format: vLLM's; templates get the content of a message as text.
            lora_request, priority, tokenization_kwargs, mm_processor_kwargs: as in `generate`.

        Raises:
            InvalidRequest: malformed messages, the chat template cannot take them, or `continue_final_message` with
                `add_generation_prompt`; an argument is not supported.
        """
        _check_unsupported(lora_request, tokenization_kwargs, mm_processor_kwargs)
        if chat_template_content_format not in ("auto", "string"):
            raise InvalidRequest(
                "chat_template_content_format must be auto or string: templates get the content of a message as text",
                param="chat_template_content_format",
            )
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        fields = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "chat_template_kwargs": chat_template_kwargs,
            "chat_template": chat_template,
            "return_prompt_text": True,
        }
        prompts = []
        for conversation in conversations:
            try:
                request = msgspec.convert({"messages": conversation, **fields}, ChatCompletionRequest)
            except msgspec.ValidationError as error:
                raise InvalidRequest(str(error), param="messages") from None
            prompts.append(self.renderer.render_chat(request))
        return self._run(prompts, sampling_params, use_tqdm, priority)

    def beam_search(
        self, prompts: PromptType | Sequence[PromptType], params: BeamSearchParams
    ) -> list[BeamSearchOutput]:
        """Find the most probable continuations of each prompt by beam search.

        Raises:
            InvalidRequest: a prompt is empty or too long for `max_tokens`, or parameters are out of bounds.
            EngineError: the core could not continue one of the beams.
        """
        sampling_params = params.round_params(self.config)
        made = [self.renderer.render_prompt(prompt) for prompt in as_list(prompts)]
        for prompt in made:
            max_output_tokens(self.input_processor, prompt, params.max_tokens)  # raises if it is too long
        batch = BeamSearchBatch(
            made, [BeamSearch(prompt.token_ids, params, self.config.eos_token_ids) for prompt in made]
        )
        while beams := batch.beams:
            results = self._run(beams, sampling_params, False)
            if error := next((result.error for result in results if result.error is not None), None):
                raise EngineError(error)
            batch.advance(result.outputs[0].logprobs[0] for result in results)
        return [BeamSearchOutput(sequences) for sequences in batch.best(self.renderer.tokenizer)]

    def encode(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput]:
        """Compute one vector of each prompt, batched, in the order given. One that fails has `error` and no vector.

        Raises:
            InvalidRequest: a prompt is empty or too long, or the model has no vectors of so many dimensions.
        """
        made = [self.renderer.render_prompt(prompt) for prompt in as_list(prompts)]
        return self._encode(made, pooling_params, use_tqdm)

    def _encode(
        self, prompts: Sequence[TokenizedPrompt], params: PoolingParams | None, use_bar: bool
    ) -> list[PoolingRequestOutput]:
        params = params or PoolingParams()
        with _progress(len(prompts), use_bar) as bar:
            return encode(
                self.client, self.input_processor, prompts, params, lambda tokens: bar.advance(tokens, 1)
            )

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput]:
        """Call `encode`, by vLLM's name for vectors of whole prompts (`.outputs.embedding` of each result)."""
        return self.encode(prompts, pooling_params, use_tqdm=use_tqdm)

    def classify(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput]:
        """Compute the probabilities of a classifier's labels for each prompt (`.outputs.probs` of each result).

        Raises:
            InvalidRequest: as `encode`, or the model does not classify.
        """
        params = (pooling_params or PoolingParams()).replace(task="classify")
        return self.encode(prompts, params, use_tqdm=use_tqdm)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        pooling_params: PoolingParams | None = None,
        *,
        chat_template_kwargs: dict[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput]:
        """Score pairs of texts (`.outputs.score` of each result): one text with each of several, or pair by pair.

        A model that classifies reads both texts at once; for one that embeds it is the cosine of their vectors.

        Raises:
            InvalidRequest: the numbers of texts do not match, a text is too long, or the model does neither.
        """
        check_scores(self.config)
        try:
            request = ScoreRequest(
                queries=as_list(data_1), documents=as_list(data_2), chat_template_kwargs=chat_template_kwargs
            )
        except BadRequest as error:
            raise InvalidRequest(error.message, param=error.param) from None
        params = pooling_params or PoolingParams()
        if params.is_token_wise:
            raise InvalidRequest(
                f"scores are of whole texts, not {params.task}; encode has the vectors of tokens"
            )
        if self.config.pooling is not None and self.config.pooling.task == "classify":
            return self._encode(render_pairs(self.renderer, request), params, use_tqdm)
        prompts, num_queries = render_texts(self.renderer, request)
        results = self._encode(prompts, params, use_tqdm)
        queries, documents = results[:num_queries], results[num_queries:]
        if num_queries == 1:
            queries *= len(documents)
        return [joined_scores(query, document) for query, document in zip(queries, documents, strict=True)]

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a public method of every worker, and return the results by rank (`Executor.collective_rpc`).

        Raises:
            UtilityFailed: there is no such method, it failed, or it timed out.
        """
        return self.engine.collective_rpc(method, timeout, args, kwargs)

    def sleep(self, level: int = 1) -> None:
        """Free weights and KV cache until `wake_up`; see `LLMEngine.sleep`."""
        self.engine.sleep(level)

    def wake_up(self) -> None:
        self.engine.wake_up()

    def close(self) -> None:
        """Free the model and end the core. Further calls have no effect; other methods raise EngineClosed from then
        on."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(
        self,
        prompts: Sequence[PromptType | TokenizedPrompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        use_bar: bool,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        elif not isinstance(params, Sequence) or not all(isinstance(own, SamplingParams) for own in params):
            raise InvalidRequest(
                f"sampling_params must be a SamplingParams, or a list of one for each prompt, not {_types(params)}",
                param="sampling_params",
            )
        if len(params) != len(prompts):
            raise InvalidRequest(
                f"{len(params)} sampling_params for {len(prompts)} prompts; give one for all, or one for each",
                param="sampling_params",
            )
        if priority is None or isinstance(priority, int):
            priority = [priority or 0] * len(prompts)
        if len(priority) != len(prompts):
            raise InvalidRequest(
                f"{len(priority)} priorities for {len(prompts)} prompts; give one for all, or one for each",
                param="priority",
            )
        request_ids = [str(next(self._request_ids)) for _ in prompts]
        results: dict[str, RequestOutput] = {}
        known: dict[str, tuple[int, int]] = {}
        try:
            for request_id, prompt, own, rank in zip(request_ids, prompts, params, priority, strict=True):
                self.engine.add_request(request_id, prompt, own, priority=rank)
            with _progress(sum(own.n for own in params), use_bar) as bar:
                while self.engine.has_unfinished_requests():
                    for result in self.engine.step():
                        results[result.request_id] = result
                        tokens, finished = known.get(result.request_id, (0, 0))
                        known[result.request_id] = now = _count(result)
                        bar.advance(now[0] - tokens, now[1] - finished)
        finally:
            # After an error or Ctrl-C no request of this call may remain in the core.
            self.engine.abort_request(request_ids)
        ordered = [results[request_id] for request_id in request_ids]
        log_failures([result.error for result in ordered])
        return ordered


def _check_unsupported(
    lora_request: object,
    tokenization_kwargs: Mapping[str, Any] | None,
    mm_processor_kwargs: Mapping[str, Any] | None,
) -> None:
    """Refuse arguments of vLLM's calls, by name, unless they ask for nothing."""
    for name, value, reason in (
        ("lora_request", lora_request, "adapters are not served yet; load the merged model"),
        ("tokenization_kwargs", tokenization_kwargs, "tokenise the prompt, and give its token ids"),
        ("mm_processor_kwargs", mm_processor_kwargs, "models read text only"),
    ):
        if value:
            raise InvalidRequest(f"{name} is not supported: {reason}", param=name)


def _types(params: object) -> str:
    """Name the type of what is no list of sampling parameters."""
    kind = type(params).__name__
    if not isinstance(params, list | tuple):
        return kind
    return f"{kind} with {next(type(own).__name__ for own in params if not isinstance(own, SamplingParams))}"


def _count(result: RequestOutput) -> tuple[int, int]:
    """Count the tokens so far and the finished choices."""
    tokens = sum(len(output.token_ids) for output in result.outputs)
    return tokens, sum(bool(output.finish_reason) for output in result.outputs)


class _Bar:
    """Make a progress bar over requests, with the rate in tokens per second."""

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

    def advance(self, tokens: int, finished: int) -> None:
        self._tokens += tokens
        elapsed = self._progress.tasks[0].elapsed or 1e-9
        self._progress.update(self._task, advance=finished, rate=f"{self._tokens / elapsed:.0f} tok/s")


class _NoBar:
    def advance(self, tokens: int, finished: int) -> None: ...


def _progress(total: int, use_bar: bool) -> AbstractContextManager[_Bar | _NoBar]:
    return _Bar(total) if use_bar and sys.stderr.isatty() else nullcontext(_NoBar())
