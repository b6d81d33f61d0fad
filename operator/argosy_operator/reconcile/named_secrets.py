"""Refuses the Secrets of an operator that a service names, by their labels.

Owns which names were looked at, and how many are at once: a service may name hundreds, each costs a request, and while
a worker asks for those of one tenant it reconciles no service of another. Must not know where a service names them.
Invariants: no Deployment is applied before every name of it was looked at since the last edit of the service and the
last resync; one reconcile asks for AT_ONCE names; at rest nothing is asked.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from argosy_operator.cluster.api_server import Api
from argosy_operator.desired.deployment_problem import named_secrets, reserved
from argosy_operator.errors import SecretReserved
from argosy_operator.kinds import SECRETS
from argosy_operator.names import FIELD_MANAGER, MANAGED_BY_LABEL
from argosy_operator.reconcile.concurrent_steps import run_together
from argosy_resource.types import InferenceService

AT_ONCE: Final = 16
"""Names that one reconcile asks for. The rest is asked for behind the services that wait."""


class NamedSecrets:
    """The Secrets that services name. Bounded by the number of services."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._checked: dict[str, tuple[int, set[str]]] = {}
        """By UID of a service: its generation, and the names that no operator's Secret had."""

    def check_all_again(self) -> None:
        """Have the next `check` of every service look at all of its names, as a resync does."""
        self._checked.clear()

    async def check(self, service: InferenceService) -> bool:
        """Look at names that were not looked at yet. False if some are left: check again.

        Raises:
            SecretReserved: an operator has made one of them, under whatever name.
            ApiError: the API server refused.
        """
        metadata = service.metadata
        generation, known = self._checked.get(metadata.uid, (metadata.generation, set()))
        if generation != metadata.generation:
            known = set()
        left = sorted(named_secrets(service) - known)
        if not left:
            return True
        self._checked[metadata.uid] = metadata.generation, known
        made = await run_together(
            partial(self._is_made, metadata.namespace, name, known) for name in left[:AT_ONCE]
        )
        if any(made):
            named = [f"the Secret {name}" for name, is_one in zip(left, made, strict=False) if is_one]
            raise SecretReserved(reserved(named).message)
        return len(left) <= AT_ONCE

    async def _is_made(self, namespace: str, name: str, known: set[str]) -> bool:
        live = await self._api.read_metadata(SECRETS, namespace, name)
        if live is not None and live["metadata"].get("labels", {}).get(MANAGED_BY_LABEL) == FIELD_MANAGER:
            return True
        known.add(name)
        return False
