"""`argosy why`: the chain from a service's manifest until it is ready, and the first link that fails.

Owns: choosing the local fleet or a cluster, and the reads. Must not know: what decides a link (`diagnosis`).
"""

from __future__ import annotations

import contextlib
import datetime
import sys
from collections.abc import Sequence
from typing import Any, Final

from argosy.arguments import Parser, add_state_dir, with_state_dir
from argosy.diagnosis.chain import READ_LINES, Diagnosis, render, render_json
from argosy.diagnosis.cluster_chain import cluster_diagnosis, log_source, selector, suspect
from argosy.diagnosis.installation import (
    LEASE,
    Installation,
    num_ready,
    operator_absence,
    router_service,
    unreadable_reason,
)
from argosy.diagnosis.kubectl import Kubectl, NoSuchKind, NotFound
from argosy.diagnosis.local_chain import local_diagnosis
from argosy.errors import FAILURE, OK, CommandError
from argosy.local.child_process import tail
from argosy.local.control_client import current_status
from argosy.local.state_dir import choose_state_dir
from argosy_resource.types import GROUP, PLURAL

NO_SERVICES: Final = (
    "the cluster has no InferenceServices; install the chart, or `kubectl apply` what `argosy crd` prints"
)
_SHOWN_NAMES: Final = 10
_NO_LOG: Final = "unable to retrieve container logs"
"""What a kubelet answers, as if it were the log, when the container of the last run is gone."""
_RESOURCE: Final = f"{PLURAL}.{GROUP}"


def main(argv: Sequence[str], *, cluster: bool = False) -> int:
    """Print the chain. `cluster`: ask the cluster, whatever is given (`kubectl argosy why`)."""
    parser = Parser(
        prog="kubectl argosy why" if cluster else "argosy why",
        description="Show why a service does not answer: the chain from its manifest until it is ready, up to the "
        "first link that fails or waits, with its log's last lines and what to do. It sends no request to the service.",
        epilog="Exit codes: 0 clients are served, 1 they are not, also if spec.replicas is 0.",
    )
    parser.add_argument("name", nargs="?", help="name of the service; may be left out if there is one only")
    if not cluster:
        parser.add_argument(
            "--cluster",
            action="store_true",
            help="ask the cluster of kubectl instead of the local fleet; so do the next two options",
        )
    parser.add_argument("-n", "--namespace", help="namespace of the service (kubectl's own)")
    parser.add_argument("--context", help="context of kubectl (the current one)")
    parser.add_argument(
        "-o", "--output", choices=("text", "json"), default="text", help="format (%(default)s)"
    )
    if not cluster:
        add_state_dir(parser)
    options = parser.parse_args(argv)
    if cluster or options.cluster or options.namespace or options.context:
        words = [f"--namespace={options.namespace}"] if options.namespace else []
        words += [f"--context={options.context}"] if options.context else []
        found = in_cluster(Kubectl(words), options.name)
    else:
        found = _in_local_fleet(options.name, options.state_dir)
    if options.output == "json":
        sys.stdout.buffer.write(render_json(found).encode() + b"\n")
    else:
        print(render(found) if cluster else with_state_dir(render(found), options.state_dir))
    return OK if found.is_served else FAILURE


def in_cluster_main(argv: Sequence[str]) -> int:
    """`kubectl argosy why`."""
    return main(argv, cluster=True)


def in_cluster(kubectl: Kubectl, name: str | None) -> Diagnosis:
    """Diagnose a service of the cluster; None: the only one of the namespace.

    Raises:
        CommandError: there is no such service, or the cluster does not answer.
    """
    try:
        name = name or _only([each["metadata"]["name"] for each in kubectl.get(_RESOURCE)["items"]])
        service = kubectl.get(_RESOURCE, name)
    except NoSuchKind:
        raise CommandError(NO_SERVICES) from None
    except NotFound as error:
        raise CommandError(with_names(kubectl, str(error))) from None
    unread, pods = "", []
    try:
        pods = kubectl.get("pods", "--selector", selector(name))["items"]
    except CommandError as error:
        unread = str(error)
    pod = suspect(service, pods)
    log: list[str] = []
    events: list[str] = []
    if pod is not None:
        where = pod["metadata"]["name"]
        if (source := log_source(pod)) is not None:
            container, is_previous = source
            previous = ["--previous"] if is_previous else []
            found = kubectl.lines("logs", where, "-c", container, f"--tail={READ_LINES}", *previous)
            log = [line for line in found if not line.startswith(_NO_LOG)]
        events = _warnings(kubectl, where)
    return cluster_diagnosis(
        service,
        pods,
        log=log,
        events=events,
        installation=_installation(kubectl, service),
        unread=unread,
    )


