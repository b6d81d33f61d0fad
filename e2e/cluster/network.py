"""The cluster's network: a bridge on the host, one network namespace per node, and the routes between them.

    host  argosy-e2e0 10.200.0.1 --+-- eth0 10.200.0.11 [node-a]  pods 10.244.1.0/24
                                   +-- eth0 10.200.0.12 [node-b]  pods 10.244.2.0/24

The host routes pod subnets to their node and the service subnet to the first node, whose kube-proxy
translates: tests on the host reach pod addresses and cluster addresses alike, and no rule enters the host's
iptables. Everything hangs on the bridge and the namespaces: removing those removes all of it.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Sequence
from pathlib import Path

from cluster.settings import (
    BRIDGE,
    HOST_ADDRESS,
    NODE_SUBNET,
    POD_SUBNET,
    SERVICE_SUBNET,
    NodeSettings,
    Settings,
)
from cluster.shell import ClusterError, mount_points, run

NAMESPACES = Path("/run/netns")


def create(settings: Settings) -> None:
    """Raises ClusterError when the machine already uses one of our subnets."""
    _refuse_overlaps()
    if NAMESPACES not in mount_points():
        _mount_marker(settings).touch()  # the first `ip netns add` mounts it
    ip("link", "add", BRIDGE, "type", "bridge")
    ip("addr", "add", f"{HOST_ADDRESS}/24", "dev", BRIDGE)
    ip("link", "set", BRIDGE, "up")
    for number, node in enumerate(settings.nodes):
        connect(node, settings.nodes[:number])
    route_services_through(settings.nodes[0])


def connect(node: NodeSettings, others: Sequence[NodeSettings]) -> None:
    """Give a node its namespace and cable, and routes between its pods, the host and the pods of other nodes."""
    _plug_in(node)
    ip("route", "add", node.pod_subnet, "via", node.address)
    for other in others:
        ip("-n", node.netns, "route", "add", other.pod_subnet, "via", other.address)
        ip("-n", other.netns, "route", "add", node.pod_subnet, "via", node.address)


def route_services_through(node: NodeSettings) -> None:
    """Choose the node whose kube-proxy serves the host; another one when that node is made to die."""
    ip("route", "replace", SERVICE_SUBNET, "via", node.address)


def destroy(settings: Settings) -> None:
    """Remove every namespace and link of any earlier run; the routes go with them."""
    for node in settings.possible_nodes:
        if (NAMESPACES / node.netns).exists():
            ip("netns", "del", node.netns)
    if _mount_marker(settings).exists() and NAMESPACES in mount_points() and not any(NAMESPACES.iterdir()):
        run("umount", NAMESPACES)
        NAMESPACES.rmdir()
    for link in (*(node.link for node in settings.possible_nodes), BRIDGE):
        if Path(f"/sys/class/net/{link}").exists():
            run(
                "ip", "link", "del", link, check=False
            )  # a namespace's end takes its cables along, a little later


def remains(settings: Settings) -> list[str]:
    names = [f"{NAMESPACES}/{node.netns}" for node in settings.possible_nodes]
    links = [f"/sys/class/net/{link}" for link in (BRIDGE, *(node.link for node in settings.possible_nodes))]
    return [path for path in (*names, *links) if Path(path).exists()]


def _mount_marker(settings: Settings) -> Path:
    return settings.state / "netns-mounted"


def ip(*words: str) -> None:
    run("ip", *words)


def _plug_in(node: NodeSettings) -> None:
    ip("netns", "add", node.netns)
    ip("link", "add", node.link, "type", "veth", "peer", "name", "eth0", "netns", node.netns)
    ip("link", "set", node.link, "master", BRIDGE, "up")
    ip("-n", node.netns, "link", "set", "lo", "up")
    ip("-n", node.netns, "addr", "add", f"{node.address}/24", "dev", "eth0")
    ip("-n", node.netns, "link", "set", "eth0", "up")
    ip("-n", node.netns, "route", "add", "default", "via", HOST_ADDRESS)


def _refuse_overlaps() -> None:
    ours = [ipaddress.ip_network(subnet) for subnet in (NODE_SUBNET, POD_SUBNET, SERVICE_SUBNET)]
    for route in json.loads(run("ip", "-j", "-4", "route", "show", "table", "all").stdout or "[]"):
        if route.get("dst") in (None, "default"):
            continue
        theirs = ipaddress.ip_network(route["dst"], strict=False)
        for subnet in ours:
            if theirs.overlaps(subnet):
                raise ClusterError(
                    f"this machine already routes {theirs} ({route.get('dev', '?')}), which overlaps the "
                    f"cluster's {subnet}: use another machine, or a cluster of yours (ARGOSY_E2E_EXTERNAL=1)"
                )
