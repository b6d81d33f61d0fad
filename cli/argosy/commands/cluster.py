"""`argosy why` and `kubectl argosy`: a cluster's services through kubectl, and why one does not answer, there or in the
local fleet. Also `argosy crd`.

A diagnosis is the chain from a service's manifest until it is ready, up to the first link that fails. The local fleet's
follows from what its supervisor says; a cluster's from the objects that are read here (`cluster_chain`).

Must not know: how a choice of replicas is shown (`commands.admin`). Invariant: nothing is written to a cluster, and a
read ends by its deadline; kubectl has the contexts and logins of its user.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import datetime
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from argosy.cluster_chain import (
    COMPONENTS,
    LEASE,
    Installation,
    cluster_diagnosis,
    log_source,
    num_ready,
    operator_absence,
    router_service,
    selector,
    suspect,
    unreadable_reason,
)
from argosy.commands import admin
from argosy.diagnosis import (
    MAX_LINES,
    READ_LINES,
    Diagnosis,
    Link,
    State,
    loading,
    render,
    render_json,
    served_meanwhile,
    until_first_problem,
)
from argosy.errors import FAILURE, OK, CommandError
from argosy.local.control import (
    FleetStatus,
    ReplicaStatus,
    ServiceStatus,
    choose_state_dir,
    current_status,
    tail,
)
from argosy.terminal import Parser, add_output, add_state_dir, table, with_state_dir
from argosy_fetcher.progress import printable
from argosy_protocol.headers import internal_key
from argosy_protocol.reports import ADMIN_KEY_UID
from argosy_resource.types import GROUP, PLURAL

_FORWARDED: Final = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+) ")
DEADLINE: Final = 30.0
"""Seconds for one run, logins with a browser excepted, which should be done before."""


_NO_CLUSTER: Final = "the server could not find the requested resource"
"""What kubectl says of an HTTP server that answers 404 to everything."""


class NotFound(CommandError):
    """The object, or its kind, does not exist."""


class NoSuchKind(NotFound):
    """The cluster has no objects of this kind: their definition is not installed."""


class Kubectl:
    """kubectl with the options that choose cluster and namespace."""

    def __init__(self, options: Sequence[str] = (), *, program: str = "kubectl") -> None:
        self._options = tuple(options)
        self._program = program

    def get(self, *words: str) -> Any:
        """The object, or the list, as JSON.

        Raises:
            NotFound: it does not exist.
            CommandError: kubectl failed; the message is its own.
        """
        return msgspec.json.decode(self._run("get", *words, "-o", "json"))

    def lines(self, *words: str) -> list[str]:
        """The lines that a command writes; none if it fails."""
        try:
            return self._run(*words).decode(errors="replace").splitlines()
        except CommandError:
            return []

    def run(self, *words: str) -> int:
        """Run a command on our own standard output, for as long as it takes; return its exit code."""
        self._require()
        command = [self._program, *self._options, *words]
        return subprocess.run(command, check=False).returncode  # noqa: S603 - as in `_run`

    @contextmanager
    def forwarded(self, target: str, port: int) -> Iterator[int]:
        """Forward a free port of this machine to a port of a pod, and yield it.

        Raises:
            CommandError: kubectl cannot.
        """
        self._require()
        command = [self._program, *self._options, "port-forward", "--address=127.0.0.1", target, f":{port}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:  # noqa: S603
            assert process.stdout is not None
            assert process.stderr is not None
            try:
                line = process.stdout.readline().decode(errors="replace")
                found = _FORWARDED.match(line)
                if found is None:
                    process.terminate()
                    said = process.stderr.read().decode(errors="replace").strip() or "it said nothing"
                    raise CommandError(f"cannot reach port {port} of {target}: {said}")
                yield int(found[1])
            finally:
                process.terminate()

    def _require(self) -> None:
        if shutil.which(self._program) is None:
            raise CommandError(f"{self._program} is not installed; it reads the cluster")

    def _run(self, *words: str) -> bytes:
        self._require()
        try:
            done = subprocess.run(  # noqa: S603 - the words are ours, and a name that argparse accepts
                [self._program, *self._options, *words], capture_output=True, timeout=DEADLINE, check=False
            )
        except subprocess.TimeoutExpired:
            raise CommandError(f"the cluster does not answer within {DEADLINE:.0f} s") from None
        if done.returncode == 0:
            return done.stdout
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["kubectl failed"]
        message = printable(said[-1])
        if _NO_CLUSTER in message:
            raise CommandError(
                "what kubectl asks is not a cluster. Without a kubeconfig it asks localhost:8080, where a local fleet "
                "may listen; `kubectl config view --minify` shows the address that it was given"
            )
        if "doesn't have a resource type" in message:
            raise NoSuchKind(message.removeprefix("error: "))
        raise (NotFound if "(NotFound)" in message else CommandError)(message.removeprefix("error: "))


_ORDER: Final = ("BackOff", "Stopping", "Draining", "Starting", "Ready", "Routable")
"""Phases from the worst to the best."""


def local_diagnosis(
    status: FleetStatus, service: ServiceStatus, log: Callable[[str], Sequence[str]]
) -> Diagnosis:
    """The chain of a service. `log(NAME)` gives the last lines of a replica's log, or the router's."""
    links = [
        Link(name="manifest", state="done", detail=f"{service.model}, {service.desired} replicas wanted"),
        _process(service, log),
    ]
    replica = _suspect(service)
    if replica is not None:
        links += [_loaded(replica, log), _routable(replica, status, log)]
    links.append(Link(name="ready", state="done", detail=f"{status.router.url} as {service.model!r}"))
    found = until_first_problem(links)
    if found[-1].state == "done" or not status.router.is_ready:
        return Diagnosis(service=service.key, links=found)
    routable = [replica for replica in service.replicas if replica.phase == "Routable"]
    newest = sum(replica.is_current for replica in routable)
    notes = (served_meanwhile(len(routable), newest),) if routable else ()
    return Diagnosis(service=service.key, links=found, notes=notes, serving=len(routable))


def _suspect(service: ServiceStatus) -> ReplicaStatus | None:
    current = [replica for replica in service.replicas if replica.is_current]
    return min(current, key=lambda each: (_ORDER.index(each.phase), each.name), default=None)


def _process(service: ServiceStatus, log: Callable[[str], Sequence[str]]) -> Link:
    replica = _suspect(service)
    if replica is None:
        if service.desired == 0:
            return Link(
                name="process",
                state="stopped",
                detail="spec.replicas is 0",
                remedy="raise spec.replicas, and `argosy up -f FILE`",
            )
        state: State = "failed" if service.reason else "waiting"
        return Link(name="process", state=state, detail=service.reason or "none has started yet")
    if replica.phase == "BackOff":
        return Link(
            name="process",
            state="failed",
            detail=f"{replica.name}: {replica.reason or 'it ended'}, {replica.restarts} restarts",
            lines=tuple(log(replica.name))[-MAX_LINES:],
            remedy=f"{_remedy(service, replica)}. `argosy logs {replica.name}` shows more",
        )
    return Link(name="process", state="done", detail=f"{replica.name} runs, process {replica.pid or '?'}")


def _remedy(service: ServiceStatus, replica: ReplicaStatus) -> str:
    """What to do about an engine that has ended."""
    if service.reason.startswith("RolloutHalted"):
        return (
            "correct what its last lines name, or go back by `argosy up -f FILE` with the previous manifest: the "
            "rollout is halted, and no further replica is replaced"
        )
    if "argosy up" in replica.reason:
        return "correct what its last lines name, and `argosy up -f FILE`"
    return "correct what its last lines name; it is started again by itself"


def _loaded(replica: ReplicaStatus, log: Callable[[str], Sequence[str]]) -> Link:
    if replica.phase in ("Ready", "Routable"):
        return Link(name="loaded", state="done", detail="the engine is ready")
    lines = tuple(log(replica.name))
    detail = f"{replica.name}: {replica.reason or loading(lines)}"
    return Link(name="loaded", state="waiting", detail=detail, lines=lines[-MAX_LINES:])


def _routable(replica: ReplicaStatus, status: FleetStatus, log: Callable[[str], Sequence[str]]) -> Link:
    if not status.router.is_ready:
        return Link(
            name="routable",
            state="failed" if status.router.reason else "waiting",
            detail=f"the router is not ready{': ' * bool(status.router.reason)}{status.router.reason}",
            lines=tuple(log("router"))[-MAX_LINES:],
            remedy="`argosy logs router` shows more",
        )
    if replica.phase != "Routable":
        detail = f"{replica.name}: {replica.reason or 'the router is not synced with it yet'}"
        return Link(name="routable", state="waiting", detail=detail)
    return Link(name="routable", state="done", detail="the router is synced with it")


NO_SERVICES: Final = (
    "the cluster has no InferenceServices; install the chart, or `kubectl apply` what `argosy crd` prints"
)
_SHOWN_NAMES: Final = 10
_NO_LOG: Final = "unable to retrieve container logs"
"""What a kubelet answers, as if it were the log, when the container of the last run is gone."""
_RESOURCE: Final = f"{PLURAL}.{GROUP}"


def why(argv: Sequence[str], *, cluster: bool = False) -> int:
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
    _add_cluster(parser)
    add_output(parser, "text")
    if not cluster:
        add_state_dir(parser)
    options = parser.parse_args(argv)
    if cluster or options.cluster or options.namespace or options.context:
        found = in_cluster(_kubectl(options), options.name)
    else:
        found = _in_local_fleet(options.name, options.state_dir)
    if options.output == "json":
        sys.stdout.buffer.write(render_json(found).encode() + b"\n")
    else:
        print(render(found) if cluster else with_state_dir(render(found), options.state_dir))
    return OK if found.is_served else FAILURE


def why_in_cluster(argv: Sequence[str]) -> int:
    """`kubectl argosy why`."""
    return why(argv, cluster=True)


def in_cluster(kubectl: Kubectl, name: str | None) -> Diagnosis:
    """Diagnose a service of the cluster; None: the only one of the namespace.

    Raises:
        CommandError: there is no such service, or the cluster does not answer.
    """
    with _services_named(kubectl):
        name = name or _only([each["metadata"]["name"] for each in kubectl.get(_RESOURCE)["items"]])
        service = kubectl.get(_RESOURCE, name)
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


@contextmanager
def _services_named(kubectl: Kubectl) -> Iterator[None]:
    """Say which services there are, where one or their kind does not exist."""
    try:
        yield
    except NoSuchKind:
        raise CommandError(NO_SERVICES) from None
    except NotFound as error:
        raise CommandError(with_names(kubectl, str(error))) from None


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


_TOP: Final = ("NAMESPACE", "SERVICE", "READY", "ROUTABLE", "RESTARTS", "MODEL", "CACHE", "REASON")
_PODS_AT_ONCE: Final = 100
"""Logs that are followed at the same time; kubectl refuses more than five unless it is told."""


def top(argv: Sequence[str]) -> int:
    """List services, with the restarts of their engines."""
    parser = Parser(
        prog="kubectl argosy top", description="List services: readiness, replicas, restarts, reason."
    )
    parser.add_argument("-A", "--all-namespaces", action="store_true", help="of all namespaces")
    _add_cluster(parser)
    options = parser.parse_args(argv)
    kubectl, everywhere = _kubectl(options), ["--all-namespaces"] if options.all_namespaces else []
    with _services_named(kubectl):
        services = kubectl.get(_RESOURCE, *everywhere)["items"]
    if not services:
        where = "the cluster" if everywhere else "this namespace; -A lists those of all"
        sys.stderr.write(f"there are no services in {where}\n")
        return OK
    pods = kubectl.get("pods", "--selector", COMPONENTS, *everywhere)["items"]
    restarts: dict[tuple[str, str], int] = {}
    for pod in pods:
        metadata, status = pod["metadata"], pod.get("status", {})
        key = metadata.get("namespace", ""), metadata.get("labels", {}).get(f"{GROUP}/service", "")
        counts = (each.get("restartCount", 0) for each in status.get("containerStatuses") or ())
        restarts[key] = restarts.get(key, 0) + sum(counts)
    print(table(_TOP, [_row(service, restarts) for service in services]))
    return OK


def logs(argv: Sequence[str]) -> int:
    """Print or follow the logs of a service's pods."""
    parser = Parser(prog="kubectl argosy logs", description="Print or follow the logs of a service's pods.")
    parser.add_argument("name", help="name of the service")
    parser.add_argument("-f", "--follow", action="store_true", help="follow the logs")
    parser.add_argument("-c", "--container", help="engine, or fetch-model (all)")
    parser.add_argument(
        "--tail", type=int, default=200, metavar="N", help="lines to begin with (%(default)s)"
    )
    _add_cluster(parser)
    options = parser.parse_args(argv)
    words = ["logs", "--selector", selector(options.name), "--prefix", f"--tail={options.tail}"]
    words += [f"--container={options.container}"] if options.container else ["--all-containers"]
    words += ["--follow", f"--max-log-requests={_PODS_AT_ONCE}"] if options.follow else []
    kubectl = _kubectl(options)
    _require_pods(kubectl, options.name)
    return kubectl.run(*words)


