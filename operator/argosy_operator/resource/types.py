"""The `InferenceService` custom resource, as types.

Owns what a user may write and what the operator reports. The CRD is generated from these structs (`crd`), so
a constraint, default or description is written once, here: attribute docstrings become field descriptions,
`rules` become CEL. Must not know how pods look or which API client is in use. Invariants: a field exists only
if it works; every field is bounded; no default decides an either-or for the user (those fields are optional
and their effective value is a property).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import Meta, Struct

from argosy_operator.resource.overlay import EnvVar, PodTemplate
from argosy_operator.resource.schema_types import (
    MAP_BY_NAME,
    MAP_BY_TYPE,
    SET,
    CacheQuantity,
    InferenceServiceName,
    LabelKey,
    LabelValue,
    ObjectName,
    Quantity,
    ResourceName,
    Rule,
    ServedName,
    quantity_bytes,
    rules_of,
)
from argosy_protocol.engine_limits import (
    BlockSize,
    MaxModelLen,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    Threads,
)
from argosy_protocol.fleet import RoutingPolicy

GROUP: Final = "inference.argosy.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
KIND: Final = "InferenceService"
PLURAL: Final = "inferenceservices"
SINGULAR: Final = "inferenceservice"
SHORT_NAME: Final = "isvc"

_source_rules = rules_of(
    Rule(
        rule=(
            "self == 'builtin://tiny' || self.matches('^pvc://[a-z0-9]([a-z0-9.-]*[a-z0-9])?(/.*)?$') || "
            "self.matches('^file:///.+')"
        ),
        message="must be builtin://tiny, pvc://CLAIM/PATH or file:///ABSOLUTE/PATH",
    ),
    Rule(
        rule="!self.contains('/../') && !self.endsWith('/..')",
        message="must not contain '..' as a path segment",
    ),
)
_hedge_rules = rules_of(
    Rule(rule="double(self) == 0.0 || double(self) >= 1.0", message="must be 0 (never) or between 1 and 100")
)
ModelSource = Annotated[str, Meta(min_length=1, max_length=1024, extra_json_schema=_source_rules)]


class Model(Struct, frozen=True, kw_only=True, rename="camel"):
    """Which model is served, and under which names."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            rule="!has(self.servedName) || !has(self.aliases) || !(self.servedName in self.aliases)",
            message="aliases must not repeat servedName",
            field_path=".aliases",
        ),
    )
    source: ModelSource
    """Where the weights are: `builtin://tiny` (the model that ships with the engine), `pvc://CLAIM/PATH` (a
    PersistentVolumeClaim of the same namespace, mounted read-only) or `file:///ABSOLUTE/PATH` (a path inside
    the engine container, mounted through podTemplate or part of the image)."""
    served_name: ServedName | None = None
    """Name clients put into `model`. The resource's name if left out."""
    aliases: Annotated[tuple[ServedName, ...], Meta(max_length=32, extra_json_schema=SET)] = ()
    """Further names the model answers to."""


class Engine(Struct, frozen=True, kw_only=True, rename="camel"):
    """How each replica's engine runs. What is left out, the engine decides."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            rule="!(has(self.kvCacheMemory) && has(self.gpuMemoryUtilization))",
            message="set kvCacheMemory (bytes) or gpuMemoryUtilization (a share), not both",
            field_path=".kvCacheMemory",
        ),
        Rule(
            rule="!has(self.gpuMemoryUtilization) || !has(self.device) || self.device != 'cpu'",
            message="gpuMemoryUtilization has no meaning with device cpu; set kvCacheMemory",
            field_path=".gpuMemoryUtilization",
        ),
    )
    image: (
        Annotated[str, Meta(min_length=1, max_length=512, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@-]*$")] | None
    ) = None
    """Container image of the engine. The operator's own default if left out."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where the model computes. `auto` takes a GPU if the replica has one. `cuda` needs resources.gpu."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of weights and activations. `auto` follows the model and the device."""
    max_model_len: MaxModelLen | None = None
    """Longest sequence, prompt and output together, in tokens. The model's own limit if left out."""
    max_num_seqs: MaxNumSeqs | None = None
    """Most sequences in one step."""
    max_num_batched_tokens: MaxNumBatchedTokens | None = None
    """Most tokens in one step; longer prompts are computed in chunks."""
    block_size: BlockSize | None = None
    """Tokens per KV cache block."""
    kv_cache_memory: CacheQuantity | None = None
    """Size of the KV cache of one replica, such as `2Gi`, between 1M and 63Ti. Excludes gpuMemoryUtilization."""
    gpu_memory_utilization: Annotated[float, Meta(ge=0.05, le=1.0)] | None = None
    """Share of a GPU's memory that weights, activations and KV cache may take together."""
    enable_prefix_caching: bool = True
    """Whether prompts that begin alike share KV blocks. Prefix-aware routing needs it."""
    threads: Threads | None = None
    """CPU compute threads of one replica."""
    env: Annotated[tuple[EnvVar, ...], Meta(max_length=128, extra_json_schema=MAP_BY_NAME)] = ()
    """Environment variables of the engine."""
    shutdown_timeout_seconds: Annotated[int, Meta(ge=0, le=3600)] = 45
    """How long a stopping replica may take to finish the requests it has; then it ends them with an error."""

    @property
    def kv_cache_memory_bytes(self) -> int | None:
        return None if self.kv_cache_memory is None else quantity_bytes(self.kv_cache_memory)


