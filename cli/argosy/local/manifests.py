"""Reading manifests for a local fleet.

Owns: reading the files, checks for what a valid manifest may request but this machine cannot do, and lines on standard
error that name what it does without. Must not know: processes.
Invariant: a manifest is validated by the same code as in a cluster; what cannot be done here is refused before anything
starts, or, if the fleet serves without it, named.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from argosy.errors import UsageError
from argosy.local.cluster_fields import cluster_fields, missing_here
from argosy_protocol.fleet import FleetDocument
from argosy_resource.engine_command import claim_name, model_path
from argosy_resource.engine_flags import argument_problems
from argosy_resource.fleet_document import fleet_document, without_canary
from argosy_resource.name_claims import NamePolicy, settle_names
from argosy_resource.types import InferenceService
from argosy_resource.validation import ManifestError, load_manifests

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
