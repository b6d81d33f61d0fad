"""Encoders (BERT and its like): vectors and scores are transformers' own, and what they cannot do is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerFast

from argosy_engine import LLM
from argosy_engine.api.doctor import diagnose
from argosy_engine.config import EngineArgs
from argosy_engine.core.proc.core_client import InprocClient
from argosy_engine.errors import ConfigError, InvalidRequest
from argosy_engine.frontend.model_source import budget_table
from argosy_engine.params import PoolingParams
from argosy_engine.sizing.kv_cache_sizing import check_model
from argosy_engine.sizing.resources import DeviceMemory
from encoder_checkpoints import (
    ENCODER_TYPES,
    FIRST,
    LAST,
    PADDING,
    VOCAB_SIZE,
    write_encoder,
    write_tokenizer,
)
from fp8_checkpoints import quantize_checkpoint
from model_types.__main__ import row_of
from processes import free_port, running
from transformers_sweep import EXACT

LENGTHS = (1, 2, 7, 40, 39, 100, 17, 40)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def prompts() -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(5, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


def edit(path: Path, **fields: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def vectors(path: Path, params: PoolingParams | None = None, **flags: Any) -> list[torch.Tensor]:
    with closing(LLM(str(path), **{**EXACT, **flags})) as llm:
        results = llm.encode(prompts(), params or PoolingParams(), use_tqdm=False)
    return [torch.tensor(each.outputs.data) for each in results]


@torch.inference_mode()
def states(reference: Any, token_ids: list[int]) -> torch.Tensor:
    found: torch.Tensor = reference.base_model(input_ids=torch.tensor([token_ids])).last_hidden_state[0]
    return found


def check(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("model_type", ENCODER_TYPES)
def test_vectors_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    reference = write_encoder(model_type, tmp_path)
    expected = [F.normalize(states(reference, prompt)[0], dim=0) for prompt in prompts()]
    check(vectors(tmp_path), expected)


CLASSIFIERS = (
    "bert",
    "camembert",
    "deberta-v2",
    "distilbert",
    "modernbert",
    "mpnet",
    "roberta",
    "xlm-roberta",
)


@pytest.mark.parametrize("model_type", CLASSIFIERS)
def test_scores_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    reference = write_encoder(model_type, tmp_path, "classify", num_labels=3)
    with torch.inference_mode():
        expected = [reference(input_ids=torch.tensor([each])).logits[0].softmax(dim=-1) for each in prompts()]
    check(vectors(tmp_path), expected)


def test_a_head_over_the_mean(tmp_path: Path) -> None:
    reference = write_encoder("modernbert", tmp_path, "classify", num_labels=2, classifier_pooling="mean")
    with torch.inference_mode():
        expected = [reference(input_ids=torch.tensor([each])).logits[0].softmax(dim=-1) for each in prompts()]
    check(vectors(tmp_path), expected)
    message = refusal(tmp_path, pooler_config={"pooling_type": "CLS"})
    assert "the head of ModernBertForSequenceClassification takes MEAN, not CLS" in message


@pytest.mark.parametrize("model_type", ["bert", "modernbert", "mpnet"])
def test_a_masked_language_model_embeds(model_type: str, tmp_path: Path) -> None:
    reference = write_encoder(model_type, tmp_path, "masked")
    expected = [F.normalize(states(reference, prompt)[0], dim=0) for prompt in prompts()]
    check(vectors(tmp_path), expected)


def test_a_classifier_embeds_if_asked(tmp_path: Path) -> None:
    reference = write_encoder("xlm-roberta", tmp_path, "classify", num_labels=1)
    expected = [F.normalize(states(reference, prompt)[0], dim=0) for prompt in prompts()]
    check(vectors(tmp_path, convert="embed"), expected)


@pytest.mark.parametrize("mode", ["cls_token", "mean_tokens", "lasttoken"])
@pytest.mark.parametrize("normalizes", [False, True])
def test_modules_say_how_states_are_pooled(mode: str, normalizes: bool, tmp_path: Path) -> None:
    reference = write_encoder("bert", tmp_path)
    modules = [{"path": "", "type": "sentence_transformers.models.Transformer"}]
    modules.append({"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"})
    if normalizes:
        modules.append({"path": "2_Normalize", "type": "sentence_transformers.models.Normalize"})
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))
    expected = []
    for prompt in prompts():
        own = states(reference, prompt)
        vector = {"cls_token": own[0], "mean_tokens": own.mean(dim=0), "lasttoken": own[-1]}[mode]
        expected.append(F.normalize(vector, dim=0) if normalizes else vector)
    check(vectors(tmp_path), expected)


@pytest.mark.parametrize("model_type", ["bert", "modernbert"])
def test_every_token_has_a_vector(model_type: str, tmp_path: Path) -> None:
    reference = write_encoder(model_type, tmp_path)
    found = vectors(tmp_path, PoolingParams(task="token_embed", use_activation=False))
    check(found, [states(reference, prompt) for prompt in prompts()])


@pytest.mark.parametrize("model_type", ["bert", "xlm-roberta", "mpnet"])
def test_padding_within_a_prompt_counts_as_in_transformers(model_type: str, tmp_path: Path) -> None:
    """RoBERTa's positions leave such tokens out."""
    reference = write_encoder(model_type, tmp_path)
    prompt = [FIRST, 9, PADDING, 8, PADDING, PADDING, 7, LAST]
    with closing(LLM(str(tmp_path), **EXACT)) as llm:
        results = llm.encode(
            [[5, 6, 7], prompt, [PADDING, 8]], PoolingParams(pooling_type="mean"), use_tqdm=False
        )
    check(
        [torch.tensor(results[1].outputs.data)], [F.normalize(states(reference, prompt).mean(dim=0), dim=0)]
    )


