"""LLMEngine: runs requests step by step, for callers with a loop of their own. `LLM` is built on it.

    engine = LLMEngine.from_engine_args(EngineArgs.of(model="builtin://tiny"))
    engine.add_request("1", "Once upon a time", SamplingParams(max_tokens=8))
    while engine.has_unfinished_requests():
        for output in engine.step():
            print(output.request_id, output.text, output.finished)

It knows the client's interface, but not where the core runs. Request ids are the caller's; the core has ids of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from argosy_engine.config import EngineArgs
from argosy_engine.core.proc.core_client import ClosedClient, InprocClient, SyncClient, SyncMPClient
from argosy_engine.core.proc.data_parallel_client import DPLBSyncMPClient
from argosy_engine.errors import InvalidRequest
from argosy_engine.frontend.input_processor import InputProcessor
from argosy_engine.frontend.memory_report import budget_table
from argosy_engine.frontend.model_source import local_model
from argosy_engine.frontend.observer import Choices
from argosy_engine.frontend.output_processor import OutputProcessor
from argosy_engine.frontend.outputs import CompletionOutput, RequestOutput
from argosy_engine.frontend.prompts import PromptType, text_of
from argosy_engine.frontend.renderer import TokenizedPrompt
from argosy_engine.messages.collective_rpc import CollectiveRpc
from argosy_engine.params.sampling_params import SamplingParams
from argosy_engine.parsers.parser_registry import check_parser_flags

logger = logging.getLogger("argosy.frontend")


class LLMEngine:
    """A context manager that closes the engine.

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
                from argosy_engine.core.proc.copied_core_client import CopiedCoreClient

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
        client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
