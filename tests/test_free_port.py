"""Ports that tests give to the servers they start: no two tests get the same, in any process."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

import processes
from processes import free_port

KERNELS_LOWEST = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


def test_no_port_is_given_twice_nor_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    lowest = KERNELS_LOWEST - 5
    monkeypatch.setattr(processes, "LOWEST_PORT", lowest)
    ports: list[int] = []
    with pytest.raises(OSError, match=f"no free port from {lowest} to {KERNELS_LOWEST - 1}"):
        ports.extend(free_port() for _ in itertools.count())
    assert len(set(ports)) == len(ports) <= 5
    assert all(lowest <= port < KERNELS_LOWEST for port in ports)

    folder = Path(processes.__file__).parent
    program = f"import processes; processes.LOWEST_PORT = {lowest}; processes.free_port()"
    other = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert "no free port" in other.stderr


def test_where_the_kernel_takes_all_ports_it_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "LOWEST_PORT", KERNELS_LOWEST)
    ports = {free_port() for _ in range(5)}
    assert len(ports) == 5
    assert min(ports) >= KERNELS_LOWEST