def _installation(kubectl: Kubectl, service: dict[str, Any]) -> Installation:
    """Routers and operator, as far as the user may read them."""
    served = service["metadata"].get("namespace", "default")
    if (where := router_service(service)) is None:
        return _refused_operator(kubectl, served)
    namespace, name = where
    endpoints, absence, unreadable = None, "", ""
    with contextlib.suppress(CommandError):
        words = ("--namespace", namespace, "--selector", f"kubernetes.io/service-name={name}")
        endpoints = num_ready(kubectl.get("endpointslices.discovery.k8s.io", *words)["items"])
    with contextlib.suppress(CommandError):
        lease = _lease(kubectl, namespace)
        absence = operator_absence(lease, namespace, datetime.datetime.now(datetime.UTC))
        unreadable = "" if absence else unreadable_reason(lease, served)
    return Installation(
        router=f"{namespace}/{name}",
        endpoints=endpoints,
        absence=absence,
        lease_namespace=namespace,
        unreadable=unreadable,
    )


def _refused_operator(kubectl: Kubectl, served: str) -> Installation:
    """The operator that says that it cannot read a namespace, for a service that none has seen."""
    with contextlib.suppress(CommandError):
        words = ("--all-namespaces", "--field-selector", f"metadata.name={LEASE}")
        for lease in kubectl.get("leases.coordination.k8s.io", *words)["items"]:
            namespace = lease["metadata"]["namespace"]
            is_absent = operator_absence(lease, namespace, datetime.datetime.now(datetime.UTC))
            if not is_absent and (reason := unreadable_reason(lease, served)):
                return Installation(lease_namespace=namespace, unreadable=reason)
    return Installation()


def _lease(kubectl: Kubectl, namespace: str) -> dict[str, Any] | None:
    """The operator's Lease; None if there is none."""
    try:
        return kubectl.get("leases.coordination.k8s.io", LEASE, "--namespace", namespace)
    except NotFound:
        return None


def _only(names: Sequence[str]) -> str:
    """Return the only name.

    Raises:
        CommandError: there is none, or there are several.
    """
    if len(names) == 1:
        return names[0]
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    raise CommandError(f"name a service; there are: {_first(names)}{more}")


def _first(names: Sequence[str]) -> str:
    return ", ".join(sorted(names)[:_SHOWN_NAMES]) or "none"


def with_names(kubectl: Kubectl, message: str) -> str:
    """A message that a service does not exist, with those that do."""
    try:
        names = [each["metadata"]["name"] for each in kubectl.get(_RESOURCE)["items"]]
    except CommandError:
        return message
    return f"{message}; in this namespace there are: {_first(names)}. `-n NAMESPACE` looks elsewhere"


def _warnings(kubectl: Kubectl, pod: str) -> list[str]:
    """The newest warnings about a pod; none if they cannot be read."""
    try:
        items: list[dict[str, Any]] = kubectl.get(
            "events", "--field-selector", f"involvedObject.name={pod},type=Warning"
        )["items"]
    except CommandError:
        return []
    items.sort(key=lambda each: each.get("lastTimestamp") or each.get("eventTime") or "")
    return [f"{each.get('reason', '')}: {each.get('message', '')}"[:512] for each in items[-3:]]


def _asks_a_cluster(name: str | None) -> str:
    """How the same is asked of a cluster, for who has no such local service. Here a name may have its namespace."""
    namespace, _, own = (name or "NAME").rpartition("/")
    return f"`kubectl argosy why {own} -n {namespace or 'NAMESPACE'}` asks a cluster"


def _in_local_fleet(name: str | None, state_dir: str | None) -> Diagnosis:
    state = choose_state_dir(state_dir)
    status = current_status(state, in_cluster=_asks_a_cluster(name))
    services = {service.key: service for service in status.services}
    name = name or _only([key.removeprefix("default/") for key in services])
    service = services.get(name) or services.get(f"default/{name}")
    if service is None:
        known = ", ".join(key.removeprefix("default/") for key in services) or "none"
        raise CommandError(f"the fleet has no service {name!r}; there are: {known}. {_asks_a_cluster(name)}")

    def log(process: str) -> list[str]:
        path = state.log_file(process)
        return tail(path, READ_LINES).splitlines() if path.exists() else []

    return local_diagnosis(status, service, log)
