"""Models that are served for pooling equal transformers', however the steps are cut: labels, embeddings, scores."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from argosy_engine import LLM
from argosy_engine.errors import ConfigError, InvalidRequest
from argosy_engine.params import PoolingParams
from random_checkpoints import KINDS, Kind, make_checkpoint

TINY = Path(__file__).parents[2] / "models" / "argosy-tiny"
EXACT = {
    "dtype": "float32",
    "device": "cpu",
    "threads": 1,
    "max_num_batched_tokens": 48,
    "num_gpu_blocks_override": 128,
}
LENGTHS = (1, 5, 16, 47, 48, 49, 130)
CLASSIFIERS = {
    "llama": "LlamaForSequenceClassification",
    "qwen3-yarn": "Qwen3ForSequenceClassification",
    "opt-post-norm": "OPTForSequenceClassification",
    "gpt2": "GPT2ForSequenceClassification",
    "gemma3": "Gemma3TextForSequenceClassification",
    "qwen3-moe": "Qwen3MoeForSequenceClassification",
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


Checkpoint = Callable[..., torch.nn.Module]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Writes a random checkpoint, with the tiny model's tokenizer, into a folder; returns transformers' model.

    Each is made once and copied, because tests change their folders.
    """
    made: dict[str, tuple[Path, torch.nn.Module]] = {}

    def make(path: Path, kind: str, model: str | None = None, **fields: Any) -> torch.nn.Module:
        key = json.dumps([kind, model, fields])
        if key not in made:
            of_kind, folder = KINDS[kind], tmp_path_factory.mktemp(kind)
            fields = {**of_kind.fields, "vocab_size": 1024, **fields}
            reference = make_checkpoint(Kind(of_kind.config, model or of_kind.model, fields), folder)
            shutil.copy(TINY / "tokenizer.json", folder)
            made[key] = folder, reference
        folder, reference = made[key]
        shutil.copytree(folder, path, dirs_exist_ok=True)
        return reference

    return make


def prompts() -> list[list[int]]:
    rng = random.Random(1)
    made = [[rng.randrange(2, 512) for _ in range(length)] for length in LENGTHS]
    return [*made, [*made[-1][:64], 3]]


@torch.inference_mode()
def logits(reference: torch.nn.Module, token_ids: list[int]) -> torch.Tensor:
    return reference(torch.tensor([token_ids])).logits[0]  # type: ignore[no-any-return]


