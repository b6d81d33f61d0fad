"""The operator's own changes of a service's pods, such as a new default image: whether they apply, and when.

Owns the hash of those parts of a spec that shape the pods, which tells a user's change from one of the operator's own;
which of the operator's images a service keeps although the defaults have changed; and the decisions of the staged
rollout, in which few services at a time roll out such a change: whether a service has to wait for its turn, whether it
has come through it, and what became of a turn that takes too long. Must not know what else is in a pod, nor which
services have a turn (`reconcile.reconciler` does).

    OnSpecChange  the images that were rolled out last stay until an edit of the resource replaces the pods anyway;
                  an edit back to a revision that still serves, beside a canary or in a rollout, finds that one's
    Automatic     the present defaults, to few services at a time

Invariants: a new default rolls out by itself only where the upgrade policy is Automatic; an image that never served is
not kept, so that a better default reaches a service that is stuck with a bad one; what a later operator gives its
engines beside the image (the variable of the warm-up, the file of internal keys, requests for CPUs and memory) comes
with an image that is chosen anew, so that an upgrade of the operator alone replaces no pod, and no older image gets
what it does not know.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import xxhash
from msgspec import Struct

from argosy_operator.config import OperatorConfig
from argosy_operator.names import (
    ENGINE_IMAGE_ANNOTATION,
    FETCH_IMAGE_ANNOTATION,
    HELD_IMAGES_ANNOTATION,
    INPUT_ANNOTATION,
    KEY_ANNOTATION,
    KEY_FILE_ANNOTATION,
    REQUESTS_ANNOTATION,
    SERVED_ANNOTATION,
    WARM_UP_ANNOTATION,
    Object,
    annotations_of,
)
from argosy_operator.observation import (
    Observation,
    Turn,
    TurnState,
    container_image,
    deployment_condition,
    has_the_turn,
    read_turn,
    serving_revision,
    template_revision,
)
from argosy_operator.pod import min_time, seconds_between
from argosy_resource.pod_fields import ENGINE_CONTAINER, FETCH_CONTAINER
from argosy_resource.resources import Resources
from argosy_resource.types import InferenceService, UpgradePolicy

_CHOSEN_SINCE: Final = {
    "warms_up": WARM_UP_ANNOTATION,
    "has_key_file": KEY_FILE_ANNOTATION,
    "has_requests": REQUESTS_ANNOTATION,
}
"""Fields of `Images`, and the annotations that stand for them."""
_IMAGE_ANNOTATIONS: Final = (ENGINE_IMAGE_ANNOTATION, FETCH_IMAGE_ANNOTATION, *_CHOSEN_SINCE.values())


def input_digest(service: InferenceService) -> str:
    """Hash of those parts of the spec that shape the pods. Defaults are left out, so that a field which a later version
    adds does not change it."""
    spec = service.spec
    engine = msgspec.structs.replace(spec.engine, upgrade_policy=None)
    parts = (engine, _resources(service), spec.placement, spec.pod_template)
    said = [spec.model.source, spec.rollout.drain_seconds, *map(_non_defaults, parts)]
    if parallelism := _non_defaults(spec.parallelism):
        said.append({"parallelism": parallelism})
    if spec.engine.foreign is not None:  # which is started with the names that clients use
        said.append({"names": [service.served_name, *spec.model.aliases]})
    store = _non_defaults((spec.model.secret_ref, spec.model.cache))
    if any(store):
        said.append(store)
    if spec.model.widened_size is not None:
        said.append({"widened": spec.model.widened_size})
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(said, order="deterministic"))[:10]


def _resources(service: InferenceService) -> Resources:
    """The resources, whose GPUs are the same whether their number is written or follows."""
    resources = service.spec.resources
    if resources.gpu is None:
        return resources
    return msgspec.structs.replace(resources, gpu=msgspec.structs.replace(resources.gpu, count=None))


def _non_defaults(value: Any) -> Any:
    if isinstance(value, Struct):
        given = ((name, getattr(value, name), default) for name, default in _defaults(type(value)))
        return {name: _non_defaults(field) for name, field, default in given if field != default}
    if isinstance(value, tuple):
        return [_non_defaults(item) for item in value]
    return value


@functools.cache
def _defaults(struct: type[Struct]) -> tuple[tuple[str, Any], ...]:
    """Fields and their defaults. Cached, because msgspec takes longer to look them up than the rest of a reconcile."""
    fields = msgspec.structs.fields(struct)
    return tuple(
        (each.name, each.default if each.default_factory is msgspec.NODEFAULT else each.default_factory())
        for each in fields
    )


class Images(Struct, frozen=True, kw_only=True):
    """The images that a service's pods run unless the resource names one."""

    engine: str
    fetch: str
    """Of the container that fetches the model, whatever engine the resource names."""
    warms_up: bool = True
    """Whether engines are told of their peers, to compute their hottest prefixes."""
    has_key_file: bool = True
    """Whether Argosy engines get a file of internal keys, which they follow."""
    has_requests: bool = True
    """Whether engines with GPUs request CPUs and memory where the resource does not say how much."""

    @property
    def annotations(self) -> Mapping[str, str]:
        """Annotations of the Deployment, by which the next operator knows them."""
        found = {ENGINE_IMAGE_ANNOTATION: self.engine, FETCH_IMAGE_ANNOTATION: self.fetch}
        return found | {name: "true" for field, name in _CHOSEN_SINCE.items() if getattr(self, field)}


