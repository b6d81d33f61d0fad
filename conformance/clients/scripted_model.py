"""ScriptedModel: a logits processor that has a model write what a test wants; all else of the engine is as it is.

The user's message has the script. A line `script: NAME {ARGUMENTS}` has the model call a tool; of several lines the
next one follows each result. Then it answers by what the tools have returned. Where there are no tools, a line
`say: "TEXT"` is the answer, or else it is short: agents ask for titles and summaries.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from argosy_engine.sample.logits_processor import BatchUpdate, LogitsProcessor, ProcessorConfig, Rows

if TYPE_CHECKING:
    import torch

    from argosy_engine.params import SamplingParams

OUTPUT = re.compile(r"argosy-\d+")
NO_OUTPUT = "The tools returned something else."
NO_SCRIPT = "Fine."
_CALL = re.compile(r"script: ([\w.-]+) (\{.*\})")
_TEXT = re.compile(r'say: ("(?:[^"\\]|\\.)*")')
_RESULT = "<tool_response>"
_TOOLS = "<tools>"


def scripted_text(prompt: str) -> str:
    """Return what the model writes after a prompt."""
    if _TOOLS not in prompt:
        said = _TEXT.search(prompt)
        return json.loads(said[1]) if said is not None else NO_SCRIPT
    calls = list(dict.fromkeys(_CALL.findall(prompt)))
    num_results = prompt.count(_RESULT)
    if num_results < len(calls):
        name, arguments = calls[num_results]
        return f'I look.\n<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    if not calls:
        return NO_SCRIPT
    found = OUTPUT.findall("".join(prompt.split(_RESULT)[1:]))
    return f"The tools returned {' '.join(dict.fromkeys(found))}." if found else NO_OUTPUT


class ScriptedModel(LogitsProcessor):
    @classmethod
    def is_used_by(cls, params: SamplingParams) -> bool:
        return True

    def __init__(self, config: ProcessorConfig) -> None:
        self._tokenizer = Tokenizer.from_file(str(Path(config.model_path) / "tokenizer.json"))
        self._end = config.eos_token_ids[0]
        self._scripts: dict[int, tuple[int, list[int]]] = {}
        """Of each slot: the length of its prompt, and the tokens to write."""

    def update_state(self, update: BatchUpdate) -> None:
        for slot in update.removed:
            self._scripts.pop(slot, None)
        for added in update.added:
            prompt = self._tokenizer.decode(
                added.token_ids[: added.num_prompt_tokens], skip_special_tokens=False
            )
            ids = self._tokenizer.encode(scripted_text(prompt), add_special_tokens=False).ids
            self._scripts[added.slot] = added.num_prompt_tokens, [*ids, self._end]

    def apply(self, logits: torch.Tensor, rows: Rows) -> None:
        for row, (slot, position) in enumerate(
            zip(rows.slots.tolist(), rows.positions.tolist(), strict=True)
        ):
            prompt, tokens = self._scripts[slot]
            logits[row] = float("-inf")
            logits[row, tokens[min(position - prompt, len(tokens) - 1)]] = 0.0
