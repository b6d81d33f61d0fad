"""Reconciles one InferenceService: observe, decide, act, report.

Owns the order of these steps, what an error means for the status, and which services have a turn to roll out a change
of the operator's own. Decisions are pure (`desired.diff`); when to reconcile is the controller's business. Invariants:
level-based, so any step may fail or be repeated; an observation is taken without an await, so that all of it is of one
moment, and leads to one diff, and a second one is for the report only; gates are set before anything else, and
Deployments are applied after the Secret; StatefulSets, whose contents pods say, are applied last, so that one which is
refused holds up nothing else, and what the pods call for is done though another child is refused; nothing is written
that is already so; there is no state but the cluster's, except since when pods stop, as their own times are of another
clock.

Few services at a time have a turn (`OperatorConfig.max_concurrent_rollouts`); which one has to wait, `desired.upgrades`
decides. An annotation of the Deployment records a turn and what became of it; `RolloutLock` covers the time from the
decision to the write. A service whose Deployment is left alone keeps the annotation, but holds up no other one; nor
does a Deployment that is no service's, such as one that was left behind when its service was deleted, or one that
somebody else made for it. A turn that ends in no healthy service is not kept for ever. One that lacks room in the
cluster counts no more after its deadline. One that is older than MAX_TURN_S has failed, whatever its Deployment says:
nobody writes that of a service that is paused meanwhile, or refused by the API server. Of those that have failed as
many count no more as may be had at once: one service that fails for reasons of its own holds up nobody, and a change
that fails everywhere stops at twice that number. Invariant: no more services are given a turn than may have one,
because a claim is made without an await after the observation that found one free, and is kept until it is known what
became of the write. Who waits in which order, each reconcile tells again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, Final

import msgspec
from msgspec import structs

from argosy_operator.cluster.api import Api, ApiError, OperatorError
from argosy_operator.cluster.fetch_watch import FetchWatch
from argosy_operator.cluster.router_watch import LoadWatch, RouterWatch
from argosy_operator.cluster.store import Store, oversize_problem, service_of
from argosy_operator.config import OperatorConfig, RolloutShare
from argosy_operator.desired.children import deployment_problem
from argosy_operator.desired.diff import ChildChange, Diff, GateChange, cached_patch, compute_diff, gate_patch
from argosy_operator.desired.scaling import CostChange, cost_changes
from argosy_operator.names import (
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    PODS,
    STATEFUL_SETS,
    TURN_ANNOTATION,
    Kind,
    Name,
    Object,
    child_name,
    deployment_name,
    kind_of,
    object_name,
)
from argosy_operator.observation import (
    CHILD_KINDS,
    Observation,
    Scalers,
    Turn,
    controller_uid,
    has_the_turn,
    is_owned,
    read_turn,
)
from argosy_operator.pod import Pod, Problem, min_time, own_pods, seconds_between, with_workers
from argosy_operator.reconcile.autoscaler import Autoscaler
from argosy_operator.reconcile.child_writer import ChildWriter, KeySecrets, NamedSecrets, patched
from argosy_operator.reconcile.fleet_publisher import FleetPublisher
from argosy_operator.reconcile.metrics import OperatorMetrics
from argosy_operator.reconcile.reporter import Reporter
from argosy_operator.reconcile.workqueue import CpuMeter, run_together
from argosy_operator.status.problems import scaling_status, unmounted_pods
from argosy_resource.types import InferenceService, parse

_REPORTED: Final = (400, 403, 422)
"""HTTP statuses of refusals that do not go away by themselves, so a user should read of them."""
PATIENCE_S: Final = 60.0
"""Seconds for which other failures of one service are not told, since most pass: the API server is busy, say. One that
lasts does not: a webhook that does not answer refuses every change with 500."""
_SURPLUS_AT_ONCE: Final = 16
"""Objects that one reconcile deletes. Who may create Services can label any number as a service's children, and other
services wait for a worker meanwhile."""
_LAG_S: Final = 1.0
"""Seconds until a service is looked at again whose objects the watch, or the API server, does not show yet as they are.
Without a pause a worker would do nothing else meanwhile."""
MAX_TURN_S: Final = 7200.0
"""The longest that a turn holds up others. A service's own deadline may be a day."""
_LEFT_OUT: Final = Problem(
    "FleetDocumentFull",
    "routers do not know this service: the document that tells them of all services is full, and this namespace takes "
    "the largest part of it; delete services of this namespace, or give them fewer and shorter aliases",
)

