"""Decoders that only transformers' code runs, served for pooling: their vectors and scores are transformers' own."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import AutoModelForSequenceClassification

from argosy_engine import LLM
from argosy_engine.checkpoint.model_folder import resolve_model
from argosy_engine.config import EngineArgs
from argosy_engine.core.proc.core_client import InprocClient
from argosy_engine.errors import ConfigError, InvalidRequest
from argosy_engine.params import PoolingParams
from fp8_checkpoints import quantize_checkpoint
from transformers_checkpoints import VOCAB_SIZE, write_checkpoint
from transformers_sweep import EXACT

FLAGS: dict[str, Any] = {**EXACT, "max_num_batched_tokens": 48, "num_gpu_blocks_override": 128}
LENGTHS = (1, 5, 47, 48, 49, 90)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def prompts() -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


def edit(path: Path, **fields: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def add_tokenizer(path: Path) -> None:
    (path / "tokenizer.json").write_bytes((resolve_model("builtin://tiny") / "tokenizer.json").read_bytes())


def write_classifier(model_type: str, path: Path, **fields: Any) -> Any:
    """Write a checkpoint with a head for three labels; return it in transformers."""
    decoder: Any = write_checkpoint(model_type, path, **fields)
    decoder.config.num_labels, decoder.config.pad_token_id = 3, 0
    model = AutoModelForSequenceClassification.from_config(decoder.config, attn_implementation="eager")
    model.base_model.load_state_dict(decoder.base_model.state_dict())
    with torch.no_grad():
        generator = torch.Generator().manual_seed(7)
        model.score.weight.copy_(torch.randn(model.score.weight.shape, generator=generator))
    model.eval().save_pretrained(path)
    edit(path, architectures=[type(model).__name__])
    return model


def vectors(path: Path, params: PoolingParams | None = None, **flags: Any) -> list[torch.Tensor]:
    add_tokenizer(path)
    with closing(LLM(str(path), **{**FLAGS, **flags})) as llm:
        results = llm.encode(prompts(), params or PoolingParams(), use_tqdm=False)
    return [torch.tensor(each.outputs.data) for each in results]


@torch.inference_mode()
def states(reference: Any, token_ids: list[int]) -> torch.Tensor:
    found: torch.Tensor = reference.base_model(torch.tensor([token_ids])).last_hidden_state[0]
    return found


@pytest.mark.parametrize("model_type", ["arcee", "cohere2", "falcon_h1", "mamba"])
def test_vectors_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    reference = write_checkpoint(model_type, tmp_path)
    found = vectors(tmp_path, runner="pooling")
    for prompt, vector in zip(prompts(), found, strict=True):
        expected = F.normalize(states(reference, prompt)[-1], dim=0)
        torch.testing.assert_close(vector, expected, atol=2e-4, rtol=2e-4)


def test_a_checkpoint_without_a_head_embeds(tmp_path: Path) -> None:
    reference: Any = write_checkpoint("arcee", tmp_path)
    reference.model.save_pretrained(tmp_path)
    edit(tmp_path, architectures=["ArceeModel"])
    mean = PoolingParams(pooling_type="mean", use_activation=False)
    for prompt, vector in zip(prompts(), vectors(tmp_path, mean), strict=True):
        torch.testing.assert_close(vector, states(reference, prompt).mean(dim=0), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("model_type", ["arcee", "phi"])
def test_scores_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    reference = write_classifier(model_type, tmp_path)
    for prompt, scores in zip(prompts(), vectors(tmp_path), strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt])).logits[0].softmax(dim=-1)
        torch.testing.assert_close(scores, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_decoder_scores_by_two_tokens(is_tied: bool, tmp_path: Path) -> None:
    reference: Any = write_checkpoint("arcee", tmp_path, tie_word_embeddings=is_tied)
    add_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokens = [tokenizer.id_to_token(id_) for id_ in (7, 11)]
    two_way = {
        "architectures": ["ArceeForSequenceClassification"],
        "classifier_from_token": tokens,
        "method": "from_2_way_softmax",
    }
    found = vectors(tmp_path, hf_overrides=two_way)
    for prompt, score in zip(prompts(), found, strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt])).logits[0, -1, [7, 11]].softmax(dim=-1)[1:]
        torch.testing.assert_close(score, expected, atol=2e-4, rtol=2e-4)


def test_a_quantised_checkpoint_pools(tmp_path: Path) -> None:
    write_checkpoint("arcee", tmp_path)
    quantize_checkpoint(tmp_path, "fp8-block")
    for found, plain in zip(
        vectors(tmp_path, runner="pooling"), vectors(tmp_path / "widened", runner="pooling"), strict=True
    ):
        assert torch.equal(found, plain)


def test_a_family_of_ours_falls_back_with_its_head(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    reference = write_classifier("llama", tmp_path, rope_parameters=rope)
    (scores, *_) = vectors(tmp_path)
    with torch.inference_mode():
        expected = reference(torch.tensor([prompts()[0]])).logits[0].softmax(dim=-1)
    torch.testing.assert_close(scores, expected, atol=2e-4, rtol=2e-4)


def refusal(path: Path, **flags: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        InprocClient(EngineArgs.of(model=str(path), **{**EXACT, **flags}))
    return str(caught.value)


def test_what_has_no_head_is_refused(tmp_path: Path) -> None:
    write_checkpoint("arcee", tmp_path)
    assert "no head for labels by the name score.weight" in refusal(tmp_path, convert="classify")
    edit(tmp_path, architectures=["ArceeModel"])
    assert "does not generate; leave --runner generate out" in refusal(tmp_path, runner="generate")
    edit(tmp_path, architectures=["CohereModel"])
    assert "architecture CohereModel is not supported: transformers" in refusal(tmp_path)


def test_a_head_for_other_labels_is_refused(tmp_path: Path) -> None:
    write_classifier("arcee", tmp_path)
    edit(tmp_path, id2label={"0": "a", "1": "b"}, label2id={"a": 0, "b": 1})
    assert "score.weight is [3, 64], for 2 labels" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("architecture", "model_type"), [("T5Model", "t5"), ("ViTModel", "vit"), ("BartModel", "bart")]
)
def test_models_that_are_no_decoders_are_refused(architecture: str, model_type: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": [architecture], "model_type": model_type})
    )
    assert f"architecture {architecture} is not supported: it is no decoder" in refusal(tmp_path)


def test_a_text_part_on_transformers_code_generates_only(tmp_path: Path) -> None:
    write_checkpoint("aria", tmp_path)
    assert "which only generates here" in refusal(tmp_path, runner="pooling")


def test_generation_is_refused(tmp_path: Path) -> None:
    write_checkpoint("arcee", tmp_path)
    add_tokenizer(tmp_path)
    with (
        closing(LLM(str(tmp_path), **FLAGS, runner="pooling")) as llm,
        pytest.raises(InvalidRequest, match="served for pooling"),
    ):
        llm.generate([[1, 2, 3]], use_tqdm=False)
