"""Manifests of a local fleet: read, and checked for what this machine cannot do.

Invariants: a manifest is validated by the same code as in a cluster; what cannot be done here is refused before
anything starts, or, if the fleet serves without it, named on standard error. A field is named if, and only if, it
differs from its default and nothing of the local fleet reads it. An engine, and the fetch of its model, read the
variables and files that they are given, so these fields are refused; the others concern where and how pods run.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from argosy.errors import UsageError
from argosy_protocol.fleet import FleetDocument
from argosy_resource.engine_arguments import argument_problems
from argosy_resource.engine_command import claim_name, model_path
from argosy_resource.fleet_document import NamePolicy, fleet_document, settle_names, without_canary
from argosy_resource.model import Model
from argosy_resource.resources import Gpu, Resources
from argosy_resource.types import InferenceService, InferenceServiceSpec
from argosy_resource.validation import ManifestError, load_manifests

_FIELDS: Final[dict[str, str]] = {
    "model.cache": "this machine's store is used",
    "model.widenedSize": "",
    "engine.image": "",
    "engine.upgradePolicy": "",
    "resources.gpu.resourceName": "",
    "resources.cpu": "",
    "resources.cpuLimit": "",
    "resources.memory": "",
    "resources.sharedMemory": "",
    "resources.claims": "",
    "placement.nodeSelector": "",
    "placement.tolerations": "",
    "placement.affinity": "",
    "placement.topologySpreadConstraints": "",
    "placement.priorityClassName": "",
    "placement.runtimeClassName": "",
    "placement.schedulerName": "",
    "placement.serviceAccountName": "",
    "podDisruptionBudget.maxUnavailable": "",
    "scaling": "spec.replicas is used",
    "rollout.canary": "a change is rolled out at once",
    "rollout.drainSeconds": "",
    "rollout.inPlaceAfterSeconds": "",
    "rollout.progressDeadlineSeconds": "",
    "podTemplate.metadata.labels": "",
    "podTemplate.metadata.annotations": "",
    "podTemplate.spec.volumes": "",
    "podTemplate.spec.imagePullSecrets": "",
}
"""Paths below `spec`, each with what applies instead, if anything does."""
_ENGINE: Final = "spec.podTemplate.spec.containers[engine]"


def cluster_fields(service: InferenceService) -> tuple[str, ...]:
    """The fields that the resource sets and a local fleet ignores, with what applies instead."""
    spec = msgspec.to_builtins(service.spec)
    defaults = msgspec.to_builtins(
        InferenceServiceSpec(model=Model(source=service.spec.model.source), resources=Resources(gpu=Gpu()))
    )
    found = [path for path in _FIELDS if _value(spec, path) not in (None, _value(defaults, path))]
    return tuple(_with_note(path) for path in found)


def missing_here(service: InferenceService) -> tuple[str, ...]:
    """What the resource gives its engines, and the fetch of its model, that a local fleet has not: files of volumes,
    a token, and values of Secrets and ConfigMaps, unless these are optional. Each with the remedy."""
    found: list[str] = []
    if secret := service.spec.model.secret_ref:
        found.append(
            f"spec.model.secretRef: this machine has no Secret {secret.name!r}; leave it out here, and set the "
            "variables that are its keys, such as HF_TOKEN, in the environment of `argosy up`"
        )
    if service.spec.placement.automount_service_account_token:
        found.append(
            "spec.placement.automountServiceAccountToken: this machine has no account and no token; leave it out here"
        )
    for container in service.spec.pod_template.spec.containers:
        found += [
            f"{_ENGINE}.volumeMounts: {mount.name} at {mount.mount_path}: no volume is mounted on this machine; "
            "leave the mount out here, and name a path of this machine where the engine reads it"
            for mount in container.volume_mounts
        ]
        for variable in container.env:
            source = variable.value_from
            if source is None:
                continue
            key, kind = source.secret_key_ref or source.config_map_key_ref, "ConfigMap"
            if source.secret_key_ref is not None:
                kind = "Secret"
            if key is not None and not key.optional:
                found.append(
                    f"{_ENGINE}.env: {variable.name} comes from the {kind} {key.name!r}, which this machine has not; "
                    "give it as `value` here, or make it `optional: true`"
                )
    return tuple(found)


def _with_note(path: str) -> str:
    note = _FIELDS.get(path)
    return f"spec.{path} ({note})" if note else f"spec.{path}"


def _value(spec: dict[str, Any], path: str) -> object:
    """The value at a path, None if there is none."""
    value: Any = spec
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


_MOST_LISTED: Final = 10


def read_services(names: Sequence[str], *, gpus: int) -> tuple[InferenceService, ...]:
    """Read and check all resources in the files (`-` is standard input), in their order.

    Raises:
        UsageError: a file cannot be read, or a manifest is not valid or cannot run here.
    """
    services: list[InferenceService] = []
    others: list[str] = []
    for name in names:
        try:
            text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise UsageError(f"cannot read {name}: {why}") from error
        try:
            services += load_manifests(text, on_other=others.append)
        except ManifestError as error:
            problems = "\n".join(f"  {problem}" for problem in error.errors)
            raise UsageError(
                f"{name}: {error.resource or 'the manifest'} is not valid; nothing was changed",
                details=problems,
            ) from error
    if not services:
        found = f", but {_listed(others)}" if others else ""
        raise UsageError(f"{', '.join(names)}: no InferenceService in it{found}")
    _check_together(services)
    for service in services:
        _check_here(service, gpus)
    if others:
        _tell(f"skipped, as a local fleet has InferenceServices only: {_listed(others)}")
    for service in services:
        if fields := cluster_fields(service):
            _tell(f"{service.key}: without effect on this machine: {', '.join(fields)}")
    return tuple(services)


def _listed(objects: Sequence[str]) -> str:
    shown = ", ".join(objects[:_MOST_LISTED])
    more = len(objects) - _MOST_LISTED
    return f"{shown} and {more} more" if more > 0 else shown


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _check_together(services: Sequence[InferenceService]) -> None:
    keys = [service.key for service in services]
    for key in keys:
        if keys.count(key) > 1:
            raise UsageError(f"{key} is given twice; remove one of the two")
    document = fleet_document(services)
    policy = NamePolicy(namespaces={service.metadata.namespace for service in services})
    settled = settle_names(document, FleetDocument(), policy, datetime.datetime.now(datetime.UTC))
    for key, (lost, *_) in sorted(settled.lost.items()):
        raise UsageError(f"{key}: the model name {lost.name!r} {lost.why}; change servedName or aliases")
    for key in sorted(without_canary(document)):
        raise UsageError(f"{key}: its canary (spec.router.canary.service) is in none of the files; add it")


def _check_here(service: InferenceService, gpus: int) -> None:
    if missing := missing_here(service):
        raise UsageError(
            f"{service.key}: its engines would miss what only a cluster has; nothing was changed",
            details="\n".join(f"  {each}" for each in missing),
        )
    source = service.spec.model.source
    if service.spec.engine.foreign is not None:
        raise UsageError(
            f"{service.key}: spec.engine.type {service.spec.engine.type} needs a cluster; on this machine start the "
            "engine yourself, and give its URL to `argosy router --replica URL`"
        )
    if service.spec.parallelism.nodes > 1:
        raise UsageError(
            f"{service.key}: spec.parallelism.nodes needs a cluster; on this machine set it to 1, or start "
            "`argosy serve` on each machine yourself (--nnodes)"
        )
    if problems := argument_problems(service.spec.engine.args):
        raise UsageError(f"{service.key}: spec.engine.args: {'; '.join(problems)}")
    if claim_name(source) is not None:
        raise UsageError(
            f"{service.key}: {source} needs a cluster; on this machine use file:///ABSOLUTE/PATH"
        )
    if source.startswith("file://") and not Path(model_path(source)).is_dir():
        raise UsageError(f"{service.key}: spec.model.source: {model_path(source)} is not a directory")
    if service.spec.engine.device == "cuda" and service.spec.resources.gpu is None:
        raise UsageError(
            f"{service.key}: spec.resources.claims needs a cluster; on this machine set spec.resources.gpu"
        )
    needed = service.spec.gpus
    if service.spec.replicas and needed > gpus:
        raise UsageError(
            f"{service.key}: a replica needs {needed} GPU{'s' * (needed > 1)}, this machine has {gpus}; "
            "lower spec.parallelism or remove spec.resources.gpu to run on the CPU"
        )