class Gpu(Struct, frozen=True, kw_only=True, rename="camel"):
    """GPUs of one replica."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            rule="!has(self.count) || self.count == 1",
            message="a replica runs on one GPU today; for more GPUs set more replicas",
            field_path=".count",
        ),
    )
    count: Annotated[int, Meta(ge=1, le=16)] = 1
    """How many. One: an engine does not share a model among GPUs yet."""
    resource_name: ResourceName = "nvidia.com/gpu"
    """Extended resource that stands for one GPU, such as `nvidia.com/gpu` or `nvidia.com/mig-1g.10gb`."""


class Resources(Struct, frozen=True, kw_only=True, rename="camel"):
    """What one replica needs of its node."""

    gpu: Gpu | None = None
    """GPUs; none if left out."""
    cpu: Quantity | None = None
    """CPU request. No limit is set: throttling would stall decoding."""
    memory: Quantity | None = None
    """Memory request and limit."""


class Toleration(Struct, frozen=True, kw_only=True, rename="camel"):
    """A taint the replicas tolerate."""

    key: Annotated[str, Meta(max_length=317)] | None = None
    """Key of the taint; every taint if left out with operator Exists."""
    operator: Literal["Exists", "Equal"] | None = None
    """How value is compared; Equal if left out."""
    value: Annotated[str, Meta(max_length=63)] | None = None
    """Value of the taint."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint; every effect if left out."""
    toleration_seconds: Annotated[int, Meta(ge=0, le=31_536_000)] | None = None
    """How long a NoExecute taint is tolerated; for ever if left out."""


class Placement(Struct, frozen=True, kw_only=True, rename="camel"):
    """Which nodes replicas may run on."""

    node_selector: Annotated[dict[LabelKey, LabelValue], Meta(max_length=32)] = {}
    """Labels a node must have."""
    tolerations: Annotated[tuple[Toleration, ...], Meta(max_length=32)] = ()
    """Taints the replicas tolerate."""
    priority_class_name: ObjectName | None = None
    """PriorityClass of the pods."""


class Rollout(Struct, frozen=True, kw_only=True, rename="camel"):
    """How a change reaches the replicas."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            rule=(
                "!has(self.maxSurge) || !has(self.maxUnavailable) || self.maxSurge + self.maxUnavailable > 0"
            ),
            message="maxSurge and maxUnavailable must not both be 0: no replica could ever be replaced",
            field_path=".maxSurge",
        ),
    )
    max_surge: Annotated[int, Meta(ge=0, le=1000)] | None = None
    """Replicas that may exist beyond `replicas` while a change rolls out. 1 if left out, 0 if only
    maxUnavailable is set. Where the cluster has no GPU left for a surge, replicas are replaced in place, one at a
    time, as long as another one goes on serving; with a single replica, or with maxUnavailable 0, the rollout waits
    (reason WaitingForCapacity). The first new replica is made alone; if it fails, no other one is replaced (reason
    RolloutHalted)."""
    max_unavailable: Annotated[int, Meta(ge=0, le=1000)] | None = None
    """Replicas that may be missing while a change rolls out. 0 if left out, 1 if maxSurge is 0. The last routable
    replica is given up only if this allows all of them to be missing."""
    drain_seconds: Annotated[int, Meta(ge=0, le=600)] = 5
    """How long a terminating replica keeps serving before it is told to stop, so that every router has
    dropped it."""
    progress_deadline_seconds: Annotated[int, Meta(ge=30, le=86_400)] = 1800
    """How long a rollout may go without progress before Progressing turns False."""

    @property
    def surge(self) -> int:
        """maxSurge in effect."""
        if self.max_surge is not None:
            return self.max_surge
        return 0 if self.max_unavailable else 1

    @property
    def unavailable(self) -> int:
        """maxUnavailable in effect."""
        if self.max_unavailable is not None:
            return self.max_unavailable
        return 0 if self.surge else 1


class RouterLimits(Struct, frozen=True, kw_only=True, rename="camel"):
    """What a router lets through to this service. 0 stands for the router's own default."""

    max_inflight_per_replica: Annotated[int, Meta(ge=0, le=65_536)] = 0
    """Sequences each router has under way at one replica (a request has one for each choice, prompt and beam); further
    requests wait for their turn. By default replicas count as full with 1.5 sequences for each that their batch holds,
    all replicas taken together."""
    max_queued_requests: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """Requests that may wait in each router while all replicas are full; further ones are refused (429)."""
    queue_timeout_seconds: Annotated[int, Meta(ge=0, le=3600)] = 0
    """How long one may wait before it is refused (429)."""
    hold_timeout_seconds: Annotated[int, Meta(ge=0, le=3600)] = 0
    """How long requests wait for the first replica while there is none, instead of being refused (503)."""
    request_timeout_seconds: Annotated[int, Meta(ge=0, le=86_400)] = 0
    """How long an answer may take to begin. One that is not streamed begins when it is complete."""


