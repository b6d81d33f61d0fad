"""Decisions about all names of a fleet: what is bounded, what they cost, what clocks may do, who reads the document."""

from __future__ import annotations

import datetime
import functools
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
    NameReservation,
    decode_fleet,
    encode_fleet,
    resolve_names,
)
from argosy_resource.fleet_document import (
    MAX_RESERVED,
    MAX_RESERVED_OF_NAMESPACE,
    NamePolicy,
    SettledNames,
    settle_names,
    within,
)

NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
HOUR = "2026-01-01T01:00:00Z"


def service(key: str, *names: str, created: str = "2025", **fields: Any) -> FleetService:
    namespace, name = key.split("/")
    model, *aliases = names or (name,)
    return FleetService(
        namespace=namespace,
        name=name,
        uid=key,
        created=created,
        model=model,
        aliases=tuple(aliases),
        engine_model=fields.pop("engine_model", "tiny"),
        **fields,
    )


def fleet(*services: FleetService, reservations: tuple[NameReservation, ...] = ()) -> FleetDocument:
    return FleetDocument(services=services, reservations=reservations)


def settle(
    claimed: FleetDocument,
    last: FleetDocument | None = None,
    *,
    now: datetime.datetime = NOW,
    namespaces: frozenset[str] = frozenset(),
    **allowed: tuple[str, ...],
) -> SettledNames:
    known = namespaces | {each.namespace for each in claimed.services}
    policy = NamePolicy(
        namespaces=known, allowed={key.replace("_", "-"): value for key, value in allowed.items()}
    )
    return settle_names(claimed, last or FleetDocument(), policy, now)


def reserved(settled: SettledNames) -> dict[str, tuple[str, str]]:
    return {each.name: (each.namespace, each.until) for each in settled.document.reservations}


def owner(settled: SettledNames, name: str) -> str:
    found = resolve_names(settled.document).names.get(name)
    return "" if found is None else found.qualified_name


def test_what_was_settled_is_settled_again_in_the_same_way() -> None:
    claimed = fleet(service("a/x", "chat", "b/y", "k"), service("b/y", "chat", "k", created="2024"))
    first = settle(claimed)
    assert settle(claimed, first.document) == first
    assert settle(fleet(*reversed(claimed.services)), first.document).lost == first.lost
    ended = settle(fleet(claimed.services[0]), first.document)
    assert settle(fleet(claimed.services[0]), ended.document, now=NOW) == ended


def test_an_older_router_gives_lost_names_to_nobody() -> None:
    """It decides by age alone, and ignores fields that it does not know."""
    thief = service("b/thief", "team-a/chat", "gpt-x", "own", created="2020")
    settled = settle(fleet(service("a/x", "gpt-x"), thief), fleet(service("a/x", "gpt-x")),
                     namespaces=frozenset({"team-a"}))  # fmt: skip
    plain = json.loads(encode_fleet(settled.document))
    entry = next(each for each in plain["services"] if each["name"] == "thief")
    assert (entry["model"], entry["aliases"]) == ("b/thief", ["own"])


def test_an_older_document_is_read_and_its_names_are_kept() -> None:
    last = decode_fleet(
        '{"version": 1, "services": [{"namespace": "a", "name": "x", "uid": "u", "model": "chat"}]}'
    )
    settled = settle(fleet(service("b/y", "chat", created="2020")), last)
    assert owner(settled, "chat") == ""
    assert reserved(settled) == {"chat": ("a", HOUR), "a/x": ("a", HOUR)}


def test_an_engine_of_another_make_keeps_the_name_that_it_was_started_with() -> None:
    foreign = service("b/y", "team-a/chat", engine_model="")
    (entry,) = settle(fleet(foreign), namespaces=frozenset({"team-a"})).document.services
    assert (entry.model, entry.withheld_model, entry.started_name) == ("b/y", "team-a/chat", "team-a/chat")
    assert entry.engine_name == foreign.engine_name, "the router need not begin anew"
    (again,) = settle(fleet(entry), namespaces=frozenset({"team-a"})).document.services
    assert again == entry, "an entry that is kept of the last document"


def test_a_service_and_its_canary_lose_and_keep_names_together() -> None:
    stable = service("a/stable", "chat", created="2025", canary=Canary(service="next", weight=10))
    canary = service("a/next", "chat", created="2023")
    other = service("b/y", "chat", created="2024")
    settled = settle(fleet(stable, canary, other))
    assert owner(settled, "chat") == "a/stable"
    assert settled.lost.keys() == {"b/y"}
    (lost,) = settled.lost["b/y"]
    assert lost.why == "belongs to a/stable, whose canary is older"