class _HeldImages(Images, frozen=True, kw_only=True, omit_defaults=True):
    """What a revision was made of that keeps serving while another one is tried."""

    revision: str
    input_digest: str
    warms_up: bool = False
    has_key_file: bool = False
    has_requests: bool = False


def held_annotations(live: Object | None, held: str) -> Mapping[str, str]:
    """Annotations of a Deployment whose pods keep the revision `held`: its images, for an edit back to it."""
    if live is None or not held:
        return {}
    annotations = annotations_of(live)
    kept = _held_images(live)
    if kept is not None and kept.revision == held:
        return {HELD_IMAGES_ANNOTATION: annotations[HELD_IMAGES_ANNOTATION]}
    named = (INPUT_ANNOTATION, ENGINE_IMAGE_ANNOTATION, FETCH_IMAGE_ANNOTATION)
    if template_revision(live) != held or not all(annotations.get(name) for name in named):
        return {}
    kept = _HeldImages(
        revision=held,
        input_digest=annotations[INPUT_ANNOTATION],
        engine=annotations[ENGINE_IMAGE_ANNOTATION],
        fetch=annotations[FETCH_IMAGE_ANNOTATION],
        **{field: name in annotations for field, name in _CHOSEN_SINCE.items()},
    )
    return {HELD_IMAGES_ANNOTATION: msgspec.json.encode(kept).decode()}


def replaced_revision(
    service: InferenceService, observed: Observation, config: OperatorConfig, revision: str, images: Images
) -> str:
    """The revision of old replicas that serve while `revision`, with which other images came, replaces them; empty if
    there is none. An edit back to it, after a rollout that was halted, is to find its images."""
    live = observed.deployment
    if live is None or _policy(service, config) == "Automatic":
        return ""
    kept, annotations = _held_images(live), annotations_of(live)
    before = {name: annotations[name] for name in _IMAGE_ANNOTATIONS if name in annotations}
    found = ["" if kept is None else kept.revision, template_revision(live)]
    if before == images.annotations:
        del found[1]
    serving = {pod.revision for pod in observed.without_canary.pods if pod.is_routable}
    return next((each for each in found if each != revision and each in serving), "")


def _policy(service: InferenceService, config: OperatorConfig) -> UpgradePolicy:
    return service.spec.engine.upgrade_policy or config.engine_upgrade_policy


def _held_images(live: Object) -> _HeldImages | None:
    """What the Deployment remembers; None if that is nothing, or cannot be read."""
    text = annotations_of(live).get(HELD_IMAGES_ANNOTATION)
    try:
        return msgspec.json.decode(text, type=_HeldImages) if text else None
    except msgspec.MsgspecError:
        return None


def default_images(service: InferenceService, config: OperatorConfig) -> Images:
    """The operator's present defaults."""
    return Images(engine=config.default_image(service.spec.engine.type), fetch=config.engine_image)


def pinned_images(service: InferenceService, observed: Observation, config: OperatorConfig) -> Images:
    """The images that the service's pods should run now."""
    live = observed.deployment
    kept = None if live is None or _policy(service, config) == "Automatic" else _held_images(live)
    if kept is not None and kept.input_digest == input_digest(service):
        return msgspec.convert(kept, Images, from_attributes=True)
    images = _chosen(service, observed, config)
    if live is None:
        return images
    annotations = annotations_of(live)
    is_chosen_anew = _is_edited(service, live) or container_image(live, ENGINE_CONTAINER) != (
        service.spec.engine.image or images.engine
    )
    chosen = {field: is_chosen_anew or name in annotations for field, name in _CHOSEN_SINCE.items()}
    return msgspec.structs.replace(images, **chosen)


def _chosen(service: InferenceService, observed: Observation, config: OperatorConfig) -> Images:
    defaults, live = default_images(service, config), observed.deployment
    if live is None or _policy(service, config) == "Automatic":
        return defaults
    annotations = annotations_of(live)
    if _is_edited(service, live) or _never_served(live, observed):
        return defaults
    # A Deployment of an operator that wrote no such annotations tells the images by its containers.
    engine = "" if service.spec.engine.image else container_image(live, ENGINE_CONTAINER)
    fetch = container_image(live, FETCH_CONTAINER)
    return Images(
        engine=annotations.get(ENGINE_IMAGE_ANNOTATION) or engine or defaults.engine,
        fetch=annotations.get(FETCH_IMAGE_ANNOTATION) or fetch or defaults.fetch,
    )


