"""The pod fields that a user may set: `spec.placement`, `spec.podDisruptionBudget` and `spec.podTemplate`.

Owns the types; names and meanings are Kubernetes'. `spec.placement` says on which nodes and beside which pods replicas
run, who schedules them, and as whom they run; `spec.podDisruptionBudget` how many of them those who drain nodes may
evict. The overlay `spec.podTemplate` is an allow-list, because every field that is passed through to a pod grants a
permission to everyone who may write the resource: no hostPath, no service account, no security context, no extra
containers. Must not know how pods look, or which labels they have. Invariants: no field takes a pod out of the
restricted Pod Security profile; every list is bounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Final, Literal

from msgspec import Meta, Struct

from argosy_resource.schema_types import (
    MAP_BY_NAME,
    AnnotationValue,
    CountOrPercent,
    LabelKey,
    LabelValue,
    ListedQuantity,
    ObjectName,
    Rule,
    SecretObjectName,
    rules_of,
)

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
        )
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


ENGINE_CONTAINER: Final = "engine"
FETCH_CONTAINER: Final = "fetch-model"
"""The init container that fetches a model which is not in a volume."""

RESERVED_ENV: Final = (
    *(
        "ARGOSY_API_KEY",
        "ARGOSY_INTERNAL_KEYS_FILE",
        "ARGOSY_MASTER_ADDR",
        "ARGOSY_NODE_KEY",
        "ARGOSY_NODE_RANK",
    ),
    *("ARGOSY_NODE_TEMPLATE_HASH", "ARGOSY_OFFLINE", "HOME", "POD_NAME", "POD_NAMESPACE", "POD_UID"),
)
"""Variables that the operator sets. An overlay that could change them could disable a replica's key, or its name."""

RESERVED_MOUNTS: Final = ("/", "/dev/shm", "/home/argosy", "/model", "/tmp")  # noqa: S108 - a path in the pod

VOLUME_PREFIX: Final = "argosy-"
KEY_VOLUME: Final = f"{VOLUME_PREFIX}key"
"""The volume with the Secret of an engine's internal key, whose name is shortened with the service's."""

_quoted_env = ", ".join(f"'{name}'" for name in RESERVED_ENV)
_quoted_mounts = ", ".join(f"'{path}'" for path in RESERVED_MOUNTS)

_env_name_rules: Final[dict[str, Any]] = rules_of(
    Rule(
        rule=f"!(self in [{_quoted_env}])",
        message=f"is set by the operator; reserved: {', '.join(RESERVED_ENV)}",
    )
)
EnvName = Annotated[
    str,
    Meta(
        min_length=1, max_length=256, pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*$", extra_json_schema=_env_name_rules
    ),
]
FileMode = Annotated[int, Meta(ge=0, le=0o777)]
MountPath = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=1024,
        extra_json_schema=rules_of(
            Rule(
                rule="self.startsWith('/') && !self.contains(':') && !self.contains('..')",
                message="must be an absolute path without ':' or '..'",
            ),
            Rule(
                rule=f"!(self in [{_quoted_mounts}])",
                message=f"is used by the operator; reserved: {', '.join(RESERVED_MOUNTS)}",
            ),
        ),
    ),
]
RelativePath = Annotated[str, Meta(max_length=512, pattern=r"^[^/]")]
"""A path below the volume. Kubernetes itself rejects `..` in it when the Deployment is applied."""
Key = Annotated[str, Meta(min_length=1, max_length=253)]

_own_volume_rule: Final = Rule(
    rule=f"!self.name.startsWith('{VOLUME_PREFIX}')",
    message=f"names that begin with '{VOLUME_PREFIX}' are the operator's own",
    field_path=".name",
)


class KeyToPath(Struct, frozen=True, kw_only=True, rename="camel"):
    """One key of a ConfigMap or Secret and the file it becomes."""

    key: Key
    """Key to project."""
    path: RelativePath
    """Path of the file below the mount."""
    mode: FileMode | None = None
    """Permission bits of the file."""


KeysToPaths = Annotated[tuple[KeyToPath, ...], Meta(max_length=32)]


class ConfigMapVolume(Struct, frozen=True, kw_only=True, rename="camel"):
    """A ConfigMap of the resource's own namespace."""

    name: ObjectName
    """Name of the ConfigMap."""
    items: KeysToPaths = ()
    """Keys to project; every key if left out."""
    default_mode: FileMode | None = None
    """Permission bits of the files."""
    optional: bool | None = None
    """Whether the pod may start without the ConfigMap."""


class SecretVolume(Struct, frozen=True, kw_only=True, rename="camel"):
    """A Secret of the resource's own namespace."""

    secret_name: SecretObjectName
    """Name of the Secret."""
    items: KeysToPaths = ()
    """Keys to project; every key if left out."""
    default_mode: FileMode | None = None
    """Permission bits of the files."""
    optional: bool | None = None
    """Whether the pod may start without the Secret."""


