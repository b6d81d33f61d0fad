"""Supervisor of a local fleet: it makes the running processes equal to the manifests.

It is level-based like the operator: every event only marks the fleet dirty; one task then compares the desired state
with the present one (`next_step`) and acts. `ControlServer` answers commands on the control socket. This module is the
supervisor's program: `argosy up` starts `python -m argosy.local.supervisor`.

`next_step` is a rolling update as a pure function. `argosy_resource.rollout` sets the bounds and decides what
halts a rollout, as it does for the operator. Within the bounds the rules are those of a Deployment's rolling update,
with one difference: a replica that still drains counts against the surge, since it holds its memory until it is gone.

Invariants: there is one supervisor per state directory. The fleet file lists a replica only while its engine is ready
or draining; a draining replica is stopped once the router has reported it as draining with nothing in flight, or at its
deadline; an unchanged manifest changes nothing. A client that does not read is disconnected and never delays the fleet;
the socket is removed before the process exits.

No step takes the available replicas below `replicas - unavailable` (or below their present number), nor, until a new
one is available, those that are available or will soon be so again; none takes the processes above `replicas + surge`
(or above their present number), and as long as new replicas become available, the steps end with exactly the desired
replicas. While a rollout is halted, no replica is replaced.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import xxhash

from argosy.local.child_process import DEFAULT_PORT, ROUTER_API_KEY_ENV, Settings, choose_gpus, local_gpus
from argosy.local.control import (
    MAX_MESSAGE_BYTES,
    Apply,
    BatchStatus,
    FleetStatus,
    Refused,
    ReplicaStatus,
    Reply,
    RouterStatus,
    ServiceStatus,
    StateDir,
    Stop,
    decode_request,
    encode,
)
from argosy.local.processes import BatchProcess, Replica, RouterProcess
from argosy_protocol.fleet import Endpoint, FleetDocument, FleetService, encode_fleet
from argosy_protocol.headers import internal_key
from argosy_resource.engine_command import engine_args, engine_env
from argosy_resource.fleet_document import fleet_service
from argosy_resource.rollout import RolloutReplica, halting_replica, may_replace_in_place, rollout_bounds
from argosy_resource.types import InferenceService


@dataclass(frozen=True)
class Goal:
    """Desired state of one service."""

    replicas: int
    revision: str
    surge: int
    unavailable: int
    most: int | None = None
    """Replicas that the hardware can hold, including draining ones; None for no bound."""
    halted_by: str = ""
    """Name of the new replica whose failure halts the rollout; empty if it is not halted."""

    @property
    def waits_for_capacity(self) -> bool:
        """Whether no replica can be replaced now: there is no room for a surge, and none may be unavailable."""
        return self.surge == 0 and self.unavailable == 0


class Member(NamedTuple):
    """A replica as the plan sees it. Members are ordered oldest first."""

    name: str
    revision: str
    is_available: bool
    """Whether the router may send it requests; for a new replica, only once it has been ready for `min_ready_s`."""
    is_leaving: bool
    """Whether it is draining or stopping."""
    is_unreported: bool = False
    """Whether its engine is ready, but the router has not reported yet whether it serves."""
    has_failed: bool = False
    """Whether its process ended, and no later one has been ready for `min_ready_s`."""
    has_served: bool = False
    """Whether one of its processes has been ready."""
    is_recovering: bool = False
    """Whether it served until a moment ago, and restarts."""


class Step(NamedTuple):
    """Number of replicas to start and names of replicas to retire now. The next step follows from its effects."""

    start: int
    retire: tuple[str, ...]


def revision_of(service: InferenceService) -> str:
    """Hash of what determines a replica's process; an edit that does not change it restarts nothing."""
    process = (engine_args(service, host="", port=0), engine_env(service), service.spec.gpus)
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(process, order="sorted"))[:8]


