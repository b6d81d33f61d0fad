"""Model names: which service a request names, which keys may use it, and what its engines call the model.

Owns: the rules of names in requests. Must not know: bodies, connections, how a replica is chosen.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from argosy_protocol.errors import BadRequest, NotFound, Unavailable
from argosy_router.auth.accounts import Account
from argosy_router.fleet.fleet import Fleet
from argosy_router.fleet.service import Service

_RETRY_AFTER_S: Final = 1.0
_SHOWN_NAMES: Final = 8
"""Names of models in one message."""
_MAX_KEPT_LISTS: Final = 64
"""Lists of names that are kept: keys that may use the same models have one, and that of a thousand services takes 100
KB. Finding it takes some milliseconds."""


class Renaming(NamedTuple):
    """The two names of one model."""

    engine: str
    client: str


def find_service(fleet: Fleet, name: str, account: Account | None = None) -> tuple[Service, str]:
    """Return the service that has a name, and the adapter if it is one's, else the empty string. Whether `account` may
    use it is not checked: the error names what it may use.

    Raises:
        BadRequest: the name is empty.
        NotFound: no service has this model name.
        Unavailable: none has it yet, and some replicas have not told their models.
    """
    if not name:
        raise BadRequest("you must provide a model parameter", param="model")
    service = fleet.service_of(name)
    if service is None:
        raise no_such_model(fleet, name, account)
    return service, fleet.adapter_of(name)


def engine_name(service: Service, asked: str, adapter: str) -> str:
    """Return the name under which the engine gets the model that the client calls `asked`: the same if a header tells
    the engines that name, else the engines' own."""
    if adapter:
        return adapter
    if service.takes_model_names:
        return asked
    spec = service.spec
    if spec.engine_model and (announced := service.announced_name):
        return announced  # an older engine, which has the names it was started with
    return asked if asked in spec.aliases else spec.started_name


def may_use(fleet: Fleet, account: Account, name: str, service: Service, adapter: str = "") -> bool:
    """Whether the account may call the service by this name: a key that lists one of its main names means all of it,
    and one that lists `MODEL:ADAPTER` means the adapter by all its names. A name that another service has is none of
    its own, whatever it claims."""
    model = service.model
    if fleet.service_of(model) is not service:
        return account.may_use(name, service.name)
    return account.may_use(name, model, service.name, f"{model}:{adapter}" if adapter else name)


def names_for(fleet: Fleet, account: Account) -> list[tuple[str, Service]]:
    """Return the names that the account may give in requests, each with its service; the list is shared."""
    kept = fleet.permitted.get(account.models)
    if kept is not None:
        return kept
    found: list[tuple[str, Service]] = []
    for service in fleet.services.values():
        spec = service.spec
        adapters = [f"{spec.model}:{adapter}" for adapter in spec.adapters]
        found += [
            (name, service)
            for name in dict.fromkeys((spec.model, *spec.aliases, *adapters))
            if fleet.service_of(name) is service
            and may_use(fleet, account, name, service, fleet.adapter_of(name))
        ]
    if len(fleet.permitted) >= _MAX_KEPT_LISTS:
        fleet.permitted.clear()
    fleet.permitted[account.models] = found
    return found


def unknown_model(fleet: Fleet, name: str, account: Account | None) -> NotFound:
    """Return the error for a name that no service has, or that the account may not use, with the names that it may use;
    None: whoever asks sees no names."""
    names = names_for(fleet, account) if account is not None else []
    shown = ", ".join(repr(found[:256]) for found, _ in names[:_SHOWN_NAMES])
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    there = f"; models: {shown}{more}" if shown else ""
    return NotFound(f"the model `{name[:256]}` does not exist{there}", param="model", code="model_not_found")


def no_such_model(fleet: Fleet, name: str, account: Account | None) -> NotFound | Unavailable:
    """Return the error for a name that no service has: another one while some replicas have not told their models."""
    if fleet.knows_all_models:
        return unknown_model(fleet, name, account)
    return Unavailable(
        f"the model `{name[:256]}` is not known yet: the router has not heard of all of its replicas; retry",
        param="model",
        retry_after_s=_RETRY_AFTER_S,
    )
