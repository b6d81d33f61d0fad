"""A vocabulary and a context of the size that real models have: 150,000 tokens, and 32,768 positions.

150,000 tokens fill no whole number of words in a mask of 32 bits each.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from argosy_engine import LLM, SamplingParams, StructuredOutputsParams
from argosy_engine.api.doctor import diagnose
from argosy_engine.checkpoint.model_folder import resolve_model
from argosy_engine.config import EngineArgs
from argosy_engine.core import engine_core
from argosy_engine.errors import InvalidRequest
from argosy_engine.structured.compile_queue import CompileQueue
from argosy_engine.structured.grammar_server import GrammarClient, GrammarServerArgs
from argosy_engine.structured.manager import StructuredOutputManager

VOCAB = 150_000
CONTEXT = 32_768
LAST = VOCAB - 1
PIECE = "lantern"
"""Text of the last token, which no merge makes: only sampling gives it."""
NOTHING_LIKE_IT = "Yes"
TIE = 1e-3
"""A token is accepted whose logit is this close to the reference's best one."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights in two layers, and the tiny model's tokenizer with more pieces at its end."""
    path = tmp_path_factory.mktemp("large") / "model"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=128, max_position_embeddings=CONTEXT, initializer_range=0.2, eos_token_id=2,
        bos_token_id=None, pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    tiny = resolve_model("builtin://tiny")
    tokenizer: dict[str, Any] = json.loads((tiny / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    # An added token keeps its id only if it is in the vocabulary, or if its id follows the others.
    vocab |= {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    taken = set(vocab.values())
    vocab |= {f"unused{number}": number for number in range(LAST) if number not in taken}
    vocab[PIECE] = LAST
    (path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    shutil.copy(tiny / "tokenizer_config.json", path)
    return path


def flags(checkpoint: Path, **more: Any) -> dict[str, Any]:
    given = {
        "model": str(checkpoint), "device": "cpu", "dtype": "float32", "max_num_seqs": 4,
        "max_model_len": CONTEXT, "kv_cache_memory_bytes": 64 << 20,
    }  # fmt: skip
    return given | more


def patient_structured_output_manager(
    model_path: str, vocab_size: int, eos_token_ids: Collection[int], cache_bytes: int
) -> StructuredOutputManager:
    """Make the engine's own, which waits longer: reading the vocabulary takes seconds beside other tests."""
    args = GrammarServerArgs(model_path, vocab_size, sorted(eos_token_ids), 1)
    client = GrammarClient(args, deadline_s=200.0, warm_up_timeout_s=150.0)
    queue = CompileQueue(client, num_threads=1, cache_bytes=cache_bytes, deadline_s=200.0)
    return StructuredOutputManager(queue, vocab_size, eos_token_ids)


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_core, "create_structured_output_manager", patient_structured_output_manager)
        engine = LLM(**flags(checkpoint), threads=1)
    yield engine
    engine.close()


def generate(llm: LLM, prompt: Any, **params: Any) -> Any:
    (answer,) = llm.generate([prompt], SamplingParams(temperature=0.0, **params))
    return answer.outputs[0]


def test_the_estimate_before_the_start_is_what_the_engine_takes(llm: LLM, checkpoint: Path) -> None:
    told, found = diagnose(EngineArgs.of(**flags(checkpoint))).budget, llm.config.memory
    assert told is not None
    assert told.weights_bytes == found.weights_bytes
    assert told.weights_bytes > VOCAB * 64 * 4
    assert told.kv_cache_tokens == found.kv_cache_tokens >= CONTEXT
    assert told.activation_bytes == found.activation_bytes
    assert told.activation_bytes > 4 * VOCAB * 4, "logits of each sequence"


@pytest.mark.parametrize("token", [VOCAB // 32 * 32 - 1, VOCAB // 32 * 32, LAST - 1, LAST])
def test_a_bias_moves_the_last_tokens(llm: LLM, token: int) -> None:
    chosen = generate(llm, "Hello", max_tokens=3, ignore_eos=True, logit_bias={token: 100.0})
    assert list(chosen.token_ids) == [token] * 3
    spared = generate(llm, "Hello", max_tokens=3, allowed_token_ids=[token, 5], logit_bias={token: -100.0})
    assert list(spared.token_ids) == [5] * 3


def test_a_bias_beyond_the_vocabulary_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="logit_bias"):
        generate(llm, "Hello", max_tokens=1, logit_bias={VOCAB: 1.0})


def test_masks_of_structured_outputs_reach_the_last_token(llm: LLM) -> None:
    """It is taken where the grammar has its text, and not elsewhere however likely it is."""
    wanted = {"max_tokens": 20, "logit_bias": {LAST: 100.0}}
    fits = StructuredOutputsParams(choice=[PIECE + "s", NOTHING_LIKE_IT])
    taken = generate(llm, "Hello", structured_outputs=fits, **wanted)
    assert (taken.text, taken.token_ids[0]) == (PIECE + "s", LAST)
    other = generate(
        llm, "Hello", structured_outputs=StructuredOutputsParams(choice=[NOTHING_LIKE_IT]), **wanted
    )
    assert other.text == NOTHING_LIKE_IT
    assert LAST not in other.token_ids


def greedy_gaps(checkpoint: Path, prompt: list[int], output: list[int]) -> list[str]:
    """Where the output is not the reference's greedy one: transformers with teacher forcing, one pass."""
    model = transformers.LlamaForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="sdpa"
    )
    with torch.inference_mode():
        ids = torch.tensor([prompt + output])
        logits = model(ids, logits_to_keep=len(output) + 1, use_cache=False).logits[0, :-1]
    best = logits.max(dim=-1)
    gaps = [(best.values[at] - logits[at, token]).item() for at, token in enumerate(output)]
    return [f"position {at}: {gap:.2e} below the best" for at, gap in enumerate(gaps) if gap > TIE]


@pytest.mark.parametrize(
    "length", [1_000, pytest.param(30_000, marks=[pytest.mark.full, pytest.mark.timeout(900)])]
)
def test_a_long_prompt_is_answered_as_by_transformers(checkpoint: Path, length: int) -> None:
    """In steps of a thousand tokens at most, each of which reads the keys of all before it."""
    generator = torch.Generator().manual_seed(length)
    prompt = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
    llm = LLM(**flags(checkpoint, max_num_batched_tokens=1024, enable_prefix_caching=False))
    try:
        output = list(generate(llm, {"prompt_token_ids": prompt}, max_tokens=8, ignore_eos=True).token_ids)
    finally:
        llm.close()
    assert len(set(output)) > 1
    assert greedy_gaps(checkpoint, prompt, output) == []
