"""`spec.resources`: what one replica takes of its node.

Owns the types. Must not know how pods look. Invariant: what is left out is not requested.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Final

from msgspec import Meta, Struct

from argosy_resource.schema_types import MAP_BY_NAME, ObjectName, Quantity, ResourceName, Rule

MAX_DEVICES: Final = 16
"""Most devices of one replica: those of the largest nodes."""


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
    """CPU request."""
    cpu_limit: Quantity | None = None
    """CPU limit, at least as much as cpu. None if left out: throttling would stall decoding. With cpu the same and
    memory set, the pods are of class Guaranteed, and a kubelet with static CPU management gives them cores of their
    own."""
    memory: Quantity | None = None
    """Memory request and limit."""
    shared_memory: Quantity | None = None
    """Size of `/dev/shm`, through which an engine's processes exchange data; it counts against memory. 1Gi if left
    out."""
    claims: Annotated[tuple[ResourceClaim, ...], Meta(max_length=8, extra_json_schema=MAP_BY_NAME)] = ()
    """Claims of dynamic resource allocation that the engine gets, for devices that no extended resource stands for.
    Kubernetes 1.34 or newer."""
