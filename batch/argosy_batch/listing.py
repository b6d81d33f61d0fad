"""Pages of lists, as OpenAI's: `after`, `limit`, `order`; `data`, `first_id`, `last_id`, `has_more`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from argosy_protocol import object_ids
from argosy_protocol.errors import BadRequest
from argosy_protocol.file_objects import Page

T = TypeVar("T")
_READS_AT_ONCE: Final = 32


def limit_of(query: Mapping[str, str], default: int, maximum: int) -> int:
    """Return how many objects a page has.

    Raises:
        BadRequest: `limit` is not a number from 1 to `maximum`.
    """
    given = query.get("limit")
    if given is None:
        return default
    if not (given.isascii() and given.isdigit() and 1 <= int(given[:9]) <= maximum):
        raise BadRequest(f"limit must be a number from 1 to {maximum}", param="limit")
    return int(given[:9])


def in_order(ids: list[str], query: Mapping[str, str], prefix: str) -> list[str]:
    """Return ids, given oldest first, in the order and from the place that a query asks for.

    The object of `after` need not exist any more: a client may delete what it has listed before it asks for the next
    page.

    Args:
        prefix: what the ids of the list begin with.

    Raises:
        BadRequest: `order` is unknown, or `after` is not an id as the list has them.
    """
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise BadRequest("order must be asc or desc", param="order")
    if order == "desc":
        ids = ids[::-1]
    after = query.get("after")
    if after:
        if not (after.startswith(prefix) and object_ids.is_id(after)):
            raise BadRequest("after must be the id of an object of the list", param="after")
        place = object_ids.place_of(after)
        ids = [
            each
            for each in ids
            if (object_ids.place_of(each) > place if order == "asc" else object_ids.place_of(each) < place)
        ]
    return ids


async def page_of(ids: Sequence[str], limit: int, read: Callable[[str], Awaitable[T | None]]) -> Page[T]:
    """Return the first page of `ids`, without those for which `read` returns None."""
    found: list[tuple[str, T]] = []
    for start in range(0, len(ids), _READS_AT_ONCE):
        some = ids[start : start + _READS_AT_ONCE]
        results: Any = await asyncio.gather(*(read(each) for each in some))
        found += [(each, result) for each, result in zip(some, results, strict=True) if result is not None]
        if len(found) > limit:
            break
    page = found[:limit]
    return Page(
        data=[result for _, result in page],
        first_id=page[0][0] if page else None,
        last_id=page[-1][0] if page else None,
        has_more=len(found) > limit,
    )
