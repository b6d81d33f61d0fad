"""Rules of a rollout that hold wherever replicas run, in a cluster or on a laptop.

Must not know: pods, Deployments, processes.
"""

from __future__ import annotations

from argosy_resource.types import InferenceService


def may_replace_in_place(service: InferenceService) -> bool:
    """Whether a replica may be removed before its successor exists, although the rollout was to surge. A Deployment
    with maxUnavailable 1 and two or more replicas never removes the last available one."""
    explicit = service.spec.rollout.max_unavailable
    return service.spec.replicas > 1 if explicit is None else explicit > 0
