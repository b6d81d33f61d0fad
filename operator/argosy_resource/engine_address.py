"""The labels, port and key by which the engines of a service are found and called.

Owns the strings about engines on which operator, router and local fleet agree. Must not know how pods are made.
"""

from __future__ import annotations

from typing import Final

from argosy_resource.types import GROUP, InferenceService

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


def service_label(service: InferenceService) -> str:
    """Value of `SERVICE_LABEL`: the resource's name, which a CEL rule limits to the length of a label."""
    return service.metadata.name


def selector(service: InferenceService) -> dict[str, str]:
    """Labels that select the service's pods inside its namespace."""
    return {COMPONENT_LABEL: "engine", SERVICE_LABEL: service_label(service)}
