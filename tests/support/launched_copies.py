"""A program of which a launcher starts two copies: what they generate, or how they end.

    python launched_copies.py same|ends FOLDER CHECKPOINT

Copy r writes what it found to FOLDER/r.json. `same` runs an engine of every layout, one after the other; CHECKPOINT is
a model with experts. `ends` is its own launcher: it forks both copies, which outlive each other, and prints their exit
codes. It lets a copy of one engine after the other fail; the program goes on with a new engine.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from argosy_engine import LLM, SamplingParams, StructuredOutputsParams
from argosy_engine.distributed.engine_copies import CopyLost, EngineCopies
from argosy_engine.errors import EngineError
from preemptions import PreemptionCounter

EXAMPLE = Path(__file__).parents[2] / "examples" / "torchrun_offline.py"
FLAGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "threads": 1}
TINY: dict[str, Any] = {
    "model": "builtin://tiny",
    **FLAGS,
    "max_model_len": 128,
    "num_gpu_blocks_override": 18,
}
LAUNCHED = {"distributed_executor_backend": "external_launcher"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "data": {"data_parallel_size": 2},
}
EXPERTS = {**FLAGS, "tensor_parallel_size": 2, "enable_expert_parallel": True}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
STORY = "Once upon a time there was a small ship, and it sailed far out to the north where the ice is."


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 24, **fields})


REQUESTS = [
    (STORY, params(ignore_eos=True, max_tokens=24)),
    (STORY + " Then", params(ignore_eos=True, max_tokens=24)),
    ("Tell me about the sea", params(temperature=1.0, seed=3, top_p=0.9, logprobs=2)),
    ("Tell me about the sea", params(temperature=0.8, seed=4, n=3, ignore_eos=True, max_tokens=24)),
    ("What is 2 plus 3?", params(repetition_penalty=1.3, frequency_penalty=0.5)),
    ("A person, as JSON:", params(structured_outputs=StructuredOutputsParams(json=SCHEMA), max_tokens=40)),
    ("Yes or no?", params(structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))),
    ("Nothing", params(structured_outputs=StructuredOutputsParams(grammar="root ::= missing"))),
    ("One, two, three,", params(min_tokens=12, stop=["e"])),
    ("Grass is green", params(prompt_logprobs=2, max_tokens=2)),
]
TOKENS = [[7, 8, 9], list(range(20, 60)), [300] * 5]


def generate(llm: LLM) -> list[Any]:
    """Return tokens, end and error of every choice."""
    prompts, wanted = [prompt for prompt, _ in REQUESTS], [each for _, each in REQUESTS]
    return [
        [[choice.token_ids, choice.finish_reason] for choice in result.outputs] + [result.error]
        for result in llm.generate(prompts, wanted, use_tqdm=False)
    ]


def survivor(llm: LLM) -> list[int]:
    """Return the tokens of a request beside which others were aborted at every stage."""
    engine = llm.engine
    engine.add_request("stays", STORY, params(ignore_eos=True, max_tokens=12))
    for turn in range(4):
        engine.add_request("leaves", "Tell me about the sea", params(ignore_eos=True))
        for _ in range(turn):
            engine.step()
        engine.abort_request("leaves")
    finished = {}
    while engine.has_unfinished_requests():
        finished |= {output.request_id: output for output in engine.step() if output.finished}
    return list(finished["stays"].token_ids)


def observe(llm: LLM) -> dict[str, Any]:
    """Return what an engine gives, in JSON's types."""
    counter = PreemptionCounter(llm.client)
    found = {"generated": generate(llm), "repeated": generate(llm), "survivor": survivor(llm)}
    (cached,) = llm.generate(STORY, params(max_tokens=1), use_tqdm=False)
    llm.sleep()
    llm.wake_up()
    return json.loads(
        json.dumps(
            {
                **found,
                "slept": generate(llm),
                "cached": cached.num_cached_tokens,
                "preemptions": counter.total,
            }
        )
    )


