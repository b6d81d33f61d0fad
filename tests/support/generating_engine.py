"""A small engine that generates a few tokens. As a program, whose argument is the model, it starts twice, compiles its
layers and counts what Inductor has generated and read.

Each start is a fork of a process that has imported the compiler, which takes seconds. It prints one line of JSON:
`tokens` by request, `generated` and `read` graphs, and `later`: graphs that were compiled after the start.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import shutil
import sys
from pathlib import Path

from argosy_engine import EngineArgs, LLMEngine, SamplingParams
from argosy_engine.checkpoint.model_folder import resolve_model
from argosy_engine.osproc import paused_collector

PROMPTS = ["Hello", "The sky is", "Tell me about the sea"]


def generate(engine: LLMEngine) -> dict[str, list[int]]:
    """Generate for 1 to 3 requests at a time."""
    for index, prompt in enumerate(PROMPTS):
        params = SamplingParams(temperature=0.0, max_tokens=4 + index, ignore_eos=True)
        engine.add_request(str(index), prompt, params)
    finished = {}
    while engine.has_unfinished_requests():
        finished |= {each.request_id: each.outputs[0].token_ids for each in engine.step() if each.finished}
    return finished


def write_sparse_model(path: Path) -> None:
    """Write a model whose layers have one part to compile. It has no weights."""
    builtin = resolve_model("builtin://tiny")
    path.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(builtin / name, path)
    config = json.loads((builtin / "config.json").read_text())
    del config["layer_types"]
    config |= {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 2,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))


def make_engine(level: int, model: str) -> LLMEngine:
    args = EngineArgs.of(
        model=model, load_format="dummy", device="cpu", dtype="float32", threads=1, num_gpu_blocks_override=64,
        max_num_seqs=4, max_model_len=128, compilation_config={"level": level},
    )  # fmt: skip
    return LLMEngine.from_engine_args(args)


def start(model: str) -> None:
    from torch._dynamo.utils import counters

    engine = make_engine(3, model)
    inductor, graphs = counters["inductor"].copy(), counters["stats"]["unique_graphs"]
    tokens = generate(engine)
    engine.sleep()
    engine.wake_up()
    assert generate(engine) == tokens
    engine.close()
    result = {
        "tokens": tokens,
        "generated": inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"],
        "read": inductor["fxgraph_cache_hit"],
        "later": counters["stats"]["unique_graphs"] - graphs,
    }
    print(json.dumps(result), flush=True)


def main() -> int:
    with paused_collector():
        importlib.import_module("torch._inductor.compile_fx")
    gc.freeze()
    for _ in range(2):
        pid = os.fork()
        if pid == 0:
            start(sys.argv[1])
            return 0
        _, status = os.waitpid(pid, 0)
        if status:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
