"""SleepState: whether the workers hold weights and KV cache, and the way there and back.

Sleep needs an idle scheduler. The prefix cache is reset first, which announces to every router that nothing is
resident; block ids stay valid, so the scheduler goes on with the same pool when the workers wake up.
"""

from __future__ import annotations

from argosy_engine.core.kv_cache_manager import KVCacheManager
from argosy_engine.core.scheduler import Scheduler
from argosy_engine.errors import EngineAsleep, UtilityFailed
from argosy_engine.executor.base import Executor

LEVELS = (1, 2)


class SleepState:
    def __init__(self, scheduler: Scheduler, kv: KVCacheManager, executor: Executor) -> None:
        self._scheduler = scheduler
        self._kv = kv
        self._executor = executor
        self.level = 0
        """0: awake"""

    def check_awake(self) -> None:
        """Raises EngineAsleep if it is not."""
        if self.level:
            raise EngineAsleep("the engine is asleep; wake it up first (POST /wake_up)")

    def sleep(self, level: int) -> None:
        """Frees weights and KV cache; a second call may go deeper.

        Raises:
            UtilityFailed: no such level, or requests are running.
        """
        if level not in LEVELS:
            raise UtilityFailed(f"there is no sleep level {level}; there are {LEVELS[0]} and {LEVELS[1]}")
        if self._scheduler.has_unfinished_requests or not self._kv.reset_prefix_cache():
            raise UtilityFailed("requests are running")
        self._executor.collective_rpc("sleep", args=[level])
        self._scheduler.forget_released()
        self.level = level

    def wake_up(self) -> None:
        """Loads weights and allocates the KV cache; no effect on an engine that is awake.

        Raises:
            UtilityFailed: they no longer fit, or the checkpoint is gone; the engine stays asleep.
        """
        self._executor.collective_rpc("wake_up")
        self.level = 0
