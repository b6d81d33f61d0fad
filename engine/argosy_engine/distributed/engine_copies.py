"""EngineCopies: the copies of an engine core that a launcher has started, and what they tell each other on the host.

Every copy makes the same calls in the same order. A copy that ends says so in the launcher's store before it closes its
connections; the others wait in short slices and look there, so that they end with its reason. A copy that was killed
says nothing: its connections close, and the others name it because it is the one that did not say anything. A copy
that waits says in which call, so that copies that make different calls end at once.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Literal

import msgspec
import torch
import torch.distributed as dist

from argosy_engine.distributed.unfinished_calls import keep_until_finished

logger = logging.getLogger(__name__)

TIMEOUT_S = 1800.0
"""How long a copy waits for the others, whose programs may do something else between two calls of the engine."""
SLICE = timedelta(seconds=0.5)
"""How often a copy that waits looks whether another has ended."""
WARN_S = 30.0
"""After how long a copy that waits says in the log for which others."""
CASCADE_S = 1.0
"""How long a copy waits until all that have noticed the end of another have said so."""
_INLINE_BYTES = 4096
"""Payload of a broadcast's first message. Longer payloads need a second one."""
_MAX_KNOWN_CALLS = 64
"""Calls that a copy tells the others. The source of broadcasts may be some calls ahead of the others."""


class CopyLost(RuntimeError):
    """Another copy has ended, or does not come. The message says which and why."""


class Report(msgspec.Struct, array_like=True, frozen=True):
    """What a copy says when it ends."""

    kind: Literal["ended", "lost"]
    """`lost`: because of another copy."""
    reason: str


class Calls(msgspec.Struct, array_like=True, frozen=True):
    """What a copy says while it waits."""

    number: int
    """Of calls so far; it waits in the last one."""
    kinds: list[str]
    """Of the last calls."""

    def kind_of(self, number: int) -> str:
        """Return the kind of a call, counted from 1; empty if it is not known."""
        index = number - 1 - self.number + len(self.kinds)
        return self.kinds[index] if 0 <= index < len(self.kinds) else ""


