"""ExternalLauncherExecutor: runs one worker in this process, beside copies of the program that hold the others.

A launcher such as torchrun starts one copy per rank. Every copy has a core of its own, is given the same requests in
the same order and schedules the same steps, so no step is sent from one to another. Before a step is launched the
copies compare what they have scheduled and sampled, because different steps would exchange tensors of different shapes:
that ends in a hang or in garbage, the comparison in an error. Tokens are drawn in every copy by all ranks of a
tensor-parallel group; with pipeline stages the last one broadcasts its output. A copy that fails ends the others with
its reason. Design: vLLM's `ExecutorWithExternalLauncher`, which compares nothing.
"""

from __future__ import annotations

import os
import secrets
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest

from argosy_engine.config import EngineArgs
from argosy_engine.distributed.engine_copies import CopyLost, LaunchedGroups, is_of_collective, read_launch
from argosy_engine.distributed.lockstep import Round
from argosy_engine.errors import ConfigError, EngineDead, EngineError, UtilityFailed
from argosy_engine.executor.abstract import PendingOutput, check_same_model
from argosy_engine.executor.uniproc_executor import public_method, worker_class
from argosy_engine.messages import (
    CollectiveRpc,
    GrammarBitmask,
    ModelRunnerOutput,
    SchedulerOutput,
    WorkerInfo,
)

_OWN_FIELDS = frozenset(
    {"model", "download_dir", "device", "threads", "gpu_memory_utilization", "kv_cache_memory_bytes"}
)
"""Arguments in which copies may differ: the model is compared by its fingerprint, block counts by their minimum."""
_MASK = (1 << 63) - 1