def change(path: Path, **fields: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def close_to(ours: list[float], theirs: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(ours), theirs.float(), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_labels_equal_transformers(kind: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    reference = checkpoint(tmp_path, kind, CLASSIFIERS[kind], num_labels=3)
    with closing(LLM(str(tmp_path), **EXACT)) as llm:
        assert llm.config.pooling is not None
        assert llm.config.pooling.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
        expected = [logits(reference, prompt) for prompt in prompts()]
        for _ in range(2):  # the second time from the prefix cache
            results = llm.classify(prompts(), use_tqdm=False)
            for row, result in zip(expected, results, strict=True):
                close_to(result.outputs.probs, row.softmax(dim=-1))
        assert max(result.num_cached_tokens for result in results) >= 112
        raw = PoolingParams(use_activation=False)
        for row, result in zip(expected, llm.classify(prompts(), raw, use_tqdm=False), strict=True):
            close_to(result.outputs.probs, row)
        of_tokens = llm.encode(prompts(), PoolingParams(task="token_classify"), use_tqdm=False)
        for prompt, row, result in zip(prompts(), expected, of_tokens, strict=True):
            assert len(result.outputs.data) == len(prompt)
            close_to(result.outputs.data[-1], row.softmax(dim=-1))
            close_to(result.outputs.data[0], logits(reference, prompt[:1]).softmax(dim=-1))
        with pytest.raises(InvalidRequest, match="does not generate"):
            llm.generate([[5, 6]], use_tqdm=False)
        for task in ("embed", "token_embed"):
            with pytest.raises(InvalidRequest, match="--convert embed"):
                llm.encode([[5, 6]], PoolingParams(task=task), use_tqdm=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("limit", [64, 65])
def test_a_prompt_may_fill_the_context(limit: int, checkpoint: Checkpoint, tmp_path: Path) -> None:
    reference = checkpoint(tmp_path, "llama", "LlamaForSequenceClassification", num_labels=1)
    flags = {**EXACT, "num_gpu_blocks_override": 1 + -(-limit // 16)}
    prompt = prompts()[-2][:limit]
    with closing(LLM(str(tmp_path), **flags, max_model_len=limit, max_num_seqs=1)) as llm:
        for _ in range(2):
            (result,) = llm.classify([prompt], use_tqdm=False)
            assert result.error is None
            close_to(result.outputs.probs, logits(reference, prompt).sigmoid())
        with pytest.raises(InvalidRequest, match=r"maximum context length.*set truncate_prompt_tokens: "):
            llm.classify([[*prompt, 5]], use_tqdm=False)


@pytest.mark.parametrize(
    ("in_config", "flags", "expected"),
    [
        ({}, {}, lambda row: row.softmax(dim=-1)),
        ({"problem_type": "multi_label_classification"}, {}, torch.sigmoid),
        ({"problem_type": "regression"}, {}, lambda row: row),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            {},
            lambda row: row,
        ),
        (
            {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"},
            {},
            lambda row: row.softmax(dim=-1),
        ),
        ({}, {"use_activation": False}, lambda row: row),
        ({}, {"logit_mean": 0.5, "logit_sigma": 2.0}, lambda row: ((row - 0.5) / 2).softmax(dim=-1)),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_activations(
    in_config: dict[str, Any], flags: dict[str, Any], expected: Any, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    reference = checkpoint(tmp_path, "llama", "LlamaForSequenceClassification", num_labels=2)
    change(tmp_path, **in_config)
    with closing(LLM(str(tmp_path), **EXACT, pooler_config=flags or None)) as llm:
        (result,) = llm.classify([[7, 8, 9]], use_tqdm=False)
        close_to(result.outputs.probs, expected(logits(reference, [7, 8, 9])))


@pytest.mark.parametrize("kind", ["qwen3-yarn", "llama"], ids=["tied", "untied"])
def test_answers_of_a_generating_reranker_are_weighed(
    kind: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """As of Qwen3-Reranker's original checkpoints: the share of "yes" among "yes" and "no"."""
    reference = checkpoint(tmp_path, kind)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    no, yes = "no", "an"
    ids = [tokenizer.token_to_id(token) for token in (no, yes)]
    assert None not in ids
    overrides = {
        "architectures": [KINDS[kind].model.replace("ForCausalLM", "ForSequenceClassification")],
        "classifier_from_token": [no, yes],
        "is_original_qwen3_reranker": True,
    }
    with closing(LLM(str(tmp_path), **EXACT, hf_overrides=overrides)) as llm:
        for prompt, result in zip(prompts(), llm.classify(prompts(), use_tqdm=False), strict=True):
            both = logits(reference, prompt)[-1][ids].softmax(dim=-1)
            close_to(result.outputs.probs, both[1:])
        results = llm.score("red", ["lantern", "boat in the harbor"], use_tqdm=False)
        for document, result in zip(("lantern", "boat in the harbor"), results, strict=True):
            assert result.prompt_token_ids == tokenizer.encode("red" + document).ids
            both = logits(reference, result.prompt_token_ids)[-1][ids].softmax(dim=-1)
            close_to([result.outputs.score], both[1:])


def test_rows_of_the_output_head_as_labels(checkpoint: Checkpoint, tmp_path: Path) -> None:
    reference = checkpoint(tmp_path, "llama")
    tokens = ["a", "an", "no"]
    ids = [Tokenizer.from_file(str(tmp_path / "tokenizer.json")).token_to_id(token) for token in tokens]
    overrides = {"classifier_from_token": tokens, "method": "no_post_processing"}
    with closing(LLM(str(tmp_path), **EXACT, convert="classify", hf_overrides=overrides)) as llm:
        (result,) = llm.classify([[7, 8, 9]], use_tqdm=False)
        assert llm.config.pooling is not None
        assert llm.config.pooling.labels == tuple(tokens)
        close_to(result.outputs.probs, logits(reference, [7, 8, 9])[-1][ids].softmax(dim=-1))


def sentence_transformers(path: Path, mode: str, *, normalizes: bool) -> None:
    """Write the files of sentence-transformers beside a checkpoint."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalizes else [])]
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{kind}" if index else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    flags = {
        f"pooling_mode_{name}": name == mode
        for name in ("cls_token", "mean_tokens", "lasttoken", "max_tokens")
    }
    config = {"word_embedding_dimension": 64, **flags, "include_prompt": True}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("mode", "normalizes"), [("lasttoken", True), ("mean_tokens", False), ("cls_token", True)]
)
def test_modules_of_sentence_transformers(
    mode: str, normalizes: bool, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    reference = checkpoint(tmp_path, "qwen3-yarn")
    sentence_transformers(tmp_path, mode, normalizes=normalizes)
    with closing(LLM(str(tmp_path), **EXACT)) as llm, torch.inference_mode():
        for prompt, result in zip(prompts(), llm.embed(prompts(), use_tqdm=False), strict=True):
            states = reference.base_model(torch.tensor([prompt])).last_hidden_state[0]  # type: ignore[operator]
            vector = {"lasttoken": states[-1], "mean_tokens": states.mean(dim=0), "cls_token": states[0]}[
                mode
            ]
            close_to(result.outputs.embedding, F.normalize(vector, dim=0) if normalizes else vector)


def test_what_is_not_computed_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    checkpoint(tmp_path, "llama")
    sentence_transformers(tmp_path, "max_tokens", normalizes=True)
    with pytest.raises(ConfigError, match="pooling_mode_max_tokens"):
        LLM(str(tmp_path), **EXACT)
    modules = [{"idx": 0, "type": "sentence_transformers.models.Dense", "path": "2_Dense"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ConfigError, match="'Dense'"):
        LLM(str(tmp_path), **EXACT)
    modules = [{"idx": 0, "type": "sentence_transformers.models.Pooling", "path": "../1_Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ConfigError, match="must be in the model's own"):
        LLM(str(tmp_path), **EXACT)
    (tmp_path / "1_Pooling" / "config.json").unlink()
    (tmp_path / "modules.json").write_text(json.dumps([{**modules[0], "path": "1_Pooling"}]))
    with pytest.raises(ConfigError, match="is missing"):
        LLM(str(tmp_path), **EXACT)
    with closing(LLM(str(tmp_path), **EXACT, pooler_config={"pooling_type": "MEAN"})) as llm:
        assert llm.config.pooling is not None
        assert llm.config.pooling.pooling_type == "mean"
    with closing(LLM(str(tmp_path), **EXACT, runner="generate")) as llm:
        assert llm.config.pooling is None


@pytest.mark.parametrize("kind", ["llama", "opt-post-norm"])
def test_base_models_have_no_head(kind: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    model = {"llama": "LlamaModel", "opt-post-norm": "OPTModel"}[kind]
    reference = checkpoint(tmp_path, kind, model)
    with closing(LLM(str(tmp_path), **EXACT)) as llm, torch.inference_mode():
        (result,) = llm.embed([[7, 8, 9]], use_tqdm=False)
        state = reference(torch.tensor([[7, 8, 9]])).last_hidden_state[0, -1]
        close_to(result.outputs.embedding, F.normalize(state, dim=0))
    with pytest.raises(ConfigError, match=f"{model} does not generate"):
        LLM(str(tmp_path), **EXACT, runner="generate")


def test_a_classifier_can_embed(checkpoint: Checkpoint, tmp_path: Path) -> None:
    reference = checkpoint(tmp_path, "llama", "LlamaForSequenceClassification")
    config = {"pooling_type": "MEAN", "use_activation": False, "dimensions": 8}
    flags = {"convert": "embed", "pooler_config": config, "hf_overrides": {"is_matryoshka": True}}
    with closing(LLM(str(tmp_path), **EXACT, **flags)) as llm, torch.inference_mode():
        (result,) = llm.embed([[7, 8, 9]], use_tqdm=False)
        states = reference.base_model(torch.tensor([[7, 8, 9]])).last_hidden_state[0]  # type: ignore[operator]
        close_to(result.outputs.embedding, states.mean(dim=0)[:8])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"runner": "generate", "convert": "embed"}, "does not pool"),
        ({"runner": "pooling", "convert": "none"}, "--convert embed"),
        ({"pooler_config": {"pooling_type": "MEAN"}}, "--runner pooling"),
        ({"convert": "embed", "pooler_config": {"task": "classify"}}, "--convert for embed"),
        ({"convert": "classify", "pooler_config": {"dimensions": 4}}, "dimensions"),
        ({"convert": "classify"}, "1 missing: score.weight"),
        ({"pooler_config": {"pooling_type": "MAX"}}, "pooling_type"),
        ({"pooler_config": {"logit_sigma": 0}}, "logit_sigma"),
        ({"pooler_config": {"normalise": True}}, "normalise"),
        ({"hf_overrides": {"architectures": ["Qwen3ForSequenceClassification"]}}, "another head"),
        ({"convert": "classify", "hf_overrides": {"is_original_qwen3_reranker": True}}, '"no", "yes"'),
        ({"convert": "classify", "hf_overrides": {"classifier_from_token": ["no such token"]}}, "no token"),
    ],
    ids=str,
)
def test_flags_that_cannot_work(
    flags: dict[str, Any], message: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    checkpoint(tmp_path, "llama", num_hidden_layers=1)
    with pytest.raises(ConfigError, match=message):
        LLM(str(tmp_path), **EXACT, **flags)


def test_pairs_of_a_classifier_are_tokenised_as_pairs(checkpoint: Checkpoint, tmp_path: Path) -> None:
    reference = checkpoint(tmp_path, "llama", "LlamaForSequenceClassification", num_labels=1)
    file = tmp_path / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    content = json.loads(file.read_text())
    specials = {
        name: {"id": name, "ids": [id_], "tokens": [name]} for name, id_ in (("[A]", 11), ("[B]", 12))
    }
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "[A]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [
            {"SpecialToken": {"id": "[A]", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "[B]", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 1}},
            {"SpecialToken": {"id": "[B]", "type_id": 1}},
        ],
        "special_tokens": specials,
    }
    file.write_text(json.dumps(content))
    query, documents = "the red lantern", ["in the harbor", "a river runs"]
    with closing(LLM(str(tmp_path), **EXACT)) as llm:
        for document, result in zip(documents, llm.score(query, documents, use_tqdm=False), strict=True):
            texts = [tokenizer.encode(text, add_special_tokens=False).ids for text in (query, document)]
            assert result.prompt_token_ids == [11, *texts[0], 12, *texts[1], 12]
            close_to([result.outputs.score], logits(reference, result.prompt_token_ids).sigmoid())
        with pytest.raises(InvalidRequest, match="as many"):
            llm.score(["a", "b"], ["c", "d", "e"], use_tqdm=False)


def test_scores_of_a_model_that_embeds_are_cosines(checkpoint: Checkpoint, tmp_path: Path) -> None:
    checkpoint(tmp_path, "llama")
    with closing(LLM(str(tmp_path), **EXACT, runner="pooling")) as llm:
        texts = ["the red lantern", "in the harbor", "a river runs north"]
        query, *others = (
            torch.tensor(result.outputs.embedding) for result in llm.embed(texts, use_tqdm=False)
        )
        results = llm.score(texts[0], texts[1:], use_tqdm=False)
        for vector, result in zip(others, results, strict=True):
            close_to([result.outputs.score], F.cosine_similarity(query, vector, dim=0).reshape(1))
        pairs = llm.score(texts[:2], texts[1:], use_tqdm=False)
        close_to([pairs[1].outputs.score], F.cosine_similarity(*others, dim=0).reshape(1))
