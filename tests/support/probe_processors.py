"""Custom logits processors for tests of `--logits-processors`, most of them faulty."""

from __future__ import annotations

import torch

from argosy_engine import LogitsProcessor, SamplingParams
from argosy_engine.sample.logits_processor import BatchUpdate, ProcessorConfig, Rows


class Faulty(LogitsProcessor):
    """Raises in the method that `extra_args["fail_in"]` names, and never for `extra_args["harmless"]`."""

    def __init__(self, config: ProcessorConfig) -> None:
        self.fails: dict[int, str] = {}

    @classmethod
    def is_used_by(cls, params: SamplingParams) -> bool:
        extra_args = params.extra_args or {}
        if extra_args.get("fail_in") == "is_used_by":
            raise RuntimeError("as asked")
        return "harmless" in extra_args or "fail_in" in extra_args

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        match (params.extra_args or {}).get("fail_in"):
            case "validate_params":
                raise RuntimeError("as asked")
            case "nothing":
                raise ValueError("fail_in must name a method")

    def update_state(self, update: BatchUpdate) -> None:
        for slot in update.removed:
            del self.fails[slot]
        for added in update.added:
            where = (added.params.extra_args or {}).get("fail_in", "")
            if where == "update_state":
                raise RuntimeError("as asked")
            self.fails[added.slot] = where

    def apply(self, logits: torch.Tensor, rows: Rows) -> None:
        logits[:, 3] = 1e9
        if "apply" in {self.fails[slot] for slot in rows.slots.tolist()}:
            raise RuntimeError("as asked")


class NeverTwice(LogitsProcessor):
    """Masks out every token that the output already contains."""

    reads_tokens = True

    @classmethod
    def is_used_by(cls, params: SamplingParams) -> bool:
        return "never_twice" in (params.extra_args or {})

    def __init__(self, config: ProcessorConfig) -> None:
        self.token_ids = config.token_ids
        self.starts: dict[int, int] = {}

    def update_state(self, update: BatchUpdate) -> None:
        for slot in update.removed:
            del self.starts[slot]
        for added in update.added:
            self.starts[added.slot] = added.num_prompt_tokens

    def apply(self, logits: torch.Tensor, rows: Rows) -> None:
        for row, (slot, position) in enumerate(
            zip(rows.slots.tolist(), rows.positions.tolist(), strict=True)
        ):
            logits[row, self.token_ids[slot, self.starts[slot] : position].tolist()] = float("-inf")


class CannotStart(NeverTwice):
    def __init__(self, config: ProcessorConfig) -> None:
        raise FileNotFoundError("no such list of words")


class NoProcessor:
    pass
