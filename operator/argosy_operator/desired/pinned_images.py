"""The operator's own images in a service's pods: which ones stay although the defaults have changed.

Owns the decision, and its memory, annotations of the Deployment. Must not know what else is in a pod. Invariants: a
new default rolls out by itself only where the upgrade policy is Automatic; an image that never served is not kept, so
that a better default reaches a service that is stuck with a bad one; what a later operator gives its engines
beside the image (the variable of the warm-up, the file of internal keys, requests for CPUs and memory) comes with an
image that is chosen anew, so that an upgrade of the operator alone replaces no pod, and no older image gets what it
does not know.

    OnSpecChange  the images that were rolled out last stay until an edit of the resource replaces the pods anyway;
                  an edit back to a revision that still serves, beside a canary or in a rollout, finds that one's
    Automatic     the present defaults, to few services at a time (`staged_rollout`)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import Struct

from argosy_operator.config import OperatorConfig
from argosy_operator.desired.spec_digest import input_digest
from argosy_operator.names import (
    ENGINE_IMAGE_ANNOTATION,
    FETCH_IMAGE_ANNOTATION,
    HELD_IMAGES_ANNOTATION,
    INPUT_ANNOTATION,
    KEY_FILE_ANNOTATION,
    REQUESTS_ANNOTATION,
    SERVED_ANNOTATION,
    WARM_UP_ANNOTATION,
)
from argosy_operator.observed.deployment import container_image, template_revision
from argosy_operator.observed.observation import Object, Observation
from argosy_resource.pod_overlay import ENGINE_CONTAINER, FETCH_CONTAINER
from argosy_resource.types import InferenceService, UpgradePolicy

_IMAGE_ANNOTATIONS: Final = (
    ENGINE_IMAGE_ANNOTATION,
    FETCH_IMAGE_ANNOTATION,
    WARM_UP_ANNOTATION,
    KEY_FILE_ANNOTATION,
    REQUESTS_ANNOTATION,
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
        found |= {WARM_UP_ANNOTATION: "true"} if self.warms_up else {}
        found |= {REQUESTS_ANNOTATION: "true"} if self.has_requests else {}
        return found | ({KEY_FILE_ANNOTATION: "true"} if self.has_key_file else {})


class _HeldImages(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a revision was made of that keeps serving while another one is tried."""

    revision: str
    input_digest: str
    engine: str
    fetch: str
    warms_up: bool = False
    has_key_file: bool = False
    has_requests: bool = False


def held_annotations(live: Object | None, held: str) -> Mapping[str, str]:
    """Annotations of a Deployment whose pods keep the revision `held`: its images, for an edit back to it."""
    if live is None or not held:
        return {}
    annotations = live["metadata"].get("annotations", {})
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
        warms_up=WARM_UP_ANNOTATION in annotations,
        has_key_file=KEY_FILE_ANNOTATION in annotations,
        has_requests=REQUESTS_ANNOTATION in annotations,
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
    kept, annotations = _held_images(live), live["metadata"].get("annotations", {})
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
    text = live["metadata"].get("annotations", {}).get(HELD_IMAGES_ANNOTATION)
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
        return Images(
            engine=kept.engine,
            fetch=kept.fetch,
            warms_up=kept.warms_up,
            has_key_file=kept.has_key_file,
            has_requests=kept.has_requests,
        )
    images = _chosen(service, observed, config)
    if live is None:
        return images
    annotations = live["metadata"].get("annotations", {})
    is_chosen_anew = _is_edited(service, live) or container_image(live, ENGINE_CONTAINER) != (
        service.spec.engine.image or images.engine
    )
    return msgspec.structs.replace(
        images,
        warms_up=is_chosen_anew or WARM_UP_ANNOTATION in annotations,
        has_key_file=is_chosen_anew or KEY_FILE_ANNOTATION in annotations,
        has_requests=is_chosen_anew or REQUESTS_ANNOTATION in annotations,
    )


def _chosen(service: InferenceService, observed: Observation, config: OperatorConfig) -> Images:
    defaults, live = default_images(service, config), observed.deployment
    if live is None or _policy(service, config) == "Automatic":
        return defaults
    annotations = live["metadata"].get("annotations", {})
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
    annotations = live["metadata"].get("annotations", {})
    return bool(annotations.get(INPUT_ANNOTATION) != input_digest(service))


def served_revision(observed: Observation, revision: str) -> str:
    """The last revision of which a replica was routable, `revision` being the Deployment's now; empty if none was."""
    if any(pod.is_routable and pod.revision == revision for pod in observed.pods):
        return revision
    live = observed.deployment
    return "" if live is None else live["metadata"].get("annotations", {}).get(SERVED_ANNOTATION, "")


def _never_served(live: Object, observed: Observation) -> bool:
    """Whether pods of the Deployment's template fail and none of them ever served."""
    revision = template_revision(live)
    return served_revision(observed, revision) != revision and any(
        pod.problem is not None for pod in observed.pods if pod.is_alive and pod.revision == revision
    )
