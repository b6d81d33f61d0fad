"""`spec.model`: which model is served, where it comes from, and where it is kept.

Owns the types. Must not know how a model is fetched. Invariant: a field that the source has no use for is refused.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, Struct

from argosy_resource.model_source import REMOTE_PATTERN, SOURCE_RULES
from argosy_resource.schema_types import MAP_BY_NAME, SET, ObjectName, Quantity, Rule, SecretName, ServedName

ModelSource = Annotated[str, Meta(min_length=1, max_length=1024, extra_json_schema=SOURCE_RULES)]


class SecretReference(Struct, frozen=True, kw_only=True, rename="camel"):
    """A Secret of the resource's own namespace."""

    name: SecretName
    """Name of the Secret."""


class ModelCache(Struct, frozen=True, kw_only=True, rename="camel"):
    """Where a fetched model is kept."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            rule="(has(self.type) && self.type == 'claim') == has(self.claimName)",
            message="claimName belongs to type claim: set both, or neither",
            field_path=".claimName",
        ),
        Rule(
            rule="!has(self.sizeLimit) || !has(self.type) || self.type == 'none'",
            message="sizeLimit is for type none only; a claim has its own size, and a node's cache that of the chart",
            field_path=".sizeLimit",
        ),
    )
    type: Literal["none", "node", "claim"] = "none"
    """`none`: each pod fetches the model for itself, and it goes with the pod. `node`: the pods of a node share a
    directory of the node, if the operator's settings provide one. `claim`: the pods share a PersistentVolumeClaim."""
    claim_name: ObjectName | None = None
    """PersistentVolumeClaim of the same namespace, for type claim. With replicas on several nodes it must be
    ReadWriteMany."""
    size_limit: Quantity | None = None
    """Most that the model may take of the node's ephemeral storage, for type none, such as `60Gi`; no limit if left
    out."""


class Adapter(Struct, frozen=True, kw_only=True, rename="camel"):
    """A LoRA adapter of the model."""

    name: ServedName
    """Name of the adapter."""
    source: Annotated[str, Meta(min_length=1, max_length=1024)]
    """Where the adapter is."""


class Model(Struct, frozen=True, kw_only=True, rename="camel"):
    """Which model is served, and under which names."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            rule="!has(self.adapters)",
            message=(
                "adapters are not served yet; merge the adapter into the model, and serve it as a service of its own"
            ),
            field_path=".adapters",
        ),
        Rule(
            rule=f"!has(self.secretRef) || self.source.matches('{REMOTE_PATTERN}')",
            message="secretRef is for models that are fetched; this source needs no credentials",
            field_path=".secretRef",
        ),
        Rule(
            rule=f"!has(self.cache) || self.source.matches('{REMOTE_PATTERN}')",
            message="cache is for models that are fetched; this source is in its place already",
            field_path=".cache",
        ),
        Rule(
            rule="!has(self.servedName) || !has(self.aliases) || !(self.servedName in self.aliases)",
            message="aliases must not repeat servedName",
            field_path=".aliases",
        ),
    )
    source: ModelSource
    """Where the model is. Fetched before the engine starts: `hf://ORG/NAME[@REVISION]`, `s3://BUCKET/PREFIX`,
    `gs://BUCKET/PREFIX`, `oci://HOST/REPOSITORY[:TAG][@sha256:DIGEST]`, `https://HOST/PATH[#sha256=DIGEST]` (an archive
    or a SHA256SUMS). There already: `pvc://CLAIM/PATH` (a PersistentVolumeClaim of the same namespace, mounted
    read-only), `file:///ABSOLUTE/PATH` (a path inside the engine container, mounted through podTemplate or part of the
    image), `builtin://tiny` (the model that ships with the engine)."""
    secret_ref: SecretReference | None = None
    """Secret of the same namespace with the source's credentials. Its keys are named like the variables that the
    source's own tools read: `HF_TOKEN`, `AWS_ACCESS_KEY_ID` and so on. Only the container that fetches gets it."""
    cache: ModelCache | None = None
    """Where a fetched model is kept; type none if left out."""
    served_name: ServedName | None = None
    """Name that clients send as `model`. The resource's name if left out. It must not begin with the name of another
    namespace and `/`, nor be another service's; clients then have `namespace/name` alone."""
    aliases: Annotated[tuple[ServedName, ...], Meta(max_length=32, extra_json_schema=SET)] = ()
    """Further names under which clients may ask for the model, of which the same is true."""
    adapters: Annotated[tuple[Adapter, ...], Meta(max_length=64, extra_json_schema=MAP_BY_NAME)] | None = None
    """Reserved for LoRA adapters, and refused until the engine serves them."""