def _require_pods(kubectl: Kubectl, name: str) -> None:
    """Refuse a service without pods, of which kubectl's answer would be that it has found nothing. Pods of one that is
    deleted are shown while they end. Without the right to list pods kubectl's own error says what is missing.

    Raises:
        CommandError: there is no such service, or it has no pods.
    """
    try:
        pods = kubectl.get("pods", "--selector", selector(name))["items"]
    except CommandError:
        return
    if pods:
        return
    with _services_named(kubectl):
        where = kubectl.get(_RESOURCE, name)["metadata"].get("namespace", "default")
    raise CommandError(
        f"the service {name!r} has no pods, so no logs; `kubectl argosy why {name} -n {where}` says why"
    )


def explain(argv: Sequence[str]) -> int:
    """Ask a router of the cluster which replica a prompt would get."""
    parser = Parser(
        prog="kubectl argosy route",
        description="Show which replica a prompt would get, asking a router through a port-forward.",
        epilog="What follows -- goes to `argosy route`, such as `-- --recent 20`. Reads the fleet key's Secret, which "
        "its user must be allowed to.",
    )
    parser.add_argument("model", nargs="?", help="a name the router lists under /v1/models")
    parser.add_argument("prompt", nargs="?", help="the user's message; - reads standard input")
    parser.add_argument("--router-namespace", default="argosy-system", help="of the release (%(default)s)")
    parser.add_argument("--fleet-key-secret", default="argosy-fleet-key", help="its Secret (%(default)s)")
    parser.add_argument("--context", help="context of kubectl (the current one)")
    at = argv.index("--") if "--" in argv else len(argv)
    options, rest = parser.parse_args(argv[:at]), argv[at + 1 :]
    options.namespace = options.router_namespace
    kubectl = _kubectl(options)
    try:
        secret = kubectl.get("secret", options.fleet_key_secret)
        deployment = kubectl.get("deployment", "argosy-router")
    except NotFound as error:
        raise CommandError(
            f"{error}; --router-namespace names the release's namespace, --fleet-key-secret its Secret"
        ) from None
    key = base64.b64decode(secret.get("data", {}).get("key", ""))
    if not deployment.get("status", {}).get("availableReplicas"):
        raise CommandError(
            f"no router runs: `kubectl get pods -n {options.router_namespace}` shows those of argosy-router"
        )
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    speaks_tls = any(each.startswith("--ssl-certfile") for each in container.get("args", ()))
    try:
        admin_key = internal_key(key, ADMIN_KEY_UID)
    except ValueError as error:
        raise CommandError(f"the Secret {options.fleet_key_secret!r}: {error}") from None
    words = [each for each in (options.model, options.prompt) if each is not None]
    with kubectl.forwarded("deployment/argosy-router", 8081) as port:
        url = f"{'https' if speaks_tls else 'http'}://127.0.0.1:{port}"
        insecure = ["--insecure"] if speaks_tls else []
        return admin.route([*words, "--admin-url", url, "--admin-key", admin_key, *insecure, *rest])


def _row(service: Mapping[str, Any], restarts: Mapping[tuple[str, str], int]) -> tuple[str, ...]:
    metadata, status = service["metadata"], service.get("status", {})
    conditions = {each.get("type"): each for each in status.get("conditions") or ()}
    ready = conditions.get("Ready", {})
    key = metadata.get("namespace", ""), metadata["name"]
    return (
        *key,
        ready.get("status", "Unknown"),
        status.get("routable") or "-",
        str(restarts.get(key, 0)),
        status.get("model") or "-",
        status.get("modelCache") or "-",
        ready.get("reason", ""),
    )


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", "--namespace", help="namespace (kubectl's own)")
    parser.add_argument("--context", help="context of kubectl (the current one)")


def _kubectl(options: argparse.Namespace) -> Kubectl:
    words = [f"--namespace={options.namespace}"] if options.namespace else []
    return Kubectl([*words, f"--context={options.context}"] if options.context else words)


def crd(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="argosy crd", description="Print the CustomResourceDefinition of InferenceService as YAML."
    )
    parser.parse_args(argv)
    from argosy_resource.crd import render

    sys.stdout.write(render())
    return OK