class EngineCopies:
    """The copies of one engine core.

    Args:
        group: of all copies, over gloo. Owned by this object, which destroys it.
        ranks: the launcher's rank of each copy.
        timeout_s: how long to wait for the others.
    """

    def __init__(
        self, group: dist.ProcessGroup, ranks: Sequence[int], *, timeout_s: float = TIMEOUT_S
    ) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._group: dist.ProcessGroup | None = group
        self._store = group.get_group_store()
        self._ranks = tuple(ranks)
        self._timeout_s = timeout_s
        self._num_calls = 0
        self._kinds: deque[str] = deque(maxlen=_MAX_KNOWN_CALLS)
        self._work: dist.Work | None = None
        """The call that has not ended; it stays when it fails."""
        self._has_reported = False

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """Return the values of every copy, by rank; each gives as many, below 2^63.

        Raises:
            CopyLost: another copy has ended or does not come. Every method that exchanges something raises it.
        """
        if self.size == 1:
            return [list(values)]
        own = torch.tensor(values, dtype=torch.int64)
        return self._gather(own).tolist()

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """Return the payload of every copy, by rank."""
        sizes = [size for (size,) in self.gather([len(payload)])]
        if self.size == 1:
            return [payload]
        own = torch.frombuffer(bytearray(payload.ljust(max(*sizes, 1), b"\0")), dtype=torch.uint8)
        return [row.numpy().tobytes()[:size] for row, size in zip(self._gather(own), sizes, strict=True)]

    def broadcast(self, payload: bytes | None, source: int = 0) -> bytes:
        """Return the payload of one copy.

        Args:
            payload: None in the other copies.
        """
        if self.rank == source:
            assert payload is not None
            if self.size == 1:
                return payload
            message = len(payload).to_bytes(8, "little") + payload
            self._broadcast(bytearray(message[: 8 + _INLINE_BYTES].ljust(8 + _INLINE_BYTES, b"\0")), source)
            if len(payload) > _INLINE_BYTES:
                self._broadcast(bytearray(payload[_INLINE_BYTES:]), source)
            return payload
        first = self._broadcast(bytearray(8 + _INLINE_BYTES), source)
        size = int.from_bytes(first[:8], "little")
        if size <= _INLINE_BYTES:
            return bytes(first[8 : 8 + size])
        return bytes(first[8:]) + bytes(self._broadcast(bytearray(size - _INLINE_BYTES), source))

    def report(self, kind: Literal["ended", "lost"], reason: str) -> None:
        """Tell the other copies that this one ends. Only the first report counts."""
        if self._has_reported or self._group is None:
            return
        self._has_reported = True
        report = msgspec.json.encode(Report(kind, reason[:4096])).decode()
        with contextlib.suppress(RuntimeError):  # the store has ended with the process that held it
            self._store.set(f"ended/{self.rank}", report)
            self._store.set("ended", "1")

    def cause(self, error: object) -> str:
        """Say why a collective has failed: which copies have ended, and why.

        Args:
            error: what the collective says.
        """
        self.report("lost", "")
        others = [rank for rank in range(self.size) if rank != self.rank]
        deadline = time.monotonic() + CASCADE_S
        while True:
            reports = self._reports(others)
            ended = {rank: report.reason for rank, report in reports.items() if report.kind == "ended"}
            silent = [rank for rank in others if rank not in reports]
            if ended or len(silent) <= 1 or time.monotonic() > deadline:
                break
            time.sleep(0.02)
        if ended:
            return "; ".join(f"rank {self._ranks[rank]} {reason}" for rank, reason in ended.items())
        if silent:
            return f"{self.names(silent)} ended without a word, or lost the connection ({_brief(error)})"
        return f"the copies have lost their connections ({_brief(error)})"

    def names(self, copies: Sequence[int]) -> str:
        """Return `rank 2` or `ranks 2, 3`, by the launcher's numbers."""
        return f"rank{'s' if len(copies) > 1 else ''} {', '.join(str(self._ranks[rank]) for rank in copies)}"

    def close(self, reason: str) -> None:
        """Leave the group, and tell the others why. May be called twice."""
        self.report("ended", reason)
        if self._group is not None:
            group, self._group = self._group, None
            if self._work is not None and not self._work.is_completed():
                keep_until_finished(group, self._work)
            dist.destroy_process_group(group)

    def _gather(self, own: torch.Tensor) -> torch.Tensor:
        """Return [size, len(own)]."""
        gathered = own.new_empty(self.size * len(own))
        work = dist.all_gather_into_tensor(gathered, own, group=self._open_group(), async_op=True)
        self._wait(work, f"comparison of {len(own)}")
        return gathered.view(self.size, len(own))

    def _broadcast(self, message: bytearray, source: int) -> bytearray:
        tensor = torch.frombuffer(message, dtype=torch.uint8)
        work = dist.broadcast(tensor, group=self._open_group(), group_src=source, async_op=True)
        self._wait(work, f"broadcast of {self.names([source])}")
        return message

    def _open_group(self) -> dist.ProcessGroup:
        if self._group is None:
            raise CopyLost("this copy has left the others")
        return self._group

    def _wait(self, work: dist.Work | None, kind: str) -> None:
        """Wait for a collective, looking from time to time whether another copy has ended.

        Args:
            kind: what all copies have to say of this call.
        """
        assert work is not None
        self._num_calls += 1
        self._kinds.append(kind)
        self._work = work
        began, has_warned = time.monotonic(), False
        while True:
            try:
                work.wait(SLICE)
                self._work = None
                return
            except RuntimeError:
                if work.is_completed():
                    try:
                        work.wait()
                        self._work = None
                        return  # it was completed just after the slice
                    except RuntimeError as error:
                        raise CopyLost(self.cause(error)) from None
            waited = time.monotonic() - began
            late = self._late()
            if waited > self._timeout_s:
                limit = f"{self._timeout_s:g} s"
                if not late:
                    self.report("ended", f"has waited {limit} for the end of a {kind}")
                    raise CopyLost(f"a {kind}, in which all copies take part, has not ended within {limit}")
                self.report("ended", f"has waited for {self.names(late)} for {limit}")
                raise CopyLost(
                    f"{self.names(late)} did not begin the next step within {limit}; do all copies make the same calls "
                    "with the same prompts?"
                )
            if waited > WARN_S and not has_warned:
                has_warned = True
                awaited = self.names(late) if late else f"the end of a {kind}"
                logger.warning("waiting for %s, for %.0f s now", awaited, waited)

    def _late(self) -> list[int]:
        """Return the copies that do not wait in the same call, having said that this one does.

        Raises:
            CopyLost: a copy has ended, or makes other calls.
        """
        late = []
        try:
            if self._store.check(["ended"]):
                raise CopyLost(self.cause("it has left the others"))
            own = Calls(self._num_calls, list(self._kinds))
            self._store.set(f"waiting/{self.rank}", msgspec.json.encode(own).decode())
            for rank in range(self.size):
                key = f"waiting/{rank}"
                if not self._store.check([key]):
                    late.append(rank)
                    continue
                calls = msgspec.json.decode(self._store.get(key), type=Calls)
                self._check_same(own, rank, calls)
                if calls.number < own.number:
                    late.append(rank)
        except dist.DistError as error:
            raise CopyLost(f"the process that holds the launcher's store has ended ({error})") from None
        return late

    def _check_same(self, own: Calls, rank: int, calls: Calls) -> None:
        """
        Raises:
            CopyLost: the last call that this copy and another have both begun is not the same.
        """
        number = min(own.number, calls.number)
        mine, theirs = own.kind_of(number), calls.kind_of(number)
        if mine == theirs or not mine or not theirs:
            return
        found = (
            f"{self.names([rank])} makes other calls than {self.names([self.rank])} (a {theirs}, not a {mine}); give "
            "all copies the same prompts and parameters in the same order"
        )
        self.report("ended", f"has found that {found}")
        raise CopyLost(found)

    def _reports(self, ranks: Sequence[int]) -> dict[int, Report]:
        reports = {}
        with contextlib.suppress(RuntimeError):
            for rank in ranks:
                if self._store.check([f"ended/{rank}"]):
                    reports[rank] = msgspec.json.decode(self._store.get(f"ended/{rank}"), type=Report)
        return reports


def _brief(error: object) -> str:
    """Return the first sentence of gloo's message, without the place in its source."""
    text = str(error)
    if text.startswith("["):
        text = text.partition("] ")[2]
    return text.partition(". ")[0][:200]


def is_of_collective(error: BaseException) -> bool:
    """Whether an error was raised by a collective, so that another process is its cause."""
    if isinstance(error, (CopyLost, dist.DistError)):
        return True
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is not None and str(last.tb_frame.f_globals.get("__name__", "")).startswith(
        "torch.distributed."
    )
