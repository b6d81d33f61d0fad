"""What the core's process sends to which API process (`OutputRouter`), and when (`HeldOutputs`).

Thread-safe: requests are added and removed by other threads than the one that routes and sends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

import msgspec

from argosy_engine.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    HeldStep,
    SchedulerStats,
)

STATS_INTERVAL_S = 0.1


class OutputRouter:
    """Which of several API processes gets which of the core's messages. One process gets all unchanged.

    A request's outputs go to the process that sent the request, and the result of a utility to its caller. The first
    process also gets what the core says of itself for every step: statistics, which it publishes for all, and changes
    of the prefix cache. The others get statistics without counters, which show that the core lives, with their outputs
    or every `STATS_INTERVAL_S`, and changes of the prefix cache if they balance several cores. All get the reason of a
    death.

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


HOLD_S = 0.1
"""The load that telemetry tells lags by it at most."""
HOLD_TOKENS_S = 1.0
"""Counters of tokens lag by it at most. Most short answers are complete by then, so that none of their tokens but the
first and the last ones are sent by themselves."""
MAX_HELD = 64
"""Maximum number of messages held for a client, which it processes at once."""


class HeldOutputs:
    """Which messages wait for later ones, to be sent together.

    A request whose output is read once it is complete (`EngineCoreRequest.final_only`) needs its tokens at its end.
    Sent with each step they would wake the API process for each step, and be decoded and delivered one by one. Here
    they are taken out of the steps' messages and put before the request's last tokens. Each step keeps its time
    (`HeldStep`), so counters and latencies keep their values.

    Held are tokens of such requests between the first ones, which release a prompt's other choices and end the time to
    the first token, and the last ones. A message in which nothing but statistics is left is held, too.

    Invariants: a request's tokens and a client's messages keep their order, no message is held for longer than `HOLD_S`
    and no token for longer than `HOLD_TOKENS_S`. What is removed may not change while the sender looks through it,
    hence the lock.

    Args:
        num_clients: number of API processes.
        clock: monotonic seconds.
    """

    def __init__(self, num_clients: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._encode = msgspec.msgpack.Encoder().encode
        self._quiet: set[str] = set()
        """Requests with `final_only` that have not ended."""
        self._tokens: list[dict[str, EngineCoreOutput]] = [{} for _ in range(num_clients)]
        """For each client the held tokens of its requests, as one output for each."""
        self._messages: list[list[bytes]] = [[] for _ in range(num_clients)]
        """For each client the held messages, encoded. They have statistics only."""
        self._messages_due: float | None = None
        """When the oldest held message must be sent."""
        self._tokens_due: float | None = None
        """When the oldest held tokens must be sent. They may have been sent earlier, with the request's last ones."""

    def add(self, request: EngineCoreRequest) -> None:
        if request.final_only:
            self._quiet.add(request.request_id)

    def remove(self, request_ids: Iterable[str]) -> None:
        """Forget aborted requests; those that end by an output are forgotten with it."""
        with self._lock:
            for request_id in request_ids:
                self._quiet.discard(request_id)
                for tokens in self._tokens:
                    tokens.pop(request_id, None)

    def pass_on(self, client: int, message: EngineCoreOutputs) -> list[bytes]:
        """Hold what can be held of a client's message; return the encoded messages to send it now, none if it waits."""
        now = self._clock()
        has_taken = False
        if self._quiet and message.outputs:
            with self._lock:
                loud = [output for output in message.outputs if not self._hold_tokens(client, output, now)]
            has_taken = len(loud) < len(message.outputs)
            message.outputs = loud
        held = self._messages[client]
        can_wait = has_taken and not message.outputs and message.residency is None and message.utility is None
        if can_wait:
            message.timestamp = now
        held.append(self._encode(message))
        if can_wait and len(held) <= MAX_HELD:
            if self._messages_due is None:
                self._messages_due = now + HOLD_S
            return []
        return self._take_messages(client)

    def take(self, client: int) -> list[bytes]:
        """Return all that is held for a client, to be sent now."""
        held = self._take_messages(client)
        with self._lock:
            tokens, self._tokens[client] = self._tokens[client], {}
            self._find_tokens_due()
        if tokens:
            held.append(self._encode(EngineCoreOutputs(list(tokens.values()))))
        return held

    def take_due(self, client: int) -> list[bytes]:
        """Return what must be sent to a client now."""
        now = self._clock()
        is_due = self._messages_due is not None and now >= self._messages_due
        messages = self._take_messages(client) if is_due else []
        with self._lock:
            old = self._take_old_tokens(client, now)
            self._find_tokens_due()
        if old:
            # Messages before these tokens have nothing of their requests, but statistics are told in order.
            messages = messages or self._take_messages(client)
            messages.append(self._encode(EngineCoreOutputs(old)))
        return messages

    @property
    def is_due(self) -> bool:
        """Whether some of what is held must be sent now (`take_due`)."""
        due = self._due
        return due is not None and self._clock() >= due

    @property
    def wait_s(self) -> float | None:
        """Seconds until some of what is held must be sent, 0 at least; None if nothing is held."""
        due = self._due
        return None if due is None else max(0.0, due - self._clock())

    @property
    def _due(self) -> float | None:
        return min((due for due in (self._messages_due, self._tokens_due) if due is not None), default=None)

    def _take_messages(self, client: int) -> list[bytes]:
        held, self._messages[client] = self._messages[client], []
        if not any(self._messages):
            self._messages_due = None
        return held

    def _take_old_tokens(self, client: int, now: float) -> list[EngineCoreOutput]:
        tokens, old = self._tokens[client], []
        for request_id, output in tokens.items():  # the oldest come first
            if now < output.held_steps[0].timestamp + HOLD_TOKENS_S:
                break
            old.append(request_id)
        return [tokens.pop(each) for each in old]

    def _find_tokens_due(self) -> None:
        """Find when the oldest of the held tokens must be sent."""
        oldest = [next(iter(tokens.values())).held_steps[0].timestamp for tokens in self._tokens if tokens]
        self._tokens_due = min(oldest) + HOLD_TOKENS_S if oldest else None

    def _hold_tokens(self, client: int, output: EngineCoreOutput, now: float) -> bool:
        """Hold the tokens of an output, or put those that are held before its own; return whether they are held."""
        request_id, tokens = output.request_id, self._tokens[client]
        if request_id not in self._quiet:
            return False
        if output.finish_reason is not None or output.prefill_stats is not None:
            if output.finish_reason is not None:
                self._quiet.discard(request_id)
            held = tokens.pop(request_id, None)
            if held is not None:
                _append(held, output)
                output.new_token_ids, output.logprobs = held.new_token_ids, held.logprobs
                output.held_steps = held.held_steps
            return False
        step = HeldStep(now, len(output.new_token_ids))
        held = tokens.get(request_id)
        if held is None:
            output.new_token_ids = output.new_token_ids.copy()  # the core has the list, too
            output.held_steps = [step]
            tokens[request_id] = output
            if self._tokens_due is None:
                self._tokens_due = now + HOLD_TOKENS_S
        else:
            _append(held, output)
            held.held_steps.append(step)
        return True


def _append(held: EngineCoreOutput, later: EngineCoreOutput) -> None:
    """Append a later output's tokens to held ones."""
    held.new_token_ids += later.new_token_ids
    if later.logprobs:
        held.logprobs = [*(held.logprobs or ()), *later.logprobs]
    held.num_preemptions = later.num_preemptions
