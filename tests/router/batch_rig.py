"""A router with a storage, and the official client of its files and batches."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from openai.types import Batch

from argosy_batch.config import BatchConfig

from .fake_engine import MODEL, FakeEngine
from .harness import Rig, rig

CHATS = "/v1/chat/completions"
DEADLINE_S = 60.0
KEYS = "sk-shop name=shop\nsk-lab name=lab\n"


def line(custom_id: Any, content: str = "hi", url: str = CHATS, **fields: Any) -> bytes:
    """A line of an input file."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).encode()


def lines(*contents: str) -> bytes:
    """An input file with a line for each content, which is its custom_id as well."""
    return b"".join(line(content, content) + b"\n" for content in contents)


@contextlib.asynccontextmanager
async def stored(
    tmp_path: Path, engines: Sequence[FakeEngine], limits: dict[str, Any] | None = None, **config: Any
) -> AsyncIterator[Rig]:
    """A router whose storage is in `tmp_path`, with the keys sk-shop and sk-lab; its client has the former."""
    keys = tmp_path / "keys"
    keys.write_text(KEYS)
    given = dict(limits or {})
    config |= {"batch_share": given.pop("batch_share")} if "batch_share" in given else {}
    storage = BatchConfig(storage=str(tmp_path / "storage"), **given)
    async with rig(engines, api_keys_file=keys, storage=storage, **config) as r:
        r.http.headers["authorization"] = "Bearer sk-shop"
        yield r


@contextlib.asynccontextmanager
async def official(r: Rig, key: str = "sk-shop") -> AsyncIterator[AsyncOpenAI]:
    """OpenAI's own client."""
    async with AsyncOpenAI(base_url=f"{r.router.url}/v1", api_key=key, max_retries=0) as client:
        yield client


async def start_batch(client: AsyncOpenAI, content: bytes, **fields: Any) -> Batch:
    file = await client.files.create(file=("input.jsonl", content), purpose="batch")
    given: dict[str, Any] = {"endpoint": CHATS, "completion_window": "24h", **fields}
    return await client.batches.create(input_file_id=file.id, **given)


async def results(client: AsyncOpenAI, file_id: str | None) -> dict[str, Any]:
    """The lines of a file of results by their custom_id; fails if one is there twice."""
    if file_id is None:
        return {}
    found: dict[str, Any] = {}
    for text in (await client.files.content(file_id)).text.splitlines():
        result = json.loads(text)
        assert result["custom_id"] not in found
        found[result["custom_id"]] = result
    return found