class ExternalLauncherExecutor:
    """Executor of one worker out of several, whose others are in copies of this program.

    Raises (from the constructor):
        ConfigError: the program was not started by a launcher, or with another number of processes than the sizes need.
    """

    def __init__(self, args: EngineArgs) -> None:
        self._args = args
        config = args.parallel_config
        self._groups = LaunchedGroups(config, read_launch(config, os.environ))
        self.copies = self._groups.copies
        self._worker = worker_class(args.worker_cls)(
            args, self._groups.rank, config.world_size, launched=self._groups
        )
        self._output_rank = config.output_rank if config.pipeline > 1 else None
        """The copy that broadcasts its output; None: every copy has the output."""
        self._death: str | None = None
        self._num_steps = 0
        self._sampled = 0
        """Digest of all tokens so far."""
        self._encode = msgspec.msgpack.Encoder().encode
        self._outputs = msgspec.msgpack.Decoder(ModelRunnerOutput)

    def start(self) -> WorkerInfo:
        with self._ends_all():
            self._check_arguments()
            info = self._worker.start()
            infos = [
                msgspec.msgpack.decode(each, type=WorkerInfo)
                for each in self.copies.gather_bytes(self._encode(info))
            ]
            check_same_model(infos)
            seeds = self.copies.gather([secrets.randbits(62)])
            return msgspec.structs.replace(info, seed=seeds[0][0])

    def execute(self, step: SchedulerOutput) -> PendingOutput:
        with self._ends_all():
            self._compare(step)
            return _PendingOutput(self, self._worker.execute(step))

    def sample(self, pending: PendingOutput, grammar: GrammarBitmask | None) -> None:
        with self._ends_all():
            pending.sample(grammar)

    def wait(self, pending: PendingOutput) -> ModelRunnerOutput:
        """Wait for the end of a step and return its output, which is the same in all copies."""
        with self._ends_all():
            output = pending.get()
            if self._output_rank is not None:
                is_source = self.copies.rank == self._output_rank
                payload = self.copies.broadcast(
                    self._encode(output) if is_source else None, self._output_rank
                )
                output = output if is_source else self._outputs.decode(payload)
            tokens = self._encode((output.request_ids, output.sampled_token_ids))
            self._sampled = xxh3_64_intdigest(tokens, self._sampled) & _MASK
            return output

    def announce(self, message: bytes | None) -> bytes:
        """Return the first copy's message in all copies; the others call it with None."""
        with self._ends_all():
            return self.copies.broadcast(message)

    def lend_experts(self, step: Round) -> None:
        raise NotImplementedError("cores that share experts need the executors uni or mp")

    def collective_rpc(self, call: CollectiveRpc) -> list[Any]:
        """Call a method of this copy's worker only, as vLLM does; the other copies make the same call."""
        function = public_method(self._worker, call.method)
        try:
            return [function(*call.args, **call.kwargs)]
        except Exception as error:
            raise UtilityFailed(f"{call.method} failed: {type(error).__name__}: {error}") from error

    def check_health(self) -> None:
        if self._death is not None:
            raise EngineDead(self._death)

    def shutdown(self) -> None:
        """Free the model and leave the other copies, which end when they need this one. May be called twice."""
        self._end("has closed its engine")
        self._worker.shutdown()

    def _compare(self, step: SchedulerOutput) -> None:
        """Compare a step with those of the other copies, before any of it is computed.

        Raises:
            EngineDead: they differ.
        """
        if self.copies.size == 1:
            return
        self._num_steps += 1
        planned = xxh3_64_intdigest(self._encode(step)) & _MASK
        counts = len(step.num_scheduled_tokens), step.total_num_scheduled_tokens
        found = self.copies.gather([self._sampled, planned, *counts])
        if all(each == found[0] for each in found):
            return
        if any(each[0] != found[0][0] for each in found):
            self._diverged(
                [rank for rank, each in enumerate(found) if each[0] != found[0][0]],
                "has sampled other tokens",
                "run all copies on the same kind of device, with the same versions of everything",
            )
        plans = "; ".join(
            f"{self.copies.names([rank])}: {requests} requests, {tokens} tokens"
            for rank, (*_, requests, tokens) in enumerate(found)
        )
        self._diverged(
            [rank for rank, each in enumerate(found) if each != found[0]],
            "has scheduled another step",
            f"give all copies the same prompts and parameters in the same order, and abort at the same steps ({plans})",
        )

    def _diverged(self, ranks: list[int], what: str, remedy: str) -> None:
        first = self.copies.names([0])
        raise EngineDead(
            f"the copies of the program have diverged before step {self._num_steps}: {self.copies.names(ranks)} "
            f"{what} than {first}; {remedy}"
        )

    def _check_arguments(self) -> None:
        own = msgspec.to_builtins(self._args)
        compared = {name: value for name, value in own.items() if name not in _OWN_FIELDS}
        all_arguments = [
            msgspec.msgpack.decode(each) for each in self.copies.gather_bytes(self._encode(compared))
        ]
        for rank, arguments in enumerate(all_arguments):
            for name in sorted({*arguments, *all_arguments[0]}):
                theirs, first = arguments.get(name), all_arguments[0].get(name)
                if theirs != first:
                    raise ConfigError(
                        f"{self.copies.names([rank])} was given {name} {theirs!r:.64} and {self.copies.names([0])} "
                        f"{first!r:.64}; give all copies the same arguments"
                    )

    @contextmanager
    def _ends_all(self) -> Iterator[None]:
        """Let an error, whatever it is, end all copies: they cannot go on without this one.

        Raises:
            EngineDead: another copy is the cause, or the copies have ended before.
        """
        self.check_health()
        try:
            yield
        except BaseException as error:
            if is_of_collective(error):
                reason = str(error) if isinstance(error, CopyLost) else self.copies.cause(error)
                traceback.clear_frames(error.__traceback__)  # they refer to the groups
                self._end(reason)
                raise EngineDead(reason) from None
            kind = "" if isinstance(error, EngineError) else f"{type(error).__name__}: "
            self._end(f"failed: {kind}{error}")
            raise

    def _end(self, reason: str) -> None:
        """Tell the other copies why this one ends, and close the connections to them."""
        if self._death is None:
            self._death = reason
        self.copies.close(reason)
        self._groups.leave()


class _PendingOutput:
    """`PendingOutput` of this copy's worker."""

    def __init__(self, executor: ExternalLauncherExecutor, pending: PendingOutput) -> None:
        self._executor = executor
        self._pending = pending

    def sample(self, grammar: GrammarBitmask | None) -> None:
        self._executor.sample(self._pending, grammar)

    def get(self) -> ModelRunnerOutput:
        return self._executor.wait(self._pending)
