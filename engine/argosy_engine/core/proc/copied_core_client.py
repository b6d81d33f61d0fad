"""CopiedCoreClient: client of a core in this process of which a launcher has started copies in other processes.

The copies take the same decisions because they are given the same calls. What else a core decides by is made the same
here: nothing depends on time, and the first copy alone compiles and follows grammars (`CopiedGrammars`).
"""

from __future__ import annotations

from argosy_engine.config import EngineArgs
from argosy_engine.core.proc.core_client import InprocClient
from argosy_engine.core.request_watchdog import Watchdog


class CopiedCoreClient(InprocClient):
    """
    Raises (from the constructor):
        ConfigError: the model or an argument cannot work, or no launcher has started as many processes as needed.
        EngineDead: another copy cannot start. Every call raises it once a copy has ended.
    """

    def __init__(self, args: EngineArgs) -> None:
        from argosy_engine.executor.external_launcher_executor import ExternalLauncherExecutor
        from argosy_engine.structured.copied_grammars import CopiedGrammars
        from argosy_engine.structured.manager import StructuredOutputManager

        executor = ExternalLauncherExecutor(args)
        super().__init__(args, executor)
        core, copies = self.core, executor.copies
        core.watchdog = Watchdog(0.0, clock=lambda: 0.0)  # never due
        if copies.size > 1:
            assert isinstance(core.structured, StructuredOutputManager)
            core.structured = CopiedGrammars(core.structured, executor.announce, is_leader=copies.rank == 0)