class RouterCanary(Struct, frozen=True, kw_only=True, rename="camel"):
    """Another InferenceService that answers a share of this one's requests."""

    service: InferenceServiceName
    """Its name; it is of the same namespace, and is scaled and rolled out by itself. Names of models that both serve
    are this service's, of which the canary gets its share; others reach the canary directly. Its own canary does not
    count here. While it does not exist or has no replica that could answer, this service answers everything."""
    weight: Annotated[int, Meta(ge=0, le=100)]
    """Its share of the requests in per cent. All requests of a session are answered by the same service."""


class Router(Struct, frozen=True, kw_only=True, rename="camel"):
    """How the router treats this service."""

    policy: RoutingPolicy = "cost"
    """How a replica is chosen: `cost` (cached prefix against load, the default), `least-load`, `prefix-hash` (the
    prompt's beginning names the replica), `session` (header x-session-id, or prompt_cache_key), `round-robin`,
    `random` or `power-of-two`."""
    limits: RouterLimits = RouterLimits()
    """Bounds of its requests in each router."""
    hedge_after: Annotated[float, Meta(ge=0, le=100, extra_json_schema=_hedge_rules)] | None = None
    """Asks a second replica for a streamed answer that has not begun after this many times (1 to 100) the time it was
    expected to take, for at most one request in twenty, and takes the answer that begins first; 0 never does. If left
    out, the router's own --hedge-after decides, which is not to unless it is set."""
    canary: RouterCanary | None = None
    """Who answers a share of the requests that name this service's model; nobody if left out."""


class InferenceServiceSpec(Struct, frozen=True, kw_only=True, rename="camel"):
    """What should run."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            rule=(
                "!has(self.engine) || !has(self.engine.device) || self.engine.device != 'cuda' || "
                "(has(self.resources) && has(self.resources.gpu))"
            ),
            message="device cuda needs spec.resources.gpu",
            field_path=".engine.device",
        ),
        Rule(
            rule=(
                "!has(self.engine) || !has(self.engine.device) || self.engine.device != 'cpu' || "
                "!has(self.resources) || !has(self.resources.gpu)"
            ),
            message="device cpu would leave the GPUs of spec.resources.gpu idle; remove one of them",
            field_path=".engine.device",
        ),
    )
    model: Model
    """Which model is served, and under which names."""
    engine: Engine = Engine()
    """How each replica's engine runs."""
    replicas: Annotated[int, Meta(ge=0, le=1000)] = 1
    """How many replicas to run."""
    resources: Resources = Resources()
    """What one replica needs of its node."""
    placement: Placement = Placement()
    """Which nodes replicas may run on."""
    rollout: Rollout = Rollout()
    """How a change reaches the replicas."""
    router: Router = Router()
    """How the router treats this service."""
    paused: bool = False
    """Stops reconciling; what runs goes on serving."""
    pod_template: PodTemplate = PodTemplate()
    """Additions to the pods the operator renders."""


ConditionType = Literal[
    "Ready", "Progressing", "WorkloadReady", "Routable", "Degraded", "Reconciling", "Stalled"
]
ConditionStatus = Literal["True", "False", "Unknown"]


