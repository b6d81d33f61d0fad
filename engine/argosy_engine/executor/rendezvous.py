"""Rendezvous: how an engine's workers find each other for torch.distributed.

On one machine they inherit a memory file. Over several, rank 0 serves torch's store on a socket that listens already,
so that no port is chosen and bound later. Neither the store nor what workers exchange is authenticated.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from typing import NamedTuple

from argosy_engine.osproc.collector import paused_collector

_SIOCGIFADDR = 0x8915
_ADDRESS = slice(20, 24)
"""Of a `struct ifreq`."""


class Rendezvous(NamedTuple):
    """What a worker's process is told."""

    init_method: str
    """For `init_parallel_state`."""
    own_host: str = ""
    """Address of its machine in the network of the workers; empty: all are on this machine."""
    store: int = -1
    """Descriptor of the socket on which rank 0 serves the store; -1: nobody here serves one."""
    inherited: tuple[int, ...] = ()
    """Descriptors that the process inherits."""


def tcp_url(host: str, port: int) -> str:
    """Return the `init_method` of workers on several machines."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def join_network(host: str, port: int, own_host: str, store: int = -1) -> object:
    """Prepare torch.distributed in a worker's process.

    The variables tell torch that nobody has to start a store; a launcher of processes would set them.

    Args:
        host, port: where rank 0 serves the store.
        own_host: address of this machine, by which gloo and NCCL choose the network interface.
        store: descriptor of the listening socket to serve the store on; -1: another process does.

    Returns what must live as long as the process.
    """
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": host, "MASTER_PORT": str(port)}
    interface = interface_of(own_host)
    if interface is not None:  # the name of a machine may stand for an address that others cannot reach
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if interface == "lo":
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    if store < 0:
        return None
    with paused_collector():
        import torch.distributed as dist

    return dist.TCPStore(  # type: ignore[attr-defined]
        host, port, None, True, wait_for_workers=False, master_listen_fd=store
    )


def interface_of(address: str) -> str | None:
    """Return the network interface that has an IPv4 address; None if there is none (Linux only)."""
    try:
        wanted = socket.inet_aton(address)
    except OSError:  # IPv6
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has no address
                continue
            if found[_ADDRESS] == wanted:
                return name
    return None