@pytest.mark.parametrize(
    "until", ["2999-01-01T00:00:00Z", "", "noon", "2026-01-01", "9999-12-31T23:59:59-23:59"]
)
def test_no_reservation_lasts_for_more_than_an_hour_from_now(until: str) -> None:
    kept = NameReservation(name="chat", namespace="a", until=until)
    assert reserved(settle(fleet(), fleet(reservations=(kept,)))) == {"chat": ("a", HOUR)}


@pytest.mark.parametrize(
    ("minutes", "is_reserved"), [(-120, True), (-1, True), (59, True), (60, False), (6000, False)]
)
def test_clocks_jump(minutes: int, is_reserved: bool) -> None:
    ended = settle(fleet(), fleet(service("a/x", "chat")))
    later = NOW + datetime.timedelta(minutes=minutes)
    settled = settle(fleet(service("b/y", "chat")), ended.document, now=later)
    assert ("chat" in reserved(settled)) is is_reserved
    assert owner(settled, "chat") == ("" if is_reserved else "b/y")
    if is_reserved:
        assert datetime.datetime.fromisoformat(reserved(settled)["chat"][1]) <= later + datetime.timedelta(
            hours=1
        )


def test_nothing_is_reserved_for_a_namespace_that_must_not_have_the_name() -> None:
    last = fleet(service("a/x", "gpt-x", "google/gemma"))
    settled = settle(
        fleet(service("b/y", "gpt-x"), service("google/z")), last, a=("a-*",), namespaces=frozenset({"a"})
    )
    assert reserved(settled) == {"a/x": ("a", HOUR)}
    assert owner(settled, "gpt-x") == "b/y", "the administrator has taken it away"


def test_an_administrators_pattern_lends_names_of_another_namespace_but_not_those_of_its_services() -> None:
    claimed = fleet(
        service("b/y", "google/gemma", "google/other", created="2020"), service("google/gemma", "x")
    )
    settled = settle(claimed, b=("google/*",))
    assert (owner(settled, "google/other"), owner(settled, "google/gemma")) == ("b/y", "google/gemma")
    assert [each.why for each in settled.lost["b/y"]] == ["always names google/gemma"]
    assert owner(settle(claimed, b=("*",)), "google/other") == "", (
        "that is no leave for every namespace's names"
    )


def test_reservations_are_bounded_and_nobody_pushes_out_those_of_others() -> None:
    last = fleet(service("victim/v", "gpt-x"))
    document = settle(fleet(), last).document
    for step in range(8):  # each tenant claims names, and gives them up
        now = NOW + datetime.timedelta(minutes=step)
        churn = fleet(
            *(
                service(
                    f"t{tenant}/s{number}",
                    *(f"{'n' * 200}{step}-{tenant}-{number}-{alias}" for alias in range(33)),
                )
                for tenant in range(20)
                for number in range(3)
            )
        )
        taken = settle(churn, document, now=now).document
        document = settle(fleet(), taken, now=now).document
        kept = document.reservations
        assert len(kept) <= MAX_RESERVED
        assert max(sum(each.namespace == f"t{tenant}" for each in kept) for tenant in range(20)) <= (
            MAX_RESERVED_OF_NAMESPACE
        )
        assert ("gpt-x", "victim") in {(each.name, each.namespace) for each in kept}
        assert len(encode_fleet(document)) < 240 * 1024
    newest = {each.until for each in document.reservations if each.namespace == "t0"}
    assert newest == {"2026-01-01T01:07:00Z"}, "old ones go"


def test_more_namespaces_than_reservations() -> None:
    last = fleet(*(service(f"t{number}/s", "n" * number) for number in range(1, 256)))
    crowd = fleet(*(service(f"c{number}/s", f"name-{number}") for number in range(2 * MAX_RESERVED)))
    document = settle(fleet(), settle(crowd, last).document).document
    assert len(document.reservations) == MAX_RESERVED


