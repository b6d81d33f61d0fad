"""Why a valid service cannot be deployed in this cluster, by the settings of the operator.

Owns the order of the reasons, and those about arguments and accounts. Must not know what is observed: the answer
depends on the resource and on the settings only. Invariant: a reason names what to change, for the author of the
resource and for the administrator.
"""

from __future__ import annotations

from argosy_operator.config import ANY_ACCOUNT, OperatorConfig
from argosy_operator.desired.model_volume import cache_problem
from argosy_operator.observed.pod import Problem
from argosy_resource.engine_flags import argument_problems
from argosy_resource.types import InferenceService


def deployment_problem(service: InferenceService, config: OperatorConfig) -> Problem | None:
    """Why the service's Deployment is not applied; None if it is."""
    return _arguments_problem(service) or _account_problem(service, config) or cache_problem(service, config)


def _arguments_problem(service: InferenceService) -> Problem | None:
    """What the rules of the CRD cannot tell of the engine's arguments, such as a number out of its bounds."""
    problems = argument_problems(service.spec.engine.args, service.spec.engine.type)
    return Problem("InvalidEngineArgs", f"spec.engine.args: {'; '.join(problems)}") if problems else None


def _account_problem(service: InferenceService, config: OperatorConfig) -> Problem | None:
    """An account is a permission, which who may write an InferenceService need not have."""
    account = service.spec.placement.service_account_name
    if account is None or {account, ANY_ACCOUNT} & set(config.engine_service_accounts):
        return None
    return Problem(
        "ServiceAccountNotAllowed",
        f"spec.placement.serviceAccountName is {account!r}, which engines may not use in this cluster; leave it out, "
        "or have the administrator add it to engine.serviceAccounts in the Helm chart",
    )
