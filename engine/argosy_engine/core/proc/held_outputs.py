"""HeldOutputs: tokens of the core that nobody waits for, held back to be sent together with later ones.

A request whose output is read once it is complete (`EngineCoreRequest.final_only`) needs its tokens at its end. Sent
with each step they would wake the API process for each step, and be decoded and delivered one by one. Here they are
taken out of the steps' messages and put before the request's last tokens. Each step keeps its time (`HeldStep`), so
counters and latencies keep their values.

Held are tokens of such requests between the first ones, which release a prompt's other choices and end the time to the
first token, and the last ones. A message in which nothing but statistics is left is held, too.

Invariants: a request's tokens and a client's messages keep their order, no message is held for longer than `HOLD_S` and
no token for longer than `HOLD_TOKENS_S`.

Thread-safe: requests are added and removed by other threads than the one that sends. What is removed may not change
while the sender looks through it, hence the lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

import msgspec

from argosy_engine.messages.core_messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    HeldStep,
)

HOLD_S = 0.1
"""The load that telemetry tells lags by it at most."""
HOLD_TOKENS_S = 1.0
"""Counters of tokens lag by it at most. Most short answers are complete by then, so that none of their tokens but the
first and the last ones are sent by themselves."""
MAX_HELD = 64
"""Maximum number of messages held for a client, which it processes at once."""


class HeldOutputs:
    """
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