def words(*ids: int) -> str:
    return " ".join(f"w{id_}" for id_ in ids)


PAIRS = [(words(5, 6), words(9, 8, 7)), (words(5, 6), words(99)), (words(5, 6), words(*range(20, 90)))]


@torch.inference_mode()
def pair_scores(reference: Any, path: Path, *, has_types: bool) -> list[torch.Tensor]:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(path / "tokenizer.json"),
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
    scores = []
    for pair in PAIRS:
        encoded = tokenizer(*pair, return_tensors="pt")
        types = {"token_type_ids": encoded["token_type_ids"]} if has_types else {}
        scores.append(reference(input_ids=encoded["input_ids"], **types).logits[0].sigmoid())
    return scores


@pytest.mark.parametrize(
    ("model_type", "has_types"),
    [("bert", True), ("xlm-roberta", False), ("modernbert", False), ("mpnet", False)],
)
def test_pairs_have_the_scores_of_transformers(model_type: str, has_types: bool, tmp_path: Path) -> None:
    reference = write_encoder(model_type, tmp_path, "classify", num_labels=1)
    expected = pair_scores(reference, tmp_path, has_types=has_types)
    with closing(LLM(str(tmp_path), **EXACT)) as llm:
        for _ in range(2):  # slots that held pairs are used again
            results = llm.score(PAIRS[0][0], [document for _, document in PAIRS], use_tqdm=False)
            check([torch.tensor([each.outputs.score]) for each in results], expected)
            longer = list(range(5, 100))
            alone = llm.encode([longer], use_tqdm=False)
            with torch.inference_mode():
                plain = reference(input_ids=torch.tensor([longer])).logits[0].sigmoid()
            check([torch.tensor(alone[0].outputs.data)], [plain])


def test_types_matter_to_bert_and_are_left_out_if_the_tokenizer_says_so(tmp_path: Path) -> None:
    reference = write_encoder("bert", tmp_path, "classify", num_labels=1)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"model_input_names": ["input_ids", "attention_mask"]})
    )
    expected = pair_scores(reference, tmp_path, has_types=False)
    with closing(LLM(str(tmp_path), **EXACT)) as llm:
        results = llm.score(PAIRS[0][0], [document for _, document in PAIRS], use_tqdm=False)
    found = [torch.tensor([each.outputs.score]) for each in results]
    check(found, expected)
    typed = pair_scores(reference, tmp_path, has_types=True)
    assert max(float((one - other).abs()) for one, other in zip(found, typed, strict=True)) > 1e-3


