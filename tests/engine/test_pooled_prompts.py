"""Prompts of pooling models: special tokens, truncation, pairs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from argosy_engine import LLM
from argosy_engine.frontend.pooling import render_inputs, render_pairs, render_texts
from argosy_protocol.pooling import EmbeddingRequest, ScoreRequest

TINY = Path(__file__).parents[2] / "models" / "argosy-tiny"
START, BETWEEN, END = 11, 12, 13
TEXT = "The river runs north, and the red lantern hangs in the harbor."


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The tiny model, whose tokenizer adds special tokens."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    shutil.copytree(TINY, path)
    file = path / "tokenizer.json"
    content = json.loads(file.read_text())
    ids = {"[START]": START, "[BETWEEN]": BETWEEN, "[END]": END}

    def special(name: str) -> dict[str, Any]:
        return {"SpecialToken": {"id": name, "type_id": 0}}

    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [special("[START]"), first, special("[END]")],
        "pair": [special("[START]"), first, special("[BETWEEN]"), second, special("[END]")],
        "special_tokens": {name: {"id": name, "ids": [id_], "tokens": [name]} for name, id_ in ids.items()},
    }
    file.write_text(json.dumps(content))
    flags = {"dtype": "float32", "device": "cpu", "threads": 1, "num_gpu_blocks_override": 64}
    with LLM(str(path), max_model_len=256, runner="pooling", **flags) as llm:
        yield llm


def tokens(llm: LLM, text: str) -> list[int]:
    return llm.renderer.tokenizer.encode(text, add_special_tokens=False).ids


def inputs(llm: LLM, **fields: Any) -> list[list[int]]:
    return [prompt.token_ids for prompt in render_inputs(llm.renderer, EmbeddingRequest(**fields))]


def test_inputs_get_special_tokens(llm: LLM) -> None:
    bare = tokens(llm, TEXT)
    assert inputs(llm, input=TEXT) == [[START, *bare, END]]
    assert inputs(llm, input=TEXT, add_special_tokens=False) == [bare]
    assert inputs(llm, input=[[5, 6]]) == [[5, 6]]


@pytest.mark.parametrize("side", [None, "right", "left"])
def test_truncation_leaves_special_tokens(side: Any, llm: LLM) -> None:
    bare = tokens(llm, TEXT)
    fields = {"input": TEXT, "truncate_prompt_tokens": 7, "truncation_side": side}
    kept = bare[-5:] if side == "left" else bare[:5]
    assert inputs(llm, **fields) == [[START, *kept, END]]
    bare_kept = bare[-7:] if side == "left" else bare[:7]
    assert inputs(llm, **fields, add_special_tokens=False) == [bare_kept]
    assert inputs(llm, **{**fields, "truncate_prompt_tokens": 200}) == [[START, *bare, END]]
    whole = [START, *bare, END]
    cut = whole[-2:] if side == "left" else whole[:2]
    assert inputs(llm, **{**fields, "truncate_prompt_tokens": 2}) == [cut]
    long = inputs(llm, **{**fields, "input": TEXT * 40, "truncate_prompt_tokens": -1})[0]
    assert (len(long), long[0], long[-1]) == (256, START, END)


def pairs(llm: LLM, **fields: Any) -> list[list[int]]:
    request = ScoreRequest(queries="red lantern", documents=[TEXT, "harbor"], **fields)
    return [prompt.token_ids for prompt in render_pairs(llm.renderer, request)]


def test_pairs_are_joined_and_cut(llm: LLM) -> None:
    query, text, harbor = (tokens(llm, each) for each in ("red lantern", TEXT, "harbor"))
    assert pairs(llm) == [
        [START, *query, BETWEEN, *text, END],
        [START, *query, BETWEEN, *harbor, END],
    ]
    size = len(query) + 3 + 4
    right, short = pairs(llm, truncate_prompt_tokens=size)
    assert right == [START, *query, BETWEEN, *text[:4], END]
    assert short == pairs(llm)[1][:size] or short == pairs(llm)[1]
    left, _ = pairs(llm, truncate_prompt_tokens=len(text) + 3 + 1, truncation_side="left")
    assert left == [START, query[-1], BETWEEN, *text, END]
    assert pairs(llm, max_tokens_per_query=1, max_tokens_per_doc=2)[0] == [
        START,
        query[0],
        BETWEEN,
        *text[:2],
        END,
    ]


def test_texts_for_cosines_are_prompts_of_their_own(llm: LLM) -> None:
    request = ScoreRequest(text_1=["a", "b"], text_2=["c", "d"])
    prompts, num_queries = render_texts(llm.renderer, request)
    assert num_queries == 2
    assert [prompt.token_ids for prompt in prompts] == [[START, *tokens(llm, text), END] for text in "abcd"]
