"""Each of 83 model types is served with transformers' own greedy tokens or refused by name: none is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy_engine.model_configs.transformers_config import TransformersConfig
from argosy_engine.models.config_file import load_model_config
from model_types.__main__ import row_of
from transformers_checkpoints import MODEL_TYPES, WRAPPER_TYPES
from transformers_sweep import outcome

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "model-types.md").read_text("utf-8").splitlines()
REFUSED = {
    "bloom": "cannot be followed",  # ALiBi; ours serves it
    "deepseek_v4": "attends to other keys",  # compressed ones
    "falcon": "cannot be followed",  # attention that does not go through transformers' interface; ours serves it
    "mpt": "cannot be followed",  # ALiBi; ours serves it
    "xglm": "cannot be followed",  # as Falcon
}
"""Types that transformers' code does not serve here, and what the refusal says."""
HYBRIDS = (
    *("bamba", "falcon_h1", "granitemoehybrid", "lfm2", "lfm2_moe", "nemotron_h"),
    *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
)
"""Types with states that our own code computes as well."""


def test_the_list_has_83_types() -> None:
    assert len(set(MODEL_TYPES)) == 83
    assert set(MODEL_TYPES) >= REFUSED.keys()


@pytest.mark.parametrize("model_type", [*MODEL_TYPES, *WRAPPER_TYPES])
def test_the_page_of_model_types_says_what_runs_each(model_type: str) -> None:
    assert row_of(model_type) in PAGE, "run make generate"


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
        assert found.cached_tokens


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_our_own_code_computes_hybrids(model_type: str, tmp_path: Path) -> None:
    found = outcome(model_type, tmp_path, model_impl="argosy")
    assert found[:2] == ("served", "")
    assert found.cached_tokens
    assert found.preemptions
    assert not isinstance(load_model_config(tmp_path), TransformersConfig), "our own code is what serves it"
