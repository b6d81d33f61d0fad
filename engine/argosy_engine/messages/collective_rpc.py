"""CollectiveRpc: a call of one method on every worker, as it travels from the client over the core to the workers."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from argosy_engine.errors import UtilityFailed

MAX_TIMEOUT_S = 86400.0


class CollectiveRpc(Struct, array_like=True, frozen=True):
    """Call of a public method of every worker. Arguments and results must be msgpack values.

    Raises (from the constructor, and when decoded):
        UtilityFailed: the timeout is not a number of seconds.
    """

    method: str
    timeout: float | None = None
    """Seconds to wait for the answers; None means no limit. The call itself is not cancelled."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}

    def __post_init__(self) -> None:
        timeout: Any = self.timeout  # a caller's value, which no decoder has checked
        if timeout is not None and not (isinstance(timeout, (int, float)) and 0 < timeout < MAX_TIMEOUT_S):
            raise UtilityFailed(
                f"collective_rpc: timeout is a number of seconds above 0, not {timeout!r:.64}"
            )