def goal(service: InferenceService, members: Sequence[Member] = (), *, capacity: int | None = None) -> Goal:
    """The service's goal.

    If there is no GPU for a surge, a change replaces replicas in place, or waits if that would take the last routable
    replica and the manifest does not allow it.

    Args:
        members: the service's present replicas.
        capacity: number of replicas that fit on the GPUs that no other service holds; None if replicas need no GPU.
    """
    wanted = revision_of(service)
    replicas = [_as_the_policy_sees(member, wanted) for member in members if not member.is_leaving]
    free = None if capacity is None else max(0, capacity - service.spec.replicas)
    bounds = rollout_bounds(
        service.spec.rollout,
        replicas,
        is_in_place=free == 0 and may_replace_in_place(service.spec.rollout, service.spec.replicas),
        free=free,
    )
    halting = halting_replica(replicas)
    return Goal(
        replicas=service.spec.replicas,
        revision=wanted,
        surge=bounds.surge,
        unavailable=bounds.unavailable,
        most=capacity,
        halted_by="" if halting is None else halting.name,
    )


def _as_the_policy_sees(member: Member, revision: str) -> RolloutReplica:
    """Describe a member to the policy. An old one that the router has not reported on, or that has served and fails for
    a moment, counts as serving: there is still something to lose."""
    is_new = member.revision == revision
    return RolloutReplica(
        member.name,
        is_new=is_new,
        is_serving=member.is_available or (not is_new and (member.is_unreported or member.has_served)),
        has_failed=member.has_failed,
    )


def next_step(goal: Goal, members: Sequence[Member]) -> Step:
    """Compute which replicas to start and to retire now."""
    staying = [member for member in members if not member.is_leaving]
    current = [member for member in staying if member.revision == goal.revision]
    old = [member for member in staying if member.revision != goal.revision]

    if goal.halted_by:  # only scale down
        return Step(0, (*_surplus(current, goal.replicas), *_surplus(old, goal.replicas)))

    # An old replica that fails for a moment may be the last one that works, until a new one has proved itself.
    is_new_proved = any(member.is_available for member in current)
    down = [member for member in old if not (member.is_available or member.is_unreported)]
    kept = [
        member
        for member in down
        if not is_new_proved and (member.is_recovering or (member.has_served and current))
    ]
    retire = [member.name for member in down if member not in kept]
    retire += _surplus(current, goal.replicas)
    available = sum(member.is_available for member in staying if member.name not in retire)
    floor = max(0, goal.replicas - goal.unavailable)
    if not current:
        retire += [member.name for member in kept[: max(0, available + len(kept) - floor)]]
    if available >= floor:
        retire += [member.name for member in old if member.is_unreported]
    retire += [member.name for member in old if member.is_available][: max(0, available - floor)]

    missing = max(0, goal.replicas - len(current))
    most = goal.replicas + goal.surge
    if goal.most is not None:
        most = min(most, goal.most)
    room = max(0, most - len(members))
    return Step(min(missing, room), tuple(retire))


def _surplus(members: Sequence[Member], replicas: int) -> list[str]:
    """Names of the members beyond `replicas`: unavailable ones first, then the youngest, whose caches are the
    smallest."""
    ranked = sorted(enumerate(members), key=lambda pair: (pair[1].is_available, -pair[0]))
    return [member.name for _, member in ranked[: max(0, len(members) - replicas)]]


