"""`spec.resources` and `spec.parallelism`: what one replica takes of its nodes, and how it is spread over devices.

Owns the types, the number of devices (as Python and as CEL), and what engines with GPUs request where CPUs and memory
are left out:

    cpu     1 for the API server and the core, 1 for the worker of each GPU
    memory  2Gi for the API server and the core, 4Gi for the worker of each GPU (torch with CUDA, pinned buffers), and
            sharedMemory; weights go to GPUs without a copy in host memory

Without requests a pod is of class BestEffort: the scheduler puts any number beside it, and a node that runs out of
memory ends it first. Must not know flags, nor how pods look. Invariants: these defaults are requests and no limits,
never exceed a limit that is set, and no other service requests what is left out.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Final

from msgspec import Meta, Struct

from argosy_resource.schema_types import (
    MAP_BY_NAME,
    ObjectName,
    Quantity,
    ResourceName,
    Rule,
    quantity_bytes,
    quantity_text,
    quantity_value,
)

MAX_DEVICES: Final = 16
"""Most devices of one replica: those of the largest nodes."""
SHARED_MEMORY: Final = "1Gi"
"""Size of /dev/shm if the resource does not say."""
_MEMORY: Final = 2 << 30
"""Bytes that an engine's API server and core need."""
_MEMORY_PER_GPU: Final = 4 << 30
"""Bytes of host memory that the worker of a GPU needs."""


class Gpu(Struct, frozen=True, kw_only=True, rename="camel"):
    """GPUs of one replica."""

    count: Annotated[int, Meta(ge=1, le=MAX_DEVICES)] | None = None
    """Number of GPUs: one per process of spec.parallelism, as many as there are if left out, on all nodes together. The
    API server refuses another number, because GPUs would be reserved and not used."""
    resource_name: ResourceName = "nvidia.com/gpu"
    """Extended resource that stands for one GPU, such as `nvidia.com/gpu`, `amd.com/gpu` or, for a slice of a GPU,
    `nvidia.com/mig-1g.10gb`."""


class ResourceClaim(Struct, frozen=True, kw_only=True, rename="camel"):
    """A claim of dynamic resource allocation (DRA)."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            rule="has(self.resourceClaimName) != has(self.resourceClaimTemplateName)",
            message=(
                "name exactly one of resourceClaimName (one claim that all replicas share) and "
                "resourceClaimTemplateName (a claim for each replica)"
            ),
        ),
    )
    name: Annotated[str, Meta(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
    """Name of the claim inside the pod."""
    resource_claim_name: ObjectName | None = None
    """ResourceClaim of the same namespace, which all replicas share."""
    resource_claim_template_name: ObjectName | None = None
    """ResourceClaimTemplate of the same namespace, from which each replica gets a claim of its own."""
    request: Annotated[str, Meta(min_length=1, max_length=63)] | None = None
    """The one request of the claim whose devices the engine gets; all of them if left out."""


class Resources(Struct, frozen=True, kw_only=True, rename="camel"):
    """Resources that one replica needs on its node."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            rule=(
                "!has(self.cpu) || !has(self.cpuLimit) || "
                "!quantity(string(self.cpu)).isGreaterThan(quantity(string(self.cpuLimit)))"
            ),
            message="must be at least as much as cpu, which is reserved; raise it, or leave it out for no limit",
            field_path=".cpuLimit",
        ),
    )
    gpu: Gpu | None = None
    """GPUs; none if left out."""
    cpu: Quantity | None = None
    """CPU request. If left out, 1 and 1 for each GPU of the pod, but no more than cpuLimit; none without GPUs."""
    cpu_limit: Quantity | None = None
    """CPU limit, at least as much as cpu. None if left out: throttling would stall decoding. With cpu the same and
    memory set, the pods are of class Guaranteed, and a kubelet with static CPU management gives them cores of their
    own."""
    memory: Quantity | None = None
    """Memory request and limit. If left out there is no limit, and the request is 2Gi, 4Gi for each GPU of the pod, and
    sharedMemory; none without GPUs."""
    shared_memory: Quantity | None = None
    """Size of `/dev/shm`, through which an engine's processes exchange data; it counts against memory. 1Gi if left
    out."""
    claims: Annotated[tuple[ResourceClaim, ...], Meta(max_length=8, extra_json_schema=MAP_BY_NAME)] = ()
    """Claims of dynamic resource allocation that the engine gets, for devices that no extended resource stands for.
    Kubernetes 1.34 or newer."""

    def default_requests(self, gpus: int) -> dict[str, str]:
        """What a pod with so many GPUs requests, by name of the resource. What is set comes before it."""
        cpus, limit = 1 + gpus, self.cpu_limit
        is_limited = limit is not None and quantity_value(limit) < cpus
        memory = _MEMORY + gpus * _MEMORY_PER_GPU + quantity_bytes(self.shared_memory or SHARED_MEMORY)
        cpu = quantity_text(limit) if is_limited else None
        return {"cpu": cpu or str(cpus), "memory": f"{-(-memory >> 20)}Mi"}