def experts(checkpoint: str, **flags: Any) -> list[list[int]]:
    with LLM(checkpoint, num_gpu_blocks_override=64, **{**FLAGS, **flags}) as llm:
        outputs = llm.generate(TOKENS, params(temperature=0.9, seed=5, max_tokens=8), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def same(rank: int, checkpoint: str) -> Iterator[tuple[str, Any]]:
    for name, layout in LAYOUTS.items():
        with LLM(**{**TINY, **LAUNCHED, **layout}) as llm:
            yield name, observe(llm)
            drawn = llm.generate(["The sea"] * 3, params(temperature=2.0, max_tokens=8), use_tqdm=False)
            yield f"{name} without a seed", [list(each.outputs[0].token_ids) for each in drawn]
    yield "experts", experts(checkpoint, **LAUNCHED, **EXPERTS)
    sizes = {"kv_cache_memory_bytes": f"{8 + rank}M", "num_gpu_blocks_override": None}
    with LLM(**{**TINY, **LAUNCHED, **LAYOUTS["tensor"], **sizes, "max_num_seqs": 1024}) as llm:
        yield "blocks", [llm.config.num_gpu_blocks, llm.config.memory.limited_by]
    runpy.run_path(str(EXAMPLE))["main"]("builtin://tiny")


def failure(act: Callable[[], object]) -> list[str]:
    try:
        act()
    except (EngineError, CopyLost, RuntimeError) as error:
        return [type(error).__name__, str(error)]
    return []


def ends(rank: int, checkpoint: str) -> Iterator[tuple[str, Any]]:
    dist.init_process_group("gloo")  # as a program does that uses it for itself
    control = dist.new_group()
    assert isinstance(control, dist.ProcessGroup)
    tensor = {**TINY, **LAUNCHED, **LAYOUTS["tensor"]}
    pipeline = {**LAYOUTS["pipeline"], "tensor_parallel_size": 1}

    after: list[str] = []

    def run(prompts: list[str] | None = None, **flags: Any) -> None:
        with LLM(**{**tensor, **flags}) as llm:
            try:
                llm.generate(prompts or ["The sea"], params(ignore_eos=True), use_tqdm=False)
            finally:
                after.append(failure(lambda: llm.generate(["The sea"], use_tqdm=False))[0])

    yield "arguments", failure(lambda: run(max_num_seqs=4 + rank))
    yield "start", failure(lambda: run(worker_cls="probe_worker.FailsLateWorker"))
    out_of_memory = {"worker_cls": "probe_worker.OutOfMemoryWorker"}
    yield "memory, tensor", failure(lambda: run(**out_of_memory, seed=1))
    for seed in (0, 1):
        flags = {**pipeline, **out_of_memory, "seed": seed}
        yield f"memory, pipeline {seed}", failure(partial(run, **flags))
    yield "prompts", failure(lambda: run(["The sea"] if rank else ["The sea", "Ships"]))
    yield "tokens", failure(lambda: run(worker_cls="probe_worker.OtherTokensWorker"))

    def constrain_one(constrained: int) -> None:
        choice = StructuredOutputsParams(choice=["yes", "no"]) if rank == constrained else None
        with LLM(**tensor) as llm:
            llm.generate(["Yes or no?"], params(structured_outputs=choice), use_tqdm=False)

    for constrained in (0, 1):
        yield f"parameters {constrained}", failure(partial(constrain_one, constrained))

    def close_early(*, closes: int, **fields: Any) -> None:
        with LLM(**tensor) as llm:
            if rank != closes:
                llm.generate(["The sea"], params(**fields), use_tqdm=False)

    yield "after", after
    yield "closed", failure(partial(close_early, closes=1))
    grammar = StructuredOutputsParams(choice=["yes", "no"])
    yield "closed, grammar", failure(partial(close_early, closes=0, structured_outputs=grammar))
    copies = EngineCopies(control, [0, 1], timeout_s=0.5)
    if rank == 1:
        dist.barrier()
    # The second copy still gets what the first has sent before it gave up.
    yield "late", failure(lambda: [copies.gather([1]) for _ in range(2)])
    if rank == 0:
        dist.barrier()
    with LLM(**tensor) as llm:
        yield "fine", [list(each.outputs[0].token_ids) for each in llm.generate(["The sea"], params())]
    yield "killed", failure(lambda: run(worker_cls="probe_worker.KilledWorker"))


def fork_copies() -> int:
    """Fork copies of this process as a launcher would start them; return the rank of the copy, in which it returns.

    This process ends when both have ended.
    """
    copies = []
    for rank in range(2):
        if (pid := os.fork()) == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            return rank
        copies.append(pid)
    print(*(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in copies))
    sys.exit()


def main() -> None:
    mode, folder, checkpoint = sys.argv[1:]
    rank = fork_copies() if mode == "ends" else int(os.environ["RANK"])
    found = {}
    for name, value in {"same": same, "ends": ends}[mode](rank, checkpoint):
        found[name] = value
        Path(folder, f"{rank}.json").write_text(json.dumps(found))
    with suppress(RuntimeError):
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
