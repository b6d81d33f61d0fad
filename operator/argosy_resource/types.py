"""The `InferenceService` custom resource, as types.

Owns what a user may write and what the operator reports. The CRD is generated from these structs (`crd`), so that each
constraint, default and description is written once: attribute docstrings become field descriptions, `rules` become CEL.
Must not know how pods look or which API client is in use. Invariants: a field exists only if it works, or is reserved
and refused; every field is bounded; a field whose default depends on another field is optional, and its effective value
is a property.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import Meta, Struct

from argosy_protocol.fleet import RoutingPolicy
from argosy_protocol.program.flags import BlockSize, MaxModelLen, MaxNumBatchedTokens, MaxNumSeqs, Threads
from argosy_resource.engine_arguments import (
    ARGS_RULES,
    FOREIGN_ENGINES,
    MAX_ARGUMENTS,
    Argument,
    EngineType,
    ForeignEngine,
)
from argosy_resource.model import (
    FETCH_CREDENTIALS,
    FETCH_CREDENTIALS_MESSAGE,
    FETCH_ENV,
    FETCH_ENV_MESSAGE,
    GGUF_PATTERN,
    MODELS_MOUNT,
    REMOTE_PATTERN,
    Model,
)
from argosy_resource.pod_fields import EnvVar, Placement, PodDisruptionBudget, PodTemplate
from argosy_resource.resources import Parallelism, Resources, devices_expression
from argosy_resource.rollout import Rollout, RolloutStatus
from argosy_resource.scaling import Scaling, ScalingStatus
from argosy_resource.schema_types import (
    MAP_BY_NAME,
    MAP_BY_TYPE,
    CacheQuantity,
    InferenceServiceName,
    Rule,
    quantity_bytes,
    rules_of,
)

GROUP: Final = "inference.argosy.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
KIND: Final = "InferenceService"
PLURAL: Final = "inferenceservices"
SINGULAR: Final = "inferenceservice"
SHORT_NAME: Final = "isvc"


_DEVICES = f"(has(self.parallelism) ? {devices_expression('self.parallelism')} : 1)"
"""CEL of the number of devices of one replica, in a rule of the spec."""

_IS_FOREIGN = "has(self.engine) && has(self.engine.type) && self.engine.type != 'argosy'"
"""CEL: whether another engine than ours serves, in a rule of the spec."""

_NOT_FETCHED = f"!self.model.source.matches('{REMOTE_PATTERN}')"
_ALL_CONTAINERS = (
    "!has(self.podTemplate) || !has(self.podTemplate.spec) || !has(self.podTemplate.spec.containers) || "
    "self.podTemplate.spec.containers.all"
)


def _variable_rules(unless: str, names: list[str], message: str) -> tuple[Rule, Rule]:
    """That neither the engine's variables nor those of the overlay have one of these names."""
    others = f"env.all(variable, !(variable.name in {names}))"
    return (
        Rule(
            rule=f"{unless} || !has(self.engine) || !has(self.engine.env) || self.engine.{others}",
            message=message,
            field_path=".engine.env",
        ),
        Rule(
            rule=f"{unless} || {_ALL_CONTAINERS}(container, !has(container.env) || container.{others})",
            message=message,
            field_path=".podTemplate.spec.containers",
        ),
    )


_hedge_rules = rules_of(
    Rule(rule="double(self) == 0.0 || double(self) >= 1.0", message="must be 0 (never) or between 1 and 100")
)


UpgradePolicy = Literal["OnSpecChange", "Automatic"]
"""What a new default image of the operator does to a service that names no image."""


