"""The keys of an installation: created once by the operator, however often the chart is rendered."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from builders import CONFIG
from fake_kubernetes import FakeKubernetes, Object
from virtual_time import run, virtual_time

from argosy_operator.cluster.api import ApiError, OperatorError
from argosy_operator.config import OperatorConfig
from argosy_operator.main import ensure_keys, follow_fleet_keys, keep_fleet_key
from argosy_operator.names import SECRETS
from argosy_protocol.fleet_keys import LINGER_S, FleetKeys

FLEET = (SECRETS, "argosy-system", "argosy-fleet-key")
ROUTER = (SECRETS, "argosy-system", "argosy-router-keys")
FIRST = dataclasses.replace(
    CONFIG, fleet_key=b"", fleet_key_secret="argosy-fleet-key", router_keys_secret="argosy-router-keys"
)
"""The first start: the Secret does not exist yet, so the pod got no key."""


def value(cluster: FakeKubernetes, key: Any, field: str) -> bytes:
    return base64.b64decode(cluster.objects[key]["data"][field])


def secret(name: str, data: Object) -> Object:
    metadata = {"name": name, "namespace": "argosy-system"}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data}


def test_the_first_start_makes_both() -> None:
    async def scenario() -> OperatorConfig:
        cluster = FakeKubernetes()
        config = await ensure_keys(cluster, FIRST)
        assert config.fleet_key == value(cluster, FLEET, "key")
        assert len(config.fleet_key) >= 32
        assert value(cluster, ROUTER, "api-keys").startswith(b"sk-")
        for key in (FLEET, ROUTER):
            labels = cluster.objects[key]["metadata"]["labels"]
            assert "app.kubernetes.io/instance" not in labels, "by it Argo CD would take and prune the Secret"
            assert "ownerReferences" not in cluster.objects[key]["metadata"], "it outlives the installation"
        return config

    assert run(scenario()).fleet_key != run(scenario()).fleet_key


@virtual_time
async def test_a_restart_keeps_them() -> None:
    cluster = FakeKubernetes()
    first = await ensure_keys(cluster, FIRST)
    before = {key: cluster.objects[key] for key in (FLEET, ROUTER)}
    again = await ensure_keys(cluster, dataclasses.replace(FIRST, fleet_key=first.fleet_key))
    assert again.fleet_key == first.fleet_key
    assert {key: cluster.objects[key] for key in (FLEET, ROUTER)} == before


@virtual_time
async def test_keys_of_the_administrator_are_never_overwritten() -> None:
    cluster = FakeKubernetes()
    cluster.create(secret("argosy-router-keys", {"api-keys": "bWluZQ=="}))
    await ensure_keys(cluster, FIRST)
    assert value(cluster, ROUTER, "api-keys") == b"mine"


@pytest.mark.parametrize("data", [{"key": "c29tZWJvZHkgbWFkZSBpdA=="}, {}], ids=["a race", "no field"])
@virtual_time
async def test_a_fleet_key_that_exists_but_was_not_given_stops_the_process(data: Object) -> None:
    """Another start made it after this pod was given its environment: the next one is given it. A Secret without the
    field has to be mended by a person."""
    cluster = FakeKubernetes()
    cluster.create(secret("argosy-fleet-key", data))
    with pytest.raises(OperatorError, match=r"Secret 'argosy-fleet-key'.*field `key`"):
        await ensure_keys(cluster, FIRST)
    assert cluster.objects[FLEET]["data"] == data


@virtual_time
async def test_keys_that_the_chart_does_not_request_are_not_created() -> None:
    cluster = FakeKubernetes()
    assert await ensure_keys(cluster, CONFIG) == CONFIG
    assert not cluster.objects


def test_a_refusal_is_an_error_if_it_lasts() -> None:
    """The chart creates permissions and operator together, and permissions take a moment to apply."""

    async def scenario(until: int) -> OperatorConfig:
        cluster = FakeKubernetes()

        def forbid(number: int) -> None:
            if number <= until:
                raise ApiError("POST", 403, "no permission")

        cluster.before_write = forbid
        return await ensure_keys(cluster, FIRST)

    assert run(scenario(3)).fleet_key
    with pytest.raises(ApiError, match="no permission"):
        run(scenario(10**6))


@virtual_time
async def test_a_fleet_key_that_was_deleted_comes_back_as_it_was() -> None:
    """Otherwise the next start would create another one, and every engine would be replaced."""
    cluster = FakeKubernetes()
    config = await ensure_keys(cluster, FIRST)
    made = dict(cluster.objects[FLEET]["data"])
    keeping = asyncio.create_task(keep_fleet_key(cluster, config, FleetKeys(config.fleet_key)))
    cluster.remove(FLEET)
    await asyncio.sleep(2 * config.resync_seconds)
    assert cluster.objects[FLEET]["data"] == made
    changed = {**cluster.objects[FLEET], "data": {"key": "bmV3"}}
    cluster.overwrite(FLEET, changed)

    def fail(number: int) -> None:
        raise ApiError("POST", 0, "no answer")

    cluster.before_write = fail
    await asyncio.sleep(2 * config.resync_seconds)
    cluster.before_write = lambda number: None
    await asyncio.sleep(2 * config.resync_seconds)
    assert cluster.objects[FLEET]["data"] == {"key": "bmV3"}, "the administrator's change stays"
    assert not keeping.done(), "an API server that fails for a while stops nothing"
    keeping.cancel()


@virtual_time
async def test_a_rotated_key_that_was_deleted_comes_back_with_the_one_before(tmp_path: Path) -> None:
    cluster = FakeKubernetes()
    config = await ensure_keys(cluster, FIRST)
    cluster.remove(FLEET)
    (tmp_path / "key").write_bytes(b"n" * 32)
    (tmp_path / "previous").write_bytes(b"o" * 32)
    keys = FleetKeys(b"", tmp_path)
    keeping = asyncio.create_task(keep_fleet_key(cluster, config, keys))
    await asyncio.sleep(2 * config.resync_seconds)
    keeping.cancel()
    assert (value(cluster, FLEET, "key"), value(cluster, FLEET, "previous")) == (b"n" * 32, b"o" * 32)


@virtual_time
async def test_a_rotation_is_followed(tmp_path: Path) -> None:
    """The kubelet replaces the files; the old key lapses by itself."""
    (tmp_path / "key").write_bytes(b"o" * 32)
    keys = FleetKeys(b"", tmp_path, asyncio.get_running_loop().time)
    seen: list[tuple[tuple[bytes, ...], tuple[bytes, ...]]] = []
    following = asyncio.create_task(
        follow_fleet_keys(keys, lambda given, lingering: seen.append((given, lingering)))
    )
    await asyncio.sleep(60)
    assert seen == []
    (tmp_path / "key").write_bytes(b"n" * 32)
    await asyncio.sleep(5)
    assert seen == [((b"n" * 32,), (b"o" * 32,))]
    (tmp_path / "key").unlink()
    await asyncio.sleep(LINGER_S)
    following.cancel()
    assert seen[1:] == [((b"n" * 32,), ())], "a Secret that was deleted takes no key away"
