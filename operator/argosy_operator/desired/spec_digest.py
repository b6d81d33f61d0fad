"""Hash of the parts of a spec that shape the pods, which tells a user's change from one of the operator's own."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
import xxhash
from msgspec import Struct

from argosy_resource.resources import Resources
from argosy_resource.types import InferenceService


def input_digest(service: InferenceService) -> str:
    """Hash of those parts of the spec that shape the pods. Defaults are left out, so that a field which a later version
    adds does not change it."""
    spec = service.spec
    engine = msgspec.structs.replace(spec.engine, upgrade_policy=None)
    parts = (engine, _resources(service), spec.placement, spec.pod_template)
    said = [spec.model.source, spec.rollout.drain_seconds, *map(_non_defaults, parts)]
    if parallelism := _non_defaults(spec.parallelism):
        said.append({"parallelism": parallelism})
    if spec.engine.foreign is not None:  # which is started with the names that clients use
        said.append({"names": [service.served_name, *spec.model.aliases]})
    store = _non_defaults((spec.model.secret_ref, spec.model.cache))
    if any(store):
        said.append(store)
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(said, order="deterministic"))[:10]


def _resources(service: InferenceService) -> Resources:
    """The resources, whose GPUs are the same whether their number is written or follows."""
    resources = service.spec.resources
    if resources.gpu is None:
        return resources
    return msgspec.structs.replace(resources, gpu=msgspec.structs.replace(resources.gpu, count=None))


def _non_defaults(value: Any) -> Any:
    if isinstance(value, Struct):
        given = ((name, getattr(value, name), default) for name, default in _defaults(type(value)))
        return {name: _non_defaults(field) for name, field, default in given if field != default}
    if isinstance(value, tuple):
        return [_non_defaults(item) for item in value]
    return value


@functools.cache
def _defaults(struct: type[Struct]) -> tuple[tuple[str, Any], ...]:
    """Fields and their defaults. Cached, because msgspec takes longer to look them up than the rest of a reconcile."""
    fields = msgspec.structs.fields(struct)
    return tuple(
        (each.name, each.default if each.default_factory is msgspec.NODEFAULT else each.default_factory())
        for each in fields
    )