class SecretProjection(Struct, frozen=True, kw_only=True, rename="camel"):
    """A Secret inside a projected volume."""

    name: SecretObjectName
    """Name of the Secret."""
    items: KeysToPaths = ()
    """Keys to project; every key if left out."""
    optional: bool | None = None
    """Whether the pod may start without the Secret."""


class ConfigMapProjection(Struct, frozen=True, kw_only=True, rename="camel"):
    """A ConfigMap inside a projected volume."""

    name: ObjectName
    """Name of the ConfigMap."""
    items: KeysToPaths = ()
    """Keys to project; every key if left out."""
    optional: bool | None = None
    """Whether the pod may start without the ConfigMap."""


class VolumeProjection(Struct, frozen=True, kw_only=True, rename="camel"):
    """One source of a projected volume. Service account tokens are not offered."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            rule="has(self.configMap) != has(self.secret)", message="name exactly one of configMap and secret"
        ),
    )
    config_map: ConfigMapProjection | None = None
    """Files from a ConfigMap."""
    secret: SecretProjection | None = None
    """Files from a Secret."""


class ProjectedVolume(Struct, frozen=True, kw_only=True, rename="camel"):
    """Several ConfigMaps and Secrets in one folder."""

    sources: Annotated[tuple[VolumeProjection, ...], Meta(min_length=1, max_length=16)]
    """ConfigMaps and Secrets to project."""
    default_mode: FileMode | None = None
    """Permission bits of the files."""


class EmptyDirVolume(Struct, frozen=True, kw_only=True, rename="camel"):
    """Scratch space that lives as long as the pod."""

    medium: Literal["", "Memory"] | None = None
    """`Memory` for a tmpfs; it counts against the memory limit."""
    size_limit: ListedQuantity | None = None
    """Upper bound of its size."""


class ClaimVolume(Struct, frozen=True, kw_only=True, rename="camel"):
    """A PersistentVolumeClaim of the resource's own namespace."""

    claim_name: ObjectName
    """Name of the claim."""
    read_only: bool | None = None
    """Whether to mount it read-only."""


class Volume(Struct, frozen=True, kw_only=True, rename="camel"):
    """A volume of an allowed kind."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            rule=(
                "size([has(self.configMap), has(self.secret), has(self.emptyDir), "
                "has(self.persistentVolumeClaim), has(self.projected)].filter(x, x)) == 1"
            ),
            message=(
                "name exactly one of configMap, secret, emptyDir, persistentVolumeClaim and projected "
                "(no other kind of volume is allowed)"
            ),
        ),
        _own_volume_rule,
    )
    name: Annotated[str, Meta(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
    """Name that volumeMounts refer to."""
    config_map: ConfigMapVolume | None = None
    """Files from a ConfigMap."""
    secret: SecretVolume | None = None
    """Files from a Secret."""
    empty_dir: EmptyDirVolume | None = None
    """Scratch space."""
    persistent_volume_claim: ClaimVolume | None = None
    """A PersistentVolumeClaim."""
    projected: ProjectedVolume | None = None
    """Several ConfigMaps and Secrets in one folder."""


class VolumeMount(Struct, frozen=True, kw_only=True, rename="camel"):
    """Where a volume appears in the engine container."""

    rules: ClassVar[tuple[Rule, ...]] = (_own_volume_rule,)
    name: Annotated[str, Meta(min_length=1, max_length=63)]
    """Name of a volume in podTemplate.spec.volumes."""
    mount_path: MountPath
    """Absolute path in the container."""
    sub_path: RelativePath | None = None
    """Folder or file of the volume to mount instead of its root."""
    read_only: bool | None = None
    """Whether the engine may only read it."""


class ConfigMapKeySelector(Struct, frozen=True, kw_only=True, rename="camel"):
    """One key of a ConfigMap of the resource's own namespace."""

    name: ObjectName
    """Name of the object."""
    key: Key
    """Key whose value is taken."""
    optional: bool | None = None
    """Whether the pod may start without it."""


class SecretKeySelector(Struct, frozen=True, kw_only=True, rename="camel"):
    """One key of a Secret of the resource's own namespace."""

    name: SecretObjectName
    """Name of the object."""
    key: Key
    """Key whose value is taken."""
    optional: bool | None = None
    """Whether the pod may start without it."""