_Version = tuple[str, int | None]
"""UID and generation of a resource."""


def _version(obj: Mapping[str, Any]) -> _Version:
    return obj["metadata"]["uid"], obj["metadata"].get("generation")


class Reconciler:
    """Reconciles single resources against the store and the API server."""

    def __init__(
        self,
        api: Api,
        store: Store,
        config: OperatorConfig,
        *,
        metrics: OperatorMetrics,
        now: Callable[[], str],
        routers: RouterWatch,
        fetches: FetchWatch,
        loads: LoadWatch,
        autoscaler: Autoscaler,
        fleet: FleetPublisher,
        is_known: Callable[[str], bool],
        wake: Callable[[Name], None],
        look_again: Callable[[Name, float], None],
    ) -> None:
        """`is_known` says of a namespace whether it was read and may be; `wake` has a service reconciled soon."""
        self._api = api
        self._store = store
        self._config = config
        self._metrics = metrics
        self._now = now
        self._is_known = is_known
        self._autoscaler = autoscaler
        self._fleet = fleet
        self._look_again = look_again
        self._loads = loads
        self.key_secrets = KeySecrets(api, metrics)
        self.named_secrets = NamedSecrets(api)
        self._turn = RolloutLock(
            store, config.max_concurrent_rollouts, wake, now=now, is_left_alone=self._is_left_alone
        )
        self.costs: dict[Name, float] = {}
        """Seconds of CPU time that the last reconcile of each service took."""
        self._left_alone: dict[Name, tuple[_Version, bool]] = {}
        """Whether a service is, and the version of it that says so."""
        self._failing: dict[Name, str] = {}
        """Since when the API server has carried out no change of a service's children (RFC 3339)."""
        self._observer = Observer(store, self._turn, routers, fetches, loads, fleet, now=now)
        self._children = ChildWriter(api, store, metrics)
        self._reporter = Reporter(api, store, config, metrics=metrics, now=now, look_again=look_again)

    def use(self, config: OperatorConfig) -> None:
        """Reconcile with these settings from now on: other fleet keys are valid. Each service's Secret is checked."""
        self._config = config
        self.key_secrets.check_all_again()

    def begin(self) -> None:
        """Note that the operator leads from now on: what another one's clock said counts no longer than that."""
        self._observer.began = self._now()
        self._failing.clear()

    async def reconcile(self, key: Name) -> None:
        """Reconcile one resource once.

        Raises:
            OperatorError: try again later; what a user should know of it is already in the status.
        """
        self._turn.begin(key)
        meter = CpuMeter()
        try:
            await meter.run(self._reconcile(key))
        finally:
            self.costs[key] = meter.seconds
            if self._store.get(INFERENCE_SERVICES, *key) is None:
                del self.costs[key]
            self._turn.wake_next()

    def wake_next(self) -> None:
        """Have services reconciled that wait for a turn, if one is free."""
        self._turn.wake_next()

    async def _reconcile(self, key: Name) -> None:
        if self._turn.is_unclear(key):
            await self._read_deployment(key)
        obj = self._store.get(INFERENCE_SERVICES, *key)
        if obj is None or obj["metadata"].get("deletionTimestamp"):
            self._turn.leave(key)
            self._left_alone.pop(key, None)
            self._failing.pop(key, None)
            self._observer.forget(key)
            return  # its children are deleted by their owner reference, and the fleet document is rendered again
        try:
            stored = parse(obj)
        except msgspec.ValidationError as error:
            await self._reporter.report_invalid(obj, oversize_problem(obj) or str(error))
            return
        scalers = self._autoscaler.scalers(stored)
        service = self._autoscaler.scaled(stored)
        observed = self._observer.observe(service, scalers)
        diff = compute_diff(service, observed, self._config)
        if diff.plan.rollout.waits_for and diff.plan.problem is None and not service.spec.paused:
            self._turn.wait(key)
        else:
            self._turn.leave(key)
        self._left_alone[key] = _version(obj), diff.plan.problem is not None
        decision = self._autoscaler.decision(service)
        # Decided once: what is not written now must not be written later, to a service that is another one by then.
        children = [each for each in diff.children if self._children.may_write(each)]
        contested = tuple(
            f"{each.wanted['kind']} {each.wanted['metadata']['name']}"
            for each in diff.children
            if each not in children
        )
        takes_turn = diff.takes_turn and any(kind_of(each.wanted) is DEPLOYMENTS for each in children)
        failure: OperatorError | None = None
        try:
            # No await between the observation and the claim: see RolloutLock.
            with self._turn.claim(key) if takes_turn else nullcontext():
                is_current = await self._act(service, observed, diff, children)
            if not is_current:
                return  # deleted: its children go with it; a newer resource, or the rest, is reconciled next
        except OperatorError as error:
            failure = error
            if isinstance(error, ApiError):
                if error.is_namespace_ending:
                    return  # the resource is deleted as well, in its turn
                if error.status and self._turn.is_unclear(key):
                    with suppress(ApiError):  # then the next reconcile reads it
                        await self._read_deployment(key)
                if error.status not in _REPORTED and not self._fails_for_long(key):
                    raise
        else:
            self._failing.pop(key, None)
        problem = Problem(failure.reason, str(failure)) if failure is not None else diff.plan.problem
        if problem is None and self._fleet.is_left_out(key):
            problem = _LEFT_OUT
        later = self._observer.observe(service, scalers)
        scaling = scaling_status(service, decision, diff.gates, self._now(), observed.scalers)
        asked = stored.spec.replicas
        with nullcontext() if failure is None else suppress(ApiError):  # what failed first is raised
            await self._reporter.report(
                service, later, diff.plan, problem, scaling, asked=asked, contested=contested
            )
        if failure is not None:
            raise failure

    def _fails_for_long(self, key: Name) -> bool:
        """Note that a change of a service failed. Whether all have for PATIENCE_S."""
        now = self._now()
        return seconds_between(self._failing.setdefault(key, now), now) >= PATIENCE_S

    async def _read_deployment(self, key: Name) -> None:
        """Have the store know what became of a write whose answer is missing.

        Raises:
            ApiError: that is still not known.
        """
        live = await self._api.get(DEPLOYMENTS, key[0], deployment_name(key[1]))
        if live is not None:
            self._store.put(DEPLOYMENTS, live)
        self._turn.note_read(key)

    async def _act(
        self, service: InferenceService, observed: Observation, diff: Diff, children: Sequence[ChildChange]
    ) -> bool:
        """Do what was decided. False if the resource turned out to be deleted, or newer than what was observed, or if
        the rest follows."""
        await run_together(partial(self._set_gate, service, observed, gate) for gate in diff.gates)
        if children and not await self._is_current(service):
            return False
        changes: dict[Kind, list[ChildChange]] = {DEPLOYMENTS: [], STATEFUL_SETS: []}
        for change in children:
            changes.setdefault(kind_of(change.wanted), []).append(change)
        deployments, node_sets = changes.pop(DEPLOYMENTS), changes.pop(STATEFUL_SETS)
        steps: list[Callable[[], Awaitable[None]]] = [
            partial(self._apply, service, observed, each) for others in changes.values() for each in others
        ]
        if diff.secret is not None:
            secret, is_suspect = diff.secret, diff.is_key_suspect
            unmounted = unmounted_pods(observed.pods, observed.time)
            steps.insert(
                0,
                partial(self.key_secrets.ensure, service, secret, is_suspect=is_suspect, unmounted=unmounted),
            )
        try:
            await run_together(steps)
            is_done = await self._act_on_deployments(service, observed, diff, deployments)
        except OperatorError:
            with suppress(OperatorError):  # what failed first is reported
                await self._act_on_pods(service, observed, diff, node_sets)
            raise
        await self._act_on_pods(service, observed, diff, node_sets)
        if not is_done:
            self._look_again((service.metadata.namespace, service.metadata.name), 0.0)
        return is_done

    async def _act_on_deployments(
        self, service: InferenceService, observed: Observation, diff: Diff, deployments: list[ChildChange]
    ) -> bool:
        """False if something is left to be looked at before a Deployment may be applied."""
        if deployments and not await self.named_secrets.check(service):
            return False
        for change in deployments:  # in the plan's order
            await self._apply(service, observed, change)
        if diff.ends_turn:
            await self._end_turn(observed.deployment)
        await self._delete(service, [each for each in diff.surplus if each[0] is not STATEFUL_SETS])
        return True

    async def _act_on_pods(
        self, service: InferenceService, observed: Observation, diff: Diff, node_sets: list[ChildChange]
    ) -> None:
        """What the pods that there are call for, whether the other children can be applied or not."""
        now = self._now()
        steps = [partial(self._apply, service, observed, each) for each in node_sets]
        steps.append(
            partial(self._delete, service, [each for each in diff.surplus if each[0] is STATEFUL_SETS])
        )
        steps += [partial(self._children.delete_pod, service.metadata.namespace, pod) for pod in diff.broken]
        steps += [
            partial(self._patch_pod, service, cached.pod, cached_patch(cached, now=now))
            for cached in diff.cached
        ]
        await run_together(steps)

    async def _delete(
        self, service: InferenceService, surplus: Sequence[tuple[Kind, Mapping[str, Any]]]
    ) -> None:
        for kind, obj in surplus[:_SURPLUS_AT_ONCE]:
            await self._children.delete(kind, obj)
        if len(surplus) > _SURPLUS_AT_ONCE:
            self._look_again((service.metadata.namespace, service.metadata.name), _LAG_S)

    async def _set_gate(self, service: InferenceService, observed: Observation, gate: GateChange) -> None:
        router_lives = observed.routers.alive > 0
        patch = gate_patch(gate.pod, gate.status, now=self._now(), router_lives=router_lives)
        await self._patch_pod(service, gate.pod, patch)

    async def _apply(self, service: InferenceService, observed: Observation, change: ChildChange) -> None:
        if change.removed_replicas:
            await self._mark_least_valuable(service, observed, change.removed_replicas)
        await self._children.apply(change)

    async def _end_turn(self, deployment: Mapping[str, Any] | None) -> None:
        """Have the Deployment say no more that it has the turn, if it still does after it was applied: the service is
        paused, or somebody else has written the annotation as well."""
        assert deployment is not None
        live = self._store.get(DEPLOYMENTS, *object_name(deployment))
        if live is None or live["metadata"]["uid"] != deployment["metadata"]["uid"] or not has_the_turn(live):
            return
        await self._children.remove_annotation(DEPLOYMENTS, live, TURN_ANNOTATION)

    async def _mark_least_valuable(
        self, service: InferenceService, observed: Observation, removed: int
    ) -> None:
        """Have the Deployment give up the replicas whose caches are worth least."""
        loads = await self._loads.ask()
        changes = cost_changes(observed.without_canary.pods, loads.get(service.key), removed)
        await run_together(partial(self._set_deletion_cost, service, change) for change in changes)

    async def _set_deletion_cost(self, service: InferenceService, change: CostChange) -> None:
        sent = self._api.patch(PODS, service.metadata.namespace, change.pod.name, change.patch)
        await patched(self._store, self._metrics, PODS, "patch", sent)

    def _is_left_alone(self, key: Name) -> bool:
        """Whether a service's Deployment is not applied: for a problem of its plan, or as its namespace is refused."""
        if not self._is_known(key[0]):
            return True
        obj = self._store.get(INFERENCE_SERVICES, *key)
        if obj is None:
            self._left_alone.pop(key, None)
            return False
        known, is_left_alone = self._left_alone.get(key, (None, False))
        if known != _version(obj):
            try:
                is_left_alone = deployment_problem(parse(obj), self._config) is not None
            except msgspec.ValidationError:
                is_left_alone = False
            self._left_alone[key] = _version(obj), is_left_alone
        return is_left_alone

    async def _patch_pod(self, service: InferenceService, pod: Pod, patch: dict[str, Any]) -> None:
        sent = self._api.patch_status(PODS, service.metadata.namespace, pod.name, patch, strategic=True)
        await patched(self._store, self._metrics, PODS, "patch-status", sent)

    async def _is_current(self, service: InferenceService) -> bool:
        """Whether the resource is as it was observed. Asks the API server, because the store may lag behind, and each
        kind on its own: an old number of replicas beside a new Deployment would cost living replicas. A newer resource
        is stored, and reconciled next."""
        metadata = service.metadata
        live = await self._api.get(INFERENCE_SERVICES, metadata.namespace, metadata.name)
        if live is None or live["metadata"].get("deletionTimestamp"):
            return False
        if (live["metadata"]["uid"], live["metadata"].get("generation")) == (
            metadata.uid,
            metadata.generation,
        ):
            return True
        is_newer = self._store.put(INFERENCE_SERVICES, live)
        self._look_again((metadata.namespace, metadata.name), 0.0 if is_newer else _LAG_S)
        return False


