"""Offline generation: `LLM`, and `LLMEngine`, on which it is built, for callers with a loop of their own.

    with LLM("builtin://tiny") as llm:
        (output,) = llm.chat([{"role": "user", "content": "Hello!"}])

    engine = LLMEngine.from_engine_args(EngineArgs.of(model="builtin://tiny"))
    engine.add_request("1", "Once upon a time", SamplingParams(max_tokens=8))
    while engine.has_unfinished_requests():
        for output in engine.step():
            print(output.request_id, output.text, output.finished)

The engine knows the client's interface, but not where the core runs. Request ids are the caller's; the core has ids of
its own.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import msgspec

from argosy_engine.config import EngineArgs
from argosy_engine.core.proc.core_client import ClosedClient, InprocClient, SyncClient, SyncMPClient
from argosy_engine.core.proc.data_parallel_client import DPLBSyncMPClient
from argosy_engine.errors import EngineError, InvalidRequest
from argosy_engine.frontend.beam_search import (
    BeamSearch,
    BeamSearchBatch,
    BeamSearchOutput,
    BeamSearchParams,
    max_output_tokens,
)
from argosy_engine.frontend.input_processor import InputProcessor
from argosy_engine.frontend.media.processor import ChatImages, image_roles
from argosy_engine.frontend.model_source import budget_table, local_model
from argosy_engine.frontend.observer import Choices
from argosy_engine.frontend.output_processor import (
    CompletionOutput,
    OutputProcessor,
    RequestOutput,
    log_failures,
)
from argosy_engine.frontend.pooling import (
    PoolingRequestOutput,
    check_scores,
    encode,
    joined_scores,
    render_pairs,
    render_texts,
)
from argosy_engine.frontend.prompts import PromptType, as_list, text_of
from argosy_engine.frontend.renderer import Renderer, TokenizedPrompt
from argosy_engine.messages import CollectiveRpc
from argosy_engine.params import PoolingParams, SamplingParams
from argosy_engine.parsers.parser_registry import check_parser_flags
from argosy_engine.sample.logits_processor import LogitsProcessor, processor_path
from argosy_engine.vllm_settings import engine_args_of
from argosy_protocol.errors import BadRequest
from argosy_protocol.openai import ChatCompletionRequest
from argosy_protocol.pooling import ScoreRequest

logger = logging.getLogger("argosy.frontend")


class LLMEngine:
    """Runs requests step by step. A context manager that closes the engine.

    Args:
        client: owned by this engine from now on; `close` closes it.
    """

    def __init__(self, client: SyncClient) -> None:
        self.client: SyncClient = client
        self.config = client.config
        self.input_processor = InputProcessor(client.config)
        self.renderer = self.input_processor.renderer
        self.output_processor = OutputProcessor(self.renderer.tokenizer)
        self._core_ids: dict[str, list[str]] = {}
        """Request id -> the core's ids of its choices, until the last of them ends."""

    @classmethod
    def from_engine_args(cls, args: EngineArgs, *, multiprocess: bool = False) -> LLMEngine:
        """Load the model, after fetching it if it is remote, and log its memory budget (`argosy.frontend`, INFO).

        Args:
            multiprocess: the core runs in a process of its own, so that tokenising and stepping overlap. Several
                cores (`data_parallel_size`) always do.

        Raises:
            ConfigError: the model or an argument cannot work.
            FetchFailed: the model could not be fetched for now.
        """
        if multiprocess:
            args.check_core_process()
        check_parser_flags(args)
        with local_model(args) as local:
            client: SyncClient
            if local.executor_backend == "external_launcher":
                from argosy_engine.core.proc.core_client import CopiedCoreClient

                client = CopiedCoreClient(local)
            elif local.data_parallel_size > 1:
                client = DPLBSyncMPClient(local)
            else:
                client = SyncMPClient(local) if multiprocess else InprocClient(local)
        try:
            config = client.config
            logger.info("memory of %s\n%s", config.model_name, budget_table(*config.memory_of_ranks))
            return cls(client)
        except BaseException:
            client.close()
            raise

    def add_request(
        self,
        request_id: str,
        prompt: PromptType | TokenizedPrompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
    ) -> None:
        """Send a request to the core.

        Args:
            request_id: may be used again once the request is finished or aborted.
            prompt: text, token ids, vLLM's dict with either, or a chat's prompt from the renderer.
            priority: lower goes first, with `scheduling_policy="priority"`.

        Raises:
            InvalidRequest: the id is taken, the prompt is empty or too long, parameters are out of bounds, or there is
                a priority and the engine does not schedule by it.
        """
        if request_id in self._core_ids:
            raise InvalidRequest(f"a request with id {request_id!r} is running", param="request_id")
        params = params or SamplingParams()
        params.verify()
        made = self.renderer.render_prompt(prompt)
        requests = self.input_processor.process_inputs(made, params, priority=priority)
        result = RequestOutput(
            request_id,
            made.token_ids,
            [CompletionOutput(choice) for choice in range(params.n)],
            prompt=made.text if isinstance(prompt, TokenizedPrompt) else text_of(prompt),
        )
        if params.prompt_logprobs is not None:
            result.prompt_logprobs = [None]
        self.client.add_request(requests[0])
        self._core_ids[request_id] = [request.request_id for request in requests]
        choices = Choices(len(requests))
        states = [
            self.output_processor.add_request(request, choice, request_output=result, choices=choices)
            for choice, request in enumerate(requests)
        ]
        states[0].siblings = requests[1:]

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Forget requests; ids that are not running are ignored."""
        aborted: list[str] = []
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            aborted += self._core_ids.pop(request_id, ())
        for core_id in aborted:
            self.output_processor.finish(core_id, "abort")
        if aborted:
            self.client.abort_requests(aborted)

    def has_unfinished_requests(self) -> bool:
        return self.output_processor.has_unfinished_requests()

    def step(self) -> list[RequestOutput]:
        """Run a step, and return the requests that got tokens or ended in it, with all their output so far.

        Raises:
            EngineDead: the core died.
        """
        if not self.output_processor.has_unfinished_requests():
            return []
        processed = self.output_processor.process_outputs(self.client.step().outputs)
        if processed.reqs_to_abort:
            self.client.abort_requests(processed.reqs_to_abort)
        for request in processed.reqs_to_add:
            self.client.add_request(request)
        results = list(processed.request_outputs.values())
        for result in results:
            if result.finished:
                self._core_ids.pop(result.request_id, None)
        return results

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
        call = CollectiveRpc(method, timeout, list(args), dict(kwargs or {}))
        return list(self.client.call_utility("collective_rpc", call))

    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes. Returns False and has no effect while requests hold blocks."""
        return bool(self.client.call_utility("reset_prefix_cache"))

    def sleep(self, level: int = 1) -> None:
        """Free weights and KV cache until `wake_up`. All requests must be finished.

        Raises:
            UtilityFailed: requests are running, or there is no such level.
        """
        self.client.call_utility("sleep", level)

    def wake_up(self) -> None:
        """Load the weights again. Raises UtilityFailed if that is impossible; the engine stays asleep."""
        self.client.call_utility("wake_up")

    def close(self) -> None:
        """Free the model and end the core. Further calls have no effect; any other method raises EngineClosed."""
        client, self.client = self.client, ClosedClient(self.config)
        self.input_processor.close()
        client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Encoding(dict[str, Any]):
    """What a call of the tokenizer returns, with items that are attributes as well: `input_ids` and `attention_mask`,
    lists of integers for one text, and lists of these for several."""

    @property
    def input_ids(self) -> Any:
        return self["input_ids"]

    @property
    def attention_mask(self) -> Any:
        """Ones: nothing is padded."""
        return self["attention_mask"]


