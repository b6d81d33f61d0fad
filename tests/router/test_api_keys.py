"""API keys: reading key files, finding a request's account, and what a key may use."""

from __future__ import annotations

import hashlib

import pytest

from argosy_router.auth.accounts import AnonymousAccount, RateLimited
from argosy_router.auth.api_keys import KeyFileError, KeyTable, parse_line

from .accounts import account


def bearer(key: str) -> bytes:
    return b"Bearer " + key.encode()


def test_a_key_is_given_as_it_is_or_as_its_digest() -> None:
    table = KeyTable(is_closed=True)
    digest = hashlib.sha256(b"sk-one").hexdigest()
    assert table.load(f"# keys\n\n  sha256:{digest} name=one\nsk-two name=two weight=2.5\n", 0.0) == []
    one, two = table.account_of(b"bearer  sk-one"), table.account_of(bearer("sk-two"))
    assert one is not None
    assert two is not None
    assert (one.name, two.name, two.weight) == ("one", "two", 2.5)
    for wrong in (
        None,
        b"",
        b"Bearer",
        b"Bearer ",
        b"sk-one",
        b"Basic sk-one",
        bearer(f"sha256:{digest}"),
        bearer(digest),
    ):
        assert table.account_of(wrong) is None, wrong


def test_only_a_table_without_keys_and_file_is_open() -> None:
    assert KeyTable().account_of(None) is not None
    assert KeyTable(is_closed=True).account_of(None) is None
    assert KeyTable(["k"]).account_of(None) is None
    assert KeyTable(["k"]).account_of(bearer("k")) is not None


@pytest.mark.parametrize(
    ("line", "problem"),
    {
        "an unknown term": ("k rpm=5", "unknown term 'rpm'; allowed terms: name, models"),
        "a key in the place of a term": ("k sk-secret=", "unknown term .not shown, because it may be a key"),
        "a word without value": ("k team", "NAME=VALUE"),
        "a term twice": ("k weight=1 weight=2", "the term weight is given twice"),
        "no number": ("k requests_per_minute=many", "int"),
        "a negative limit": ("k tokens_per_minute=-1", ">= 0"),
        "a weight of zero": ("k weight=0", ">= 0.01"),
        "a weight that is none": ("k weight=nan", "weight"),
        "a name with spaces in disguise": ("k name=a\u00a0b", "NAME=VALUE"),
        "an odd name": ("k name=a/b", "name"),
        "no model": ("k models=", "models"),
        "a short digest": ("sha256:abcd", "64 hexadecimal"),
        "no digest": ("sha256:" + "x" * 64, "64 hexadecimal"),
        "the digest of nothing": ("sha256:" + hashlib.sha256(b"").hexdigest(), "empty key"),
    }.values(),
)
def test_bad_lines_are_refused_without_their_key(line: str, problem: str) -> None:
    with pytest.raises(KeyFileError, match=problem):
        parse_line(line)
    table = KeyTable(is_closed=True)
    (told,) = table.load(f"good\n{line.replace('k ', 'sk-secret ')}\n", 0.0)
    assert told.startswith("line 2: ")
    assert "sk-secret" not in told
    assert table.account_of(bearer("good")) is not None, "one bad line costs no other key"
    assert table.account_of(bearer("sk-secret")) is None


def test_two_keys_of_one_name_share_an_account_and_must_agree() -> None:
    table = KeyTable(is_closed=True)
    assert table.load("old name=a weight=2\nnew name=a weight=2", 0.0) == []
    assert table.account_of(bearer("old")) is table.account_of(bearer("new"))
    assert table.load("old name=a weight=2\nnew name=a weight=3\nold name=b", 0.0) == [
        "line 2: keys named 'a' must have the same terms",
        "line 3: the key was given before",
    ]


def test_keys_without_a_name_share_nothing() -> None:
    """Two whose digests begin with the same 32 bits, which of ten thousand keys some two do with a chance of 1 %."""
    first, second = "sk-3334", "sk-121845"
    digests = [hashlib.sha256(key.encode()).hexdigest() for key in (first, second)]
    assert digests[0][:8] == digests[1][:8]
    in_file = KeyTable(is_closed=True)
    assert in_file.load(f"{first}\n{second}", 0.0) == []
    for table in (KeyTable([first, second]), in_file):
        one, two = table.account_of(bearer(first)), table.account_of(bearer(second))
        assert one is not None
        assert two is not None
        assert (one.name, two.name) == (f"key-{digests[0][:32]}", f"key-{digests[1][:32]}")
        assert table.account_named(one.name) is one


def test_no_key_takes_the_name_of_one_without() -> None:
    name = f"key-{hashlib.sha256(b'one').hexdigest()[:32]}"
    table = KeyTable(is_closed=True)
    (told,) = table.load(f"one\ntwo name={name}", 0.0)
    assert told == f"line 2: {name!r} is the name of a key without a name: give another"
    assert table.account_of(bearer("two")) is None
    assert table.load(f"two name={name}\none", 0.0) != []
    assert table.account_of(bearer("one")) is not None


def test_a_reload_keeps_what_was_used() -> None:
    table = KeyTable(is_closed=True)
    table.load("k name=a requests_per_minute=2", 0.0)
    before = table.account_of(bearer("k"))
    assert before is not None
    for _ in range(2):
        before.reserve(1, 0.0)
    table.load("other\nk name=a requests_per_minute=3", 0.0)
    assert table.account_of(bearer("k")) is before
    with pytest.raises(RateLimited):
        before.reserve(1, 0.0)
    table.load("k name=a", 0.0)
    assert not before.is_limited
    table.load("", 0.0)
    assert table.account_of(bearer("k")) is None


@pytest.mark.parametrize(
    ("terms", "asked", "priority"),
    [
        ({}, 0, 0),
        ({}, 5, 5),
        ({}, -5, 0),
        ({"priority": -3}, 0, -3),
        ({"priority": 10}, -20, 10),
        ({"priority": 10}, 1, 11),
    ],
)
def test_a_request_steps_back_but_never_ahead_of_its_key(
    terms: dict[str, int], asked: int, priority: int
) -> None:
    assert account("a", **terms).priority(asked) == priority
    assert AnonymousAccount().priority(asked) == asked


def test_keys_open_their_own_models_only() -> None:
    assert account().may_use("anything")
    limited = account(models=("tiny", "team/large"))
    assert limited.may_use("x", "tiny")
    assert not limited.may_use("x", "TINY")
