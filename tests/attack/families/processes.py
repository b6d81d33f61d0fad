"""Replicas that freeze or die while they serve requests, and are restarted."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Callable

from ..fleet import MODEL, Engine
from ..target import COMPLETIONS, Attack, Target

FREEZE_S = 12.0
FROZEN_STALL_S = 8.0
"""A router cannot distinguish a frozen core from a busy one within the first few seconds."""
_turns = itertools.count()


async def _load(target: Target) -> None:
    """Run the attacker's streams on every replica, so that requests are in flight when one dies."""

    async def once(number: int) -> None:
        body = {"model": MODEL, "prompt": f"Tale {number}: ", "max_tokens": 100, "ignore_eos": True}
        await target.ask(COMPLETIONS, {**body, "stream": True}, allowed=frozenset({200, 502, 504}))

    await target.volley(once, in_flight=6, most=100)


async def _hit(target: Target, strike: Callable[[Engine], None]) -> None:
    """Strike one engine under load, a different one each time; return when it is synced again."""
    engine = target.fleet.mortals[next(_turns) % len(target.fleet.mortals)]
    load = asyncio.create_task(_load(target))
    try:
        await asyncio.sleep(min(1.0, target.seconds_left / 3))
        strike(engine)
        target.outcomes[f"{engine.name} hit"] += 1
        await target.fleet.restart(engine)
    finally:
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


async def core_killed(target: Target) -> None:
    def strike(engine: Engine) -> None:
        engine.stop_grammar_server()
        engine.signal_core(signal.SIGKILL)

    await _hit(target, strike)


async def api_killed(target: Target) -> None:
    await _hit(target, lambda engine: _kill(engine.pid))


async def engine_killed(target: Target) -> None:
    await _hit(target, lambda engine: os.killpg(engine.pid, signal.SIGKILL))


async def engine_terminated(target: Target) -> None:
    await _hit(target, lambda engine: os.kill(engine.pid, signal.SIGTERM))


async def core_frozen(target: Target) -> None:
    engine = target.fleet.engines[next(_turns) % len(target.fleet.engines)]
    load = asyncio.create_task(_load(target))
    try:
        await asyncio.sleep(1.0)
        engine.signal_core(signal.SIGSTOP)
        target.outcomes[f"{engine.name} frozen"] += 1
        await asyncio.sleep(FREEZE_S)
    finally:
        engine.signal_core(signal.SIGCONT)
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
    await target.fleet.until_synced(60.0)


ATTACKS = (
    Attack("a core frozen", core_frozen, stall_s=FROZEN_STALL_S, kills=True, is_slow=True),
    Attack("a core killed", core_killed, kills=True, is_slow=True),
    Attack("an API process killed", api_killed, kills=True, is_slow=True),
    Attack("an engine killed", engine_killed, kills=True, is_slow=True),
    Attack("an engine terminated", engine_terminated, kills=True, is_slow=True),
)
