"""The processes that a launcher such as torchrun has started: what it tells each, their groups, and the copies of an
engine core among them.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import msgspec
import torch
import torch.distributed as dist

from argosy_engine.distributed.parallel_config import ParallelConfig
from argosy_engine.distributed.parallel_state import (
    Communicator,
    GroupCommunicator,
    LocalCommunicator,
    ParallelState,
)
from argosy_engine.errors import ConfigError

logger = logging.getLogger(__name__)

POLL_S = 0.5

_exiting = threading.Event()
_unsettled: set[threading.Event] = set()


def keep_until_finished(group: dist.ProcessGroup, work: dist.Work) -> None:
    """Keep a group until a call on it has ended, or for ever if the program ends before.

    gloo cannot abort a call, and whoever destroys a group waits for its calls, which end once the other processes have.
    The thread that keeps the group must not be inside torch when the interpreter ends: torch takes the interpreter's
    lock again in destructors, where an ending interpreter ends the thread, and with it, by `std::terminate`, the
    process.
    """
    kept: list[Any] = [group, work]
    settled = threading.Event()

    def keep() -> None:
        while not kept[1].is_completed() and not _exiting.wait(POLL_S):
            pass
        if not _exiting.is_set():
            kept.clear()
        _unsettled.discard(settled)
        settled.set()
        if kept:
            threading.Event().wait()

    _unsettled.add(settled)
    threading.Thread(target=keep, name="unfinished call of copies", daemon=True).start()


@atexit.register
def _settle() -> None:
    _exiting.set()
    for settled in list(_unsettled):
        settled.wait()


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

    Every copy makes the same calls in the same order. A copy that ends says so in the launcher's store before it closes
    its connections; the others wait in short slices and look there, so that they end with its reason. A copy that was
    killed says nothing: its connections close, and the others name it because it is the one that did not say anything.
    A copy that waits says in which call, so that copies that make different calls end at once.

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


_FLAG = "--distributed-executor-backend external_launcher"
_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")


class LaunchEnvironment(NamedTuple):
    """What the launcher tells a process: its place among all that it has started."""

    rank: int
    world_size: int
    """Processes on all machines."""
    local_rank: int
    """Among the processes of this machine; on CUDA the index of this process's GPU."""
    local_world_size: int
    """Processes on this machine; those on all machines, if the launcher does not tell."""


def read_launch(config: ParallelConfig, environment: Mapping[str, str]) -> LaunchEnvironment:
    """Read the launcher's variables.

    Raises:
        ConfigError: one is missing or no number, or there are more or fewer processes than the config needs.
    """
    missing = [name for name in (*_NUMBERS, "MASTER_ADDR") if not environment.get(name)]
    if missing:
        raise ConfigError(
            f"{_FLAG} needs environment variables that are not set: {', '.join(missing)}; start the program "
            f"with `torchrun --nproc-per-node {config.num_workers}` or another launcher that sets them, or leave the "
            "flag out"
        )
    rank, world_size, local_rank, _ = (_number(environment, name) for name in _NUMBERS)
    if world_size != config.num_workers:
        raise ConfigError(
            f"{_FLAG}: the launcher has started {world_size} processes (WORLD_SIZE), and {config.num_workers} are "
            f"needed, which is --tensor-parallel-size {config.tensor} x --pipeline-parallel-size {config.pipeline} x "
            f"--data-parallel-size {config.data}; start {config.num_workers}, or change the sizes"
        )
    local_world_size = world_size
    if environment.get("LOCAL_WORLD_SIZE"):
        local_world_size = _number(environment, "LOCAL_WORLD_SIZE")
    if rank >= world_size or local_rank >= local_world_size or local_world_size > world_size:
        raise ConfigError(
            f"{_FLAG}: RANK {rank} of WORLD_SIZE {world_size} and LOCAL_RANK {local_rank} of LOCAL_WORLD_SIZE "
            f"{local_world_size} contradict each other; ranks count from 0"
        )
    return LaunchEnvironment(rank, world_size, local_rank, local_world_size)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not (text.isascii() and text.isdigit() and len(text) <= 6):
        raise ConfigError(f"{_FLAG}: the environment variable {name} is a number from 0, not {text!r:.32}")
    return int(text)


