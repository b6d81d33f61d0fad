"""Compares times as Kubernetes writes them (RFC 3339)."""

from __future__ import annotations

from datetime import datetime


def seconds_between(start: str, end: str) -> float:
    """Seconds from `start` to `end`; 0 if one of them is missing, or has no zone."""
    try:
        return (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()
    except (ValueError, TypeError):
        return 0.0


def min_time(time: str, other: str) -> str:
    """The earlier of two times; `time` if one of them is missing, or has no zone."""
    return other if seconds_between(time, other) < 0 else time
