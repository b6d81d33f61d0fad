"""Measure the engine core's overhead per step: microseconds per running request and step, by kind of request.

Covers all of `EngineCore.step` with a stub executor, whose own time is subtracted: scheduling, grammars, processing of
step outputs, statistics, prefix cache events, and encoding the outputs for the API process. All requests decode: every
step gives each one token, and one request in 16 crosses a block boundary.

    plain      tokens alone
    logprobs   with the log probabilities of 5 alternatives per token
    grammar    a JSON schema: a mask before each token, and the grammar follows the token
    both       a grammar, and log probabilities

The API process's work (text, stop strings, server-sent events) and the worker's (input tensors, sampling) are not
included; `scheduler.py` measures scheduler and KV cache alone. Times are CPU time of the process, including threads
that advance grammars: the median over the steps of the best round.

    python bench/engine/core_step.py [--requests 256] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from results import save

from argosy_engine.attention.kv_cache_spec import FullAttentionSpec, group_layers
from argosy_engine.checkpoint.model_folder import resolve_model
from argosy_engine.config import EngineArgs
from argosy_engine.core.engine_core import EngineCore
from argosy_engine.messages import (
    CollectiveRpc,
    EngineCoreRequest,
    GrammarBitmask,
    ModelRunnerOutput,
    SchedulerOutput,
    WorkerInfo,
)
from argosy_engine.models.config_file import load_model_config
from argosy_engine.params import SamplingParams
from argosy_engine.resolved_config import MemoryBudget
from argosy_engine.sample.token_logprobs import TokenLogprobs
from argosy_engine.structured.manager import GrammarRequest
from argosy_engine.structured.structured_outputs_params import GrammarSpec

MODEL = "builtin://tiny"
BLOCK_SIZE = 16
PROMPT_TOKENS = 256
STEPS = 96
SCHEMA = (
    '{"type": "object", "properties": {"name": {"type": "string"}, "tags": {"type": "array", "items": '
    '{"type": "string"}}}, "required": ["name", "tags"], "additionalProperties": false}'
)
TOKEN = 75
"""A letter, so that a JSON string can continue with it without end."""
LOGPROBS = TokenLogprobs([9, 9, 10, 11, 12, 13], [-0.5, -0.5, -1.5, -2.5, -3.5, -4.5], 1)


class Pending:
    """A pending step that the stub has already computed."""

    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output

    def sample(self, grammar: GrammarBitmask | None) -> None: ...

    def get(self) -> ModelRunnerOutput:
        return self._output


class StubExecutor:
    """Returns one token per request: always `TOKEN`, or the first allowed one if the grammar forbids it.

    Attributes:
        seconds: CPU time spent in the stub.
    """

    def __init__(self, num_requests: int) -> None:
        self._num_requests = num_requests
        self._has_logprobs = False
        self._eos: frozenset[int] = frozenset()
        self.seconds = 0.0

    def start(self) -> WorkerInfo:
        path = resolve_model(MODEL)
        config = load_model_config(path)
        self._eos = frozenset(config.eos_token_ids)
        length = PROMPT_TOKENS + 2 * STEPS
        num_blocks = self._num_requests * (length // BLOCK_SIZE + 2)
        return WorkerInfo(
            model_path=str(path),
            model_fingerprint="",
            config=config,
            device="stub",
            dtype="float32",
            memory=MemoryBudget(
                device="stub", total_bytes=1, available_bytes=1, utilization=0.5, weights_bytes=0, activation_bytes=0,
                block_bytes=1, block_size=BLOCK_SIZE, num_blocks=num_blocks, request_blocks=length // BLOCK_SIZE,
                max_model_len=length, limited_by="memory",
            ),
            kv_cache_groups=group_layers([FullAttentionSpec(1)]),
            phases=(),
        )  # fmt: skip

    def with_logprobs(self, has_logprobs: bool) -> None:
        self._has_logprobs = has_logprobs

    def execute(self, step: SchedulerOutput) -> Pending:
        started = time.process_time()
        request_ids = list(step.num_scheduled_tokens)
        allowed = self._allowed(step.grammar)
        output = ModelRunnerOutput(
            request_ids,
            [[allowed.get(request_id, TOKEN)] for request_id in request_ids],
            {request_id: [LOGPROBS] for request_id in request_ids} if self._has_logprobs else {},
            {},
        )
        self.seconds += time.process_time() - started
        return Pending(output)

    def _allowed(self, grammar: GrammarBitmask | None) -> dict[str, int]:
        if grammar is None:
            return {}
        words = np.frombuffer(grammar.bitmask, np.uint8).reshape(len(grammar.request_ids), -1)
        tokens = {}
        for request_id, row in zip(
            grammar.request_ids, np.unpackbits(words, axis=1, bitorder="little"), strict=True
        ):
            if not row[TOKEN]:
                tokens[request_id] = next(
                    int(token) for token in np.flatnonzero(row) if token not in self._eos
                )
        return tokens

    def collective_rpc(self, call: CollectiveRpc) -> list[Any]:
        return [None]

    def check_health(self) -> None: ...

    def shutdown(self) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    executor = StubExecutor(options.requests)
    args = EngineArgs.of(
        model=MODEL,
        async_scheduling=False,
        max_num_seqs=options.requests,
        max_num_batched_tokens=options.requests * PROMPT_TOKENS,
    )
    core = EngineCore(args, executor)
    kinds = {
        "plain": (False, False),
        "logprobs": (True, False),
        "grammar": (False, True),
        "both": (True, True),
    }
    costs = {
        kind: min(measure(core, executor, options.requests, *outputs) for _ in range(options.rounds))
        for kind, outputs in kinds.items()
    }
    core.shutdown()
    save({"argosy": {f"core step, {kind} us": [cost] for kind, cost in costs.items()}}, options.json)
    print(f"{options.requests} decoding requests: us per request and step, the model's part left out")
    for kind, cost in costs.items():
        print(f"{kind:<10}{cost:>8.2f}")


def measure(
    core: EngineCore, executor: StubExecutor, num_requests: int, has_logprobs: bool, has_grammar: bool
) -> float:
    """Measure one round; returns microseconds per request and step, the median over its steps."""
    executor.with_logprobs(has_logprobs)
    grammar = GrammarRequest(GrammarSpec("json", SCHEMA, False)) if has_grammar else None
    for index in range(num_requests):
        prompt = [(index * 7919 + i) % 1000 + 10 for i in range(PROMPT_TOKENS - index % BLOCK_SIZE)]
        params = SamplingParams(max_tokens=2 * STEPS, logprobs=5 if has_logprobs else None, seed=1)
        core.add_request(EngineCoreRequest(f"{index:024x}", prompt, params, 0.0, grammar=grammar))
    while core.scheduler.blocked:
        core.structured.wait(0.1)
        core.step()
    while core.scheduler.waiting:
        core.step()
    encoder = msgspec.msgpack.Encoder()
    gc.collect()
    gc.freeze()
    steps = []
    for _ in range(STEPS):
        before, started = executor.seconds, time.process_time()
        encoder.encode(core.step())
        steps.append(time.process_time() - started - (executor.seconds - before))
        assert len(core.scheduler.running) == num_requests
    core.abort_requests(list(core.scheduler.requests))
    core.step()
    core.scheduler.check()
    core.kv.reset_prefix_cache()
    gc.unfreeze()
    return statistics.median(steps) * 1e6 / num_requests


if __name__ == "__main__":
    main()