def test_prompts_fill_steps_whole(tmp_path: Path) -> None:
    """A budget below the longest prompt is raised to it; caps on chunks and a prefix cache change nothing."""
    reference = write_encoder("bert", tmp_path)
    flags: dict[str, Any] = {
        "max_num_batched_tokens": 48,
        "max_num_seqs": 3,
        "long_prefill_token_threshold": 16,
    }
    expected = [F.normalize(states(reference, prompt)[-1], dim=0) for prompt in prompts()]
    with closing(LLM(str(tmp_path), **EXACT, **flags, pooler_config={"pooling_type": "LAST"})) as llm:
        assert llm.config.max_num_batched_tokens == 128
        for _ in range(2):
            results = llm.encode(prompts(), use_tqdm=False)
            check([torch.tensor(each.outputs.data) for each in results], expected)
            assert not any(each.num_cached_tokens for each in results)


@pytest.mark.parametrize(("model_type", "most"), [("bert", 128), ("xlm-roberta", 126), ("mpnet", 126)])
def test_a_prompt_that_is_too_long_is_refused(model_type: str, most: int, tmp_path: Path) -> None:
    reference = write_encoder(model_type, tmp_path)
    with closing(LLM(str(tmp_path), **EXACT)) as llm:
        longest = [7] * most
        (result,) = llm.encode([longest], use_tqdm=False)
        check([torch.tensor(result.outputs.data)], [F.normalize(states(reference, longest)[0], dim=0)])
        with pytest.raises(InvalidRequest, match=f"the prompt has {most + 1}; shorten it"):
            llm.encode([[7] * (most + 1)], use_tqdm=False)


def test_bfloat16_is_near(tmp_path: Path) -> None:
    reference = write_encoder("bert", tmp_path, "classify", num_labels=3)
    with torch.inference_mode():
        expected = [reference(input_ids=torch.tensor([each])).logits[0].softmax(dim=-1) for each in prompts()]
    for ours, theirs in zip(vectors(tmp_path, dtype="bfloat16"), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=0.05, rtol=0.05)


def test_an_fp8_encoder(tmp_path: Path) -> None:
    write_encoder("eurobert", tmp_path)
    quantize_checkpoint(tmp_path, "fp8")
    write_tokenizer(tmp_path / "widened")
    for found, plain in zip(vectors(tmp_path), vectors(tmp_path / "widened"), strict=True):
        assert torch.equal(found, plain)


