"""SleepState: puts the workers to sleep, which frees weights and KV cache, and wakes them up.

Sleeping needs an idle scheduler. The prefix cache is reset first, which announces to every router that nothing is
resident. Block ids stay valid, so the scheduler continues with the same pool after wake-up.
"""

from __future__ import annotations

from argosy_engine.core.kv_cache.kv_cache_manager import KVCacheManager
from argosy_engine.core.sched.scheduler import Scheduler
from argosy_engine.errors import EngineAsleep, UtilityFailed
from argosy_engine.executor.abstract import Executor
from argosy_engine.messages.collective_rpc import CollectiveRpc
from argosy_engine.messages.sleep_levels import check_level


class SleepState:
    """Whether the workers hold weights and KV cache, and the transitions between the levels."""

    def __init__(self, scheduler: Scheduler, kv: KVCacheManager, executor: Executor) -> None:
        self._scheduler = scheduler
        self._kv = kv
        self._executor = executor
        self.level = 0
        """Sleep level; 0 is awake."""

    def check_awake(self) -> None:
        """Raise EngineAsleep if the engine is asleep."""
        if self.level:
            raise EngineAsleep(
                "the engine is asleep; wake it up first, with wake_up() of an LLM or POST /wake_up of a server"
            )

    def sleep(self, level: int) -> None:
        """Free weights and KV cache. A sleeping engine may be put to sleep at another level.

        Raises:
            UtilityFailed: the level does not exist, or there are unfinished requests.
        """
        check_level(level)
        if self._scheduler.has_unfinished_requests or not self._kv.reset_prefix_cache():
            raise UtilityFailed("requests are running")
        self._executor.collective_rpc(CollectiveRpc("sleep", args=[level]))
        self._scheduler.forget_released()
        self.level = level

    def wake_up(self) -> None:
        """Load the weights and allocate the KV cache. No effect on an engine that is awake.

        Raises:
            UtilityFailed: memory no longer suffices, or the checkpoint is gone; the engine stays asleep.
        """
        self._executor.collective_rpc(CollectiveRpc("wake_up"))
        self.level = 0
