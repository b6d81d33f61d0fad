"""Compares an engine's greedy tokens with transformers' for tiny checkpoints of many model types.

As a program, with model types as its arguments or for all, it prints which are served, refused and wrong.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch

from argosy_engine.config import EngineArgs
from argosy_engine.core.proc.core_client import InprocClient
from argosy_engine.errors import ConfigError
from argosy_engine.messages import EngineCoreRequest
from argosy_engine.models.config_file import load_model_config
from argosy_engine.models.loader import complete_config
from argosy_engine.params import SamplingParams
from argosy_engine.sizing.kv_cache_sizing import planned_groups
from greedy_reference import differing_tokens
from preemptions import PreemptionCounter
from transformers_checkpoints import MODEL_TYPES, VOCAB_SIZE, write_checkpoint

EXACT: dict[str, Any] = {"dtype": "float32", "device": "cpu", "threads": 1}
_LENGTHS = (1, 2, 16, 90, 63, 47, 31, 200)
"""Some end just before a block does, so that blocks run short while tokens are generated."""
_SCARCE_BLOCKS = 17
"""Of each group: enough for the longest prompt with its tokens, not for all prompts at once."""
_ENOUGH_BLOCKS = 64
_NEW_TOKENS = 10


class Outcome(NamedTuple):
    kind: str
    """`served`, `refused` or `wrong`."""
    detail: str
    preemptions: int = 0
    cached_tokens: int = 0
    """Tokens of prompts that were found in the prefix cache."""


def outcome(model_type: str, path: Path, fields: dict[str, Any] | None = None, **flags: Any) -> Outcome:
    """Serve a checkpoint of a model type, written to `path`: in batches with too few blocks, and in chunks over a
    prefix cache.

    Args:
        fields: of its config.
    """
    return served(write_checkpoint(model_type, path, **(fields or {})), path, **flags)


def served(reference: torch.nn.Module, path: Path, **flags: Any) -> Outcome:
    """Serve a checkpoint, and compare its tokens with those of the model in transformers."""
    preemptions = cached = 0
    right: set[tuple[tuple[int, ...], ...]] = set()
    """Prompts with the tokens that were found to be transformers'. Modes share most prompts."""
    try:
        config = complete_config(load_model_config(path, EngineArgs.of(model=str(path), **flags).model_use))
        groups = len(planned_groups(config, 4, 16))
        modes: dict[str, dict[str, Any]] = {
            "batched and preempted": {
                "num_gpu_blocks_override": 1 + _SCARCE_BLOCKS * groups,
                "max_model_len": 256,
                "max_num_seqs": 16,
            },
            "chunked": {
                "max_num_batched_tokens": 16,
                "max_num_seqs": 8,
                "mamba_block_size": 32,
                "num_gpu_blocks_override": 1 + _ENOUGH_BLOCKS * groups,
            },
        }
        rng = random.Random(3)
        prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in _LENGTHS]
        prompts.append(prompts[3] + [5, 6, 7])
        for mode, more in modes.items():
            rounds = [prompts[:4], prompts[4:]] if mode == "chunked" else [prompts]
            outputs: dict[int, list[int]] = {}
            with closing(InprocClient(EngineArgs.of(model=str(path), **EXACT, **flags, **more))) as client:
                counter = PreemptionCounter(client)
                for each in rounds:  # the last prompt finds its prefix cached
                    found, hits = generated(client, each, len(outputs))
                    outputs |= found
                    cached += sum(hits.values())
                preemptions += counter.total
            for index, prompt in enumerate(prompts):
                if (answered := (tuple(prompt), tuple(outputs[index]))) in right:
                    continue
                lines = differing_tokens(reference, prompt, outputs[index])
                if lines or len(outputs[index]) != _NEW_TOKENS:
                    return Outcome(
                        "wrong", f"{mode}, prompt of {len(prompt)} tokens: {lines or outputs[index]}"
                    )
                right.add(answered)
    except ConfigError as error:
        return Outcome("refused", str(error))
    return Outcome("served", "", preemptions, cached)


def generated(
    client: InprocClient, prompts: list[list[int]], first: int = 0
) -> tuple[dict[int, list[int]], dict[int, int]]:
    """Return the greedy tokens of prompts, numbered from `first`, and how many tokens of each were cached."""
    hits: dict[int, int] = {}
    sampling = SamplingParams(temperature=0.0, max_tokens=_NEW_TOKENS, ignore_eos=True)
    outputs: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts, first):
        outputs[index] = []
        client.add_request(EngineCoreRequest(str(index), prompt, sampling, time.time()))
    while client.has_work:
        for output in client.step().outputs:
            outputs[int(output.request_id)] += output.new_token_ids
            if output.prefill_stats is not None:
                hits[int(output.request_id)] = output.prefill_stats.num_cached_tokens
    return outputs, hits


def main(model_types: list[str]) -> None:
    found: dict[str, list[str]] = {"served": [], "refused": [], "wrong": []}
    for model_type in model_types or MODEL_TYPES:
        with tempfile.TemporaryDirectory() as folder:
            result = outcome(model_type, Path(folder), model_impl="transformers")
        found[result.kind].append(model_type)
        print(f"{model_type}: {result.kind} {result.detail[:220]}", flush=True)
    for kind, names in found.items():
        print(f"{len(names)} {kind}: {', '.join(names)}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
