"""Each of 80 model types is served with transformers' own greedy tokens or refused by name: none is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from transformers_checkpoints import MODEL_TYPES
from transformers_sweep import outcome

STATES = "keeps a state of its own"
REFUSED = {
    "bloom": "cannot be followed",  # ALiBi
    "deepseek_v4": "attends to other keys",  # compressed ones
    "falcon": "cannot be followed",  # attention that does not go through transformers' interface
    "falcon_h1": STATES,
    "kimi_linear": STATES,
    "lfm2": STATES,
    "lfm3": STATES,
    "mamba": "has no attention heads",
    "mamba2": "has no attention heads",
    "minimax": STATES,
    "mpt": "cannot be followed",  # ALiBi
    "nemotron_h": STATES,
    "olmo_hybrid": STATES,
    "qwen3_5_moe_text": STATES,
    "qwen3_5_text": STATES,
    "qwen3_next": STATES,
    "xglm": "cannot be followed",  # attention that does not go through transformers' interface
    "zamba2": "cannot be",
}
"""Types that are not served, and what the refusal says."""


def test_the_list_has_80_types() -> None:
    assert len(set(MODEL_TYPES)) == 80
    assert set(MODEL_TYPES) >= REFUSED.keys()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_greedy_tokens_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    found = outcome(model_type, tmp_path, model_impl="transformers")
    if model_type in REFUSED:
        assert found.kind == "refused", found
        assert REFUSED[model_type] in found.detail
        assert "ForCausalLM" in found.detail
    else:
        assert found[:2] == ("served", "")
