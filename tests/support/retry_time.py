"""Virtual time for retries: waiting takes none, and the clock shows how much was waited."""

from __future__ import annotations

import threading
from typing import Any

from argosy_fetcher.retry import RetryPolicy


class RetryTime:
    def __init__(self) -> None:
        self.now = 0.0
        self.waits: list[float] = []

    def wait(self, cancelled: threading.Event, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds

    def policy(self, **fields: Any) -> RetryPolicy:
        """Return a policy in this time."""
        return RetryPolicy(wait=self.wait, clock=lambda: self.now, **fields)