def _is_edited(service: InferenceService, live: Object) -> bool:
    """Whether an edit of the resource replaces the Deployment's pods anyway."""
    annotations = annotations_of(live)
    return bool(annotations.get(INPUT_ANNOTATION) != input_digest(service))


def served_revision(observed: Observation, revision: str) -> str:
    """The last revision of which a replica was routable, `revision` being the Deployment's now; empty if none was."""
    if any(pod.is_routable and pod.revision == revision for pod in observed.pods):
        return revision
    live = observed.deployment
    return annotations_of(live).get(SERVED_ANNOTATION, "")


def _never_served(live: Object, observed: Observation) -> bool:
    """Whether pods of the Deployment's template fail and none of them ever served."""
    revision = template_revision(live)
    return served_revision(observed, revision) != revision and any(
        pod.problem is not None for pod in observed.pods if pod.is_alive and pod.revision == revision
    )


def held_revision(
    service: InferenceService, observed: Observation, revision: str, *, digest: str, key_digest: str
) -> str:
    """The revision that keeps serving if this service may have to wait for its turn; empty if it need not wait.

    It waits only if the change is the operator's own, the last rollout is complete, and a replica is routable, or may
    be again: its revision has served, and not every replica keeps failing. Otherwise there is nothing to protect.
    Engines that read their key when they start do not wait once the last key that they have is no longer valid, because
    a router that starts now cannot reach them.
    """
    live = observed.deployment
    if live is None or has_the_turn(live) or service.spec.replicas == 0:
        return ""
    serving = serving_revision(live)
    annotations = annotations_of(live)
    template = annotations_of(live["spec"]["template"])
    is_own = annotations.get(INPUT_ANNOTATION, digest) == digest and (
        not key_digest or template.get(KEY_ANNOTATION) == key_digest
    )
    alive = [pod for pod in observed.pods if pod.is_alive]
    is_complete = all(pod.revision == serving for pod in alive)
    has_served = annotations.get(SERVED_ANNOTATION) == serving
    may_recover = has_served and not (alive and all(pod.is_backing_off for pod in alive))
    is_serving = may_recover or any(pod.is_routable for pod in alive)
    return serving if serving != revision and is_own and is_complete and is_serving else ""


def unhealthy_replicas(observed: Observation) -> str:
    """Why the operator's own change leaves the service alone for now; empty if its replicas are all routable. Those
    that no node can take are ignored beside others, as in `is_healthy`."""
    alive = [pod for pod in observed.pods if pod.is_alive]
    if not any(pod.is_routable for pod in alive):
        return f"none of {len(alive)} replicas is routable"
    failing = [pod for pod in alive if not (pod.is_routable or pod.unschedulable or pod.gate_words)]
    return f"{len(failing)} of {len(alive)} replicas are not routable" if failing else ""


def turn_of(
    service: InferenceService, observed: Observation, revision: str, *, has_failed: bool, lacks_room: bool
) -> tuple[Turn, float]:
    """The turn of a service that has it, and the seconds until it may have taken too long; 0 if that time is over. It
    has taken too long if nothing moves any more: a new replica has failed or found no room, Kubernetes sees no
    progress, or all replicas are new and some are not healthy."""
    before = read_turn(observed.deployment)
    now, deadline = observed.time, service.spec.rollout.progress_deadline_seconds
    since = min_time(
        (before.since if before is not None else "") or now, now
    )  # another clock may have been ahead
    left = deadline - seconds_between(since, now)
    if left > 0:
        return Turn(since), left
    is_late = (
        deployment_condition(observed.deployment, "Progressing").get("reason") == "ProgressDeadlineExceeded"
    )
    is_new = all(pod.revision == revision for pod in observed.pods if pod.is_alive)
    state: TurnState = "blocked" if lacks_room else "failed" if has_failed or is_late or is_new else ""
    return Turn(since, state), 0.0


def has_ended_while_paused(service: InferenceService, observed: Observation) -> bool:
    """Whether a service that has the turn, and is paused since, has rolled out what its Deployment has."""
    live = observed.deployment
    if live is None:
        return False
    spec = msgspec.structs.replace(service.spec, replicas=live["spec"].get("replicas", 1))
    kept = msgspec.structs.replace(service, spec=spec)
    return is_healthy(kept, observed.without_canary, template_revision(live))


def is_healthy(service: InferenceService, observed: Observation, revision: str) -> bool:
    """Whether the next service may have its turn: every replica is new and routable. A replica that no node can take is
    ignored, because the change is not the cause."""
    live = observed.deployment
    alive = [pod for pod in observed.pods if pod.is_alive]
    return (
        live is not None
        and template_revision(live) == revision
        and live.get("status", {}).get("observedGeneration", 0) >= live["metadata"].get("generation", 0)
        and len(alive) == service.spec.replicas
        and all(
            pod.revision == revision and (pod.is_routable or pod.unschedulable or pod.gate_words)
            for pod in alive
        )
        and (service.spec.replicas == 0 or any(pod.is_routable for pod in alive))
    )
