"""Keys with a private cache, whose prompts count as cached for nobody else."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import httpx
import pytest

from argosy_protocol.chunk_hash import chain_seed, chunk_hashes, prompt_segments
from argosy_protocol.openai import decode_request
from argosy_router.auth.api_keys import KeyTable

from .fake_engine import MODEL, FakeEngine
from .harness import Rig, chat, rig

PROMPT = "the same long system prompt, " * 60
KEYS = """
sk-a name=a cache=private
sk-a2 name=a cache=private
sk-b name=b cache=private
sk-c name=c
sk-d name=d cache=shared
"""


def salt_of(key: str, asked: str | None = None, file: str = KEYS) -> str | None:
    table = KeyTable(is_closed=True)
    assert table.load(file, 0.0) == []
    account = table.account_of(f"Bearer {key}".encode())
    assert account is not None
    return account.cache_salt(asked)


def test_a_private_salt_is_the_names_own() -> None:
    salts = [
        salt_of("sk-a"),
        salt_of("sk-a", "x"),
        salt_of("sk-a", "y"),
        salt_of("sk-b"),
        salt_of("sk-b", "x"),
    ]
    assert all(one != other for one, other in combinations([None, "x", "y", *salts], 2))
    assert salt_of("sk-a2", "x") == salt_of("sk-a", "x"), "keys of one name share their cache"
    assert salt_of("sk-a", file="# moved\nsk-a name=renamed cache=private") == salts[0]
    assert salt_of("sk-other", file="sk-other name=a cache=private") != salts[0], "a name is no secret"


@pytest.mark.parametrize("asked", [None, "x"])
@pytest.mark.parametrize("key", ["sk-c", "sk-d"])
def test_a_shared_salt_is_what_the_client_gave(key: str, asked: str | None) -> None:
    assert salt_of(key, asked) == asked


def test_a_key_becomes_private_by_an_edit_of_its_file() -> None:
    table = KeyTable(is_closed=True)
    table.load("sk-a name=a", 0.0)
    account = table.account_of(b"Bearer sk-a")
    assert account is not None
    assert account.cache_salt(None) is None
    table.load("sk-a name=a cache=private", 0.0)
    assert account.cache_salt(None)


async def ask(r: Rig, key: str, **fields: Any) -> httpx.Response:
    body, headers = chat(PROMPT, **fields), {"authorization": f"Bearer {key}"}
    answer = await r.http.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200
    return answer


def predicted(answer: httpx.Response) -> int:
    return int(answer.headers["x-argosy-predicted-tokens"])


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"cache_salt": "mine"}, {"cache_salt": None}])
async def test_a_prompt_is_found_by_its_own_key_alone(tmp_path: Path, fields: dict[str, Any]) -> None:
    keys = tmp_path / "keys"
    keys.write_text(KEYS)
    async with rig([FakeEngine()], api_keys_file=keys) as r:
        for key in ("sk-a", "sk-b", "sk-c"):
            assert predicted(await ask(r, key, **fields)) == 0, key
        for key in ("sk-a", "sk-a2", "sk-b", "sk-c", "sk-d"):
            assert predicted(await ask(r, key, **fields)) > 0, key
        salts = [request.json.get("cache_salt") for request in r.engines[0].requests]
        a, b, c = salts[:3]
        assert salts[3:] == [a, a, b, c, c]
        assert len({a, b, c}) == 3
        assert c == fields.get("cache_salt")
        # What an engine tells of such a prompt is what the router asks its index for.
        for request in r.engines[0].requests[:2]:
            decoded = decode_request("chat/completions", request.body)
            hashes = chunk_hashes(
                prompt_segments(decoded)[0], chain_seed(MODEL, cache_salt=decoded.cache_salt or "")
            )
            service = r.router.fleet.service_of(MODEL)
            assert service is not None
            assert service.index.match(hashes)[1] == len(hashes)


async def test_a_salt_that_a_private_key_asks_for_leads_to_no_other_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(KEYS)
    async with rig([FakeEngine()], api_keys_file=keys) as r:
        await ask(r, "sk-a")
        for guess in ("a", "sk-b", r.engines[0].requests[0].json["cache_salt"]):
            assert predicted(await ask(r, "sk-b", cache_salt=guess)) == 0