class Observer:
    """Observes single services."""

    def __init__(
        self,
        store: Store,
        turn: RolloutLock,
        routers: RouterWatch,
        fetches: FetchWatch,
        loads: LoadWatch,
        fleet: FleetPublisher,
        *,
        now: Callable[[], str],
    ) -> None:
        self._fleet = fleet
        self._store = store
        self._turn = turn
        self._routers = routers
        self._fetches = fetches
        self._loads = loads
        self._now = now
        self.began = now()
        """When the operator began to lead."""
        self._stopping: dict[Name, dict[str, str]] = {}
        """When each pod that is terminating was first seen so, by service and UID."""

    def observe(self, service: InferenceService, scalers: Scalers) -> Observation:
        key = (service.metadata.namespace, service.metadata.name)
        children = self._children(service, key)
        pods = with_workers(service, own_pods(service, self._store.children(PODS, key)))
        pods = self._with_their_ends(key, pods)
        reports, unpolled = self._fetches.view, self._fetches.unpolled
        deployment = children.get((DEPLOYMENTS, (service.metadata.namespace, child_name(service))))
        return Observation(
            deployment=deployment if deployment is not None and is_owned(deployment, service) else None,
            children=children,
            pods=pods,
            routers=self._routers.view,
            fetches={pod.uid: reports[pod.uid] for pod in pods if pod.uid in reports},
            unpolled_fetches=frozenset(pod.uid for pod in pods if pod.uid in unpolled),
            lost_names=self._fleet.lost_names_of(key),
            rolling_elsewhere=self._turn.holder(besides=key),
            lacks_canary=self._lacks_canary(service),
            published_canary=self._fleet.canary_of(key),
            load=self._loads.view().get(service.key) if service.spec.rollout.canary is not None else None,
            scalers=scalers
            if service.spec.scaling is not None
            else Scalers(of_deployment=scalers.of_deployment),
            began=self.began,
            time=self._now(),
        )

    def forget(self, key: Name) -> None:
        self._stopping.pop(key, None)

    def _with_their_ends(self, key: Name, pods: tuple[Pod, ...]) -> tuple[Pod, ...]:
        before, now = self._stopping.pop(key, {}), self._now()
        stopping = {
            each.uid: min_time(before.get(each.uid, now), now)
            for pod in pods
            for each in (pod, *pod.workers)
            if each.is_terminating
        }
        if not stopping:
            return pods
        self._stopping[key] = stopping

        def with_its_end(pod: Pod) -> Pod:
            workers = tuple(map(with_its_end, pod.workers))
            return structs.replace(pod, stopping_since=stopping.get(pod.uid, ""), workers=workers)

        return tuple(map(with_its_end, pods))

    def _children(self, service: InferenceService, key: Name) -> dict[tuple[Kind, Name], Object]:
        """Children by label, and by name, because a child may have lost its label."""
        found = {}
        for kind in CHILD_KINDS:
            named = self._store.get(kind, service.metadata.namespace, child_name(service))
            for obj in (*self._store.children(kind, key), *([named] if named is not None else ())):
                found[kind, object_name(obj)] = obj
        return found

    def _lacks_canary(self, service: InferenceService) -> bool:
        canary = service.spec.router.canary
        if canary is None:
            return False
        obj = self._store.get(INFERENCE_SERVICES, service.metadata.namespace, canary.service)
        return obj is None or bool(obj["metadata"].get("deletionTimestamp"))


