"""Whether the model is where the replicas can load it: the condition ModelCached, its column, and what a fetch that is
under way means for the other conditions.

Must not talk to an API server or look at a clock. Invariants: a message names the pod; a fetch counts as progress of a
rollout for as long as a rollout may go without, counted from its last report that differed.

    True     LocalSource     nothing has to be fetched; whether the model is there, the engine finds out
    False    ClaimNotFound   the claim that is to be mounted does not exist
    False    SourceNotFound  an engine has not found the model where it is to be mounted, or in the image
    True     Cached          every replica that began to fetch has its model
    False    Fetching        the least advanced of the fetches under way
    False    StoreLocked     a replica waits for a process that has the store's lock and makes no progress
    False    FetchFailed     the last attempt of a replica failed
    Unknown  Pending         no replica has begun to fetch
"""

from __future__ import annotations

from datetime import datetime
from typing import Final

from argosy_operator.observed.model_fetch import ModelFetch
from argosy_operator.observed.pod import Pod
from argosy_operator.status.condition_state import ConditionState
from argosy_operator.status.replica_problems import missing_claim, problem_message
from argosy_operator.status.service_view import ServiceView
from argosy_protocol.model_progress import WAITING, percent
from argosy_resource.engine_command import claim_name, model_path

_MAX_COLUMN: Final = 48
"""Characters of a fetch's progress in the column; more than any has."""
_RETRYING: Final = "retrying"
"""What the column says of a note, which the condition has: a column stays narrow."""
_NOT_THERE: Final = ("is no directory", "has no config.json")
"""The engine's words for a path without a model (`checkpoint.model_path`)."""
_LOCK_REMEDY: Final = (
    "; look at the pods that use the volume: whoever can write to it can choose that name; another pod continues the "
    "fetch of one that ends; if none of them fetches, the file system keeps the lock: restart what serves the volume, "
    "or set spec.model.cache to another one"
)


def model_cached(view: ServiceView) -> ConditionState:
    if not view.fetches_model:
        return _local_source(view)
    fetches = _fetches(view)
    for name, fetch in fetches:
        if fetch.has_failed:
            return ConditionState("False", "FetchFailed", f"pod {name}: {fetch.failure}")
    locked = store_locked(view)
    if locked:
        return ConditionState("False", "StoreLocked", locked)
    under_way = fetching(view)
    if under_way:
        return ConditionState("False", "Fetching", under_way)
    for _, fetch in fetches:
        if fetch.state == "succeeded":
            return ConditionState("True", "Cached", fetch.exit_message)
    return ConditionState("Unknown", "Pending", "no pod has begun to fetch the model")


def _local_source(view: ServiceView) -> ConditionState:
    """The condition where nothing is fetched: False as soon as a replica has shown that the model is not there."""
    source = view.service.spec.model.source
    claim = claim_name(source)
    planned = [pod for pod in view.judged_pods if pod.revision == view.plan.revision]
    for pod in planned or view.judged_pods:
        if claim is not None and missing_claim(claim) in pod.unschedulable:
            return ConditionState("False", "ClaimNotFound", f"pod {pod.name}: {pod.unschedulable}")
        if pod.problem is not None and _is_source_missing(pod.problem.message, model_path(source)):
            told = problem_message(view, pod.problem)
            return ConditionState("False", "SourceNotFound", f"pod {pod.name}: {told}")
    return ConditionState(
        "True",
        "LocalSource",
        "nothing has to be fetched: the model is part of the engine"
        if source.startswith("builtin://")
        else "nothing has to be fetched: replicas read the model from a volume, or from their image",
    )


def _is_source_missing(message: str, path: str) -> bool:
    """Whether our engine's last line says that its model is not at this path; other engines have other words."""
    return any(f": {path.rstrip('/')} {what}" in message for what in _NOT_THERE)


def model_cache_column(view: ServiceView) -> str:
    """The condition in a few words: `cached`, `failed`, or how far the fetch is; empty if there is none."""
    reason = model_cached(view).reason
    if reason == "Fetching":
        text, has_note, _ = _slowest(view)[1].partition("; ")
        return f"{text[:_MAX_COLUMN]}; {_RETRYING}" if has_note else text[:_MAX_COLUMN]
    return {"Cached": "cached", "FetchFailed": "failed", "StoreLocked": "locked"}.get(reason, "")


def store_locked(view: ServiceView) -> str:
    """The pod that waits for a store's lock whose holder makes no progress, who that is, and the remedy; empty if no
    pod does."""
    for name, fetch in _fetches(view):
        if fetch.is_blocked:
            return f"pod {name}: {fetch.summary}{_LOCK_REMEDY}"
    return ""


def fetching(view: ServiceView) -> str:
    """The pod that is furthest from the end of its fetch, and how far it is; empty if no fetch is under way."""
    name, text = _slowest(view)
    return f"pod {name}: {text}" if name else ""


def has_fetch_progress(view: ServiceView) -> bool:
    """Whether a replica that is not up yet fetches, or has fetched, its model, and that has moved on lately; or was not
    asked yet by this operator, which may have been down for longer than a fetch may stand still."""
    deadline = view.service.spec.rollout.progress_deadline_seconds
    return any(
        seconds_until_stuck(pod, view.now, deadline) > 0 or pod.uid in view.observed.unpolled_fetches
        for pod in view.observed.pods
        if pod.is_alive and not pod.is_up
    )


def seconds_until_stuck(pod: Pod, now: str, deadline: int) -> float:
    """Seconds until the fetch of a pod has gone without progress for `deadline` seconds; 0 or less if it has, or if
    there is none. A fetch that waits for another pod's has none as soon as that one is known to make none."""
    fetch = pod.fetch
    if fetch is None or fetch.has_failed or fetch.is_blocked:
        return 0.0
    if fetch.is_under_way and fetch.summary == WAITING:
        return float(deadline)
    try:
        since = datetime.fromisoformat(now) - datetime.fromisoformat(fetch.last_probe_time)
    except (ValueError, TypeError):  # it has not reported
        return 0.0
    return deadline - since.total_seconds()


def _slowest(view: ServiceView) -> tuple[str, str]:
    """Name and progress of the fetching pod with the smallest share; one without a share only if none has one."""
    texts = [(name, fetch.summary or "fetching") for name, fetch in _fetches(view) if fetch.is_under_way]
    shares = [(share, name, text) for name, text in texts if (share := percent(text)) is not None]
    if shares:
        _, name, text = min(shares)
        return name, text
    return min(texts, default=("", ""))


def _fetches(view: ServiceView) -> list[tuple[str, ModelFetch]]:
    """Fetches of living pods by name: of the wanted revision, or of others while it has none."""
    alive = [pod for pod in view.observed.pods if pod.is_alive and pod.fetch is not None]
    wanted = [pod for pod in alive if pod.revision == view.plan.revision]
    pods = sorted(wanted or alive, key=lambda pod: pod.name)
    return [(pod.name, pod.fetch) for pod in pods if pod.fetch is not None]