class EnvVarSource(Struct, frozen=True, kw_only=True, rename="camel"):
    """Where a variable's value comes from."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            rule="has(self.configMapKeyRef) != has(self.secretKeyRef)",
            message="name exactly one of configMapKeyRef and secretKeyRef",
        ),
    )
    config_map_key_ref: ConfigMapKeySelector | None = None
    """A key of a ConfigMap."""
    secret_key_ref: SecretKeySelector | None = None
    """A key of a Secret."""


class EnvVar(Struct, frozen=True, kw_only=True, rename="camel"):
    """An environment variable with a literal value."""

    name: EnvName
    """Name of the variable."""
    value: Annotated[str, Meta(max_length=32768)] = ""
    """Its value."""


class ContainerEnvVar(Struct, frozen=True, kw_only=True, rename="camel"):
    """An environment variable whose value may come from a ConfigMap or Secret."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(rule="!(has(self.value) && has(self.valueFrom))", message="set value or valueFrom, not both"),
    )
    name: EnvName
    """Name of the variable."""
    value: Annotated[str, Meta(max_length=32768)] | None = None
    """A literal value."""
    value_from: EnvVarSource | None = None
    """Where the value comes from."""


class ContainerOverlay(Struct, frozen=True, kw_only=True, rename="camel"):
    """Additions to a container."""

    name: Literal["engine"]
    """Name of the container: the pod has one, `engine`."""
    env: Annotated[tuple[ContainerEnvVar, ...], Meta(max_length=128, extra_json_schema=MAP_BY_NAME)] = ()
    """Variables, merged by name over spec.engine.env."""
    volume_mounts: Annotated[tuple[VolumeMount, ...], Meta(max_length=32)] = ()
    """Mounts of the volumes below podTemplate.spec.volumes."""


class PullSecretReference(Struct, frozen=True, kw_only=True, rename="camel"):
    """A Secret of the resource's own namespace."""

    name: SecretObjectName
    """Name of the object."""


class PodSpecOverlay(Struct, frozen=True, kw_only=True, rename="camel"):
    """Additions to the pod's spec."""

    volumes: Annotated[tuple[Volume, ...], Meta(max_length=32, extra_json_schema=MAP_BY_NAME)] = ()
    """Volumes of the allowed kinds."""
    containers: Annotated[
        tuple[ContainerOverlay, ...], Meta(max_length=1, extra_json_schema=MAP_BY_NAME)
    ] = ()
    """Additions to the engine container."""
    image_pull_secrets: Annotated[
        tuple[PullSecretReference, ...], Meta(max_length=8, extra_json_schema=MAP_BY_NAME)
    ] = ()
    """Secrets for the registry of the engine's image, besides those of the operator's own settings."""

    @property
    def read_secrets(self) -> Iterator[str]:
        """Names of the Secrets that the engine's container can read."""
        for volume in self.volumes:
            if volume.secret is not None:
                yield volume.secret.secret_name
            if volume.projected is not None:
                yield from (each.secret.name for each in volume.projected.sources if each.secret is not None)
        for container in self.containers:
            for variable in container.env:
                if variable.value_from is not None and variable.value_from.secret_key_ref is not None:
                    yield variable.value_from.secret_key_ref.name

    @property
    def claims(self) -> Iterator[str]:
        """Names of the PersistentVolumeClaims that pods get."""
        for volume in self.volumes:
            if volume.persistent_volume_claim is not None:
                yield volume.persistent_volume_claim.claim_name


_own_key_rule = (
    "self.all(key, !key.startsWith('inference.argosy.dev/') && !key.startsWith('app.kubernetes.io/'))"
)
_own_key_message = "keys below inference.argosy.dev/ and app.kubernetes.io/ are the operator's own"


CONFINING_ANNOTATIONS: Final = (
    "container.apparmor.security.beta.kubernetes.io/",
    "container.seccomp.security.alpha.kubernetes.io/",
    "seccomp.security.alpha.kubernetes.io/",
)
"""Beginnings of annotations that are security settings: the API server makes them fields of the container."""

_confining_rules: Final = rules_of(
    Rule(rule=_own_key_rule, message=_own_key_message),
    Rule(
        rule=f"self.all(key, {' && '.join(f'!key.startsWith({prefix!r})' for prefix in CONFINING_ANNOTATIONS)})",
        message="profiles of AppArmor and seccomp are the runtime's defaults, and no annotation changes them",
    ),
)


class PodMetadataOverlay(Struct, frozen=True, kw_only=True, rename="camel"):
    """Additions to the pod's metadata."""

    labels: Annotated[
        dict[LabelKey, LabelValue],
        Meta(max_length=32, extra_json_schema=rules_of(Rule(rule=_own_key_rule, message=_own_key_message))),
    ] = {}
    """Labels added to every replica."""
    annotations: Annotated[
        dict[LabelKey, AnnotationValue], Meta(max_length=32, extra_json_schema=_confining_rules)
    ] = {}
    """Annotations added to every replica."""


class PodTemplate(Struct, frozen=True, kw_only=True, rename="camel"):
    """A restricted overlay over the pods that the operator renders."""

    metadata: PodMetadataOverlay = PodMetadataOverlay()
    """Labels and annotations."""
    spec: PodSpecOverlay = PodSpecOverlay()
    """Volumes, and the engine container's variables and mounts."""
