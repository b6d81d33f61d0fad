"""`LLM.get_tokenizer` against transformers' tokenizer of the same model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from argosy_engine import LLM, SamplingParams
from argosy_engine.checkpoint.model_folder import resolve_model
from argosy_engine.errors import InvalidRequest

TINY = resolve_model("builtin://tiny")
MESSAGES = [{"role": "user", "content": "Which door?"}, {"role": "assistant", "content": "The red one "}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        "builtin://tiny", device="cpu", threads=1, num_gpu_blocks_override=64, max_model_len=256
    ) as made:
        yield made


@pytest.fixture(scope="module")
def reference() -> Any:
    return PreTrainedTokenizerFast(
        tokenizer_file=str(TINY / "tokenizer.json"),
        eos_token="<|im_end|>",
        chat_template=(TINY / "chat_template.jinja").read_text(),
    )


@pytest.mark.parametrize("text", ["The sea", "", "  two\nlines ", "Grüße, 世界 🌍", "a<|im_end|>b"])
def test_texts_have_the_tokens_of_transformers(llm: LLM, reference: Any, text: str) -> None:
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode(text)
    assert ids == reference.encode(text)
    assert tokenizer.decode(ids) == reference.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == reference.decode(ids, skip_special_tokens=True)
    assert tokenizer.convert_ids_to_tokens(ids) == reference.convert_ids_to_tokens(ids)


def test_several_texts_are_encoded_and_decoded_at_once(llm: LLM, reference: Any) -> None:
    tokenizer, texts = llm.get_tokenizer(), ["The sea", "", "a<|im_end|>b"]
    for text in (texts[0], texts):
        found, expected = tokenizer(text), reference(text, return_token_type_ids=False)
        assert dict(found) == dict(expected)
        assert found.input_ids == expected.input_ids
        assert found.attention_mask == expected.attention_mask
    ids = tokenizer(texts, add_special_tokens=False).input_ids
    assert tokenizer.batch_decode(ids) == reference.batch_decode(ids) == texts
    assert tokenizer.batch_decode(ids, skip_special_tokens=True)[2] == "ab"


def test_the_vocabulary_is_that_of_transformers(llm: LLM, reference: Any) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer.get_vocab() == reference.get_vocab()
    assert len(tokenizer) == len(reference)
    assert tokenizer.eos_token_id == reference.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.convert_tokens_to_ids("no such token") is None
    assert tokenizer.decode(ids := [5]) == tokenizer.decode(ids[0]) == reference.decode(ids)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"add_generation_prompt": True},
        {"continue_final_message": True},
        {"add_generation_prompt": True, "enable_thinking": False},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]},
    ],
    ids=str,
)
def test_chats_have_the_prompt_of_transformers(llm: LLM, reference: Any, fields: dict[str, Any]) -> None:
    tokenizer = llm.get_tokenizer()
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, **fields)
    assert text == reference.apply_chat_template(MESSAGES, tokenize=False, **fields)
    ids = tokenizer.apply_chat_template(MESSAGES, **fields)
    assert ids == reference.apply_chat_template(MESSAGES, return_dict=False, **fields)


def test_the_prompt_is_that_of_chat(llm: LLM) -> None:
    ids = llm.get_tokenizer().apply_chat_template(MESSAGES, add_generation_prompt=True)
    (output,) = llm.chat(MESSAGES, SamplingParams(max_tokens=1), use_tqdm=False)
    assert output.prompt_token_ids == ids


def test_what_cannot_be_tokenised_is_refused(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    with pytest.raises(InvalidRequest, match="out of vocabulary: ids begin at 0 and are below"):
        tokenizer.decode([1 << 20])
    with pytest.raises(InvalidRequest, match=r"Expected `str`, got `int` - at `\$.messages"):
        tokenizer.apply_chat_template([{"role": 5, "content": "x"}])
    assert tokenizer.apply_chat_template(MESSAGES, color="red") == tokenizer.apply_chat_template(MESSAGES)
