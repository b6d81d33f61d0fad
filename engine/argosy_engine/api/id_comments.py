"""Comments of a stream's events that name token ids, which tell a router what clients need not see."""

from __future__ import annotations

from collections.abc import Sequence

from argosy_protocol.headers import ID_COMMENT

NO_TOKENS = ID_COMMENT
"""Comment of an event that adds no tokens to any choice."""


def token_id_comment(index: int, token_ids: Sequence[int]) -> bytes:
    """Return the comment of an event that adds `token_ids` to the choice `index`, a line without its end."""
    if len(token_ids) == 1:
        return b"%b%d %d" % (ID_COMMENT, index, token_ids[0])
    return b"%b%d %b" % (ID_COMMENT, index, b",".join(b"%d" % token_id for token_id in token_ids))
