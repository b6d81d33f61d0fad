"""Lists the cluster into the store, each namespace by itself, and knows which ones cannot be read.

Owns when a namespace is listed, what its refusal means, and how that is told: a line of the log, a metric, an Event
about the Lease, and a summary for the Lease itself. Must not know what is done with the objects. Invariants: a
namespace that cannot be read keeps nothing from the others, and loses nothing of what the store knew of it, unless the
API server says that it does not exist; no service counts as known before every kind was listed in its namespace; a
change is told once; an API server that is away costs two deadlines, however many namespaces there are.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final

from msgspec import Struct

from argosy_operator.cluster.api import Api, ApiError
from argosy_operator.cluster.store import Store
from argosy_operator.config import OperatorConfig
from argosy_operator.names import INFERENCE_SERVICES, LEASES, PODS, Kind, Object
from argosy_operator.reconcile.metrics import OperatorMetrics
from argosy_operator.reconcile.reporter import EventRecorder
from argosy_operator.status.report import Event
from argosy_resource.types import ObjectMeta

logger = logging.getLogger(__name__)

RETRY: Final = 5.0
"""Seconds until a namespace that could not be read is asked again, doubled with each further failure."""
RETRY_MAX: Final = 60.0
ALL: Final = "*"
"""Stands for all namespaces, where a namespace is named."""
_PATIENCE: Final = 2
"""Failures in a row after which a namespace without an answer is unreadable. A refusal counts at once."""
_REFUSALS: Final[Mapping[int, str]] = {401: "Unauthorized", 403: "Forbidden", 404: "NotFound"}
"""Answers after which the operator does nothing in a namespace, since it would be refused too, and their names."""
WATCH_PATIENCE: Final = 60.0
"""Seconds without a watch after which a namespace is unreadable: only resyncs show what changes there."""
NOT_WATCHED: Final = "NotWatched"
_GONE: Final = "NamespaceGone"
_ROUNDING: Final = 0.01
"""Seconds by which a timer may come early."""
OLDER_PATIENCE: Final = 60.0
"""Seconds for which lists may be older than one before: no API server that is a little behind is for so long."""
_SILENT: Final = 2
"""Namespaces without an answer in a row after which the others are not asked."""


class Scope(Struct, frozen=True, kw_only=True):
    """A namespace, and the kinds that are listed and watched there. kopf watches the same kinds in all namespaces of an
    operator, and ends with the first watch that fails, so each scope takes one."""

    namespace: str | None
    """None for all of them."""
    watched: Mapping[Kind, str]


class _Place:
    """What is known of one scope."""

    def __init__(self, namespace: str | None, kinds: Mapping[Kind, str], *, is_served: bool) -> None:
        self.namespace = namespace
        self.kinds = kinds
        self.is_served = is_served
        self.unlisted = set(kinds)
        """Kinds that were never listed."""
        self.error: ApiError | None = None
        """Why the last attempt failed; None if it did not, or there was none."""
        self.failures = 0
        self.retry_at = 0.0
        self.listed_at = 0.0
        """When the last attempt ended, or was given up as others had no answer."""
        self.asked_at = 0.0
        """When the last attempt began."""
        self.is_suspect = False
        """Whether it is to be listed because its watches fail."""
        self.unwatched: dict[Kind, float] = {}
        """Kinds that should be watched and are not, and since when."""
        self.failed_watches: dict[Kind | None, int] = {}
        """Requests in a row of each kind's watches that failed; None for what comes before all of them."""
        self.watch_error = ""
        """What the last one that failed was answered."""
        self.versions: dict[Kind, int] = {}
        """The latest version of each kind's lists."""
        self.older_since: dict[Kind, float] = {}
        """Since when a kind's lists are older than one before."""
        self.is_gone = False
        self.posted = ""
        """The reason that the last Event told; empty if that was that it can be read."""
        self.told = ""
        self.changed = asyncio.Event()

    @property
    def name(self) -> str:
        return self.namespace or ALL

    @property
    def reason(self) -> str:
        """Why it cannot be read; empty if it can, or if that is not certain yet."""
        if self.error is None:
            return NOT_WATCHED if self.is_unwatched else ""
        if self.is_gone:
            return _GONE
        if (refusal := _REFUSALS.get(self.error.status)) is not None:
            return refusal
        if self.failures < _PATIENCE and not self.unlisted:
            return ""
        return "ApiError" if self.error.status else "NoAnswer"

    @property
    def answer(self) -> str:
        """What the API server answered that makes it unreadable."""
        if self.error is not None:
            return str(self.error)
        kinds = ", ".join(sorted(kind.plural for kind in self.unwatched))
        return f"no watch of {kinds} for {WATCH_PATIENCE:g} s: {self.watch_error or 'no answer'}"

    @property
    def is_unwatched(self) -> bool:
        """Whether a kind has had no watch for WATCH_PATIENCE."""
        return self.unwatched_at <= asyncio.get_running_loop().time() + _ROUNDING

    @property
    def unwatched_at(self) -> float:
        """When `is_unwatched` becomes true."""
        return min(self.unwatched.values(), default=math.inf) + WATCH_PATIENCE

    @property
    def is_refused(self) -> bool:
        return self.is_gone or (self.error is not None and self.error.status in _REFUSALS)


