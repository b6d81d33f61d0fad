"""A custom logits processor: a request with `"vllm_xargs": {"only_token": 42}` generates token 42 only.

PYTHONPATH=examples argosy serve builtin://tiny --logits-processors logits_processor:OnlyToken
"""

from __future__ import annotations

import torch

from argosy_engine import LogitsProcessor, SamplingParams
from argosy_engine.sample.logits_processor import BatchUpdate, ProcessorConfig, Rows


class OnlyToken(LogitsProcessor):
    def __init__(self, config: ProcessorConfig) -> None:
        self.device = config.device
        self.vocab_size = config.vocab_size
        self.tokens: dict[int, int] = {}
        """slot -> token"""

    @classmethod
    def is_used_by(cls, params: SamplingParams) -> bool:
        return "only_token" in (params.extra_args or {})

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        token = (params.extra_args or {})["only_token"]
        if not isinstance(token, int) or token < 0:
            raise ValueError("only_token must be a token id")

    def update_state(self, update: BatchUpdate) -> None:
        for slot in update.removed:
            self.tokens.pop(slot, None)
        for added in update.added:
            token = (added.params.extra_args or {})["only_token"]
            if token >= self.vocab_size:
                raise ValueError(f"there is no token {token}")
            self.tokens[added.slot] = token

    def apply(self, logits: torch.Tensor, rows: Rows) -> None:
        tokens = torch.tensor([self.tokens[slot] for slot in rows.slots.tolist()], device=self.device)
        kept = logits.gather(1, tokens.unsqueeze(1))
        logits.fill_(float("-inf"))
        logits.scatter_(1, tokens.unsqueeze(1), kept)
