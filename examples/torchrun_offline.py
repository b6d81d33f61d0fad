"""Offline generation under torchrun: every process runs this program and holds a part of the model.

torchrun --nproc-per-node 2 examples/torchrun_offline.py builtin://tiny
"""

from __future__ import annotations

import os
import sys

from argosy_engine import LLM, SamplingParams


def main(model: str) -> None:
    prompts = ["The sea", "Tell me about ships", "What is 2 plus 3?"]  # the same in every process
    with LLM(
        model,
        tensor_parallel_size=int(os.environ["WORLD_SIZE"]),
        distributed_executor_backend="external_launcher",
    ) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0.8, max_tokens=16))
    if os.environ["RANK"] == "0":  # the outputs are the same as well
        for prompt, output in zip(prompts, outputs, strict=True):
            print(f"{prompt!r}: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main(sys.argv[1])
