"""A fake executor without a model, for tests of the engine core."""

from __future__ import annotations

from typing import Any

from argosy_engine.attention.kv_cache_spec import FullAttentionSpec, group_layers
from argosy_engine.checkpoint.model_folder import resolve_model
from argosy_engine.distributed.lockstep import Round
from argosy_engine.errors import EngineDead
from argosy_engine.messages import (
    CollectiveRpc,
    GrammarBitmask,
    ModelRunnerOutput,
    SchedulerOutput,
    WorkerInfo,
)
from argosy_engine.models.config_file import load_model_config
from argosy_engine.resolved_config import MemoryBudget
from fake_worker import FakeWorker

BLOCK = 4


class FakePending:
    """A pending step whose output is already known, unless its executor dies. It ignores grammars."""

    def __init__(self, executor: FakeExecutor, output: ModelRunnerOutput) -> None:
        self._executor = executor
        self._output = output

    def sample(self, grammar: GrammarBitmask | None) -> None: ...

    def get(self) -> ModelRunnerOutput:
        if self._executor.is_dead:
            raise EngineDead("in the forward pass")
        return self._output


class FakeExecutor:
    """Runs a `FakeWorker`. Like the real worker, it cannot execute while asleep and loses all state when it sleeps."""

    def __init__(self) -> None:
        self.worker = FakeWorker(BLOCK)
        self.is_asleep = False
        self.lent: list[Round] = []
        """Steps of other cores."""
        self.is_dead = False
        """Set it to make every step fail from now on, those in flight included."""

    def start(self) -> WorkerInfo:
        path = resolve_model("builtin://tiny")
        return WorkerInfo(
            model_path=str(path),
            model_fingerprint="",
            config=load_model_config(path),
            device="cpu",
            dtype="float32",
            memory=MemoryBudget(
                device="cpu", total_bytes=1, available_bytes=1, utilization=0.5, weights_bytes=0,
                activation_bytes=0, block_bytes=1, block_size=BLOCK, num_blocks=64,
                request_blocks=16, max_model_len=64,
                limited_by="memory",
            ),
            kv_cache_groups=group_layers([FullAttentionSpec(1)]),
            phases=(),
        )  # fmt: skip

    def execute(self, step: SchedulerOutput) -> FakePending:
        assert not self.is_asleep
        return FakePending(self, self.worker.execute(step))

    def lend_experts(self, step: Round) -> None:
        assert not self.is_asleep
        self.lent.append(step)

    def collective_rpc(self, call: CollectiveRpc) -> list[Any]:
        self.is_asleep = call.method == "sleep"
        if self.is_asleep:
            self.worker = FakeWorker(BLOCK)
        return [None]

    def check_health(self) -> None: ...

    def shutdown(self) -> None: ...