def test_whoever_fills_the_document_frees_no_name_of_others_and_takes_no_room_from_their_services() -> None:
    greedy = fleet(
        *(service(f"a/s{number}", *(f"{number}-{alias}" for alias in range(9))) for number in range(50))
    )
    last = fleet(service("b/y", "gpt-x"), service("c/z"), *greedy.services)
    new = fleet(service("c/z"), *(service(f"a/new{number}", "n" * 200 + str(number)) for number in range(60)))
    document = settle(new, settle(last).document).document
    assert len(document.reservations) == MAX_RESERVED_OF_NAMESPACE + 2
    limit = len(encode_fleet(document)) // 3
    shortened = within(document, limit)
    assert len(encode_fleet(shortened)) <= limit
    assert {"gpt-x", "b/y"} <= {each.name for each in shortened.reservations}
    assert "c/z" in {each.qualified_name for each in shortened.services}
    assert len(shortened.services) > 20, "services come before the reservations of their own namespace"


def lines_run(function: Callable[[], object]) -> int:
    lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return lines


def contested(services: int) -> FleetDocument:
    """All claim one name and some of their own, in as many namespaces."""
    return fleet(
        *(
            service(f"t{number}/s", "chat", f"o{number}/m", f"t{number + 1}/x", f"n{number}")
            for number in range(services)
        )
    )


def test_a_decision_takes_a_time_that_is_linear_in_the_number_of_names() -> None:
    documents = [contested(100), contested(400)]
    new = [lines_run(functools.partial(settle, each)) for each in documents]
    known = [lines_run(functools.partial(settle, each, settle(each).document)) for each in documents]
    ended = [lines_run(functools.partial(settle, fleet(), each)) for each in documents]
    for short, long in (new, known, ended):
        assert long <= 5 * short


def test_the_longest_names_fit_into_the_document() -> None:
    key = f"{'n' * 63}/{'s' * 63}"
    settled = settle(fleet(service(key, "team-a/" + "m" * 249)), namespaces=frozenset({"team-a"}))
    assert decode_fleet(encode_fleet(settled.document)) == settled.document
    ended = settle(fleet(), fleet(service(key, "m" * 256)))
    assert decode_fleet(encode_fleet(ended.document)) == ended.document


@pytest.mark.parametrize(
    "name", ["Team-A/chat", "team-a", "team-a:chat", "team-b/team-a/chat", "xteam-a/chat"]
)
def test_names_that_only_look_like_those_of_another_namespace(name: str) -> None:
    settled = settle(fleet(service("team-b/s", name)), namespaces=frozenset({"team-a"}))
    assert owner(settled, name) == "team-b/s"


def test_adapters_are_no_names_to_reserve() -> None:
    last = fleet(msgspec.structs.replace(service("a/x", "chat"), adapters=("sql",)))
    assert reserved(settle(fleet(), last)).keys() == {"chat", "a/x"}


def test_names_that_are_refused_to_others_anyway_push_out_no_reservation() -> None:
    """A hundred services end at once: each has `namespace/name` besides its name for clients."""
    last = settle(fleet(*(service(f"a/x{number}", f"chat-{number}") for number in range(100)))).document
    settled = settle(fleet(service("b/y", "chat-99", created="2020")), last)
    assert owner(settled, "chat-99") == ""
    names = {each.name for each in settled.document.reservations}
    assert {f"chat-{number}" for number in range(100)} < names
    assert len(names) == MAX_RESERVED_OF_NAMESPACE
    small = within(settled.document, len(encode_fleet(settled.document)) - 1000)
    assert {f"chat-{number}" for number in range(100)} < {each.name for each in small.reservations}


def test_a_name_goes_back_from_a_service_to_its_own_namespace_not_to_whoever_was_lent_it() -> None:
    lent = settle(fleet(service("b/y", "a/x"), service("a/z")), b=("a/*", "y")).document
    ended = settle(fleet(service("b/y"), service("a/x")), lent, b=("a/*", "y")).document
    assert resolve_names(ended).names["a/x"].namespace == "a"
    settled = settle(fleet(service("b/y", "a/x"), service("a/z")), ended, b=("a/*", "y"))
    assert owner(settled, "a/x") == ""
    assert reserved(settled)["a/x"] == ("a", HOUR)


def test_who_took_a_reserved_name_again_is_not_said_to_have_an_older_canary() -> None:
    last = settle(fleet(service("a/x", "chat"))).document
    ended = settle(fleet(), last).document
    settled = settle(fleet(service("a/x", "chat"), service("b/y", "chat", created="2020")), ended)
    (lost,) = settled.lost["b/y"]
    assert lost.why == "belongs to a/x, which had it first"
