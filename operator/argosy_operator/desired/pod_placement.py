"""The fields of a pod that `spec.placement` fills.

Owns their translation, and what a term about pods means that names none: the replicas of the service itself. Must not
know the rest of the pod. Invariant: a field that the user leaves out does not appear, so that Kubernetes' own default
applies; without a named account the pod gets no token.
"""

from __future__ import annotations

from typing import Any

from argosy_operator.desired.manifest_fields import Manifest, as_manifest, present
from argosy_resource.affinity import LabelSelector, PodAffinity, PodAffinityTerm
from argosy_resource.engine_address import SERVICE_LABEL, selector, service_label
from argosy_resource.placement import TopologySpreadConstraint
from argosy_resource.types import InferenceService


def placement_fields(service: InferenceService) -> Manifest:
    """The fields of the pod's spec, without nodeSelector, to which the model's volume adds."""
    placement = service.spec.placement
    mounts_token = placement.service_account_name is not None and placement.automount_service_account_token
    return {
        "automountServiceAccountToken": mounts_token,
        **present(
            tolerations=[as_manifest(toleration) for toleration in placement.tolerations],
            affinity=_affinity(service),
            topologySpreadConstraints=[
                _spread(service, constraint) for constraint in placement.topology_spread_constraints
            ],
            priorityClassName=placement.priority_class_name,
            runtimeClassName=placement.runtime_class_name,
            schedulerName=placement.scheduler_name,
            serviceAccountName=placement.service_account_name,
        ),
    }


def _affinity(service: InferenceService) -> Manifest:
    affinity = service.spec.placement.affinity
    if affinity is None:
        return {}
    return present(
        nodeAffinity=as_manifest(affinity.node_affinity),
        podAffinity=_pod_affinity(service, affinity.pod_affinity),
        podAntiAffinity=_pod_affinity(service, affinity.pod_anti_affinity),
    )


def _pod_affinity(service: InferenceService, affinity: PodAffinity | None) -> Manifest:
    if affinity is None:
        return {}
    return present(
        requiredDuringSchedulingIgnoredDuringExecution=[
            _term(service, term) for term in affinity.required_during_scheduling_ignored_during_execution
        ],
        preferredDuringSchedulingIgnoredDuringExecution=[
            {"weight": weighted.weight, "podAffinityTerm": _term(service, weighted.pod_affinity_term)}
            for weighted in affinity.preferred_during_scheduling_ignored_during_execution
        ],
    )


def _term(service: InferenceService, term: PodAffinityTerm) -> Manifest:
    return {**as_manifest(term), **_selectors(service, term.label_selector, term.namespace_selector)}


def _spread(service: InferenceService, constraint: TopologySpreadConstraint) -> Manifest:
    return {**as_manifest(constraint), **_selectors(service, constraint.label_selector)}


def _selectors(
    service: InferenceService, pods: LabelSelector | None, namespaces: LabelSelector | None = None
) -> dict[str, Any]:
    """The selectors of a term. An empty one stays: it means every object, and a missing one means none."""
    is_one_node = service.spec.parallelism.nodes == 1
    own = {"matchLabels": selector(service) if is_one_node else {SERVICE_LABEL: service_label(service)}}
    found = {"labelSelector": own if pods is None else _selector(pods)}
    return found if namespaces is None else {**found, "namespaceSelector": _selector(namespaces)}


def _selector(wanted: LabelSelector) -> Manifest:
    return present(
        matchLabels=wanted.match_labels,
        matchExpressions=[as_manifest(each) for each in wanted.match_expressions],
    )
