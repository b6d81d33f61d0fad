"""`spec.placement`: on which nodes replicas run, who schedules them, and as whom they run; and
`spec.podDisruptionBudget`: how many of them those who drain nodes may evict.

Owns the types; names and meanings are Kubernetes'. Must not know how pods look. Invariant: no field takes a pod out of
the restricted Pod Security profile.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal

from msgspec import Meta, Struct

from argosy_resource.affinity import Affinity, LabelSelector, TopologyKey
from argosy_resource.schema_types import CountOrPercent, LabelKey, LabelValue, ObjectName, Rule, rules_of

_BY_DOMAIN: Final[dict[str, Any]] = {
    "x-kubernetes-list-type": "map",
    "x-kubernetes-list-map-keys": ["topologyKey", "whenUnsatisfiable"],
}

PriorityClassName = Annotated[
    ObjectName,
    Meta(
        extra_json_schema=rules_of(
            Rule(
                rule="!self.startsWith('system-')",
                message=(
                    "must not be a class of the cluster's own components (system-...), whose pods displace every "
                    "other one; have the administrator create a PriorityClass for engines"
                ),
            )
        ),
    ),
]


class Toleration(Struct, frozen=True, kw_only=True, rename="camel"):
    """A taint that the replicas tolerate."""

    key: Annotated[str, Meta(max_length=317)] | None = None
    """Key of the taint; every taint if left out with operator Exists."""
    operator: Literal["Exists", "Equal"] | None = None
    """How value is compared; Equal if left out."""
    value: Annotated[str, Meta(max_length=63)] | None = None
    """Value of the taint."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint; every effect if left out."""
    toleration_seconds: Annotated[int, Meta(ge=0, le=31_536_000)] | None = None
    """How long a NoExecute taint is tolerated; forever if left out."""


class TopologySpreadConstraint(Struct, frozen=True, kw_only=True, rename="camel"):
    """How evenly pods are spread over the domains of a topology."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            rule="!has(self.minDomains) || !has(self.whenUnsatisfiable) || self.whenUnsatisfiable == 'DoNotSchedule'",
            message="minDomains needs whenUnsatisfiable DoNotSchedule",
            field_path=".minDomains",
        ),
    )
    topology_key: TopologyKey
    """A node's label whose values are the domains, such as `topology.kubernetes.io/zone`."""
    max_skew: Annotated[int, Meta(ge=1, le=1000)] = 1
    """Most pods by which a domain may exceed the one with the fewest."""
    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"] = "DoNotSchedule"
    """`DoNotSchedule`: the pod waits. `ScheduleAnyway`: nodes that keep the skew small are preferred."""
    label_selector: LabelSelector | None = None
    """Which pods are counted; the replicas of this service if left out."""
    match_label_keys: Annotated[tuple[LabelKey, ...], Meta(max_length=16)] = ()
    """Labels whose value has to be that of the replica itself. With `pod-template-hash` each revision is spread on its
    own, so that a rollout ends as evenly as it began."""
    min_domains: Annotated[int, Meta(ge=1, le=1000)] | None = None
    """Least number of domains: while there are fewer, the fewest pods of a domain count as none."""
    node_affinity_policy: Literal["Honor", "Ignore"] | None = None
    """Whether only the nodes count that nodeSelector and nodeAffinity allow; Honor if left out."""
    node_taints_policy: Literal["Honor", "Ignore"] | None = None
    """Whether nodes with taints that are not tolerated do not count; Ignore if left out."""


class Placement(Struct, frozen=True, kw_only=True, rename="camel"):
    """Nodes on which replicas may run."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            rule=(
                "!has(self.automountServiceAccountToken) || !self.automountServiceAccountToken || "
                "has(self.serviceAccountName)"
            ),
            message="a token is mounted for a named account only; set serviceAccountName",
            field_path=".automountServiceAccountToken",
        ),
    )
    node_selector: Annotated[dict[LabelKey, LabelValue], Meta(max_length=32)] = {}
    """Labels a node must have."""
    tolerations: Annotated[tuple[Toleration, ...], Meta(max_length=32)] = ()
    """Taints the replicas tolerate."""
    affinity: Affinity | None = None
    """Nodes and neighbours that replicas must or should have. Terms about pods mean the replicas of this service unless
    they name others."""
    topology_spread_constraints: Annotated[
        tuple[TopologySpreadConstraint, ...], Meta(max_length=8, extra_json_schema=_BY_DOMAIN)
    ] = ()
    """How replicas are spread over zones, racks or nodes."""
    priority_class_name: PriorityClassName | None = None
    """PriorityClass of the pods. Those of the cluster's own components (`system-...`) are refused: they would displace
    every other pod. Which others a namespace may use, a ResourceQuota with scope PriorityClass says."""
    runtime_class_name: ObjectName | None = None
    """RuntimeClass of the pods, such as `nvidia`; the node's default runtime if left out."""
    scheduler_name: ObjectName | None = None
    """Scheduler that places the pods; Kubernetes' own if left out."""
    service_account_name: ObjectName | None = None
    """ServiceAccount of the pods, in the same namespace: for a cloud's workload identity, or an admission policy that
    goes by accounts. The namespace's `default` if left out."""
    automount_service_account_token: bool = False
    """Whether the engine gets the account's token for the API server. Engines need none."""


class PodDisruptionBudget(Struct, frozen=True, kw_only=True, rename="camel"):
    """How many replicas may be missing because pods were evicted: a drained node, a cluster autoscaler."""

    max_unavailable: CountOrPercent = "10%"
    """Replicas that evictions may take at once: a number, or a percentage of the replicas, rounded up as Kubernetes
    does. 10%, the default, is 1 of up to ten replicas and 2 of twenty. 0 has every eviction refused, so that no node
    with a replica can be drained. A replica that is not ready may always be evicted."""

    def of(self, replicas: int) -> int:
        """The number for so many replicas. No fewer than one is evicted at once, unless none may be."""
        if isinstance(self.max_unavailable, int):
            return self.max_unavailable
        percent = int(self.max_unavailable.removesuffix("%"))
        return max(1, -(-replicas * percent // 100)) if percent else 0
