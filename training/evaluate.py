"""Measure a model folder: held-out generated cases per family, and lists of natural prompts.

    python training/evaluate.py models/argosy-tiny --count 200 --json training/evaluation.json

Runs the folder through transformers in float32. Held-out cases are scored on the whole reply, exactly;
natural prompts (not phrased by the generator) by the rules of `acceptance` on the greedy reply.
"""

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import acceptance
from corpus import mix
from scoring import exact
from tokenizer import feed_pieces

TARGETS = {
    "echo": 0.9, "echo_real_words": 0.9, "memory": 0.9, "json": 0.9, "tool_call": 0.9, "tool_result": 0.9,
    "facts_1_to_3": 0.8, "no_tool": 0.8, "spell_real_word": 0.7, "spell_other_word": 0.7, "sum_one_digit": 0.7,
}  # fmt: skip
NATURAL_TARGETS = {"natural": 36, "newcomer": 80, "reported": 14}


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


MOST_NEW_TOKENS = 96


def replies(tokenizer: Any, model: Any, case: acceptance.Case, thinking: bool) -> str:
    """The last greedy reply of a case (without what it was forced to begin with); each user message is answered.

    A case that says so is asked to think in any case, one with a forced beginning never.
    """
    thinking = "begins" not in case and case.get("thinking", thinking)
    messages: list[dict[str, Any]] = []
    if "system" in case:
        messages.append({"role": "system", "content": case["system"]})
    tools = [acceptance.TOOLS[name] for name in case.get("tools", ())] or None
    given = [{"role": "user", "content": m} if isinstance(m, str) else m for m in case["messages"]]
    reply = ""
    for number, message in enumerate(given, 1):
        messages.append(message)
        following = given[number]["role"] if number < len(given) else "end"
        if message["role"] == "assistant" or following in ("assistant", "tool"):
            continue
        begins = case.get("begins", "") if following == "end" else ""
        prompt = tokenizer.apply_chat_template(
            messages,
            tools=tools,
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=thinking,
        )
        inputs = tokenizer(prompt + begins, return_tensors="pt", add_special_tokens=False)
        output = model.generate(**inputs, max_new_tokens=MOST_NEW_TOKENS, do_sample=False)
        reply = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": acceptance.answer(reply)})
    return reply


def natural(folder: Path, model: Any, name: str, thinking: bool = False) -> list[dict[str, Any]]:
    """Which cases of a list of natural prompts are accepted, with the replies."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    answered = []
    for case in acceptance.cases(name):
        reply = replies(tokenizer, model, case, thinking)
        good = acceptance.accepts(case["accept"], reply)
        answered.append({"id": case["id"], "good": good, "reply": reply})
        asked = acceptance.user_texts(case)[-1]
        mode = "thinking" if thinking else "direct"
        print(
            f"{'good' if good else 'BAD '} {name} {mode} {case['id']:20} {asked!r} -> {reply!r}", flush=True
        )
    return answered


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--count", type=int, default=300, help="held-out cases per family; 0: natural prompts only"
    )
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_grad_enabled(False)
    model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.float32).eval()
    lists = {name: natural(options.folder, model, name) for name in acceptance.LISTS}
    good = {name: sum(a["good"] for a in answered) for name, answered in lists.items()}
    thought = {name: natural(options.folder, model, name, thinking=True) for name in acceptance.LISTS}
    good_thinking = {name: sum(a["good"] for a in answered) for name, answered in thought.items()}
    for name, answered in lists.items():
        print(
            f"{name} prompts: {good[name]} of {len(answered)}, at least {NATURAL_TARGETS[name]} wanted; "
            f"{good_thinking[name]} thinking"
        )
    table: dict[str, dict[str, float]] = {}
    if options.count:
        table = held_out(options.folder, model, options.count, options.seed)
        missed = [f for f, t in TARGETS.items() if table[f]["direct"] < t]
        print("below target (direct):", ", ".join(missed) or "none")
    if options.json:
        figures = {
            "count": options.count,
            "seed": options.seed,
            "held_out": table,
            "good": good,
            "good_thinking": good_thinking,
            "prompts": lists,
        }
        options.json.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
