"""CommentedEvent: an event of a stream with a comment, which tells a router what clients need not see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from argosy_protocol.headers import ID_COMMENT

_Data = TypeVar("_Data")

NO_TOKENS = ID_COMMENT
"""Comment of an event that adds no tokens to any choice."""


class CommentedEvent(NamedTuple, Generic[_Data]):
    """Lines of one event."""

    comment: bytes
    """A line without its end."""
    data: _Data | None
    """None: the event is the comment alone."""


def token_id_comment(index: int, token_ids: Sequence[int]) -> bytes:
    """Return the comment of an event that adds `token_ids` to the choice `index`."""
    return b"%b%d %b" % (ID_COMMENT, index, b",".join(b"%d" % token_id for token_id in token_ids))