def devices_expression(parallelism: str) -> str:
    """A CEL expression of the number of devices; `parallelism` is the expression of that field."""
    sizes = (f"{parallelism}.{name}" for name in ("tensor", "pipeline", "data"))
    return " * ".join(f"(has({size}) ? {size} : 1)" for size in sizes)


class Parallelism(Struct, frozen=True, kw_only=True, rename="camel"):
    """How one replica's engine is spread over devices: GPUs, or processes if it computes on the CPU."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            rule=f"{devices_expression('self')} <= {MAX_DEVICES}",
            message=f"tensor * pipeline * data is the number of devices of one replica, at most {MAX_DEVICES}",
        ),
        Rule(
            rule=(
                "!has(self.expert) || !self.expert || (has(self.tensor) && self.tensor > 1) || "
                "(has(self.data) && self.data > 1)"
            ),
            message="expert divides the experts among the devices of tensor and data; set one of them to 2 or more",
            field_path=".expert",
        ),
        Rule(
            rule=(
                "!has(self.nodes) || "
                "(has(self.tensor) ? self.tensor : 1) * (has(self.pipeline) ? self.pipeline : 1) % self.nodes == 0"
            ),
            message="nodes must divide tensor * pipeline: each node has an equal part of the devices",
            field_path=".nodes",
        ),
        Rule(
            rule="!has(self.nodes) || self.nodes == 1 || !has(self.data) || self.data == 1",
            message="the copies of the model are on one node; set data to 1 and use replicas, or nodes to 1",
            field_path=".nodes",
        ),
    )
    tensor: Annotated[int, Meta(ge=1, le=MAX_DEVICES)] = 1
    """Devices among which each layer's weights and attention heads are divided. It must divide the model's number of
    attention heads. Lets a model that is too large for one device run."""
    pipeline: Annotated[int, Meta(ge=1, le=MAX_DEVICES)] = 1
    """Stages among which the layers are divided, each of as many devices as tensor says."""
    data: Annotated[int, Meta(ge=1, le=MAX_DEVICES)] = 1
    """Copies of the model behind one engine's API, each with tensor times pipeline devices. Replicas do the same, and
    are replaced one by one. With expert the copies share one set of experts and compute in step."""
    expert: bool = False
    """Whether the devices of tensor and data hold whole experts of a mixture-of-experts model, instead of a slice of
    each, or in each copy all of them."""
    nodes: Annotated[int, Meta(ge=1, le=MAX_DEVICES)] = 1
    """Pods among which the devices of one replica are divided equally, for a model that one machine cannot hold. The
    first pod is the replica: it answers requests, and is ready when all of them are. If one ends, all start again.
    spec.resources is what each pod takes, but for gpu.count, the number of all."""

    @property
    def devices(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def layout(self) -> dict[str, int]:
        """The fields that say how a model is divided, by their names."""
        return {"tensor": self.tensor, "pipeline": self.pipeline, "data": self.data, "expert": self.expert}
