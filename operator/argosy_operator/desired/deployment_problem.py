"""Why a valid service cannot be deployed in this cluster, by the settings of the operator.

Owns the order of the reasons, and those about arguments, accounts and the objects that a service names. Must not know
what is observed: the answer depends on the resource and on the settings only. Invariant: a reason names what to change,
for the author of the resource and for the administrator.
"""

from __future__ import annotations

from collections.abc import Iterator

from argosy_operator.config import ANY_ACCOUNT, OperatorConfig
from argosy_operator.desired.model_volume import cache_problem
from argosy_operator.observed.pod import Problem
from argosy_resource.engine_command import claim_name
from argosy_resource.engine_flags import argument_problems
from argosy_resource.schema_types import is_own_secret
from argosy_resource.types import InferenceService


def deployment_problem(service: InferenceService, config: OperatorConfig) -> Problem | None:
    """Why the service's Deployment is not applied; None if it is."""
    return (
        _arguments_problem(service)
        or _account_problem(service, config)
        or _reserved_problem(service, config)
        or cache_problem(service, config)
    )


def named_secrets(service: InferenceService) -> frozenset[str]:
    """Secrets that the service's author has its pods get."""
    model = service.spec.model
    own = () if model.secret_ref is None else (model.secret_ref.name,)
    return frozenset((*own, *service.spec.pod_template.spec.secrets))


def _arguments_problem(service: InferenceService) -> Problem | None:
    """What the rules of the CRD cannot tell of the engine's arguments, such as a number out of its bounds."""
    problems = argument_problems(service.spec.engine.args, service.spec.engine.type)
    return Problem("InvalidEngineArgs", f"spec.engine.args: {'; '.join(problems)}") if problems else None


def _reserved_problem(service: InferenceService, config: OperatorConfig) -> Problem | None:
    """Who may write an InferenceService chooses the engine's image, and so reads whatever its pods get. Those of the
    installation are in the operator's namespace only. The CRD refuses most of the names; what was stored before it did
    is refused here."""
    is_home = service.metadata.namespace == config.namespace
    own = {config.fleet_key_secret, config.router_keys_secret, *config.reserved_secrets} if is_home else set()
    secrets = sorted(name for name in named_secrets(service) if name in own or is_own_secret(name))
    claims = sorted(set(_named_claims(service)) & set(config.reserved_claims)) if is_home else []
    named = [*(f"the Secret {name}" for name in secrets), *(f"the claim {name}" for name in claims)]
    return reserved(named) if named else None


def reserved(named: list[str]) -> Problem:
    """The problem of a service that names these objects."""
    return Problem(
        "ObjectReserved",
        f"{', '.join(named)}: has keys or data of Argosy, which no service may name; remove it from spec.podTemplate "
        "or spec.model, or give an object of yours another name",
    )


def _named_claims(service: InferenceService) -> Iterator[str]:
    yield from service.spec.pod_template.spec.claims
    model = service.spec.model
    for name in (claim_name(model.source), model.cache.claim_name if model.cache is not None else None):
        if name is not None:
            yield name


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
