"""The store equals the cluster, however lists, events, writes and gaps interleave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from builders import CONFIG, isvc_object
from fake_kubernetes import FakeKubernetes, Object
from harness import FakeFetchers, FakeRouter, Operator, new_cluster
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, precondition, rule
from virtual_time import virtual_time

from argosy_operator.cluster.api import HistoryLost, ObjectList
from argosy_operator.cluster.store import Listing, Store
from argosy_operator.names import INFERENCE_SERVICES, PODS, Kind
from argosy_operator.reconcile.controller import Controller
from argosy_protocol.fleet import decode_fleet

SOON = 20
"""Seconds; a resync comes every 300."""


class SlowLists(FakeKubernetes):
    """Every list is answered a second after it was made."""

    while_listing: Callable[[], None] | None = None

    async def list(self, kind: Kind, *, namespace: str | None, labels: str = "") -> ObjectList:
        found = await super().list(kind, namespace=namespace, labels=labels)
        if kind is INFERENCE_SERVICES and self.while_listing is not None:
            change, self.while_listing = self.while_listing, None
            await asyncio.sleep(0.5)
            change()
            await asyncio.sleep(0.5)
        return found


@pytest.mark.parametrize("change", ["created", "deleted", "replaced"])
@virtual_time
async def test_changes_during_a_list_are_kept(change: str) -> None:
    cluster = SlowLists()
    key = (INFERENCE_SERVICES, "team", "old")
    changes: dict[str, Callable[[], None]] = {
        "created": lambda: cluster.create(isvc_object("new")),
        "deleted": lambda: cluster.remove(key),
        "replaced": lambda: (cluster.remove(key), cluster.create(isvc_object("old"))),  # type: ignore[dict-item,func-returns-value]
    }
    async with Operator(cluster) as operator:
        cluster.create(isvc_object("old"))
        await operator.settle()
        cluster.while_listing = changes[change]
        await operator.controller.resync()
        await asyncio.sleep(SOON)
        published = {each.name: each.uid for each in decode_fleet(cluster.fleet()).services}
    assert published == {
        name: obj["metadata"]["uid"]
        for (kind, _, name), obj in cluster.objects.items()
        if kind is INFERENCE_SERVICES
    }


@virtual_time
async def test_after_an_expired_watch_everything_is_read_anew() -> None:
    """The event source lists its kind again, which shows what is there, but not what was deleted."""
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        for name in ("stays", "goes"):
            cluster.create(isvc_object(name))
        await operator.settle()
        await asyncio.sleep(SOON)
        listeners, cluster.listeners = cluster.listeners, []
        cluster.remove((INFERENCE_SERVICES, "team", "goes"))
        cluster.listeners = listeners
        operator.controller.handle(INFERENCE_SERVICES, None, cluster.isvc("stays"))
        await asyncio.sleep(SOON)
        published = [each.name for each in decode_fleet(cluster.fleet()).services]
    assert published == ["stays"]


class RestoredBackup(FakeKubernetes):
    """Its lists have earlier versions from some moment on."""

    backwards = 0

    async def list(self, kind: Kind, *, namespace: str | None, labels: str = "") -> ObjectList:
        found = await super().list(kind, namespace=namespace, labels=labels)
        return ObjectList(found.items, str(int(found.version) + 1000 - self.backwards))


@virtual_time
async def test_the_operator_ends_when_the_cluster_has_gone_back_to_an_earlier_state() -> None:
    """What is stored is of later versions than all that is to come, so no event would count."""
    cluster = RestoredBackup()
    router = FakeRouter(cluster)
    controller = Controller(
        cluster, CONFIG, fetch=router.fetch, fetch_load=router.fetch_load, ask_progress=FakeFetchers()
    )
    cluster.create(isvc_object())
    await controller.start()
    work = asyncio.create_task(controller.run())
    await asyncio.sleep(400)
    cluster.backwards = 500
    controller.list_again(None)
    await asyncio.sleep(SOON)
    cluster.backwards = 0
    await asyncio.sleep(700)
    assert not work.done(), "it was a little behind"
    cluster.backwards = 500
    with pytest.raises(ExceptionGroup) as caught:
        await work
    (error,) = caught.value.exceptions
    assert isinstance(error, HistoryLost)


class ListAndWatch(RuleBasedStateMachine):
    """A cluster with a history, a watch that lags behind it or loses a part of it, lists that take their time."""

    names = st.sampled_from(["a", "b", "c"])
    lists = Bundle("lists")

    def __init__(self) -> None:
        super().__init__()
        self.store = Store()
        self.truth: dict[str, Object] = {}
        self.history: list[tuple[str | None, Object]] = []
        self.delivered = 0
        self.number = 0
        self.has_gap = False
        """The watch lost events since the last whole list: only a new one can tell what was deleted."""
        self.under_way = ExitStack()

    def version(self) -> str:
        self.number += 1
        return str(self.number)

    def write(self, event: str, name: str, uid: str) -> Object:
        metadata = {"name": name, "namespace": "team", "uid": uid, "resourceVersion": self.version()}
        obj = {"metadata": metadata}
        if event == "DELETED":
            del self.truth[name]
        else:
            self.truth[name] = obj
        self.history.append((event, obj))
        return obj

    def tell(self, event: str | None, obj: Object) -> None:
        if event == "DELETED":
            self.store.remove(PODS, obj)
        else:
            self.store.put(PODS, obj)

    @rule(name=names)
    def create_or_modify(self, name: str) -> None:
        if name in self.truth:
            self.write("MODIFIED", name, self.truth[name]["metadata"]["uid"])
        else:
            self.write("ADDED", name, f"uid-{self.number}")

    @rule(name=names)
    def own_write(self, name: str) -> None:
        """The answer to the operator's own write comes before the event."""
        if name in self.truth:
            self.store.put(PODS, self.write("MODIFIED", name, self.truth[name]["metadata"]["uid"]))

    @rule(name=names)
    def delete(self, name: str) -> None:
        if name in self.truth:
            self.write("DELETED", name, self.truth[name]["metadata"]["uid"])

    @rule(name=names)
    def leave_and_return(self, name: str) -> None:
        """A label goes and comes back: the watch says that the same object is deleted, then added."""
        if name in self.truth:
            uid = self.truth[name]["metadata"]["uid"]
            self.write("DELETED", name, uid)
            self.write("ADDED", name, uid)

    @rule(count=st.integers(1, 4))
    def deliver(self, count: int) -> None:
        for event, obj in self.history[self.delivered : self.delivered + count]:
            self.tell(event, obj)
            self.delivered += 1

    @rule()
    @precondition(lambda self: self.delivered < len(self.history))
    def expire(self) -> None:
        """410 Gone: undelivered events are lost; the watch lists again and continues from there."""
        self.delivered = len(self.history)
        self.has_gap = True
        for obj in self.truth.values():
            self.tell(None, obj)

    @rule(target=lists)
    def begin_list(self) -> tuple[Listing, list[list[Object]]]:
        return self.under_way.enter_context(self.store.listing(PODS, None)), []

    @rule(begun=lists)
    def snapshot(self, begun: tuple[Listing, list[Any]]) -> None:
        """The API server makes the list; its answer is on the way."""
        if not begun[1]:
            begun[1].extend([list(self.truth.values()), self.version()])

    @rule(begun=consumes(lists))
    def finish_list(self, begun: tuple[Listing, list[Any]]) -> None:
        listing, answer = begun
        self.snapshot((listing, answer))
        self.store.adopt(listing, *answer)

    def teardown(self) -> None:
        """Lists that never came back leave no trace; then everything is delivered, and after a gap read anew."""
        self.under_way.close()
        self.deliver(len(self.history))
        if self.has_gap:
            with self.store.listing(PODS, None) as listing:
                self.store.adopt(listing, list(self.truth.values()), self.version())
        held = {obj["metadata"]["name"]: obj for obj in self.store.all(PODS)}
        assert held == self.truth


class OpaqueListAndWatch(ListAndWatch):
    """The same where resource versions are not numbers."""

    def version(self) -> str:
        self.number += 1
        return f"v{(self.number * 7919) % 10007}"


TestListAndWatch = ListAndWatch.TestCase
TestListAndWatch.settings = settings(
    max_examples=2 * settings().max_examples, stateful_step_count=40, deadline=None
)
TestOpaqueListAndWatch = OpaqueListAndWatch.TestCase
TestOpaqueListAndWatch.settings = settings(
    max_examples=2 * settings().max_examples, stateful_step_count=40, deadline=None
)


def test_a_list_that_comes_late_takes_nothing_from_one_begun_after_it() -> None:
    """Where resource versions are not numbers, and the event that would tell says nothing new."""
    machine = OpaqueListAndWatch()
    late = machine.begin_list()
    machine.snapshot(late)
    machine.create_or_modify("b")
    machine.finish_list(machine.begin_list())
    machine.deliver(1)
    machine.finish_list(late)
    machine.teardown()