HOST_TIMEOUT = timedelta(minutes=40)
"""Above `TIMEOUT_S`, which says more."""
NCCL_TIMEOUT = timedelta(minutes=10)
"""After this time torch ends a process whose peer does not join a collective. All copies have agreed on the step
before, so that they only wait for computations, or at the start for weights."""


class LaunchedGroups:
    """The groups of one process. Waits until all processes that the launcher has started have made theirs.

    The program may use torch.distributed itself: if it has initialised it, its process group stays as it is, and ours
    are further groups; otherwise we initialise it (`env://`), and it stays so until the program ends. All processes
    make all groups, in the same order.

    Raises (from the constructor):
        ConfigError: the program has initialised torch.distributed for other ranks than the launcher's.
    """

    def __init__(self, config: ParallelConfig, launch: LaunchEnvironment) -> None:
        self.launch = launch
        self._config = config
        self.core, self.rank = divmod(launch.rank, config.world_size)
        """Data-parallel rank, and rank among the workers of this engine core."""
        self._made: list[dist.ProcessGroup] = []
        self._communicators: list[_Communicator] = []
        _initialise(launch)
        everyone = range(config.world_size)
        ((ranks, control),) = self._new_groups([everyone], "gloo", None)
        self.copies = EngineCopies(control, ranks)

    def parallel_state(self, device: torch.device) -> ParallelState:
        """Make the groups that exchange tensors on a device: over NCCL on CUDA, over gloo on a CPU."""
        config = self._config
        world = self._join([list(range(config.world_size))], device)
        return ParallelState(
            config,
            self.rank,
            tensor=world if config.pipeline == 1 else self._join(config.tensor_groups(), device),
            pipeline=world if config.tensor == 1 else self._join(config.pipeline_groups(), device),
            world=world,
            device=device,
            leave=self.leave,
        )

    def leave(self) -> None:
        """Leave the groups that exchange tensors, whose connections close. May be called twice."""
        for communicator in self._communicators:
            communicator.close()
        self._communicators = []
        while self._made:
            dist.destroy_process_group(self._made.pop())

    def _join(self, groups: list[list[int]], device: torch.device) -> Communicator:
        if len(groups[0]) == 1:
            return LocalCommunicator()
        is_cuda = device.type == "cuda"
        made = self._new_groups(groups, "nccl" if is_cuda else "gloo", device if is_cuda else None)
        ((_, group),) = made
        communicator = _Communicator(group)
        self._made.append(group)
        self._communicators.append(communicator)
        return communicator

    def _new_groups(
        self, groups: Iterable[Iterable[int]], backend: str, device: torch.device | None
    ) -> list[tuple[list[int], dist.ProcessGroup]]:
        """Make groups of every engine core, and return the ranks and the group of those that this process is in.

        Args:
            groups: ranks within an engine core.
        """
        config = self._config
        mine = []
        for core in range(config.data):
            for members in groups:
                ranks = [core * config.world_size + rank for rank in members]
                group = dist.new_group(
                    ranks,
                    timeout=HOST_TIMEOUT if device is None else NCCL_TIMEOUT,
                    backend=backend,
                    device_id=device if self.launch.rank in ranks else None,
                )
                if self.launch.rank in ranks:
                    assert isinstance(group, dist.ProcessGroup)
                    mine.append((ranks, group))
        return mine


class _Communicator(GroupCommunicator):
    def close(self) -> None:
        """Drop the group, which ends only when nothing refers to it; layers still refer to this object."""
        del self._group


def _initialise(launch: LaunchEnvironment) -> None:
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (launch.rank, launch.world_size):
            raise ConfigError(
                f"torch.distributed has rank {dist.get_rank()} of {dist.get_world_size()} in this program, and the "
                f"launcher's RANK is {launch.rank} of WORLD_SIZE {launch.world_size}; initialise it with env://, or "
                "not at all"
            )
        return
    if launch.local_world_size == launch.world_size:  # one machine
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method="env://",
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=HOST_TIMEOUT,
    )
