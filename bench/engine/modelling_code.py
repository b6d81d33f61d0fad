"""Compare the CPU time of one model by the engine's own code, by transformers' modelling code in the engine, and by
`generate` of transformers.

    python bench/engine/modelling_code.py gpt_oss glm4_moe --rounds 3
    python bench/engine/modelling_code.py llama qwen3 --in-turn --rounds 5

Models have random weights in sizes that a machine with two cores computes in seconds. Each contender is a process of
its own, in one thread, and the first round of each is discarded. CPU time is that of the process, which other programs
on the machine change less than its duration. Prints the median of each, and ratios.

`--in-turn` compares the engine's own code and transformers' code in it with 449 M parameters in bfloat16. Both are in
one process and take turns with each kind of work, so that what else the machine does strikes both. Prints the medians
and the median of the ratios of turns that follow one another.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_SIZES: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 16384, "max_position_embeddings": 4096,
    "num_experts": 16, "num_local_experts": 16, "n_routed_experts": 16, "moe_num_experts": 16,
    "num_experts_per_tok": 4, "moe_k": 4, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "sliding_window": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_LARGE: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 8192, "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}  # fmt: skip
"""Of `--in-turn`: the shape `m06` of `random_model.py`."""
_LATENTS = {
    "num_key_value_heads": 16, "head_dim": None, "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
_OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [3, 7], "mamba_n_heads": 32, "mamba_d_state": 128},
    "deepseek_v2": _LATENTS,
    "deepseek_v3": _LATENTS,
    "gpt_oss": {"intermediate_size": 1024},
    "mixtral": {"intermediate_size": 1024},
    "minimax_m2": {"intermediate_size": 512},
    "granitemoe": {"intermediate_size": 512},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe"] * 3 + ["full_attention", "mlp"],
        "mamba_num_heads": 32,
        "moe_shared_expert_intermediate_size": 1024,
    },
    "qwen3_5_text": {  # Qwen3.5-0.8B
        "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "vocab_size": 248320, "tie_word_embeddings": True,
    },
}  # fmt: skip
CONTENDERS = ("argosy", "fallback", "transformers")
WORK = {"a prompt of 512": (1, 512, 1), "1 request": (1, 32, 32), "8 requests": (8, 32, 32)}
IN_TURN_WORK = {"16 requests": (16, 32, 32), "1 request": (1, 32, 32), "a prompt of 2000": (1, 2000, 1)}
LONG_WORK = {"a prompt of 3000": (1, 3000, 1), "and 64 tokens": (1, 3000, 64)}
"""Requests, tokens of their prompts, and of their outputs."""


def write(folder: Path, model_type: str, sizes: dict[str, Any], dtype: str) -> None:
    """Write a checkpoint with random weights."""
    import inspect

    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    from argosy_engine.checkpoint.model_folder import resolve_model

    config_class = CONFIG_MAPPING[model_type]
    default = config_class().to_dict()
    known = inspect.signature(config_class.__init__).parameters.keys() | default.keys()
    fields = {name: value for name, value in sizes.items() if name in known}
    fields = {name: value for name, value in fields.items() if name != "sliding_window" or default.get(name)}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_class(**fields)).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    tokenizer = resolve_model("builtin://tiny") / "tokenizer.json"
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "architectures": [type(model).__name__]}))


def contend(name: str, folder: Path, rounds: int, works: dict[str, tuple[int, int, int]]) -> None:
    """Print the CPU seconds of each kind of work and round, as JSON."""
    import torch

    torch.set_num_threads(1)
    generate = _transformers(folder) if name == "transformers" else _argosy(folder, name)
    rng = random.Random(0)
    seconds: dict[str, list[float]] = {}
    for work, (count, length, tokens) in works.items():
        for number in range(rounds + 1):
            prompts = [[rng.randrange(3, _SIZES["vocab_size"]) for _ in range(length)] for _ in range(count)]
            start = time.process_time()
            generate(prompts, tokens)
            if number:
                seconds.setdefault(work, []).append(time.process_time() - start)
    print(json.dumps(seconds))


def take_turns(model_type: str, folder: Path, rounds: int) -> None:
    """Print a row for each kind of work of `--in-turn`."""
    import torch

    torch.set_num_threads(1)
    contenders = [_argosy(folder, name, "bfloat16") for name in CONTENDERS[:2]]
    rng = random.Random(0)
    for work, (count, length, tokens) in IN_TURN_WORK.items():
        seconds: list[list[float]] = [[], []]
        for number in range(rounds + 1):
            prompts = [[rng.randrange(3, _LARGE["vocab_size"]) for _ in range(length)] for _ in range(count)]
            for index in (0, 1) if number % 2 else (1, 0):
                start = time.process_time()
                contenders[index](prompts, tokens)
                if number:
                    seconds[index].append(time.process_time() - start)
        ours, fallback = (statistics.median(each) for each in seconds)
        ratio = statistics.median(theirs / own for own, theirs in zip(*seconds, strict=True))
        print(f"| {model_type} | {work} | {ours:.2f} | {fallback:.2f} | {ratio:.2f} |", flush=True)


def _argosy(folder: Path, name: str, dtype: str = "float32") -> Any:
    from argosy_engine import LLM, SamplingParams

    llm = LLM(
        str(folder), device="cpu", dtype=dtype, threads=1, max_model_len=4096,
        enable_prefix_caching=False, model_impl="argosy" if name == "argosy" else "transformers",
    )  # fmt: skip
    return lambda prompts, tokens: llm.generate(
        [{"prompt_token_ids": each} for each in prompts],
        SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True),
        use_tqdm=False,
    )


def _transformers(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def generate(prompts: list[list[int]], tokens: int) -> None:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens,
                min_new_tokens=tokens,
            )  # fmt: skip

    return generate


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_type", nargs="+")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--long", action="store_true", help="one request with a long prompt instead")
    parser.add_argument("--in-turn", action="store_true", help="see above")
    parser.add_argument("--contend", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    works = LONG_WORK if options.long else WORK
    if options.contend:
        contend(options.contend, Path(options.model_type[0]), options.rounds, works)
        return 0
    machine = platform.processor() or platform.machine()
    if options.in_turn:
        print(f"{machine}, one thread, bfloat16, CPU seconds (median)")
        print("| model | work | argosy | transformers' code in argosy | ratio |\n|---|---|---|---|---|")
        for model_type in options.model_type:
            with tempfile.TemporaryDirectory() as path:
                write(Path(path), model_type, _LARGE, "bfloat16")
                take_turns(model_type, Path(path), options.rounds)
        return 0
    print(f"{machine}, one thread, float32, CPU seconds (median)")
    print(
        "| model | work | argosy | transformers' code in argosy | transformers | ratios |\n|---|---|---|---|---|---|"
    )
    for model_type in options.model_type:
        with tempfile.TemporaryDirectory() as path:
            write(Path(path), model_type, _SIZES | _OWN.get(model_type, {}), "float32")
            found = {
                name: json.loads(
                    subprocess.run(
                        [
                            sys.executable,
                            "-P",
                            __file__,
                            path,
                            "--contend",
                            name,
                            "--rounds",
                            str(options.rounds),
                            *(["--long"] if options.long else []),
                        ],
                        check=True,
                        capture_output=True,
                        text=True,
                    ).stdout.splitlines()[-1]
                )
                for name in CONTENDERS
            }
        for work in works:
            ours, fallback, theirs = (statistics.median(found[name][work]) for name in CONTENDERS)
            ratios = f"{ours / fallback:.2f}, {ours / theirs:.2f}"
            print(
                f"| {model_type} | {work} | {ours:.2f} | {fallback:.2f} | {theirs:.2f} | {ratios} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
