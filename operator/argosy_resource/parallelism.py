"""`spec.parallelism`: how one replica is spread over devices.

Owns the type, and the number of devices that follows from it, as Python and as CEL. Must not know flags or pods.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta, Struct

from argosy_resource.resources import MAX_DEVICES
from argosy_resource.schema_types import Rule


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
        """Number of devices of one replica."""
        return self.tensor * self.pipeline * self.data

    @property
    def layout(self) -> dict[str, int]:
        """The fields that say how a model is divided, by their names."""
        return {
            "tensor": self.tensor,
            "pipeline": self.pipeline,
            "data": self.data,
            "expert": self.expert,
        }
