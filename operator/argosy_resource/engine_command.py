"""How one replica's engine is started and called: its command line and environment, and its labels, port and key.

Owns the strings about engines on which operator, router and local fleet agree, and the translation of `spec.model`,
`spec.engine` and `spec.parallelism` into flags of `argosy serve` (vLLM's names), for pods and for the local fleet, and
the way back for messages of engines. Must not know how pods are made. Invariant: only fields that the user set become
flags, so the engine alone knows its defaults.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from argosy_resource.engine_arguments import FIELD_FLAGS, FLAG_FIELDS, ForeignEngine
from argosy_resource.model import MODEL_MOUNT
from argosy_resource.types import GROUP, InferenceService, InferenceServiceSpec

ENGINE_PORT: Final = 8000
PROGRESS_PORT: Final = 8009
"""Where the container that fetches the model tells how far it is."""
API_KEY_ENV: Final = "ARGOSY_API_KEY"
"""Environment variable, and field of the service's Secret, that holds the engines' internal key."""
API_KEYS_FIELD: Final = "api-keys"
"""Field of the service's Secret with all valid internal keys, one per line, the newest first."""
INTERNAL_KEYS_ENV: Final = "ARGOSY_INTERNAL_KEYS_FILE"
"""Environment variable that tells the engines where that field is mounted."""
NODE_KEY_ENV: Final = "ARGOSY_NODE_KEY"
"""Environment variable, and field of the service's Secret, that holds the key by which the nodes of one engine know
each other."""
COMPONENT_LABEL: Final = "app.kubernetes.io/component"
NODE_COMPONENT: Final = "engine-node"
"""Component of a replica's further nodes, which answer no requests. That of a replica itself is `engine`."""
SERVICE_LABEL: Final = f"{GROUP}/service"
"""On every child: the name of the resource that owns it. Kubernetes discovery selects by it."""
ANY_HOST: Final = "0.0.0.0"  # noqa: S104 - a pod's network namespace is its own
_FLAG: Final = re.compile(r"(?<![\w-])--[a-z]+(?:-[a-z]+)*(?![\w-])")
_SIZES: Final = ("tensor", "pipeline", "data", "nodes")
_PVC: Final = "pvc://"
_FILE: Final = "file://"


def service_label(service: InferenceService) -> str:
    """Value of `SERVICE_LABEL`: the resource's name, which a CEL rule limits to the length of a label."""
    return service.metadata.name


def selector(service: InferenceService) -> dict[str, str]:
    """Labels that select the service's pods inside its namespace."""
    return {COMPONENT_LABEL: "engine", SERVICE_LABEL: service_label(service)}


def claim_name(source: str) -> str | None:
    """The PersistentVolumeClaim of a `pvc://CLAIM/PATH` source, else None."""
    return source.removeprefix(_PVC).partition("/")[0] if source.startswith(_PVC) else None


def model_path(source: str) -> str:
    """The model argument of the engine: a path, or the source itself (`builtin://tiny`, and what is fetched)."""
    if source.startswith(_PVC):
        path = source.removeprefix(_PVC).partition("/")[2].strip("/")
        return f"{MODEL_MOUNT}/{path}" if path else MODEL_MOUNT
    return source.removeprefix(_FILE)


def engine_model(service: InferenceService) -> str:
    """Name under which engines serve the model: the resource's name, which never changes. It is the `model_name` of
    their metrics."""
    return service.metadata.name


def engine_args(
    service: InferenceService,
    *,
    host: str = ANY_HOST,
    port: int = ENGINE_PORT,
    model: str | None = None,
    download_dir: str | None = None,
) -> list[str]:
    """Arguments after `argosy`: `serve SOURCE --host ... --served-model-name NAME ...`.

    NAME is `engine_model`, not a name that clients use, so that an edit of these restarts no engine.

    Args:
        model: where the engine finds the model, if not at its source.
        download_dir: the store that a fetched model is in; the engine's own default if left out.
    """
    spec = service.spec
    args = ["serve", model or model_path(spec.model.source), "--host", host, "--port", str(port)]
    args += ["--served-model-name", engine_model(service), "--any-model-name"]
    args += ["--download-dir", download_dir] if download_dir is not None else []
    args += _field_flags(spec, FIELD_FLAGS)
    if not spec.engine.enable_prefix_caching:
        args.append("--no-enable-prefix-caching")
    if spec.parallelism.expert:
        args.append("--enable-expert-parallel")
    return [*args, *spec.engine.args]


def _field_flags(spec: InferenceServiceSpec, fields: Mapping[str, str]) -> list[str]:
    """The flags of the fields that the user has set."""
    args = []
    for field, flag in fields.items():
        value = getattr(spec.engine if hasattr(spec.engine, field) else spec.parallelism, field)
        is_default = value in (None, "auto") or (field in _SIZES and value == 1)
        if not is_default:
            args += [flag, str(value)]
    return args


def foreign_args(service: InferenceService, engine: ForeignEngine, *, model: str | None = None) -> list[str]:
    """Arguments of another engine after its program, for a pod.

    It answers to the names that clients use, because routers cannot tell it that it has another one.

    Args:
        model: where the engine finds the model, if not at its source.
    """
    spec = service.spec
    path = model or model_path(spec.model.source)
    names = [service.served_name, *(spec.model.aliases if engine.takes_aliases else ())]
    args = [*([engine.model_flag] if engine.model_flag else []), path]
    args += ["--host", ANY_HOST, "--port", str(ENGINE_PORT), "--served-model-name", *names, *engine.switches]
    args += _field_flags(spec, engine.fields)
    if not spec.engine.enable_prefix_caching:
        args.append(engine.no_prefix_caching)
    if spec.parallelism.expert and engine.expert:
        args.append(engine.expert)
    return [*args, *spec.engine.args]


def flags_as_fields(message: str) -> str:
    """Say which fields of a manifest the flags are that an engine's message names; empty if it names none of them."""
    flags = dict.fromkeys(flag for flag in _FLAG.findall(message) if flag in FLAG_FIELDS)
    named = [f"{flag} is spec.{FLAG_FIELDS[flag]}" for flag in flags]
    return f"in the manifest {', '.join(named)}" if named else ""


def engine_env(service: InferenceService) -> dict[str, str]:
    """Environment variables with literal values: those of the podTemplate overlay win over `spec.engine.env`."""
    env = {variable.name: variable.value for variable in service.spec.engine.env}
    for container in service.spec.pod_template.spec.containers:
        env |= {variable.name: variable.value for variable in container.env if variable.value is not None}
    return env
