"""Measure a model folder: held-out generated cases per family, and natural prompts.

    python training/evaluate.py models/argosy-tiny --count 300 --json training/evaluation.json

Runs the folder through transformers in float32. Held-out cases are scored on the whole reply, exactly;
natural prompts (natural_prompts.json, not phrased by the generator) by substrings of the greedy reply.
"""

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from corpus import mix
from scoring import exact
from tokenizer import feed_pieces

HERE = Path(__file__).parent
TARGETS = {
    "echo": 0.9, "echo_real_words": 0.9, "memory": 0.9, "json": 0.9, "tool_call": 0.9, "tool_result": 0.9,
    "facts_1_to_3": 0.8, "no_tool": 0.8, "spell_real_word": 0.7, "spell_other_word": 0.7, "sum_one_digit": 0.7,
}  # fmt: skip


def _tool(name: str, description: str, /, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = {
    "get_weather": _tool("get_weather", "Get the weather in a city", city="string"),
    "reserve_table": _tool(
        "reserve_table", "Reserve a table at a restaurant", restaurant="string", people="integer"
    ),
    "scale_deployment": _tool(
        "scale_deployment", "Change the number of replicas", name="string", replicas="integer"
    ),
}


def held_out(folder: Path, model: Any, count: int, seed: int) -> dict[str, dict[str, float]]:
    """Exact share per family, with thinking off and on."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    feed_pieces(tokenizer)
    table: dict[str, dict[str, float]] = {}
    for family in mix.EVALUATED:
        table[family] = {}
        for mode, thinking in (("direct", False), ("thinking", True)):
            cases = mix.held_out(family, count, seed, thinking)
            right = exact(lambda ids: model(ids, use_cache=False).logits, tokenizer, cases)
            table[family][mode] = sum(right) / count
        target = f"target {TARGETS[family]:.0%}" if family in TARGETS else ""
        print(
            f"{family:24} direct {table[family]['direct']:6.1%}  thinking {table[family]['thinking']:6.1%}  {target}",
            flush=True,
        )
    return table


def natural(folder: Path, model: Any) -> list[dict[str, Any]]:
    """Greedy replies to the natural prompts; every user message of a conversation is answered in turn."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    answered = []
    for case in json.loads((HERE / "natural_prompts.json").read_text()):
        messages = [{"role": "system", "content": case["system"]}] if "system" in case else []
        tools = [TOOLS[name] for name in case.get("tools", ())] or None
        reply = ""
        for text in case["messages"]:
            messages.append({"role": "user", "content": text})
            prompt = tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=case.get("thinking", False),
            )
            inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
            output = model.generate(**inputs, max_new_tokens=96, do_sample=False)
            reply = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            messages.append({"role": "assistant", "content": reply})
        good = all(part.lower() in reply.lower() for part in case["expect"])
        answered.append({"id": case["id"], "good": good, "reply": reply})
        print(
            f"{'good' if good else 'BAD '} {case['id']:24} {case['messages'][-1]!r} -> {reply!r}", flush=True
        )
    return answered


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=300, help="held-out cases per family")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_grad_enabled(False)
    model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.float32).eval()
    table = held_out(options.folder, model, options.count, options.seed)
    answered = natural(options.folder, model)
    good = sum(a["good"] for a in answered)
    print(f"natural prompts: {good} of {len(answered)}")
    missed = [f for f, t in TARGETS.items() if table[f]["direct"] < t]
    print("below target (direct):", ", ".join(missed) or "none")
    if options.json:
        figures = {
            "count": options.count,
            "seed": options.seed,
            "held_out": table,
            "natural_good": good,
            "natural": answered,
        }
        options.json.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
