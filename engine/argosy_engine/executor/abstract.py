"""Executor: the core's interface to its workers. It knows how they run, not what they compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from argosy_engine.distributed.lockstep import Round
from argosy_engine.errors import ConfigError
from argosy_engine.messages import (
    CollectiveRpc,
    GrammarBitmask,
    ModelRunnerOutput,
    SchedulerOutput,
    WorkerInfo,
)


class PendingOutput(Protocol):
    """Output of a launched step. Steps end in the order in which they were launched."""

    def sample(self, grammar: GrammarBitmask | None) -> None:
        """Send the bitmask to a step that was launched with `awaits_grammar`, before the next step is launched."""
        ...

    def get(self) -> ModelRunnerOutput:
        """Wait for the end of the step.

        Raises:
            EngineDead: a worker's process ended, or the step failed in it.
        """
        ...


class Executor(Protocol):
    """Interface of the workers, however they run."""

    def start(self) -> WorkerInfo:
        """Load the model, then size and allocate the KV cache.

        Raises:
            ConfigError: the model cannot be served, or not with these flags; the message names the remedy.
            EngineDead: a worker's process ended.
        """
        ...

    def execute(self, step: SchedulerOutput) -> PendingOutput:
        """Launch a step.

        Raises:
            EngineDead: a worker's process ended, or the step failed in it.
        """
        ...

    def lend_experts(self, step: Round) -> None:
        """Launch a step of other engine cores, which need the experts of this one's workers. It has no output.

        Raises:
            EngineDead: a worker's process ended, or the step failed in it.
        """
        ...

    def collective_rpc(self, call: CollectiveRpc) -> list[Any]:
        """Call a public method of every worker and return the results by rank.

        The timeout has no effect on a worker in the core's own process, because the call is synchronous there.

        Raises:
            UtilityFailed: the method does not exist, failed in a worker, or did not end in time.
            EngineDead: a worker's process ended.
        """
        ...

    def check_health(self) -> None:
        """Check that all workers live. It does not wait, so that an idle core can call it often.

        Raises:
            EngineDead: a worker's process ended.
        """
        ...

    def shutdown(self) -> None: ...


def check_same_model(infos: Sequence[WorkerInfo]) -> None:
    """Check what the workers report, by rank.

    Raises:
        ConfigError: one has loaded another model than worker 0.
    """
    for rank, info in enumerate(infos):
        for field in ("config", "dtype", "model_fingerprint"):
            if getattr(info, field) != getattr(infos[0], field):
                raise ConfigError(
                    f"worker {rank} has loaded another model than worker 0, since their {field} differs; start again "
                    "once the checkpoint no longer changes, let --worker-cls load the same on every rank, and on CPUs "
                    "in bfloat16 use machines with the same instruction set"
                )