class Condition(Struct, frozen=True, kw_only=True, rename="camel"):
    """One aspect of the service's state, as in metav1.Condition."""

    type: Annotated[str, Meta(max_length=316)]
    """Which aspect."""
    status: ConditionStatus
    """True, False or Unknown."""
    reason: Annotated[
        str, Meta(min_length=1, max_length=1024, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")
    ]
    """Why, as one CamelCase word."""
    message: Annotated[str, Meta(max_length=32768)] = ""
    """Why, for a person: names the pod and what it waits for."""
    last_transition_time: Annotated[str, Meta(max_length=64, extra_json_schema={"format": "date-time"})]
    """When status last changed."""
    observed_generation: Annotated[int, Meta(ge=0)] = 0
    """Generation of the resource the condition was computed for."""


class InferenceServiceStatus(Struct, frozen=True, kw_only=True, rename="camel"):
    """What runs. Written by the operator only; a report, never an input."""

    observed_generation: Annotated[int, Meta(ge=-1)] = -1
    """Generation of the resource this status was computed for; -1 while no operator has looked at it."""
    url: Annotated[str, Meta(max_length=2048)] = ""
    """Base URL of the router, for an OpenAI client."""
    model: Annotated[str, Meta(max_length=256)] = ""
    """Name clients put into `model`."""
    selector: Annotated[str, Meta(max_length=4096)] = ""
    """Label selector of the replicas' pods, for the scale subresource."""
    revision: Annotated[str, Meta(max_length=63)] = ""
    """Revision of the pod template that is wanted now."""
    replicas: Annotated[int, Meta(ge=0)] = 0
    """Pods that exist and do not terminate."""
    updated_replicas: Annotated[int, Meta(ge=0)] = 0
    """Of these, pods of the wanted revision."""
    ready_replicas: Annotated[int, Meta(ge=0)] = 0
    """Of these, pods whose containers are ready."""
    routable_replicas: Annotated[int, Meta(ge=0)] = 0
    """Of these, pods a router sends requests to."""
    draining_replicas: Annotated[int, Meta(ge=0)] = 0
    """Pods that terminate."""
    routable: Annotated[str, Meta(max_length=32)] = ""
    """Routable and wanted replicas, such as `2/2`."""
    conditions: Annotated[
        tuple[Condition, ...],
        Meta(
            max_length=16,
            extra_json_schema=MAP_BY_TYPE,
        ),
    ] = ()
    """Ready (the summary), Progressing, WorkloadReady, Routable, Degraded; Reconciling and Stalled for kstatus."""


class ObjectMeta(Struct, frozen=True, kw_only=True, rename="camel"):
    """The part of Kubernetes' ObjectMeta that is read here."""

    name: str
    namespace: str = "default"
    uid: str = ""
    generation: int = 0
    creation_timestamp: str = ""
    deletion_timestamp: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class InferenceService(Struct, frozen=True, kw_only=True, rename="camel"):
    """Replicas of one model's engine behind the fleet's router."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            rule="self.metadata.name.matches('^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$')",
            message=(
                "the resource's name must be a DNS label: at most 63 lower-case letters, digits and '-', "
                "beginning with a letter and not ending with '-'"
            ),
        ),
        Rule(
            rule=(
                "has(self.spec.model.servedName) || !has(self.spec.model.aliases) || "
                "!(self.metadata.name in self.spec.model.aliases)"
            ),
            message="aliases must not repeat the resource's name (the served name unless servedName is set)",
            field_path=".spec.model.aliases",
        ),
        Rule(
            rule=(
                "!has(self.spec.router) || !has(self.spec.router.canary) || "
                "self.spec.router.canary.service != self.metadata.name"
            ),
            message="the canary must be another InferenceService",
            field_path=".spec.router.canary.service",
        ),
    )
    api_version: Literal["inference.argosy.dev/v1alpha1"] = "inference.argosy.dev/v1alpha1"
    kind: Literal["InferenceService"] = "InferenceService"
    metadata: ObjectMeta
    spec: InferenceServiceSpec
    """What should run."""
    status: InferenceServiceStatus = InferenceServiceStatus()
    """What runs."""

    @property
    def key(self) -> str:
        """`namespace/name`."""
        return f"{self.metadata.namespace}/{self.metadata.name}"

    @property
    def served_name(self) -> str:
        """Canonical name clients put into `model`."""
        return self.spec.model.served_name or self.metadata.name


def parse(obj: dict[str, Any]) -> InferenceService:
    """A resource as the API server returned it. Unknown fields are ignored: the CRD may be newer than this
    operator.

    Raises:
        msgspec.ValidationError: a field has a type or value this version cannot read.
    """
    return msgspec.convert(obj, InferenceService)