def threads_per_replica(services: Sequence[InferenceService], cores: int) -> int:
    """Default CPU threads of a replica: the cores divided among all replicas, at least 1."""
    replicas = sum(service.spec.replicas for service in services)
    return max(1, cores // max(1, replicas))


log = logging.getLogger("argosy.local.supervisor")  # as a program this module is __main__

_KEPT_LOGS: Final = 10
"""Number of logs kept of replicas that are gone, so that one can look up why."""


_NOT_ROUTABLE: Final = {
    "connecting": "the router has not reached it yet",
    "suspect": "it is silent, or its engine core is stuck; the router sends it requests only if nothing else is left",
    "ejected": "requests to it kept failing; the router tries it again in a moment",
    "half-open": "requests to it kept failing; the router tries it with the next one",
    "draining": "it stops, and gets no further requests",
}
"""Why a replica that answers gets no requests, by the router's state of it."""


class Supervisor:
    """One local fleet."""

    def __init__(self, state: StateDir, settings: Settings, on_status: Callable[[FleetStatus], None]) -> None:
        self._state = state
        self._settings = settings
        self._on_status = on_status
        self._fleet_key = state.fleet_key()
        self._api_key_fingerprint = state.fingerprint(settings.api_key)
        self._gpus = local_gpus()
        self._wanted: dict[str, InferenceService] = {}
        self._replicas: dict[str, Replica] = {}
        self._serials: dict[str, int] = {}
        self._halted: dict[str, str] = {}
        """Service -> the replica that halts its rollout; empty if none does."""
        self._gone: deque[str] = deque()
        self._dirty = asyncio.Event()
        self._fleet_revision = ""
        self._is_stopping = False
        self._ports = contextlib.ExitStack()
        self._batch = self._ports.enter_context(BatchProcess.with_port(settings, state, self._dirty.set))
        self._router = RouterProcess(settings, state, self._batch.url, self._dirty.set)
        self._tasks: asyncio.TaskGroup | None = None
        self._owners: set[asyncio.Task[None]] = set()
        self._next_look: asyncio.TimerHandle | None = None
        """Timer for when a new replica will have been ready for `min_ready_s`."""

    def apply(self, services: Sequence[InferenceService]) -> None:
        """Make `services` the desired ones, and try replicas again whose engines refused their arguments. A paused
        service stays as it was."""
        wanted = {}
        for service in services:
            if service.spec.paused:
                before = self._wanted.get(service.key, _without_replicas(service))
                service = msgspec.structs.replace(
                    before, spec=msgspec.structs.replace(before.spec, paused=True)
                )
            wanted[service.key] = service
        self._wanted = wanted
        for replica in self._replicas.values():
            replica.start_again()
        self._write_fleet()  # now, so that an edit that concerns only the router is done when this returns
        self._dirty.set()

    async def run(self, stop: asyncio.Event, grace_s: Callable[[], float]) -> None:
        """Supervise until `stop` is set and every process has ended."""
        self._write_fleet()
        async with asyncio.TaskGroup() as self._tasks:
            reconciling = self._tasks.create_task(self._reconcile_forever(), name="reconcile")
            routing = self._tasks.create_task(self._router.run(), name="router")
            # Only then: until the first answer the processors are the engines'.
            keeping = self._tasks.create_task(self._batch.run(self._router.has_reported), name="batch")
            await stop.wait()
            self._is_stopping = True
            self._dirty.set()
            self._batch.stop()  # its requests go through the router
            self._router.stop(grace_s())  # before the engines, which still compute what it streams
            await keeping
            await routing
            for replica in self._replicas.values():
                replica.halt()
            await asyncio.gather(*self._owners)
            reconciling.cancel()
            if self._next_look is not None:
                self._next_look.cancel()
            self._ports.close()

    def status(self) -> FleetStatus:
        router = RouterStatus(
            url=self._router.url,
            is_ready=self._router.is_ready,
            admin_url=self._router.admin_url,
            reason=self._router.reason,
            restarts=self._router.restarts,
            pid=self._router.pid,
            api_key_fingerprint=self._api_key_fingerprint,
            api_keys_file=self._settings.api_keys_file,
        )
        batch = BatchStatus(
            url=self._batch.url,
            pid=self._batch.pid,
            restarts=self._batch.restarts,
            reason=self._batch.reason,
        )
        keys = dict.fromkeys((*self._wanted, *(replica.service.key for replica in self._replicas.values())))
        services = tuple(self._service_status(key) for key in keys)
        return FleetStatus(
            pid=os.getpid(), router=router, services=services, batch=batch, is_stopping=self._is_stopping
        )

    async def _reconcile_forever(self) -> None:
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            if not self._is_stopping:
                for key in {*self._wanted, *(replica.service.key for replica in self._replicas.values())}:
                    self._reconcile(key)
            self._write_fleet()
            self._release_drained()
            self._on_status(self.status())

    def _reconcile(self, key: str) -> None:
        service = self._wanted.get(key)
        members = self._members(key, revision_of(service) if service else "")
        wanted = (
            self._goal(service, members) if service else Goal(replicas=0, revision="", surge=0, unavailable=1)
        )
        if wanted.halted_by != self._halted.get(key, ""):
            self._halted[key] = wanted.halted_by
            if wanted.halted_by:
                log.warning("the rollout of %s halts: %s", key, self._halt_reason(wanted))
        step = next_step(wanted, members)
        for name in step.retire:
            log.info("retire %s", name)
            self._replicas[name].retire()
        if service is not None:
            for _ in range(step.start):
                self._start(service, wanted.revision)

    def _goal(self, service: InferenceService, members: Sequence[Member]) -> Goal:
        gpus = service.spec.gpus
        if not gpus:
            return goal(service, members)
        others = sum(
            len(replica.gpus) for replica in self._replicas.values() if replica.service.key != service.key
        )
        return goal(service, members, capacity=(len(self._gpus) - others) // gpus)

    def _members(self, key: str, revision: str) -> list[Member]:
        """The service's replicas as the rollout sees them, while `revision` is the desired one."""
        return [
            Member(
                replica.name,
                replica.revision,
                is_available=self._is_available(replica, revision),
                is_leaving=replica.is_leaving,
                is_unreported=self._is_unreported(replica),
                has_failed=replica.has_failed,
                has_served=replica.has_served,
                is_recovering=replica.is_recovering,
            )
            for replica in self._replicas_of(key)
        ]

    def _start(self, service: InferenceService, revision: str) -> None:
        assert self._tasks is not None
        taken = [index for replica in self._replicas.values() for index in replica.gpus]
        gpus = choose_gpus(self._gpus, taken, service.spec.gpus)
        assert gpus is not None, "the goal's capacity bounds the starts"
        replica = Replica(
            self._new_name(service),
            service,
            revision,
            settings=self._settings,
            state=self._state,
            internal_key=self._internal_key(service),
            threads=threads_per_replica(list(self._wanted.values()), os.cpu_count() or 1),
            gpus=gpus,
            changed=self._dirty.set,
        )
        log.info("start %s, revision %s", replica.name, revision)
        self._replicas[replica.name] = replica
        owner = self._tasks.create_task(self._own(replica), name=replica.name)
        self._owners.add(owner)
        owner.add_done_callback(self._owners.discard)

    async def _own(self, replica: Replica) -> None:
        try:
            await replica.run()
        finally:
            del self._replicas[replica.name]
            self._dirty.set()
        log.info("%s is gone", replica.name)
        self._gone.append(replica.name)
        if len(self._gone) > _KEPT_LOGS:
            log_file = self._state.log_file(self._gone.popleft())
            log_file.unlink(missing_ok=True)
            log_file.with_name(log_file.name + ".1").unlink(missing_ok=True)

    def _new_name(self, service: InferenceService) -> str:
        meta = service.metadata
        prefix = meta.name if meta.namespace == "default" else f"{meta.namespace}.{meta.name}"
        serial = self._serials[service.key] = self._serials.get(service.key, -1) + 1
        return f"{prefix}-{serial}"

    def _write_fleet(self) -> None:
        document = FleetDocument(
            services=tuple(self._fleet_service(self._wanted[key]) for key in sorted(self._wanted))
        )
        data = encode_fleet(document)
        revision = xxhash.xxh3_64_hexdigest(data)
        if revision != self._fleet_revision:
            self._state.write(self._state.fleet_file, data)
            self._fleet_revision = revision

    def _fleet_service(self, service: InferenceService) -> FleetService:
        endpoints = tuple(
            Endpoint(name=replica.name, url=replica.url, draining=replica.is_leaving)
            for replica in self._replicas_of(service.key)
            if replica.phase in ("Ready", "Draining")
        )
        entry = fleet_service(service, endpoints=endpoints, internal_key=self._internal_key(service))
        return msgspec.structs.replace(entry, selector={})

    def _internal_key(self, service: InferenceService) -> str:
        return internal_key(self._fleet_key, service.metadata.uid or service.key)

    def _release_drained(self) -> None:
        draining = [replica for replica in self._replicas.values() if replica.phase == "Draining"]
        self._router.is_drain_awaited = bool(draining)
        for replica in draining:
            if self._is_drained(replica):
                replica.drained.set()

    def _is_drained(self, replica: Replica) -> bool:
        if self._router.report is None:
            return self._router.pid is None  # without a router process there are no requests
        entry = self._router.replica(replica.service.key, replica.name, replica.url)
        if entry is None:
            return self._router.report.fleet_revision == self._fleet_revision
        return entry.state == "draining" and entry.inflight == 0

    def _replicas_of(self, key: str) -> list[Replica]:
        return [replica for replica in self._replicas.values() if replica.service.key == key]

    def _is_routable(self, replica: Replica) -> bool:
        entry = self._router.replica(replica.service.key, replica.name, replica.url)
        return replica.phase == "Ready" and entry is not None and entry.routable

    def _is_unreported(self, replica: Replica) -> bool:
        """Whether the engine is ready, but the router has not reported yet whether it serves: the router restarts, or
        has just been told of it."""
        entry = self._router.replica(replica.service.key, replica.name, replica.url)
        return replica.phase == "Ready" and (entry is None or entry.state == "connecting")

    def _is_available(self, replica: Replica, revision: str) -> bool:
        """Whether a rolling update may count it as available: it is routable and, if of the new revision, has been
        ready for `min_ready_s`. If that is still to come, schedule a reconcile for then."""
        if not self._is_routable(replica):
            return False
        left = self._settings.min_ready_s - replica.ready_s
        if replica.revision != revision or left <= 0:
            return True
        self._look_again(left)
        return False

    def _look_again(self, after_s: float) -> None:
        """Schedule a reconcile after `after_s`, unless one is scheduled before that."""
        loop, planned = asyncio.get_running_loop(), self._next_look
        now = loop.time()
        if planned is None or not now < planned.when() <= now + after_s:
            if planned is not None:
                planned.cancel()
            self._next_look = loop.call_later(after_s, self._dirty.set)

    def _service_status(self, key: str) -> ServiceStatus:
        service = self._wanted.get(key)
        wanted = self._goal(service, self._members(key, revision_of(service))) if service else None
        desired = wanted.revision if wanted else ""
        replicas = tuple(self._replica_status(replica, desired) for replica in self._replicas_of(key))
        status = ServiceStatus(
            key=key,
            model=service.served_name if service else "",
            desired=wanted.replicas if wanted else 0,
            revision=desired,
            replicas=replicas,
        )
        return msgspec.structs.replace(status, reason=self._why(status, service, wanted))

    def _replica_status(self, replica: Replica, revision: str) -> ReplicaStatus:
        entry = self._router.replica(replica.service.key, replica.name, replica.url)
        is_routable = self._is_routable(replica)
        reason = replica.reason
        if replica.phase == "Ready" and not is_routable:
            reason = _NOT_ROUTABLE.get(entry.state if entry else "connecting", "")
        return ReplicaStatus(
            name=replica.name,
            service=replica.service.key,
            revision=replica.revision,
            is_current=replica.revision == revision,
            phase="Routable" if is_routable else replica.phase,
            reason=reason,
            restarts=replica.restarts,
            pid=replica.pid,
            url=replica.url,
            gpus=replica.gpus,
            inflight=entry.inflight if entry else 0,
            started=replica.started,
        )

    def _halt_reason(self, wanted: Goal) -> str:
        failed = self._replicas[wanted.halted_by]
        return (
            f"{failed.name} does not become ready ({failed.last_exit}); no further replica is replaced until it is "
            "ready, or the manifest's model source, engine settings or GPUs change"
        )

    def _why(self, status: ServiceStatus, service: InferenceService | None, wanted: Goal | None) -> str:
        if service is None or wanted is None:
            return "deleted; its last requests finish"
        if service.spec.paused:
            return "paused"
        if wanted.most is not None and wanted.most < wanted.replicas:
            return f"NoGPU: the GPUs that are left hold {max(0, wanted.most)} of {wanted.replicas} replicas"
        if status.is_settled:
            return ""
        if wanted.halted_by:
            return f"RolloutHalted: {self._halt_reason(wanted)}"
        for replica in status.replicas:
            if replica.is_current and replica.phase == "BackOff":
                return f"{replica.name} {replica.reason}"
        current = [replica for replica in status.replicas if replica.is_current]
        if len(current) < len(status.replicas) and wanted.waits_for_capacity:
            return "WaitingForCapacity: no GPU is free for an additional replica; set rollout.maxUnavailable to 1"
        if len(current) < len(status.replicas):
            routable = sum(replica.phase == "Routable" for replica in current)
            return f"rolling out: {routable} of {status.desired} replicas changed"
        return f"{status.routable} of {status.desired} replicas routable"


def _without_replicas(service: InferenceService) -> InferenceService:
    return msgspec.structs.replace(service, spec=msgspec.structs.replace(service.spec, replicas=0))


_UNREAD_LIMIT_BYTES: Final = 1 << 20


class ControlServer:
    """Answers commands, and sends the fleet's status to watching clients."""

    def __init__(self, state: StateDir, settings: Settings) -> None:
        self._supervisor = Supervisor(state, settings, self._publish)
        self._state = state
        self._stop = asyncio.Event()
        self._grace_s = 0.0
        self._watchers: set[asyncio.StreamWriter] = set()
        self._last: FleetStatus | None = None

    async def run(self, notify: int | None) -> None:
        """Serve until a command or signal stops the fleet. The descriptor `notify` is closed once commands are
        answered."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        listener = self._state.listen()
        listener.setblocking(False)
        server = await asyncio.start_unix_server(self._serve, sock=listener, limit=MAX_MESSAGE_BYTES)
        if notify is not None:
            os.close(notify)
        try:
            await self._supervisor.run(self._stop, lambda: self._grace_s)
        finally:
            server.close()
            self._state.control_socket.unlink(missing_ok=True)
            self._state.fleet_file.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stops_fleet = False
        try:
            line = await reader.readline()
            try:
                request = decode_request(line)
            except msgspec.DecodeError as error:
                self._send(
                    writer, Refused(message=f"this supervisor does not understand the command: {error}")
                )
                return
            if isinstance(request, Stop):
                self._grace_s = request.grace_s
                self._stop.set()
            elif isinstance(request, Apply):
                if self._stop.is_set():
                    self._send(
                        writer, Refused(message="the fleet is stopping; try again when it has stopped")
                    )
                    return
                stops_fleet = request.stop_on_disconnect
                self._supervisor.apply(request.services)
            self._send(writer, self._supervisor.status())
            self._watchers.add(writer)
            await reader.read()  # until the client disconnects; it sends nothing more
        except (ConnectionError, ValueError):
            pass
        finally:
            self._watchers.discard(writer)
            if stops_fleet:
                self._stop.set()
            writer.close()

    def _publish(self, status: FleetStatus) -> None:
        if status == self._last:
            return
        self._last = status
        for writer in list(self._watchers):
            self._send(writer, status)

    def _send(self, writer: asyncio.StreamWriter, reply: Reply) -> None:
        if writer.transport.get_write_buffer_size() > _UNREAD_LIMIT_BYTES:
            self._watchers.discard(writer)
            writer.transport.abort()
        else:
            writer.write(encode(reply))


def serve(state: StateDir, settings: Settings, notify: int | None = None) -> int:
    """Run the supervisor in this process."""
    state.create()
    lock = state.lock()
    if lock is None:
        print(f"another supervisor owns {state.root}; try again", file=sys.stderr)
        return 1
    for old in state.logs.iterdir():
        if not old.name.startswith("supervisor."):
            old.unlink()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(ControlServer(state, settings).run(notify))
    return 0  # the lock is released by the process's end, so that no other supervisor starts before that


def main(argv: Sequence[str] | None = None, settings: Settings | None = None) -> int:
    """Entry point of `python -m argosy.local.supervisor`, which `argosy up` starts."""
    parser = argparse.ArgumentParser(prog="python -m argosy.local.supervisor")
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--port", type=int, default=DEFAULT_PORT)
    parser.add_argument("--api-keys-file", default="")
    parser.add_argument("--notify-fd", type=int)
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    settings = replace(
        settings or Settings(),
        port=options.port,
        api_key=os.environ.pop(ROUTER_API_KEY_ENV, ""),
        api_keys_file=options.api_keys_file,
    )
    return serve(StateDir(options.state_dir), settings, options.notify_fd)


if __name__ == "__main__":
    sys.exit(main())