class Engine(Struct, frozen=True, kw_only=True, rename="camel"):
    """Settings of each replica's engine. Fields that are left out have the engine's own default."""

    rules: ClassVar[tuple[Rule, ...]] = (
        *ARGS_RULES,
        Rule(
            rule=(
                "!has(self.type) || self.type == 'argosy' || "
                "((!has(self.attentionBackend) || self.attentionBackend == 'auto') && !has(self.threads))"
            ),
            message="attentionBackend and threads are for type argosy; use args or env for another engine",
            field_path=".type",
        ),
        Rule(
            rule="!has(self.type) || self.type != 'vllm' || !has(self.device) || self.device != 'cpu'",
            message="vLLM computes on the device that its image is built for; leave device out, and name the image",
            field_path=".device",
        ),
        Rule(
            rule="!has(self.type) || self.type != 'sglang' || !has(self.kvCacheMemory)",
            message="SGLang has no such setting; use gpuMemoryUtilization, or --max-total-tokens in args",
            field_path=".kvCacheMemory",
        ),
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
    type: EngineType = "argosy"
    """Which engine: ours, or stock `vllm` or `sglang`, whose replicas routers use without telemetry
    (docs/serving-on-kubernetes.md#other-engines). Its image is the operator's default for the type, unless image
    names one."""
    image: (
        Annotated[str, Meta(min_length=1, max_length=512, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@-]*$")] | None
    ) = None
    """Container image of the engine. The operator's own default if left out."""
    upgrade_policy: UpgradePolicy | None = None
    """What a new default image of the operator does. `OnSpecChange`: the replicas keep the image that they were rolled
    out with until an edit of this resource replaces them anyway. `Automatic`: it is rolled out, to few services at a
    time. The operator's own setting if left out, which is OnSpecChange unless an administrator changes it."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where the model computes. `auto` uses a GPU if the replica has one. `cuda` needs resources.gpu or
    resources.claims."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of weights and activations. `auto` follows the model and the device."""
    attention_backend: Literal["auto", "cpu", "triton", "torch", "flash_attn"] = "auto"
    """What computes attention. `auto` takes the first of cpu, triton and torch that can serve the model on the device;
    with another one the engine refuses to start where that cannot."""
    max_model_len: MaxModelLen | None = None
    """Longest sequence, prompt and output together, in tokens. The model's own limit if left out."""
    max_num_seqs: MaxNumSeqs | None = None
    """Largest number of sequences in one step."""
    max_num_batched_tokens: MaxNumBatchedTokens | None = None
    """Largest number of tokens in one step; longer prompts are computed in chunks."""
    block_size: BlockSize | None = None
    """Tokens per KV cache block."""
    kv_cache_memory: CacheQuantity | None = None
    """Size of the KV cache of one replica, such as `2Gi`, between 1M and 63Ti. Excludes gpuMemoryUtilization."""
    gpu_memory_utilization: Annotated[float, Meta(ge=0.05, le=1.0)] | None = None
    """Share of a GPU's memory that weights, activations and KV cache may take together. Not allowed with device cpu."""
    enable_prefix_caching: bool = True
    """Whether prompts with a common prefix share KV cache blocks. Prefix-aware routing needs it."""
    threads: Threads | None = None
    """CPU compute threads of one replica."""
    args: Annotated[tuple[Argument, ...], Meta(max_length=MAX_ARGUMENTS)] = ()
    """Further flags of the engine (docs/reference/engine-flags.md), one an entry, such as `--max-logprobs=5` or
    `--enforce-eager`. Flags that a field or the operator sets are refused, as are unknown ones and values of another
    type."""
    env: Annotated[tuple[EnvVar, ...], Meta(max_length=128, extra_json_schema=MAP_BY_NAME)] = ()
    """Environment variables of the engine."""
    shutdown_timeout_seconds: Annotated[int, Meta(ge=0, le=3600)] = 45
    """How long a stopping replica may take to finish its requests. A stream that has not finished by then continues on
    another replica if one can take it; what cannot move ends with an error."""

    @property
    def foreign(self) -> ForeignEngine | None:
        """The other engine that serves; None for ours."""
        return FOREIGN_ENGINES.get(self.type)

    @property
    def kv_cache_memory_bytes(self) -> int | None:
        return None if self.kv_cache_memory is None else quantity_bytes(self.kv_cache_memory)


class RouterLimits(Struct, frozen=True, kw_only=True, rename="camel"):
    """Flow control of this service's requests in each router. 0 selects the router's default."""

    max_inflight_per_replica: Annotated[int, Meta(ge=0, le=65_536)] = 0
    """Largest number of sequences in flight from each router to one replica (a request has one for each choice, prompt
    and beam); further requests are queued. By default a service is saturated when it has 1.5 times as many sequences as
    the batches of all its replicas hold."""
    max_queued_requests: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """Largest number of requests queued in each router while all replicas are full; further ones are rejected (429)."""
    queue_timeout_seconds: Annotated[int, Meta(ge=0, le=3600)] = 0
    """Longest time that a request may be queued before it is rejected (429)."""
    hold_timeout_seconds: Annotated[int, Meta(ge=0, le=3600)] = 0
    """How long requests wait for a first replica while there is none, before they are rejected (503). 600 if left out
    for a service that scales to zero."""
    request_timeout_seconds: Annotated[int, Meta(ge=0, le=86_400)] = 0
    """Longest time until a response begins. A response that is not streamed begins when it is complete."""


class RouterCanary(Struct, frozen=True, kw_only=True, rename="camel"):
    """Another InferenceService that answers a share of this one's requests."""

    service: InferenceServiceName
    """Name of the canary, in the same namespace. It is scaled and rolled out on its own. Requests for model names that
    both services claim go to this service, which passes the canary's share on; other names lead to the canary directly.
    The canary's own canary is ignored here. While the canary does not exist or has no replica that can answer, this
    service answers all requests."""
    weight: Annotated[int, Meta(ge=0, le=100)]
    """The canary's share of the requests, in percent. All requests of a session are answered by the same service."""


class Router(Struct, frozen=True, kw_only=True, rename="camel"):
    """How routers handle this service's requests."""

    policy: RoutingPolicy = "cost"
    """How a replica is chosen: `cost` (cached prefix against load, the default), `least-load`, `prefix-hash` (a hash of
    the prompt's beginning selects the replica), `session` (header x-session-id, or prompt_cache_key or session_id in
    the body), `round-robin`, `random` or `power-of-two`."""
    limits: RouterLimits = RouterLimits()
    """Flow control in each router."""
    hedge_after: Annotated[float, Meta(ge=0, le=100, extra_json_schema=_hedge_rules)] | None = None
    """Hedging: sends a streamed request to a second replica if its response has not begun after this many times (1 to
    100) the expected time, for at most one request in twenty, and uses the response that begins first. 0 never hedges.
    If left out, the router's --hedge-after applies, which by default never hedges."""
    canary: RouterCanary | None = None
    """Another InferenceService that answers a share of this one's requests; none if left out."""


class InferenceServiceSpec(Struct, frozen=True, kw_only=True, rename="camel"):
    """Desired state."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            rule=(
                "!has(self.engine) || !has(self.engine.device) || self.engine.device != 'cuda' || "
                "(has(self.resources) && (has(self.resources.gpu) || "
                "(has(self.resources.claims) && size(self.resources.claims) > 0)))"
            ),
            message="device cuda needs spec.resources.gpu, or a GPU of spec.resources.claims",
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
        Rule(
            rule=(
                "!has(self.resources) || !has(self.resources.gpu) || !has(self.resources.gpu.count) || "
                f"self.resources.gpu.count == {_DEVICES}"
            ),
            message=(
                "must equal the number of devices in spec.parallelism (tensor * pipeline * data); leave it out, or "
                "set spec.parallelism to use another number of GPUs"
            ),
            message_expression=(
                "'must be %d, the number of devices in spec.parallelism (tensor * pipeline * data), not %d; leave it "
                "out, or set spec.parallelism to use another number of GPUs'"
                f".format([{_DEVICES}, self.resources.gpu.count])"
            ),
            field_path=".resources.gpu.count",
        ),
        Rule(
            rule=f"!({_IS_FOREIGN}) || !self.model.source.startsWith('builtin://')",
            message="the model that ships with Argosy needs engine.type argosy",
            field_path=".model.source",
        ),
        Rule(
            rule=f"!({_IS_FOREIGN}) || !self.model.source.matches(r'{GGUF_PATTERN}')",
            message="GGUF files need engine.type argosy; name the repository that the file was made from",
            field_path=".model.source",
        ),
        Rule(
            rule=(
                f"!({_IS_FOREIGN}) || !has(self.model.cache) || !has(self.model.cache.type) || "
                "self.model.cache.type == 'none'"
            ),
            message=(
                "only engines of type argosy hold a model of a shared cache while they use it; use type none, or a "
                "model on a claim (pvc://)"
            ),
            field_path=".model.cache",
        ),
        Rule(
            rule=(
                "!has(self.engine) || !has(self.engine.type) || self.engine.type != 'sglang' || "
                "!has(self.parallelism) || !has(self.parallelism.expert) || !self.parallelism.expert"
            ),
            message="SGLang's experts are divided by --ep-size in engine.args",
            field_path=".parallelism.expert",
        ),
        Rule(
            rule=(
                f"!({_IS_FOREIGN}) || !has(self.parallelism) || !has(self.parallelism.nodes) || "
                "self.parallelism.nodes == 1"
            ),
            message="only engines of type argosy divide a model among several nodes",
            field_path=".parallelism.nodes",
        ),
        Rule(
            rule=(
                f"{_NOT_FETCHED} || {_ALL_CONTAINERS}(container, !has(container.volumeMounts) || "
                "container.volumeMounts.all(mount, "
                f"mount.mountPath != '{MODELS_MOUNT}' && !mount.mountPath.startsWith('{MODELS_MOUNT}/')))"
            ),
            message=f"{MODELS_MOUNT} is where fetched models are mounted; mount the volume elsewhere",
            field_path=".podTemplate.spec.containers",
        ),
        *_variable_rules(_NOT_FETCHED, FETCH_ENV, FETCH_ENV_MESSAGE),
        *_variable_rules(f"({_IS_FOREIGN}) || {_NOT_FETCHED}", FETCH_CREDENTIALS, FETCH_CREDENTIALS_MESSAGE),
    )
    model: Model
    """Which model is served, and under which names."""
    engine: Engine = Engine()
    """How each replica's engine runs."""
    parallelism: Parallelism = Parallelism()
    """How one replica is spread over several devices; one device if left out."""
    replicas: Annotated[int, Meta(ge=0, le=1000)] = 1
    """Number of replicas. With spec.scaling: the number to start with."""
    scaling: Scaling | None = None
    """Scaling by load; none if left out. While a HorizontalPodAutoscaler (KEDA makes one) has the service as its
    target, that one decides from the number that it first chooses on, and Degraded says so."""
    resources: Resources = Resources()
    """Resources that one replica needs on its node, or on each of them."""
    placement: Placement = Placement()
    """Nodes on which replicas may run."""
    pod_disruption_budget: PodDisruptionBudget = PodDisruptionBudget()
    """How many replicas may be evicted at once. Rollouts go by spec.rollout."""
    rollout: Rollout = Rollout()
    """How a change is rolled out to the replicas."""
    router: Router = Router()
    """How routers handle this service's requests."""
    paused: bool = False
    """Stops reconciling; running replicas keep serving."""
    pod_template: PodTemplate = PodTemplate()
    """Additions to the pods that the operator renders."""

    @property
    def gpus(self) -> int:
        """Number of GPUs of one replica, of all its nodes together."""
        gpu = self.resources.gpu
        return 0 if gpu is None else gpu.count or self.parallelism.devices

    @property
    def gpus_per_pod(self) -> int:
        """Number of GPUs of each of a replica's pods."""
        return self.gpus // self.parallelism.nodes

    @property
    def default_requests(self) -> dict[str, str]:
        """CPUs and memory that each pod of a replica with GPUs requests if the resource does not say."""
        claims = self.resources.claims if self.engine.device != "cpu" else ()
        devices = self.gpus or (self.parallelism.devices if claims else 0)
        return self.resources.default_requests(devices // self.parallelism.nodes) if devices else {}


ConditionType = Literal[
    "Ready", "Progressing", "WorkloadReady", "ModelCached", "Routable", "Degraded", "Reconciling", "Stalled"
]
ConditionStatus = Literal["True", "False", "Unknown"]


class Condition(Struct, frozen=True, kw_only=True, rename="camel"):
    """One aspect of the service's state, as in metav1.Condition."""

    type: Annotated[str, Meta(max_length=316)]
    """Type of the condition."""
    status: ConditionStatus
    """True, False or Unknown."""
    reason: Annotated[
        str, Meta(min_length=1, max_length=1024, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")
    ]
    """Reason for the status, as one CamelCase word."""
    message: Annotated[str, Meta(max_length=32768)] = ""
    """Explanation for people: names the pod and what it waits for."""
    last_transition_time: Annotated[str, Meta(max_length=64, extra_json_schema={"format": "date-time"})]
    """When the status last changed."""
    observed_generation: Annotated[int, Meta(ge=0)] = 0
    """Generation of the resource for which the condition was computed."""


class InferenceServiceStatus(Struct, frozen=True, kw_only=True, rename="camel"):
    """Observed state. Only the operator writes it; it is never an input."""

    observed_generation: Annotated[int, Meta(ge=-1)] = -1
    """Generation of the resource for which this status was computed; -1 while no operator has observed it."""
    url: Annotated[str, Meta(max_length=2048)] = ""
    """Base URL of the router, for an OpenAI client."""
    model: Annotated[str, Meta(max_length=256)] = ""
    """Name that clients send as `model`."""
    selector: Annotated[str, Meta(max_length=4096)] = ""
    """Label selector of the replicas' pods, for the scale subresource."""
    revision: Annotated[str, Meta(max_length=63)] = ""
    """Revision of the pod template that replicas should have now."""
    replicas: Annotated[int, Meta(ge=0)] = 0
    """Pods that are not terminating."""
    updated_replicas: Annotated[int, Meta(ge=0)] = 0
    """Pods of the wanted revision that are not terminating."""
    ready_replicas: Annotated[int, Meta(ge=0)] = 0
    """Pods whose containers are ready."""
    routable_replicas: Annotated[int, Meta(ge=0)] = 0
    """Pods to which a router sends requests."""
    draining_replicas: Annotated[int, Meta(ge=0)] = 0
    """Pods that are terminating."""
    routable: Annotated[str, Meta(max_length=32)] = ""
    """Number of routable and of wanted replicas, such as `2/2`."""
    image: Annotated[str, Meta(max_length=512)] = ""
    """Image of the engine that replicas should have now."""
    available_image: Annotated[str, Meta(max_length=512)] = ""
    """The operator's default image, if it is another one than the replicas have: what the next edit that replaces them,
    or upgradePolicy Automatic, rolls out. Empty if there is none."""
    model_cache: Annotated[str, Meta(max_length=64)] = ""
    """How far the fetch of the model is: `cached`, `failed`, or progress such as `43 % 12.1/28.0 GiB, eta 70 s`. Empty
    before the first replica begins, and if nothing is fetched."""
    gpus: Annotated[int, Meta(ge=0)] = 0
    """GPUs of one replica."""
    scaling: ScalingStatus | None = None
    """What spec.scaling has decided; absent without it."""
    rollout: RolloutStatus | None = None
    """How far spec.rollout.canary is; absent without it, and once the change is rolled out."""
    conditions: Annotated[tuple[Condition, ...], Meta(max_length=16, extra_json_schema=MAP_BY_TYPE)] = ()
    """Ready (the summary), Progressing, WorkloadReady, ModelCached, Routable, Degraded; Reconciling and Stalled for
    kstatus."""


class ManagedFieldsEntry(Struct, frozen=True, kw_only=True, rename="camel"):
    """Who wrote some fields of an object, as far as the operator reads it."""

    manager: str = ""
    subresource: str = ""
    time: str = ""
    """Of the last write (RFC 3339)."""


class ObjectMeta(Struct, frozen=True, kw_only=True, rename="camel"):
    """Those fields of Kubernetes' ObjectMeta that the operator reads."""

    name: str
    namespace: str = "default"
    uid: str = ""
    generation: int = 0
    creation_timestamp: str = ""
    deletion_timestamp: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    managed_fields: tuple[ManagedFieldsEntry, ...] = ()

    @property
    def key(self) -> str:
        """`namespace/name`."""
        return f"{self.namespace}/{self.name}"


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
    """Desired state."""
    status: InferenceServiceStatus = InferenceServiceStatus()
    """Observed state."""

    @property
    def key(self) -> str:
        """`namespace/name`."""
        return self.metadata.key

    @property
    def served_name(self) -> str:
        """Canonical name that clients send as `model`."""
        return self.spec.model.served_name or self.metadata.name


def parse(obj: dict[str, Any]) -> InferenceService:
    """Parse a resource as the API server returned it. Unknown fields are ignored: the CRD may be newer than this
    operator.

    Raises:
        msgspec.ValidationError: a field has a type or value this version cannot read.
    """
    return msgspec.convert(obj, InferenceService)
