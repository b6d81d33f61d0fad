"""`kubectl argosy top|logs|route`: a cluster's services, their logs, and the choice of a replica, through kubectl.

Owns: which objects are read. Must not know: how a choice is shown (`commands.route`).
"""

from __future__ import annotations

import argparse
import base64
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from argosy.arguments import Parser
from argosy.commands import route
from argosy.commands.why import NO_SERVICES, with_names
from argosy.diagnosis.cluster_chain import COMPONENTS, selector
from argosy.diagnosis.kubectl import Kubectl, NoSuchKind, NotFound
from argosy.errors import OK, CommandError
from argosy.terminal import table
from argosy_protocol.bearer_keys import internal_key
from argosy_protocol.routable_report import ADMIN_KEY_UID
from argosy_resource.types import GROUP, PLURAL

RESOURCE: Final = f"{PLURAL}.{GROUP}"
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
    try:
        services = kubectl.get(RESOURCE, *everywhere)["items"]
    except NoSuchKind:
        raise CommandError(NO_SERVICES) from None
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
    try:
        where = kubectl.get(RESOURCE, name)["metadata"].get("namespace", "default")
    except NoSuchKind:
        raise CommandError(NO_SERVICES) from None
    except NotFound as error:
        raise CommandError(with_names(kubectl, str(error))) from None
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
    own, _, rest = _split(argv)
    options = parser.parse_args(own)
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
        return route.main([*words, "--admin-url", url, "--admin-key", admin_key, *insecure, *rest])


def _split(argv: Sequence[str]) -> tuple[list[str], bool, list[str]]:
    """The words before and behind `--`."""
    words = list(argv)
    if "--" not in words:
        return words, False, []
    at = words.index("--")
    return words[:at], True, words[at + 1 :]


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