def refusal(path: Path, **flags: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        InprocClient(EngineArgs.of(model=str(path), **{**EXACT, **flags}))
    return str(caught.value)


def test_generation_is_refused(tmp_path: Path) -> None:
    write_encoder("bert", tmp_path)
    assert "BertModel does not generate; leave --runner generate out" in refusal(tmp_path, runner="generate")
    with (
        closing(LLM(str(tmp_path), **EXACT)) as llm,
        pytest.raises(InvalidRequest, match="served for pooling"),
    ):
        llm.generate([[5, 6]], use_tqdm=False)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"is_decoder": True}, "is_decoder: an encoder is served for pooling"),
        ({"architectures": ["BertForTokenClassification"]}, "BertForTokenClassification is not supported"),
        ({"architectures": ["RobertaModel"]}, "RobertaModel is not supported: transformers"),
        ({"num_hidden_layers": 4}, "lacks encoder.layer.3."),
        ({"num_hidden_layers": 2}, "has what the model does not use: encoder.layer.2."),
        ({"vocab_size": 200}, "has in another shape"),
        ({"auto_map": {"AutoModel": "modeling.Bert"}}, "that is never done"),
    ],
)
def test_configs_that_do_not_fit_are_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_encoder("bert", tmp_path)
    edit(tmp_path, **fields)
    assert message in refusal(tmp_path)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"model_impl": "argosy"},
            "BertModel is not an architecture of argosy's own; leave out --model-impl argosy",
        ),
        ({"convert": "classify"}, "BertModel has no head for labels"),
        ({"kv_cache_dtype": "fp8", "attention_backend": "torch"}, "use --kv-cache-dtype auto"),
        ({"hf_overrides": {"architectures": ["RobertaModel"]}}, "is not a BertModel with another head"),
        ({"hf_overrides": {"classifier_from_token": ["w7"], "is_causal": 1}}, "is_causal"),
    ],
)
def test_flags_that_do_not_work_are_refused(flags: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_encoder("bert", tmp_path)
    assert message in refusal(tmp_path, **flags)


def test_labels_by_tokens_are_of_decoders(tmp_path: Path) -> None:
    write_encoder("bert", tmp_path, "classify", num_labels=1)
    overrides = {"classifier_from_token": ["w7"]}
    assert "an encoder has a head of its own" in refusal(tmp_path, hf_overrides=overrides)


@pytest.mark.parametrize(
    ("flag", "message"),
    [("tensor_parallel_size", "an encoder runs on one"), ("pipeline_parallel_size", "no stages")],
)
def test_it_runs_on_one_device(flag: str, message: str, tmp_path: Path) -> None:
    write_encoder("bert", tmp_path)
    with pytest.raises(ConfigError, match=message):
        check_model(EngineArgs.of(model=str(tmp_path), **{flag: 2}))


@pytest.mark.parametrize("model_type", ENCODER_TYPES)
def test_the_page_of_model_types_says_what_runs_each(model_type: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "model-types.md").read_text("utf-8")
    assert row_of(model_type) in page.splitlines(), "run make generate"


def test_doctor_sizes_an_encoder(tmp_path: Path) -> None:
    write_encoder("bert", tmp_path)
    found = diagnose(
        EngineArgs.of(model=str(tmp_path), **EXACT), DeviceMemory("cpu", "a CPU", 8 << 30, 8 << 30)
    )
    assert found.fits
    assert found.budget is not None
    assert found.budget.max_model_len == 128
    assert not found.budget.block_bytes
    assert found.kv_cache_tokens == found.max_concurrency == 0
    assert "KV cache              none  an encoder computes each prompt whole" in budget_table(found.budget)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Any]]:
    """(URL of a server, the encoder in transformers)"""
    path = tmp_path_factory.mktemp("encoder")
    reference = write_encoder("bert", path)
    port = free_port()
    arguments = ["argosy_engine.api.serve", str(path), "--served-model-name", "m", "--threads", "1"]
    flags = ["--port", str(port), "--dtype", "float32", "--device", "cpu"]
    with running([*arguments, *flags], path / "log", port=port) as server:
        yield server.url, reference


def test_endpoints_of_an_encoder(served: tuple[str, Any]) -> None:
    url, reference = served
    texts = [words(5, 6, 7), words(*range(30, 70))]
    answer = httpx.post(f"{url}/v1/embeddings", json={"model": "m", "input": texts})
    assert answer.status_code == 200, answer.text
    ids = [[FIRST, 5, 6, 7, LAST], [FIRST, *range(30, 70), LAST]]
    expected = [F.normalize(states(reference, each)[0], dim=0) for each in ids]
    check([torch.tensor(each["embedding"]) for each in answer.json()["data"]], expected)
    pooled = httpx.post(f"{url}/pooling", json={"model": "m", "input": texts}).json()["data"]
    check([torch.tensor(each["data"]) for each in pooled], expected)
    score = httpx.post(f"{url}/score", json={"model": "m", "text_1": texts[0], "text_2": texts[1]}).json()
    check([torch.tensor(score["data"][0]["score"])], [expected[0] @ expected[1]])


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "w5"}]}, "embed"),
        ("/v1/completions", {"prompt": "w5"}, "embed"),
        ("/classify", {"input": "w5"}, "m does not classify: that needs a checkpoint with a head"),
    ],
)
def test_what_an_encoder_does_not_do_is_refused(
    path: str, fields: dict[str, Any], message: str, served: tuple[str, Any]
) -> None:
    url, _ = served
    answer = httpx.post(url + path, json={"model": "m", **fields})
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]


def test_a_text_that_is_too_long_is_refused_before_it_runs(served: tuple[str, Any]) -> None:
    url, _ = served
    answer = httpx.post(f"{url}/v1/embeddings", json={"model": "m", "input": words(*[9] * 127)})
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert "maximum context length is 128 tokens" in message
    assert message.endswith(
        "set truncate_prompt_tokens: the number of tokens that stay, or -1 for all that fit"
    )
