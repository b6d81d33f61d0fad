"""OutputRouter: which of several API processes gets which of the core's messages. One process gets all unchanged.

A request's outputs go to the process that sent the request, and the result of a utility to its caller. The first
process also gets what the core says of itself for every step: statistics, which it publishes for all, and changes of
the prefix cache. The others get statistics without counters, which show that the core lives, with their outputs or
every `STATS_INTERVAL_S`, and changes of the prefix cache if they balance several cores. All get the reason of a death.

Thread-safe: requests are added and removed by other threads than the one that routes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from argosy_engine.messages.core_messages import EngineCoreOutput, EngineCoreOutputs, SchedulerStats

STATS_INTERVAL_S = 0.1


class OutputRouter:
    """
    Args:
        num_clients: number of API processes.
        balances: whether all of them need the changes of the prefix cache.
        clock: monotonic seconds.
    """

    def __init__(
        self, num_clients: int, *, balances: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._num_clients = num_clients
        self._balances = balances
        self._clock = clock
        self._clients: dict[str, int] = {}
        """API process of each request that has not ended; empty if there is only one process."""
        self._sent_at = [float("-inf")] * num_clients

    def __len__(self) -> int:
        return len(self._clients)

    def add(self, request_id: str, client_index: int) -> None:
        """Send the outputs of a request to a process from now on."""
        if self._num_clients > 1:
            self._clients[request_id] = client_index

    def remove(self, request_ids: Iterable[str]) -> None:
        """Forget aborted requests; those that end by an output are forgotten with it."""
        for request_id in request_ids:
            self._clients.pop(request_id, None)

    def route(self, message: EngineCoreOutputs) -> list[tuple[int, EngineCoreOutputs]]:
        """Return what each process gets of a message. The ends of unknown requests, which may be refusals of unreadable
        ones, go to all; their other outputs are of requests that were aborted meanwhile, and go to none."""
        if self._num_clients == 1:
            return [(0, message)]
        if message.dead is not None:
            return [(client, message) for client in range(self._num_clients)]
        outputs: list[list[EngineCoreOutput]] = [[] for _ in range(self._num_clients)]
        for output in message.outputs:
            client = self._client_of(output)
            if client is None:
                if output.finish_reason is not None:
                    for own in outputs:
                        own.append(output)
            elif client < self._num_clients:
                outputs[client].append(output)
        return [
            (client, routed)
            for client, own in enumerate(outputs)
            if (routed := self._message_of(client, own, message)) is not None
        ]

    def _client_of(self, output: EngineCoreOutput) -> int | None:
        if output.finish_reason is not None:
            return self._clients.pop(output.request_id, None)
        return self._clients.get(output.request_id)

    def _message_of(
        self, client: int, outputs: list[EngineCoreOutput], message: EngineCoreOutputs
    ) -> EngineCoreOutputs | None:
        utility = message.utility
        if utility is not None and utility.client_index != client:
            utility = None
        if client == 0:
            stats = message.stats
            if stats is not None:
                stats.num_tokens_elsewhere = sum(
                    len(output.new_token_ids) for output in message.outputs
                ) - sum(len(output.new_token_ids) for output in outputs)
            return EngineCoreOutputs(outputs, stats, message.residency, utility)
        residency = message.residency if self._balances else None
        now = self._clock()
        is_due = now - self._sent_at[client] >= STATS_INTERVAL_S
        if not (outputs or utility is not None or residency is not None or is_due):
            return None
        self._sent_at[client] = now
        return EngineCoreOutputs(outputs, _without_counters(message.stats), residency, utility)


def _without_counters(stats: SchedulerStats | None) -> SchedulerStats | None:
    """Return the figures of the moment. Counters are reported once, to the first process."""
    if stats is None:
        return None
    return SchedulerStats(
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        queued_uncached_tokens=stats.queued_uncached_tokens,
        kv_cache_usage=stats.kv_cache_usage,
        prefill_tokens_per_s=stats.prefill_tokens_per_s,
        decode_step_s=stats.decode_step_s,
        longest_step_s=stats.longest_step_s,
        num_yielding=stats.num_yielding,
        num_deferred=stats.num_deferred,
    )
