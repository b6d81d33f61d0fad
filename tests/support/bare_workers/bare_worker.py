"""A worker without a model and without torch, whose import takes most of the start of an engine's process.

Processes started with this folder on PYTHONPATH (`engine_processes.worker_path`) import it as the module of `Worker`;
everything else in them is the real thing. For tests of processes: how they start, exchange messages and end. The tokens
are those of `fake_worker`, which also checks the blocks that the scheduler gives it.
"""

from __future__ import annotations

import logging
from typing import Any

from argosy_engine.attention.kv_cache_spec import FullAttentionSpec, group_layers
from argosy_engine.checkpoint.model_folder import resolve_model
from argosy_engine.config import EngineArgs
from argosy_engine.distributed.lockstep import Round
from argosy_engine.messages import (
    GrammarBitmask,
    LoadStep,
    ModelRunnerOutput,
    OnLoadStep,
    SchedulerOutput,
    WorkerInfo,
    ignore_step,
)
from argosy_engine.models.config_file import load_model_config
from argosy_engine.resolved_config import MemoryBudget
from fake_worker import FakeWorker

NUM_BLOCKS = 512

logger = logging.getLogger(__name__)


class FinishedStep:
    """A `PendingOutput` whose output is known. It ignores grammars."""

    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output

    def sample(self, grammar: GrammarBitmask | None) -> None: ...

    def wait(self) -> ModelRunnerOutput:
        return self._output

    get = wait


class Worker:
    """Has the interface of the real one, which tells what the arguments mean."""

    def __init__(
        self,
        args: EngineArgs,
        rank: int = 0,
        world_size: int = 1,
        init_method: str = "",
        *,
        data_rank: int = 0,
        local_rank: int | None = None,
    ) -> None:
        self.args = args
        self.rank = rank
        self.world_size = world_size
        self.data_rank = data_rank
        self.on_load_step: OnLoadStep = ignore_step
        self._runner: Any = None
        self._budget: MemoryBudget

    def start(self) -> WorkerInfo:
        args, path = self.args, resolve_model(self.args.model)
        self.on_load_step(LoadStep("weights"))
        config = load_model_config(path)
        logger.info("attention backend: none")
        num_blocks = args.num_gpu_blocks_override or NUM_BLOCKS
        max_model_len = args.max_model_len or (num_blocks - 1) * args.block_size
        self._budget = MemoryBudget(
            device="cpu", num_workers=args.parallel_config.world_size, total_bytes=1, available_bytes=1,
            utilization=0.5, weights_bytes=0, activation_bytes=0, block_bytes=1, block_size=args.block_size,
            num_blocks=num_blocks,
            request_blocks=-(-max_model_len // args.block_size), max_model_len=max_model_len, limited_by="memory",
        )  # fmt: skip
        self.wake_up()
        return WorkerInfo(
            model_path=str(path),
            model_fingerprint=f"seed {args.seed}",
            config=config,
            device="cpu",
            dtype="float32",
            memory=self._budget,
            kv_cache_groups=group_layers([FullAttentionSpec(1)]),
            phases=(),
        )

    def execute(self, step: SchedulerOutput) -> Any:
        assert self._runner is not None, "the worker is asleep"
        return FinishedStep(self._runner.execute(step))

    def lend_experts(self, step: Round) -> None:
        assert self._runner is not None, "the worker is asleep"

    def sleep(self, level: int) -> None:
        self._runner = None

    def wake_up(self) -> None:
        if self._runner is None:
            is_last = self.rank // self.args.tensor_parallel_size == self.args.pipeline_parallel_size - 1
            self._runner = FakeWorker(self.args.block_size, samples=is_last)

    def shutdown(self) -> None:
        self._runner = None
