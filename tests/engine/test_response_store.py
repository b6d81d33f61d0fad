"""Responses in one engine's memory: owners, bounds, expiry."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from argosy_engine.api.endpoints.responses import ResponseStore, StoreLimits
from argosy_protocol.errors import PayloadTooLarge
from argosy_protocol.response_history import StoredResponse


def record(size: int = 10) -> StoredResponse:
    return StoredResponse(msgspec.Raw(b"x" * (size - 4)), [msgspec.Raw(b"ab"), msgspec.Raw(b"cd")])


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def kept(store: ResponseStore, owner: str, names: str) -> str:
    """Those of some one-letter ids that an owner finds."""

    async def found() -> str:
        return "".join([name for name in names if await store.get(owner, name) is not None])

    return asyncio.run(found())


def put(store: ResponseStore, owner: str, names: str, size: int = 10) -> None:
    async def work() -> None:
        for name in names:
            await store.put(owner, name, record(size))

    asyncio.run(work())


def test_only_the_owner_finds_a_response() -> None:
    store = ResponseStore()
    put(store, "one", "a")
    assert (kept(store, "one", "a"), kept(store, "two", "a")) == ("a", "")
    assert asyncio.run(store.delete("two", "a")) is False
    assert asyncio.run(store.delete("one", "a")) is True
    assert asyncio.run(store.delete("one", "a")) is False
    assert (len(store), store.num_bytes) == (0, 0)


def test_responses_expire() -> None:
    clock = Clock()
    store = ResponseStore(StoreLimits(ttl_s=10.0), now=clock)
    put(store, "one", "a")
    clock.now = 9.0
    put(store, "one", "b")
    assert kept(store, "one", "ab") == "ab"
    clock.now = 10.0
    assert kept(store, "one", "ab") == "b"
    assert store.num_bytes == 10


def test_a_record_takes_the_place_of_an_earlier_one() -> None:
    store = ResponseStore()
    put(store, "one", "aa", size=30)
    put(store, "one", "a", size=20)
    assert (len(store), store.num_bytes) == (1, 20)


def test_the_oldest_responses_of_an_owner_go() -> None:
    store = ResponseStore(StoreLimits(max_records_of_owner=2, max_bytes_of_owner=100))
    put(store, "two", "z")
    put(store, "one", "abc")
    assert (kept(store, "one", "abc"), kept(store, "two", "z")) == ("bc", "z")
    put(store, "one", "d", size=95)
    assert kept(store, "one", "abcd") == "d"


def test_the_oldest_responses_of_all_go() -> None:
    store = ResponseStore(StoreLimits(max_records=3))
    put(store, "one", "ab")
    put(store, "two", "cd")
    assert (kept(store, "one", "ab"), kept(store, "two", "cd")) == ("b", "cd")
    store = ResponseStore(StoreLimits(max_bytes=25))
    put(store, "one", "a")
    put(store, "two", "bc")
    assert (kept(store, "one", "a"), kept(store, "two", "bc")) == ("", "bc")


def test_a_record_that_is_too_large_is_refused() -> None:
    store = ResponseStore(StoreLimits(max_bytes_of_owner=9))
    with pytest.raises(PayloadTooLarge, match="store: false"):
        put(store, "one", "a", size=10)
    with pytest.raises(PayloadTooLarge):
        store.check(10)
    store.check(9)
    assert len(store) == 0
