"""Write the measured figures into the model card: its tables follow evaluation.json.

python training/model_card.py
"""

import json
from pathlib import Path
from typing import Any

import acceptance
from evaluate import NATURAL_TARGETS, TARGETS

HERE = Path(__file__).parent
FIGURES = HERE / "evaluation.json"
CARD = HERE.parent / "models" / "argosy-tiny" / "README.md"
_ABOUT = {
    "natural": "written before any reply was seen, never changed",
    "newcomer": "written before the generator was widened; training skips conversations that contain one",
    "reported": 'reported by users, from "My name is Tom. What is my name?" to strings under a schema',
}


def families(figures: dict[str, Any]) -> str:
    """The table of held-out cases."""
    rows = ["| family | direct % | thinking % | target (direct) |", "|---|---|---|---|"]
    for family, shares in figures["held_out"].items():
        target = ""
        if family in TARGETS:
            met = "met" if shares["direct"] >= TARGETS[family] else "missed"
            target = f"{100 * TARGETS[family]:.0f} %, {met}"
        rows.append(
            f"| {family} | {100 * shares['direct']:.1f} | {100 * shares['thinking']:.1f} | {target} |"
        )
    return "\n".join(rows)


def prompts(figures: dict[str, Any]) -> str:
    """The table of natural prompts, and the misses by name."""
    rows = ["| list | accepted | thinking | wanted (direct) |", "|---|---|---|---|"]
    for name, path in acceptance.LISTS.items():
        accepted = f"{figures['good'][name]} of {len(figures['prompts'][name])}"
        thinking, wanted = figures["good_thinking"][name], NATURAL_TARGETS[name]
        rows.append(f"| `{path.name}`: {_ABOUT[name]} | {accepted} | {thinking} | {wanted} |")
    missed = {
        name: [case["id"] for case in cases if not case["good"]] for name, cases in figures["prompts"].items()
    }
    lines = [f"Missed of {name}: {', '.join(ids) or 'none'}." for name, ids in missed.items()]
    return "\n".join([*rows, "", *lines])


def written(card: str, figures: dict[str, Any]) -> str:
    """The card with its tables replaced; they stand between marks.

    Raises ValueError if the card lacks a mark.
    """
    for mark, text in (("families", families(figures)), ("prompts", prompts(figures))):
        start, end = f"<!-- {mark} -->", f"<!-- end of {mark} -->"
        before, found, rest = card.partition(start)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"the model card has no marks {start} and {end}: write them around its table")
        card = f"{before}{start}\n\n{text}\n\n{end}{after}"
    return card


def main() -> None:
    CARD.write_text(written(CARD.read_text(), json.loads(FIGURES.read_text())))


if __name__ == "__main__":
    main()
