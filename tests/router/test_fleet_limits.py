"""Rate limits over several routers: the live ones divide them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kubernetes.aio import client as kubernetes_client

from argosy_protocol.fleet import FleetDocument, FleetService, encode_fleet
from argosy_router.auth.accounts import Account, RateLimited
from argosy_router.auth.api_keys import KeyTable
from argosy_router.auth.key_terms import KeyTerms
from argosy_router.config import ConfigError, RouterConfig
from argosy_router.discovery.kubernetes import KubernetesDiscovery
from argosy_router.main import build_parser, config_of
from argosy_router.server import Router
from argosy_router.token_bucket import PERIOD_S

from .fake_api_server import FakeApiServer
from .fake_engine import FakeEngine
from .harness import DEADLINE_S, chat, until

ENGINE = {"component": "engine"}
ROUTER = {"app.kubernetes.io/name": "argosy", "app.kubernetes.io/component": "router"}
SERVICE = FleetService(namespace="default", name="svc", uid="u", model="tiny", selector=ENGINE)


def pod(labels: dict[str, str], *, is_ready: bool = True, **metadata: Any) -> dict[str, Any]:
    condition = {"type": "ContainersReady", "status": "True" if is_ready else "False"}
    return {
        "metadata": {"labels": labels, **metadata},
        "status": {"podIP": "127.0.0.1", "conditions": [condition]},
    }


class Fleet:
    """Routers of one cluster, with one engine behind them."""

    def __init__(self, api: FakeApiServer, keys: Path) -> None:
        self.api = api
        self._keys = keys
        self._stack = contextlib.AsyncExitStack()
        self.routers: dict[str, Router] = {}
        self.http: dict[str, httpx.AsyncClient] = {}
        self.statuses: Counter[int] = Counter()

    async def add(self, name: str, **config: Any) -> None:
        """A router starts, and its pod is there."""
        self.api.put("pods", "argosy", name, **pod(ROUTER))
        configuration = kubernetes_client.Configuration()
        configuration.host = self.api.url
        client = kubernetes_client.ApiClient(configuration)
        router = Router(
            RouterConfig(
                port=0,
                admin_port=-1,
                access_log=False,
                kubernetes=True,
                fleet_key=b"0123456789abcdef",
                api_keys_file=self._keys,
                **config,
            ),
            discovery=KubernetesDiscovery("argosy", "argosy-fleet", client=client, pod_name=name),
            tick_s=0.01,
        )
        await self._stack.enter_async_context(router.serving())
        now = time.monotonic() + 3600.0
        router.requests.shared.now = lambda: now  # nothing is refilled
        self.routers[name] = router
        self.http[name] = await self._stack.enter_async_context(
            httpx.AsyncClient(
                base_url=router.url, headers={"authorization": "Bearer sk-key"}, trust_env=False
            )
        )
        await until(lambda: any(replica.is_routable for replica in router.fleet.replicas()))

    async def ask(self, name: str) -> httpx.Response:
        answer = await self.http[name].post("/v1/chat/completions", json=chat(max_tokens=1))
        self.statuses[answer.status_code] += 1
        return answer

    async def limit(self, name: str) -> int:
        """What the router tells the key's holder of its limit."""
        return int((await self.ask(name)).headers["x-ratelimit-limit-requests"])

    async def until_limit(self, name: str, limit: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while await self.limit(name) != limit:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        await self._stack.aclose()


@contextlib.asynccontextmanager
async def fleet(tmp_path: Path, terms: str) -> AsyncIterator[Fleet]:
    keys = tmp_path / "keys"
    keys.write_text(f"sk-key name=key {terms}\n")
    async with FakeApiServer() as api, FakeEngine() as engine:
        service = FleetService(
            namespace="default", name="svc", uid="u", model="tiny", selector=ENGINE, port=engine.port
        )
        data = encode_fleet(FleetDocument(services=(service,))).decode()
        api.put("configmaps", "argosy", "argosy-fleet", data={"fleet.json": data})
        api.put("pods", "default", "e0", **pod(ENGINE))
        made = Fleet(api, keys)
        try:
            yield made
        finally:
            await made.close()


async def test_two_routers_give_a_key_its_limit_together(tmp_path: Path) -> None:
    async with fleet(tmp_path, "requests_per_minute=20") as routers:
        await routers.add("router-a")
        await routers.add("router-b")
        for name in ("router-a", "router-b"):
            await routers.until_limit(name, 10)
        for _ in range(30):
            for name in ("router-a", "router-b"):
                await routers.ask(name)
        assert routers.statuses[200] == 20
        assert routers.statuses.keys() == {200, 429}


async def test_a_router_that_dies_leaves_its_share(tmp_path: Path) -> None:
    async with fleet(tmp_path, "requests_per_minute=2000") as routers:
        await routers.add("router-a")
        assert await routers.limit("router-a") == 2000
        await routers.add("router-b")
        await routers.until_limit("router-a", 1000)
        assert await routers.limit("router-b") == 1000
        routers.api.put("pods", "argosy", "router-b", **pod(ROUTER, is_ready=False))
        await routers.until_limit("router-a", 2000)
        routers.api.put("pods", "argosy", "router-b", **pod(ROUTER))
        await routers.until_limit("router-a", 1000)
        routers.api.put("pods", "argosy", "router-b", **pod(ROUTER, deletionTimestamp="2026-01-01T00:00:00Z"))
        await routers.until_limit("router-a", 2000)
        routers.api.delete("pods", "argosy", "router-b")
        for name in ("operator", "other-engine"):
            routers.api.put("pods", "argosy", name, **pod({"app.kubernetes.io/component": name}))
        routers.api.put("pods", "elsewhere", "router-c", **pod(ROUTER))
        routers.api.put("pods", "argosy", "router-d", **pod(ROUTER))
        await routers.until_limit("router-a", 1000)


async def test_routers_that_cannot_be_counted_leave_the_limit_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with fleet(tmp_path, "requests_per_minute=2000") as routers:
        routers.api.put("pods", "argosy", "router-b", **pod(ROUTER))
        routers.api.forbidden.add(("pods", "argosy"))
        await routers.add("router-a")
        assert await routers.limit("router-a") == 2000
        told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert len(told) == 1
        assert (
            "list and watch pods in namespace argosy, or give the number of routers with --routers" in told[0]
        )
        routers.api.forbidden.clear()
        await routers.until_limit("router-a", 1000)


async def test_routers_that_cannot_be_counted_are_as_many_as_expected(tmp_path: Path) -> None:
    async with fleet(tmp_path, "requests_per_minute=2000") as routers:
        routers.api.forbidden.add(("pods", "argosy"))
        await routers.add("router-a", expected_routers=4)
        assert await routers.limit("router-a") == 500
        metrics = routers.routers["router-a"].metrics
        assert 'limiting_routers{source="assumed"} 4' in metrics.render().decode()
        routers.api.forbidden.clear()
        await routers.until_limit("router-a", 2000)
        assert 'limiting_routers{source="counted"} 1' in metrics.render().decode()


async def test_routers_that_can_be_counted_no_more_stay_as_many(tmp_path: Path) -> None:
    async with fleet(tmp_path, "requests_per_minute=2000") as routers:
        routers.api.put("pods", "argosy", "router-b", **pod(ROUTER))
        await routers.add("router-a")
        await routers.until_limit("router-a", 1000)
        routers.api.forbidden.add(("pods", "argosy"))
        for _ in range(3):
            refused = len(routers.api.refused)
            routers.api.cut_watches()
            await until(lambda refused=refused: len(routers.api.refused) > refused)
        assert await routers.limit("router-a") == 1000


async def test_a_busy_api_server_has_not_refused_to_have_routers_counted(tmp_path: Path) -> None:
    async with fleet(tmp_path, "requests_per_minute=2000") as routers:
        routers.api.put("pods", "argosy", "router-b", **pod(ROUTER))
        routers.api.forbidden.add(("pods", "argosy"))
        routers.api.forbidden_status = 429
        adding = asyncio.create_task(routers.add("router-a"))
        await until(lambda: len(routers.api.refused) > 2)
        assert not adding.done(), "it serves nobody before it knows its share"
        routers.api.forbidden.clear()
        await adding
        assert await routers.limit("router-a") == 1000


# the division


def account(**terms: int) -> Account:
    return Account(KeyTerms(name="key", **terms), 0.0)


def passed(accounts: list[Account], now: float, tokens: int = 1) -> int:
    """Requests that the routers let through now, one after another."""
    count = 0
    for each in accounts:
        with contextlib.suppress(RateLimited):
            while True:
                each.reserve(tokens, now).settle(tokens)
                count += 1
    return count


@pytest.mark.parametrize("routers", [1, 2, 3, 7])
@pytest.mark.parametrize("limit", [1, 2, 10, 100, 1001])
def test_the_shares_add_up_to_the_limit(limit: int, routers: int) -> None:
    accounts = [account(requests_per_minute=limit) for _ in range(routers)]
    for each in accounts:
        each.divide(routers, 0.0)
    first = passed(accounts, 0.0)
    assert first <= max(limit, routers), "each router has at least one"
    assert first > limit - routers
    seconds = 3600 if limit < 100 else 600
    later = sum(passed(accounts, float(second)) for second in range(1, seconds + 1))
    assert later == pytest.approx(limit * seconds / PERIOD_S, rel=0.05, abs=2 * routers)


def test_no_share_is_zero() -> None:
    each = account(requests_per_minute=1, tokens_per_minute=1, max_parallel_requests=1)
    each.divide(5, 0.0)
    held = each.reserve(1, 0.0)
    with pytest.raises(RateLimited):
        each.reserve(1, 0.0)
    held.settle(1)
    with pytest.raises(RateLimited) as refused:
        each.reserve(1, 0.0)
    assert refused.value.retry_after_s == pytest.approx(5 * PERIOD_S)
    each.reserve(1, 5 * PERIOD_S + 0.01)


def test_parallel_request_limits_are_divided() -> None:
    each = account(max_parallel_requests=7)
    each.divide(3, 0.0)
    held = [each.reserve(1, 0.0) for _ in range(2)]
    with pytest.raises(RateLimited):
        each.reserve(1, 0.0)
    each.divide(1, 0.0)
    held += [each.reserve(1, 0.0) for _ in range(5)]
    with pytest.raises(RateLimited):
        each.reserve(1, 0.0)


def test_new_keys_and_terms_are_divided_too() -> None:
    table = KeyTable(is_closed=True)
    table.divide(2, 0.0)
    table.load("sk-key name=key requests_per_minute=10", 0.0)
    made = table.account_of(b"Bearer sk-key")
    assert made is not None
    assert passed([made], 0.0) == 5
    table.load("sk-key name=key requests_per_minute=40", 0.0)
    assert passed([made], PERIOD_S) == 20
    table.divide(4, PERIOD_S)
    assert passed([made], 2 * PERIOD_S) == 10


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 4), st.integers(0, 3)), max_size=60))
def test_a_number_that_changes_gives_a_router_nothing(steps: list[tuple[float, int, int]]) -> None:
    """However their number changes, a router gives no more than what the largest of its shares would have been."""
    limit = 600
    account_here = account(tokens_per_minute=limit)
    account_here.divide(4, 0.0)
    now = granted = refilled = 0.0
    routers, capacity = 4, limit / 4
    for pause_s, following, _ in steps:
        now += pause_s
        refilled += limit / routers * pause_s / PERIOD_S
        routers = following
        account_here.divide(routers, now)
        with contextlib.suppress(RateLimited):
            account_here.reserve(50, now).settle(50)
            granted += 50
        assert granted <= capacity + refilled + 1e-6


# without Kubernetes


def test_the_number_of_routers_can_be_configured() -> None:
    flags = ["--replica", "http://127.0.0.1:1", "--routers", "3"]
    assert config_of(build_parser().parse_args(flags), {}).routers == 3
    with pytest.raises(ConfigError, match="--routers"):
        config_of(build_parser().parse_args([*flags[:-1], "-1"]), {})


async def test_a_configured_number_divides_from_the_start(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-key name=key requests_per_minute=9\n")
    async with FakeEngine() as engine:
        config = RouterConfig(
            port=0, admin_port=-1, access_log=False, replicas=(engine.url,), api_keys_file=keys, routers=3
        )
        async with (
            Router(config).serving() as router,
            httpx.AsyncClient(base_url=router.url, trust_env=False) as http,
        ):
            await until(lambda: any(replica.is_routable for replica in router.fleet.replicas()))
            http.headers["authorization"] = "Bearer sk-key"
            answer = await http.post("/v1/chat/completions", json=chat())
            assert answer.headers["x-ratelimit-limit-requests"] == "3"
