"""Kubernetes' affinity, as `spec.placement` takes it: which nodes and which neighbours a replica may or should have.

Owns the types of `spec.placement.affinity` and the label selector that topology spread constraints share with it. Names
and meanings are Kubernetes'. Must not know which labels a service's pods have. Invariant: every list is bounded.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal

from msgspec import Meta, Struct

from argosy_resource.schema_types import LabelKey, LabelValue, ObjectName, Rule

_LISTS_OF_VALUES: Final = "self.operator in ['In', 'NotIn']"
_NO_VALUES: Final = "!has(self.values) || size(self.values) == 0"

TopologyKey = Annotated[str, Meta(min_length=1, max_length=317)]
"""A node's label whose values are the topology's domains, such as `kubernetes.io/hostname`."""


class NodeRequirement(Struct, frozen=True, kw_only=True, rename="camel"):
    """A condition on one label of a node."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            rule=(
                f"{_LISTS_OF_VALUES} ? has(self.values) && size(self.values) > 0 : "
                "(self.operator in ['Gt', 'Lt'] ? has(self.values) && size(self.values) == 1 : "
                f"({_NO_VALUES}))"
            ),
            message="In and NotIn need values, Gt and Lt exactly one, Exists and DoesNotExist none",
            field_path=".values",
        ),
    )
    key: LabelKey
    """Label of the node."""
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]
    """How the label is compared with values."""
    values: Annotated[tuple[LabelValue, ...], Meta(max_length=64)] = ()
    """Values to compare with: several for In and NotIn, one whole number for Gt and Lt, none otherwise."""


class NodeSelectorTerm(Struct, frozen=True, kw_only=True, rename="camel"):
    """Nodes that meet all of its conditions."""

    match_expressions: Annotated[tuple[NodeRequirement, ...], Meta(max_length=16)] = ()
    """Conditions on the node's labels."""
    match_fields: Annotated[tuple[NodeRequirement, ...], Meta(max_length=16)] = ()
    """Conditions on the node's fields; Kubernetes knows `metadata.name`."""


class NodeSelector(Struct, frozen=True, kw_only=True, rename="camel"):
    """Nodes that meet at least one of several terms."""

    node_selector_terms: Annotated[tuple[NodeSelectorTerm, ...], Meta(min_length=1, max_length=16)]
    """Terms of which a node has to meet one."""


class PreferredNodes(Struct, frozen=True, kw_only=True, rename="camel"):
    """Nodes that are preferred, by weight."""

    weight: Annotated[int, Meta(ge=1, le=100)]
    """Points of a node that meets the preference."""
    preference: NodeSelectorTerm
    """Which nodes get the points."""


class NodeAffinity(Struct, frozen=True, kw_only=True, rename="camel"):
    """Nodes on which replicas may run, and on which they should."""

    required_during_scheduling_ignored_during_execution: NodeSelector | None = None
    """Nodes on which replicas may run."""
    preferred_during_scheduling_ignored_during_execution: Annotated[
        tuple[PreferredNodes, ...], Meta(max_length=16)
    ] = ()
    """Nodes that are preferred among those."""


class LabelRequirement(Struct, frozen=True, kw_only=True, rename="camel"):
    """A condition on one label of a pod or namespace."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            rule=f"{_LISTS_OF_VALUES} ? has(self.values) && size(self.values) > 0 : ({_NO_VALUES})",
            message="In and NotIn need values, Exists and DoesNotExist none",
            field_path=".values",
        ),
    )
    key: LabelKey
    """The label."""
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    """How the label is compared with values."""
    values: Annotated[tuple[LabelValue, ...], Meta(max_length=64)] = ()
    """Values to compare with; none for Exists and DoesNotExist."""


class LabelSelector(Struct, frozen=True, kw_only=True, rename="camel"):
    """Objects that have all labels and meet all conditions; every object if both are empty."""

    match_labels: Annotated[dict[LabelKey, LabelValue], Meta(max_length=32)] = {}
    """Labels that the object must have."""
    match_expressions: Annotated[tuple[LabelRequirement, ...], Meta(max_length=16)] = ()
    """Conditions on the object's labels."""


class PodAffinityTerm(Struct, frozen=True, kw_only=True, rename="camel"):
    """Pods in whose domain of the topology a replica is placed, or not placed."""

    topology_key: TopologyKey
    """A node's label whose value is the domain, such as `kubernetes.io/hostname` or `topology.kubernetes.io/zone`."""
    label_selector: LabelSelector | None = None
    """Which pods; the replicas of this service if left out."""
    namespaces: Annotated[tuple[ObjectName, ...], Meta(max_length=16)] = ()
    """Namespaces of the pods; this resource's own if left out and namespaceSelector as well."""
    namespace_selector: LabelSelector | None = None
    """Labels of the namespaces of the pods, besides those that namespaces names."""
    match_label_keys: Annotated[tuple[LabelKey, ...], Meta(max_length=16)] = ()
    """Labels whose value has to be that of the replica itself, such as `pod-template-hash`, which tells the replicas of
    one revision from those of another."""


class WeightedPodAffinityTerm(Struct, frozen=True, kw_only=True, rename="camel"):
    """A preference for, or against, the neighbourhood of pods."""

    weight: Annotated[int, Meta(ge=1, le=100)]
    """Points of a node that meets the term."""
    pod_affinity_term: PodAffinityTerm
    """Which pods, and in which domain."""


class PodAffinity(Struct, frozen=True, kw_only=True, rename="camel"):
    """Pods near which, or away from which, replicas must or should run."""

    required_during_scheduling_ignored_during_execution: Annotated[
        tuple[PodAffinityTerm, ...], Meta(max_length=16)
    ] = ()
    """Terms that a node must meet."""
    preferred_during_scheduling_ignored_during_execution: Annotated[
        tuple[WeightedPodAffinityTerm, ...], Meta(max_length=16)
    ] = ()
    """Terms that a node should meet."""


class Affinity(Struct, frozen=True, kw_only=True, rename="camel"):
    """Nodes and neighbours of replicas."""

    node_affinity: NodeAffinity | None = None
    """By the labels of nodes."""
    pod_affinity: PodAffinity | None = None
    """Near other pods."""
    pod_anti_affinity: PodAffinity | None = None
    """Away from other pods. A required term over the hostname keeps two replicas of the service off one node; a rollout
    then needs a free node for its surge, or `rollout.maxSurge: 0`."""