class Lister:
    """Lists the namespaces that are served, and pods in the operator's own."""

    def __init__(
        self,
        api: Api,
        store: Store,
        config: OperatorConfig,
        watched: Mapping[Kind, str],
        *,
        metrics: OperatorMetrics,
        now: Callable[[], str],
        is_leading: Callable[[], bool],
        on_listed: Callable[[Collection[str | None]], None],
    ) -> None:
        """`on_listed` is called with namespaces that were listed, and with those that have been refused since, or are
        gone."""
        self._api = api
        self._store = store
        self._config = config
        self._metrics = metrics
        self._is_leading = is_leading
        self._on_listed = on_listed
        self._events = EventRecorder(api, now=now, api_version=LEASES.api_version, kind=LEASES.name)
        served: dict[str | None, None] = dict.fromkeys(config.watch_namespaces or (None,))
        self.scopes = [Scope(namespace=each, watched=watched) for each in served]
        """Every kind in each namespace that is served, and pods in the operator's own, where the routers run and the
        operator may list nothing else."""
        if None not in served and config.namespace not in served:
            self.scopes.append(Scope(namespace=config.namespace, watched={PODS: watched[PODS]}))
        self._places: dict[str | None, _Place] = {
            each.namespace: _Place(each.namespace, each.watched, is_served=each.namespace in served)
            for each in self.scopes
        }
        self._wakeup = asyncio.Event()
        self.lost_history = ""
        """What shows that the cluster's state was replaced by an earlier one, as by a restored backup of etcd: what is
        stored, and the watches, are of versions that are yet to come. Empty if nothing does."""

    async def list_all(self) -> None:
        """List everything that can be read.

        Raises:
            ApiError: no namespace that is served could be, or the operator's own never was.
        """
        await self._list(self._places.values())
        if error := self._failure():
            raise error

    async def list_some(self, namespaces: Iterable[str | None]) -> None:
        """List some namespaces, None for all. What cannot be read is tried again like any other."""
        places = set(self._places.values())
        if None not in (wanted := set(namespaces)):
            places = {
                place for each in wanted if each is not None and (place := self._place_of(each)) is not None
            }
        await self._list(places)

    async def retry_forever(self) -> None:
        """List what could not be read when it is due, and what is suspect at once, until cancelled."""
        now = asyncio.get_running_loop().time
        while True:
            self._wakeup.clear()
            failed = [place for place in self._places.values() if place.error is not None]
            due = [place for place in failed if place.retry_at <= now() + _ROUNDING]
            due += [place for place in self._places.values() if place.is_suspect and place not in due]
            if due:
                await self._list(due)
                continue
            for place in self._places.values():
                await self._tell(place)
            times = [place.retry_at for place in failed]
            times += [
                each.unwatched_at for each in self._places.values() if each.unwatched_at > now() + _ROUNDING
            ]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(min((each for each in times if each < math.inf), default=None)):
                    await self._wakeup.wait()

    def begin_watches(self, namespace: str | None) -> None:
        """Note that every kind of a namespace should be watched from now on."""
        place = self._places[namespace]
        now = asyncio.get_running_loop().time()
        place.unwatched = {kind: place.unwatched.get(kind, now) for kind in place.kinds}
        self._wakeup.set()

    def note_watched(self, namespace: str | None, kind: Kind) -> None:
        place = self._places[namespace]
        place.unwatched.pop(kind, None)
        place.failed_watches.pop(kind, None)
        place.failed_watches.pop(None, None)
        if place.told == NOT_WATCHED:
            self._wakeup.set()

    def note_unwatched(self, namespace: str | None, kind: Kind) -> None:
        """Note that a watch has ended, or was not begun: what comes before it is asked for."""
        self._places[namespace].unwatched.setdefault(kind, asyncio.get_running_loop().time())
        self._wakeup.set()

    def note_failed_watch(self, namespace: str | None, kind: Kind | None, error: str) -> None:
        """Note that a request of a watch failed, or one that comes before all of them. After the first, second, fourth
        and so on in a row the namespace is listed, which shows whether it is refused; not if that was done just now."""
        place = self._places[namespace]
        place.watch_error = error[:256]
        failures = place.failed_watches[kind] = place.failed_watches.get(kind, 0) + 1
        is_due = place.listed_at + RETRY <= asyncio.get_running_loop().time()
        if not failures & (failures - 1) and is_due and place.error is None:
            place.is_suspect = True
            self._wakeup.set()

    def is_known(self, namespace: str) -> bool:
        """Whether the services of a namespace may be reconciled: everything in it was listed, and is not refused."""
        place = self._place_of(namespace)
        return place is not None and not place.unlisted and not place.is_refused

    def has_listed_services(self, namespace: str) -> bool:
        """Whether the services of a namespace are known; if it is not served, that there are none."""
        place = self._place_of(namespace)
        return place is None or not place.is_served or INFERENCE_SERVICES not in place.unlisted

    def is_watched(self, namespace: str | None) -> bool:
        """Whether the namespace can be watched, as far as that is known."""
        return not self._places[namespace].is_refused

    async def wait_watched(self, namespace: str | None, *, is_watched: bool) -> None:
        """Return once `is_watched` has this value."""
        place = self._places[namespace]
        while self.is_watched(namespace) is not is_watched:
            place.changed.clear()
            await place.changed.wait()

    @property
    def unreadable(self) -> dict[str, str]:
        """Why namespaces cannot be read, by their names."""
        return {place.name: place.reason for place in self._places.values() if place.reason}

    def summary(self) -> str:
        """The same as JSON, for who diagnoses a service."""
        return json.dumps(self.unreadable, sort_keys=True)

    @property
    def unready_reason(self) -> str:
        """Why nothing can be reconciled; empty if something can."""
        if any(place.unlisted and place.error is None for place in self._places.values()):
            return "not everything was listed yet"
        served = [place for place in self._places.values() if place.is_served]
        if all(place.reason for place in served):
            return "no namespace can be read: " + "; ".join(f"{each.name}: {each.answer}" for each in served)
        own = self._place_of(self._config.namespace)
        if own is not None and own.unlisted and own.error is not None:
            return f"routers are not known: {own.error}"
        return ""

    def _place_of(self, namespace: str) -> _Place | None:
        return self._places.get(namespace) or self._places.get(None)

    def _failure(self) -> ApiError | None:
        served = [place for place in self._places.values() if place.is_served]
        errors = [place.error for place in served if place.error is not None]
        if len(errors) == len(served):
            shown = "; ".join(f"{place.name}: {place.error}" for place in served)
            return ApiError("list what is served", errors[0].status, f"no namespace can be read: {shown}")
        own = self._place_of(self._config.namespace)
        if own is not None and own.unlisted and own.error is not None:
            return ApiError(
                f"list pods in {self._config.namespace}, where the routers are",
                own.error.status,
                str(own.error),
            )
        return None

    async def _list(self, places: Iterable[_Place]) -> None:
        """List namespaces, those at the front that could be read last; of the others those whose last attempt is the
        longest ago, so that two without an answer keep no other one from being asked."""
        silent: ApiError | None = None
        num_silent = 0
        changed = []
        for place in sorted(places, key=lambda each: (each.error is not None, each.asked_at)):
            if num_silent < _SILENT:
                place.asked_at = asyncio.get_running_loop().time()
                error = await self._list_place(place)
                silent = error if error is not None and error.status == 0 else None
                num_silent = num_silent + 1 if silent is not None else 0
            else:
                error = silent
            was_refused = place.is_refused
            await self._note(place, error)
            if error is None or place.is_refused is not was_refused:
                changed.append(place.namespace)
        if changed:
            self._on_listed(changed)

    async def _list_place(self, place: _Place) -> ApiError | None:
        """List every kind by itself; return the first error."""
        first = None
        for kind, labels in place.kinds.items():
            try:
                with self._store.listing(kind, place.namespace) as listing:
                    found = await self._api.list(kind, namespace=place.namespace, labels=labels)
                    items = [with_kind(obj, kind) for obj in found.items]
                    self._store.adopt(listing, items, found.version, are_kept=found.are_kept)
            except ApiError as error:
                first = first or error
                if error.status == 0:
                    break
            else:
                place.unlisted.discard(kind)
                self._note_version(place, kind, found.version)
        return first

    def _note_version(self, place: _Place, kind: Kind, version: str) -> None:
        """Note the version of a list, which is that of the moment at which it was asked for, and so grows."""
        if not (version.isascii() and version.isdigit()):
            return
        now, latest = asyncio.get_running_loop().time(), place.versions.get(kind, 0)
        if int(version) >= latest:
            place.versions[kind] = int(version)
            place.older_since.pop(kind, None)
        elif now - place.older_since.setdefault(kind, now) >= OLDER_PATIENCE:
            self.lost_history = f"{kind.plural} are of version {version}, and were of {latest} before"

    async def _note(self, place: _Place, error: ApiError | None) -> None:
        """Note how the last attempt ended, and tell what has changed."""
        was_gone, now = place.is_gone, asyncio.get_running_loop().time()
        place.listed_at, place.is_suspect = now, False
        is_gone = error is not None and await self._is_gone(place, error)
        place.error, place.is_gone = error, is_gone
        if error is None:
            place.failures = 0
        else:
            place.retry_at = now + min(RETRY_MAX, RETRY * 2 ** min(place.failures, 16))
            place.failures += 1
            self._wakeup.set()
        place.changed.set()
        if is_gone and not was_gone:
            assert place.namespace is not None
            self._store.forget_namespace(place.namespace)
            place.unlisted.clear()
            self._on_listed([place.namespace])
        await self._tell(place)

    async def _is_gone(self, place: _Place, error: ApiError) -> bool:
        """Whether the API server, which has authorized nothing in the namespace, says that the Namespace does not
        exist. It then has no objects: Kubernetes removes the Namespace last."""
        if not place.is_served or place.namespace is None or error.status != 403:
            return False
        try:
            return await self._api.has_namespace(place.namespace) is False
        except ApiError:
            return False

    async def _tell(self, place: _Place) -> None:
        reason = place.reason
        if reason != place.told:
            place.told = reason
            if reason:
                self._metrics.unreadable.labels(place.name).set(1)
                logger.warning("%s", self._message(place))
            else:
                self._metrics.unreadable.remove(place.name)
                logger.info("%s can be read again", _shown(place))
        if reason != place.posted and self._is_leading():
            before, place.posted = place.posted, reason
            if not await self._post(place):
                place.posted = before  # the next attempt tells it, or nothing if it is over by then

    async def _post(self, place: _Place) -> bool:
        """Post an Event about the Lease, as elections of client-go do; none if no Lease is used. False if it cannot be
        posted now."""
        if not self._config.lease:
            return True
        try:
            lease = await self._api.get(LEASES, self._config.namespace, self._config.lease)
        except ApiError:
            return False
        if lease is None:
            return False
        metadata = ObjectMeta(
            name=self._config.lease, namespace=self._config.namespace, uid=lease["metadata"].get("uid", "")
        )
        event = (
            Event("Warning", "NamespaceUnreadable", self._message(place))
            if place.reason
            else Event("Normal", "NamespaceReadable", f"{_shown(place)} can be read again")
        )
        await self._events.post(metadata, [event])
        return True

    def _message(self, place: _Place) -> str:
        return (
            f"{_shown(place)} cannot be read ({place.reason}): {place.answer[:320]}. "
            f"{self._consequence(place)}; {self._remedy(place)}"
        )

    def _consequence(self, place: _Place) -> str:
        if place.is_gone:
            return "It does not exist, and its services leave the fleet document"
        if not place.is_served:
            return "New routers are noticed late or never"
        if place.reason == NOT_WATCHED:
            return "Changes of its services and pods are noticed with the next resync only"
        return "Its services are served as they were, and changes, new pods and scaling wait"

    def _remedy(self, place: _Place) -> str:
        if place.reason == NOT_WATCHED:
            return "look whether the operator reaches the API server, and may watch"
        if place.namespace is None:
            return f"look at the ClusterRoleBinding argosy-operator-{self._config.namespace}"
        if not place.is_served:
            return "restore the RoleBinding argosy-operator-fleet in it (helm upgrade does)"
        restore = (
            f"restore the RoleBinding argosy-operator-{self._config.namespace} in it (helm upgrade does), or "
        )
        return f"{'' if place.is_gone else restore}take it out of the chart's watchNamespaces"


def with_kind(obj: Object, kind: Kind) -> dict[str, Any]:
    """Add the kind, which items of a list do not carry."""
    return {"apiVersion": kind.api_version, "kind": kind.name, **obj}


def _shown(place: _Place) -> str:
    return "the cluster" if place.namespace is None else f"namespace {place.namespace}"