class LLMTokenizer:
    """What `LLM.get_tokenizer` returns: the model's tokenizer and chat template, for callers only.

    It has those methods of transformers' tokenizers that callers of vLLM use, with their names, defaults and results.
    """

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._tokenizer = renderer.tokenizer

    def __len__(self) -> int:
        """Number of tokens, added ones included."""
        return self._tokenizer.vocab_size

    @property
    def eos_token_id(self) -> int | None:
        """The first token that ends an output, or None if the model has none."""
        return next(iter(self._renderer.config.eos_token_ids), None)

    def __call__(self, text: str | Sequence[str], *, add_special_tokens: bool = True) -> Encoding:
        """Tokenise a text or several, without padding and truncation.

        Raises:
            InvalidRequest: as `encode`.
        """
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens)
            return Encoding(input_ids=ids, attention_mask=[1] * len(ids))
        batch = [self.encode(each, add_special_tokens) for each in text]
        return Encoding(input_ids=batch, attention_mask=[[1] * len(ids) for ids in batch])

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Tokenise a text.

        Raises:
            InvalidRequest: it is not valid Unicode, or longer than any prompt of the model.
        """
        return self._renderer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of token ids.

        Raises:
            InvalidRequest: an id is beyond the vocabulary.
        """
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        self._renderer.check_token_ids(ids, "token_ids")
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def batch_decode(
        self, sequences: Sequence[int | Sequence[int]], skip_special_tokens: bool = False
    ) -> list[str]:
        """Return the text of each sequence of token ids.

        Raises:
            InvalidRequest: as `decode`.
        """
        return [self.decode(sequence, skip_special_tokens) for sequence in sequences]

    def get_vocab(self) -> dict[str, int]:
        """Return the tokens, as spelled in the vocabulary, with their ids."""
        return self._tokenizer.backend.get_vocab(with_added_tokens=True)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """Return the id of a token as spelled in the vocabulary; None if there is none."""
        return self._tokenizer.backend.token_to_id(token)

    def convert_ids_to_tokens(self, token_ids: Sequence[int]) -> list[str]:
        """Return the tokens as spelled in the vocabulary; empty for an id without a token."""
        return self._tokenizer.token_strs(token_ids)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **chat_template_kwargs: Any,
    ) -> list[int] | str:
        """Return the prompt of a conversation, as token ids, or as text without `tokenize`.

        Ids are those that `LLM.chat` would use: control tokens that a message spells are text in it. Tokenising the
        text would make them control tokens again.

        Args:
            add_generation_prompt: end with the beginning of an assistant's message. Off here, on in `LLM.chat`.
            continue_final_message: end with the last message's content.
            **chat_template_kwargs: variables of the model's chat template.

        Raises:
            InvalidRequest: malformed messages, the template cannot take them, or the model has none.
        """
        fields = {
            "messages": conversation,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": chat_template_kwargs or None,
        }
        try:
            request = msgspec.convert(fields, ChatCompletionRequest)
        except msgspec.ValidationError as error:
            raise InvalidRequest(str(error), param="messages") from None
        return self._renderer.encode_chat(request).ids if tokenize else self._renderer.chat_text(request)


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
            messages: with parts of the type `image_url`, if the model sees images.
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
            prompts.append(self.renderer.render_chat(request, self._images_of(request)))
        return self._run(prompts, sampling_params, use_tqdm, priority)

    def _images_of(self, request: ChatCompletionRequest) -> ChatImages | None:
        """Load the images of a chat; None if it has none, or the model gets none."""
        media = self.input_processor.media
        if media is None or not image_roles(request):
            return None
        loading = media.load(request, is_seen=self.renderer.image_roles(request))
        with ThreadPoolExecutor(1) as thread:  # the caller's may have a running event loop
            return thread.submit(asyncio.run, loading).result()

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
        ("mm_processor_kwargs", mm_processor_kwargs, "give it to LLM(...), for all images"),
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
