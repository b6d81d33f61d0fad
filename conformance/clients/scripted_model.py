"""ScriptedModel: a logits processor that has a model write what a test wants; all else of the engine is as it is.

A model too small for an agent's prompts so calls the agent's shell, and answers once it has the result.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from argosy_engine.sample.logits_processor.interface import (
    BatchUpdate,
    LogitsProcessor,
    ProcessorConfig,
    Rows,
)

if TYPE_CHECKING:
    import torch

    from argosy_engine.params.sampling_params import SamplingParams

COMMAND = "echo argosy-$((6 * 7))"
OUTPUT = "argosy-42"
CALL = f'I look.\n<tool_call>\n{{"name": "exec_command", "arguments": {{"cmd": "{COMMAND}"}}}}\n</tool_call>'
ANSWER = f"The command wrote {OUTPUT}."
NO_OUTPUT = "The command wrote something else."


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
            text = CALL
            if COMMAND in prompt:
                text = ANSWER if OUTPUT in prompt else NO_OUTPUT
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
            self._scripts[added.slot] = added.num_prompt_tokens, [*ids, self._end]

    def apply(self, logits: torch.Tensor, rows: Rows) -> None:
        for row, (slot, position) in enumerate(
            zip(rows.slots.tolist(), rows.positions.tolist(), strict=True)
        ):
            prompt, tokens = self._scripts[slot]
            logits[row] = float("-inf")
            logits[row, tokens[min(position - prompt, len(tokens) - 1)]] = 0.0
