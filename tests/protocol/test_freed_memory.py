"""A process returns what it has freed."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from pathlib import Path
from argosy_protocol.program.process import return_freed_memory

def kept():
    (line,) = [each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("RssAnon")]
    return int(line.split()[1]) // 1024

if sys.argv[1] == "returning":
    return_freed_memory()
before = kept()
bytes(b"x" * (30 << 20))  # once it is freed, blocks of this size come from the heap
pins = []
for _ in range(50):
    body = b"x" * (2 << 20)
    pins.append((body, bytearray(100_000)))
pins = [pin for _, pin in pins]
del body
print(kept() - before)
"""


def kept_mib(how: str, **env: str) -> int:
    """MiB that a process keeps of 100 that it has freed, between small blocks that it still uses."""
    command = [sys.executable, "-c", PROGRAM, how]
    path = {"PYTHONPATH": ":".join(sys.path)}
    return int(subprocess.run(command, env=path | env, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator, and /proc")
def test_freed_blocks_between_used_ones_are_returned() -> None:
    assert kept_mib("returning") < 20
    assert kept_mib("keeping") > 50, "otherwise nothing is shown here"


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator, and /proc")
def test_the_environment_decides() -> None:
    settings = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20)}
    assert kept_mib("returning", **settings) > 50
