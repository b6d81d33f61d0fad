"""Rotation of the fleet key with real engines, whose keys are in a file as the operator mounts it."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from argosy_protocol.fleet import Endpoint, FleetDocument, FleetService
from argosy_protocol.headers import internal_key
from processes import Server, free_port, running

from .harness import rig, until
from .rotation_load import Mount, load

pytestmark = pytest.mark.timeout(300)  # for processes that start beside other work

UID = "uid-1"
KEYS = [bytes([letter]) * 32 for letter in b"abcdefg"]
ENGINE = [
    *("argosy_engine.api.serve", "builtin://tiny", "--served-model-name", "tiny", "--threads", "1"),
    "--disable-log-stats",
]


def write(path: Path, *fleet_keys: bytes) -> None:
    """Replace an engine's file, as a kubelet does."""
    new = path.with_suffix(".new")
    new.write_text("".join(f"{internal_key(key, UID)}\n" for key in fleet_keys))
    os.replace(new, path)


@pytest.fixture
def files(tmp_path: Path, replicas: int) -> list[Path]:
    paths = [tmp_path / f"r{number}-keys" for number in range(replicas)]
    for path in paths:
        write(path, KEYS[0])
    return paths


@pytest.fixture
def engines(tmp_path: Path, files: list[Path]) -> Iterator[list[Server]]:
    servers = []
    for path in files:
        port = free_port()
        environment = {"ARGOSY_INTERNAL_KEYS_FILE": str(path), "ARGOSY_API_KEY": "of-the-start"}
        command = [*ENGINE, "--port", str(port)]
        servers.append(running(command, tmp_path / f"log{port}", port=port, env=environment))
    with ExitStack() as stack, ThreadPoolExecutor() as starters:
        yield list(starters.map(stack.enter_context, servers))


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.full)])
async def test_rotations_in_every_order_lose_no_request(
    tmp_path: Path, files: list[Path], engines: list[Server]
) -> None:
    """One rotation after another. Each engine's file has the new key alone: the old one lingers there.

    `test_key_rotation` has all orders of two fake replicas.
    """
    mount = Mount(tmp_path / "fleet-key")
    mount.path.mkdir()
    keys = KEYS[: 1 + math.factorial(1 + len(engines))]
    mount.write(keys[0])
    endpoints = tuple(Endpoint(name=f"r{number}", url=engine.url) for number, engine in enumerate(engines))
    service = FleetService(namespace="default", name="svc", uid=UID, model="tiny", endpoints=endpoints)
    document = FleetDocument(services=(service,))
    async with rig(document=document, fleet_key_dir=mount.path) as r, load(r, max_tokens=4) as running_load:
        places = ["router", *(endpoint.name for endpoint in endpoints)]
        for new, order in zip(keys[1:], itertools.permutations(places), strict=True):
            for place in order:
                if place == "router":
                    mount.write(new)
                else:
                    write(files[int(place[1:])], new)
                await running_load.more()
            wanted = internal_key(new, UID)
            await until(lambda: all(each.key.current == wanted for each in r.router.fleet.replicas()))  # noqa: B023
        assert r.metric("retries_total") == 0
    async with httpx.AsyncClient(base_url=engines[0].url) as client:
        for key, status in ((keys[-1], 200), (keys[-2], 200), (b"x" * 32, 401)):
            headers = {"authorization": f"Bearer {internal_key(key, UID)}"}
            assert (await client.get("/v1/models", headers=headers)).status_code == status
        answer = await client.get("/v1/models", headers={"x-api-key": "of-the-start"})
        assert answer.status_code == 401