class RolloutLock:
    """Knows which services have a turn. Deployments that have one are marked in `store` (`has_the_turn`), and those of
    services that have a ready replica are tallied (`serves`).
    `wake(service)` has one that waits reconciled again; `is_left_alone(service)`: whether its Deployment is not applied
    at present."""

    def __init__(
        self,
        store: Store,
        share: RolloutShare,
        wake: Callable[[Name], None],
        *,
        now: Callable[[], str],
        is_left_alone: Callable[[Name], bool],
    ) -> None:
        self._store = store
        self._share = share
        self._is_left_alone = is_left_alone
        self._wake = wake
        self._now = now
        self._seen: dict[Name, tuple[str, str]] = {}
        """When a turn began by its Deployment, which another operator's clock may have said, and when it was first
        seen."""
        self._claimed: set[Name] = set()
        self._unclear: set[Name] = set()
        """Those of which it is not known whether their Deployment says that they have a turn: the answer to the write
        is missing, and the watch may lag behind."""
        self._waiting: dict[Name, None] = {}
        """Services that wait for a turn, and for nothing else, the one that began first at the front."""
        self._woken: set[Name] = set()
        """Those that were told of a free turn, until they are reconciled."""

    def holder(self, *, besides: Name) -> str:
        """If no turn is free: another service that has one, or is about to (`namespace/name`). Otherwise empty."""
        if not self._claimed and not self._store.count_marked(DEPLOYMENTS):
            return ""
        holders, limit = self._holders(besides=besides), self._limit
        return "/".join(holders[0]) if len(holders) >= limit else ""

    @contextmanager
    def claim(self, service: Name) -> Iterator[None]:
        """Hold a turn for a service until its Deployment says that it has it, or could not be written. If that is not
        clear, the turn is held until `note_read`."""
        self._claimed.add(service)
        try:
            yield
        except ApiError as error:
            if error.is_unclear:
                self._unclear.add(service)
            raise
        finally:
            if service not in self._unclear:
                self._claimed.discard(service)

    def is_unclear(self, service: Name) -> bool:
        """Whether it is not known if the service's Deployment says that it has a turn: it has to be read."""
        return service in self._unclear

    def note_read(self, service: Name) -> None:
        """Note that the store has the service's Deployment as it is."""
        self._unclear.discard(service)
        self._claimed.discard(service)

    def begin(self, service: Name) -> None:
        """Note that a service is being reconciled: it tells anew whether it waits."""
        self._woken.discard(service)

    def wait(self, service: Name) -> None:
        self._waiting.setdefault(service)

    def leave(self, service: Name) -> None:
        """Note that a service waits for no turn, at least not for that alone."""
        self._waiting.pop(service, None)

    def wake_next(self) -> None:
        """Have as many services reconciled as there are free turns."""
        if not self._waiting:
            return
        self._woken = {each for each in self._woken if not self._is_left_alone(each)}
        free = self._limit - len(self._woken) - len(self._holders())
        for service in [*self._waiting]:
            if free <= 0:
                return
            self._waiting.pop(service)
            if not self._is_left_alone(service):
                free -= 1
                self._woken.add(service)
                self._wake(service)

    @property
    def _limit(self) -> int:
        """Services of which no replica is ready are left out: their namespace would have others change at once."""
        return self._share.of(self._store.tally(DEPLOYMENTS))

    def _holders(self, *, besides: Name | None = None) -> list[Name]:
        """The services whose turn counts, those that have failed first."""
        claimed = self._claimed - {each for each in self._unclear if self._is_left_alone(each)}
        rolling, failed = dict.fromkeys(claimed), []
        turns = list(self._turns())
        self._seen = {service: self._times_of(service, turn) for service, turn in turns}
        now = self._now()
        for service, turn in turns:
            has_passed = seconds_between(min_time(*self._seen[service]), now) >= MAX_TURN_S
            if turn.state == "failed" or (has_passed and not turn.state):
                failed.append(service)
            elif not turn.state:
                rolling.setdefault(service)
        found = (*failed[self._limit :], *rolling)
        return [each for each in found if each != besides]

    def _times_of(self, service: Name, turn: Turn) -> tuple[str, str]:
        known = self._seen.get(service)
        seen = known[1] if known is not None and known[0] == turn.since else self._now()
        return turn.since or seen, seen

    def _turns(self) -> Iterator[tuple[Name, Turn]]:
        for obj in self._store.marked(DEPLOYMENTS):
            service, turn = service_of(obj), read_turn(obj)
            owner = None if service is None else self._store.get(INFERENCE_SERVICES, *service)
            if service is None or turn is None or owner is None or service in self._claimed:
                continue
            is_its_own = controller_uid(obj) == owner["metadata"]["uid"]
            if (
                is_its_own
                and obj["metadata"]["name"] == deployment_name(service[1])
                and not self._is_left_alone(service)
            ):
                yield service, turn
