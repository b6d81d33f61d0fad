"""The local fleet's `argosy batch`: how it is started."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from argosy.local import processes
from argosy.local.child_process import Settings
from argosy.local.control import StateDir
from argosy.local.processes import BatchProcess
from argosy_batch.main import build_parser, config_of

SCRIPT = """
import pathlib, sys, time
path = pathlib.Path(sys.argv[1])
path.with_suffix(".new").write_text("\\n".join(sys.argv[2:]))
path.with_suffix(".new").rename(path)
time.sleep(600)
"""


async def test_it_ends_by_itself_before_it_is_killed(tmp_path: Path) -> None:
    state, given = StateDir(tmp_path / "state"), tmp_path / "flags"
    state.create()
    settings = Settings(batch=(sys.executable, "-c", SCRIPT, str(given)))
    with BatchProcess.with_port(settings, state, lambda: None) as process:
        may_start = asyncio.Event()
        may_start.set()
        running = asyncio.create_task(process.run(may_start))
        async with asyncio.timeout(60):
            while not given.exists():  # noqa: ASYNC110 - another process makes it
                await asyncio.sleep(0.01)
            process.stop()
            await running
    parser = build_parser()
    config = config_of(
        parser, parser.parse_args(given.read_text().split("\n")), {"ARGOSY_FLEET_KEY": "x" * 32}
    )
    assert 2 * config.shutdown_timeout_s < processes.STOP_S
