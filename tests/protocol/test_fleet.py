"""The fleet document, and the resolution of names."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import msgspec
import pytest

from argosy_protocol.fleet import (
    Canary,
    FleetDocument,
    FleetService,
    decode_fleet,
    encode_fleet,
    resolve_names,
)


def service(name: str, created: str, model: str, *aliases: str, namespace: str = "default") -> FleetService:
    return FleetService(
        namespace=namespace, name=name, uid=name, created=created, model=model, aliases=aliases
    )


def test_the_older_service_wins_a_name() -> None:
    old = service("old", "2026-01-01T00:00:00Z", "llama", "chat")
    new = service("new", "2026-02-01T00:00:00Z", "chat", "llama", "fresh")
    table = resolve_names(FleetDocument(services=(new, old)))
    assert {name: owner.name for name, owner in table.names.items()} == {
        "default/old": "old", "default/new": "new", "llama": "old", "chat": "old", "fresh": "new",
    }  # fmt: skip
    assert {(conflict.name, conflict.loser) for conflict in table.conflicts} == {
        ("chat", "default/new"),
        ("llama", "default/new"),
    }


def canaried(of: FleetService, by: str) -> FleetService:
    return msgspec.structs.replace(of, canary=Canary(service=by, weight=1))


@pytest.mark.parametrize("created", ["2026-01-01T00:00:00Z", "2026-03-01T00:00:00Z"])
def test_settings_shared_with_a_canary_are_the_service_s(created: str) -> None:
    stable = canaried(service("stable", "2026-02-01T00:00:00Z", "llama", "chat"), "next")
    canary = service("next", created, "llama", "chat", "preview")
    table = resolve_names(FleetDocument(services=(stable, canary)))
    assert {name: owner.name for name, owner in table.names.items()} == {
        "default/stable": "stable", "default/next": "next", "llama": "stable", "chat": "stable", "preview": "next",
    }  # fmt: skip
    assert not table.conflicts


def names_of_chat(*services: FleetService) -> tuple[str, set[tuple[str, str]]]:
    """Who owns the name `chat`, and (winner, loser) of its conflicts."""
    table = resolve_names(FleetDocument(services=services))
    return table.names["chat"].name, {(each.winner, each.loser) for each in table.conflicts}


def test_only_a_service_and_its_own_canary_share_a_name() -> None:
    a, b, c = (service(name, f"2026-0{month}-01", "chat") for month, name in enumerate("abc", 1))
    owner, conflicts = names_of_chat(canaried(a, "b"), b, c)
    assert (owner, conflicts) == ("a", {("default/a", "default/c")})
    owner, conflicts = names_of_chat(a, b, canaried(c, "a"))
    assert (owner, conflicts) == ("c", {("default/c", "default/b")}), "it stands for its canary's age"
    owner, conflicts = names_of_chat(a, canaried(b, "a"), canaried(c, "b"))
    assert (owner, conflicts) == ("c", {("default/c", "default/a")}), "a canary's canary gets nothing of it"
    assert names_of_chat(canaried(a, "b"), canaried(b, "a")) == ("a", set())
    assert names_of_chat(canaried(a, "b"), canaried(b, "c"), canaried(c, "a"))[0] == "a"
    elsewhere = msgspec.structs.replace(b, namespace="team")
    assert names_of_chat(canaried(a, "b"), elsewhere)[1] == {("default/a", "team/b")}


def test_a_namespaced_name_always_reaches_its_own_service() -> None:
    thief = service("thief", "2020-01-01T00:00:00Z", "team/prod")
    owner = service("prod", "2026-01-01T00:00:00Z", "m", namespace="team")
    assert resolve_names(FleetDocument(services=(thief, owner))).names["team/prod"] is owner


def test_adapters_are_called_by_any_name_of_their_service_and_by_their_own_where_it_is_theirs_alone() -> None:
    replace = msgspec.structs.replace
    llama = replace(service("a", "2026-01-01T00:00:00Z", "llama", "chat"), adapters=("sql", "legal", "qwen"))
    qwen = replace(service("b", "2026-02-01T00:00:00Z", "qwen", "chat", "llama:legal"), adapters=("sql",))
    table = resolve_names(FleetDocument(services=(qwen, llama)))
    assert {name: (table.names[name].name, adapter) for name, adapter in table.adapters.items()} == {
        "llama:sql": ("a", "sql"), "chat:sql": ("a", "sql"), "default/a:sql": ("a", "sql"),
        "chat:legal": ("a", "legal"), "default/a:legal": ("a", "legal"), "legal": ("a", "legal"),
        "llama:qwen": ("a", "qwen"), "chat:qwen": ("a", "qwen"), "default/a:qwen": ("a", "qwen"),
        "qwen:sql": ("b", "sql"), "llama:legal:sql": ("b", "sql"), "default/b:sql": ("b", "sql"),
    }  # fmt: skip
    assert table.names["llama:legal"].name == "b", "a service's name beats an adapter's"
    assert table.names["qwen"].name == "b"
    assert {(conflict.name, conflict.loser) for conflict in table.conflicts} == {("chat", "default/b")}


def test_fleet_documents_round_trip_and_ignore_what_is_newer() -> None:
    document = FleetDocument(services=(service("a", "", "m"),))
    assert decode_fleet(encode_fleet(document)) == document
    newer = json.loads(encode_fleet(document))
    newer["version"] = 2
    newer["services"][0]["shadow"] = {"share": 10}
    assert decode_fleet(json.dumps(newer)).services == document.services


def chain_of_canaries(links: int) -> FleetDocument:
    """Each service is the canary of the next one, and all claim one name."""
    chain = [service("s0", "2026-01-01T00:00:00Z", "chat")]
    for number in range(1, links):
        created = f"2026-01-02T{number // 3600:02}:{number // 60 % 60:02}:{number % 60:02}Z"
        chain.append(canaried(service(f"s{number}", created, "chat"), f"s{number - 1}"))
    return FleetDocument(services=tuple(chain))


def lines_run(function: Callable[[], object]) -> int:
    """Lines of Python that a call executes: once for each item that a loop or a comprehension visits."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    gc.disable()  # finalizers of others' garbage would be counted
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
        gc.enable()
    return lines


def test_a_chain_of_canaries_is_followed_in_a_time_linear_in_its_length() -> None:
    """Operator and routers resolve names on their event loops, and a namespace may have thousands of services."""
    short, long = (chain_of_canaries(links) for links in (100, 400))
    for document, links in ((short, 100), (long, 400)):
        table = resolve_names(document)
        assert table.names["chat"].name == f"s{links - 1}"
        assert len(table.conflicts) == links - 2
    assert lines_run(lambda: resolve_names(long)) <= 4 * lines_run(lambda: resolve_names(short))
