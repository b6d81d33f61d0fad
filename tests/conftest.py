"""What all tests share: Hypothesis without deadlines, because a machine that also runs other tests misses them."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("argosy", deadline=None)
settings.load_profile("argosy")
