"""The endpoints of pooling models over a real socket: /classify, /pooling, /score and /rerank."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from argosy_engine import LLM
from argosy_engine.params import PoolingParams
from case_tables import wrong_answers
from processes import Server, free_port, running
from random_checkpoints import KINDS, Kind, make_checkpoint

TINY = Path(__file__).parents[2] / "models" / "argosy-tiny"
QUERY = "Where is the red lantern?"
DOCUMENTS = ["A red lantern in the harbor.", "Two", "The river runs north. " * 6]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{{ instruction }}"
)
Post = Callable[..., httpx.Response]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with one label, with the tiny model's tokenizer."""
    path = tmp_path_factory.mktemp("classifier")
    fields = {**KINDS["llama"].fields, "vocab_size": 1024, "num_labels": 1, "num_hidden_layers": 2}
    make_checkpoint(Kind("LlamaConfig", "LlamaForSequenceClassification", fields), path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((TINY / name).read_bytes())
    return path


def serving(model: str, folder: Path, *flags: str) -> Any:
    port = free_port()
    arguments = ["argosy_engine.api.serve", model, "--served-model-name", "m", "--threads", "1", *flags]
    return running([*arguments, "--port", str(port), "--dtype", "float32"], folder / "log", port=port)


def poster(server: Server) -> Post:
    return lambda path, **body: httpx.post(server.url + path, json=body, timeout=60)


@pytest.fixture(scope="module")
def classify(classifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Post]:
    with serving(str(classifier), tmp_path_factory.mktemp("log")) as server:
        yield poster(server)


@pytest.fixture(scope="module")
def embed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Post]:
    flags = "--runner", "pooling", "--chat-template", TEMPLATE
    with serving("builtin://tiny", tmp_path_factory.mktemp("log"), *flags) as server:
        yield poster(server)


def offline(model: str, **flags: Any) -> LLM:
    return LLM(model, dtype="float32", device="cpu", threads=1, num_gpu_blocks_override=64, **flags)


@pytest.fixture(scope="module")
def classifying(classifier: Path) -> Iterator[LLM]:
    with offline(str(classifier), chat_template=TEMPLATE) as llm:
        yield llm


@pytest.fixture(scope="module")
def embedding() -> Iterator[LLM]:
    with offline("builtin://tiny", runner="pooling") as llm:
        yield llm


def near(value: Any) -> Any:
    return pytest.approx(value, abs=1e-4)


def test_labels(classify: Post, classifying: LLM) -> None:
    answer = classify("/classify", model="m", input=DOCUMENTS)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert (body["object"], body["model"], body["id"][:9]) == ("list", "m", "classify-")
    results = classifying.classify(DOCUMENTS, use_tqdm=False)
    for index, (item, result) in enumerate(zip(body["data"], results, strict=True)):
        assert item == {
            "index": index,
            "label": "LABEL_0",
            "probs": near(result.outputs.probs),
            "num_classes": 1,
        }
    tokens = sum(len(result.prompt_token_ids) for result in results)
    assert body["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    again = classify("/v1/classify", model="m", input=DOCUMENTS).json()["data"]
    assert again == [{**item, "probs": near(item["probs"])} for item in body["data"]]
    (raw,) = classify("/classify", input=[5, 6, 7], use_activation=False).json()["data"]
    (expected,) = classifying.classify([[5, 6, 7]], PoolingParams(use_activation=False), use_tqdm=False)
    assert raw["probs"] == near(expected.outputs.probs)


@pytest.mark.parametrize("name", ["activation", "softmax"])
def test_older_names_of_the_activation(name: str, classify: Post) -> None:
    fields: dict[str, Any]
    for path, fields in (
        ("/classify", {"input": QUERY}),
        ("/pooling", {"input": QUERY}),
        ("/score", {"text_1": QUERY, "text_2": DOCUMENTS[0]}),
    ):
        raw = classify(path, use_activation=False, **fields).json()["data"]
        assert raw != classify(path, **fields).json()["data"]
        assert classify(path, **{name: False}, **fields).json()["data"] == raw
        assert classify(path, **{name: True}, use_activation=False, **fields).json()["data"] == raw


def test_scores_of_a_classifier(classify: Post, classifier: Path) -> None:
    with offline(str(classifier)) as llm:
        expected = [result.outputs.score for result in llm.score(QUERY, DOCUMENTS, use_tqdm=False)]
    for path, fields in (
        ("/v1/score", ("queries", "documents")),
        ("/score", ("queries", "items")),
        ("/score", ("text_1", "text_2")),
        ("/score", ("data_1", "data_2")),
    ):
        for query, documents in ((QUERY, DOCUMENTS), ([QUERY] * 3, [{"text": text} for text in DOCUMENTS])):
            body = classify(path, **dict(zip(fields, (query, documents), strict=True))).json()
            assert [item["score"] for item in body["data"]] == near(expected)
            assert [(item["index"], item["object"]) for item in body["data"]] == [
                (index, "score") for index in range(3)
            ]
    order = sorted(range(3), key=expected.__getitem__, reverse=True)
    body = classify("/v1/rerank", query=QUERY, documents=DOCUMENTS).json()
    assert body["results"] == [
        {"index": index, "relevance_score": near(expected[index]), "document": {"text": DOCUMENTS[index]}}
        for index in order
    ]
    body = classify("/v2/rerank", query=QUERY, documents=DOCUMENTS, top_n=1, return_documents=False).json()
    assert body["results"] == [{"index": order[0], "relevance_score": near(expected[order[0]])}]
    assert body["usage"]["prompt_tokens"] > 0


def test_pairs_in_a_template(classifier: Path, classifying: LLM, tmp_path: Path) -> None:
    flags = {"chat_template_kwargs": {"instruction": "Search."}}
    results = classifying.score(QUERY, ["<|im_end|>", DOCUMENTS[0]], use_tqdm=False, **flags)
    expected = (
        f"<|im_start|>query\n{QUERY}<|im_end|>\n<|im_start|>document\n{DOCUMENTS[0]}<|im_end|>\nSearch."
    )
    encode = classifying.renderer.tokenizer.encode
    assert results[1].prompt_token_ids == encode(expected, add_special_tokens=False).ids
    ends = [result.prompt_token_ids.count(2) for result in results]
    assert ends == [2, 2], "a document's text has become a control token"


def test_scores_of_embeddings(embed: Post, embedding: LLM) -> None:
    vectors = [
        np.array(result.outputs.embedding) for result in embedding.embed([QUERY, *DOCUMENTS], use_tqdm=False)
    ]
    expected = [float(vectors[0] @ vector) for vector in vectors[1:]]
    body = embed("/score", text_1=QUERY, text_2=DOCUMENTS).json()
    assert [item["score"] for item in body["data"]] == near(expected)
    assert len({round(value, 3) for value in expected}) == 3
    results = embed("/rerank", query={"text": QUERY}, documents=DOCUMENTS, top_n=2).json()["results"]
    assert [result["relevance_score"] for result in results] == near(sorted(expected, reverse=True)[:2])


@pytest.mark.parametrize("field", ["max_tokens_per_query", "max_tokens_per_doc"])
def test_limits_of_texts(field: str, embed: Post, embedding: LLM) -> None:
    tokenizer = embedding.renderer.tokenizer
    text = DOCUMENTS[2]
    short = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids[:4])
    pair = (text, QUERY) if field == "max_tokens_per_query" else (QUERY, text)
    cut = (short, QUERY) if field == "max_tokens_per_query" else (QUERY, short)
    limited = embed("/score", text_1=pair[0], text_2=pair[1], **{field: 4}).json()
    assert limited["data"] == near_data(embed("/score", text_1=cut[0], text_2=cut[1]).json()["data"])
    assert (
        limited["usage"]["prompt_tokens"]
        < embed("/score", text_1=pair[0], text_2=pair[1]).json()["usage"]["prompt_tokens"]
    )


def near_data(data: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**item, "score": near(item["score"])} for item in data]


def test_vectors_of_either_kind(embed: Post, classify: Post, embedding: LLM, classifying: LLM) -> None:
    (expected,) = embedding.embed(QUERY, use_tqdm=False)
    body = embed("/pooling", input=QUERY).json()
    assert body["data"] == [{"index": 0, "object": "pooling", "data": near(expected.outputs.embedding)}]
    encoded = embed("/pooling", input=QUERY, encoding_format="base64", task="embed").json()["data"][0]["data"]
    assert np.frombuffer(base64.b64decode(encoded), "<f4").tolist() == near(expected.outputs.embedding)
    chat = embed("/pooling", messages=[{"role": "user", "content": "a"}]).json()
    assert len(chat["data"][0]["data"]) == len(expected.outputs.embedding)
    (expected,) = classifying.classify(QUERY, use_tqdm=False)
    assert classify("/pooling", input=QUERY).json()["data"][0]["data"] == near(expected.outputs.probs)


def test_vectors_of_tokens(embed: Post, classify: Post, embedding: LLM, classifying: LLM) -> None:
    for post, llm, task in ((embed, embedding, "token_embed"), (classify, classifying, "token_classify")):
        params = PoolingParams(task=task)  # type: ignore[arg-type]
        (expected,) = llm.encode(QUERY, params, use_tqdm=False)
        data = post("/pooling", input=QUERY, task=task).json()["data"][0]["data"]
        assert len(data) == len(expected.prompt_token_ids)
        assert data == [near(row) for row in expected.outputs.data]
        encoded = post("/pooling", input=QUERY, task=task, encoding_format="base64").json()["data"][0]["data"]
        numbers = np.frombuffer(base64.b64decode(encoded), "<f4")
        assert numbers.reshape(len(data), -1).tolist() == [near(row) for row in data]


@pytest.mark.parametrize(
    ("kind", "path", "body", "remedy"),
    [
        ("classify", "/v1/embeddings", {"input": "a"}, "--convert embed"),
        ("classify", "/pooling", {"input": "a", "task": "embed"}, "--convert embed"),
        ("classify", "/pooling", {"input": "a", "dimensions": 3}, "dimensions"),
        ("classify", "/v1/completions", {"prompt": "a"}, "does not generate"),
        (
            "classify",
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}]},
            "does not generate",
        ),
        (
            "classify",
            "/v1/messages",
            {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3},
            "does not generate",
        ),
        ("embed", "/classify", {"input": "a"}, "--convert classify"),
        ("embed", "/pooling", {"input": "a", "task": "plugin"}, "embed, classify"),
        ("embed", "/pooling", {"input": "a", "task": "token_classify"}, "--convert classify"),
        ("classify", "/pooling", {"input": "a", "task": "token_embed"}, "--convert embed"),
        ("embed", "/v1/completions", {"prompt": "a", "stream": True}, "does not generate"),
    ],
)
def test_what_a_model_does_not_answer(
    kind: str, path: str, body: dict[str, Any], remedy: str, embed: Post, classify: Post
) -> None:
    answer = (embed if kind == "embed" else classify)(path, model="m", **body)
    assert answer.status_code == 400, answer.text
    assert remedy in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/score", {"text_1": "", "text_2": "b"}, "text_1"),
        ("/score", {"text_1": "a", "text_2": ""}, "text_2"),
        ("/score", {"queries": "a", "items": ["b", ""]}, "items[1]"),
        ("/score", {"queries": ["a", ""], "documents": ["b", "c"]}, "queries[1]"),
        ("/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/rerank", {"query": "a", "documents": ["a", ""]}, "documents[1]"),
        ("/v1/embeddings", {"input": ["a", ""]}, "input[1]"),
        ("/pooling", {"input": ""}, "input"),
    ],
    ids=str,
)
def test_an_empty_text_is_named(path: str, body: dict[str, Any], param: str, embed: Post) -> None:
    answer = embed(path, **body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["message"]) == (param, f"{param}: the prompt is empty")


def test_an_empty_pair_is_named(classify: Post) -> None:
    answer = classify("/rerank", query="", documents=["a", ""])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "documents[1]")


def test_a_truncation_beyond_the_context_tells_the_bound(embed: Post) -> None:
    message = embed("/v1/embeddings", input="a", truncate_prompt_tokens=99999).json()["error"]["message"]
    assert message.endswith("this model's context length; it is 99999")


BAD_REQUESTS: list[tuple[str, dict[str, Any], str]] = [
    ("/score", {}, "queries"),
    ("/score", {"queries": "a"}, "documents"),
    ("/score", {"queries": "a", "text_2": "b"}, "queries"),
    ("/score", {"queries": "a", "documents": []}, "documents"),
    ("/score", {"queries": ["a", "b"], "documents": ["c"]}, "queries"),
    ("/score", {"queries": "a", "documents": ["b"] * 1024}, "documents"),
    ("/score", {"queries": "a", "documents": "b" * 100_000}, "documents"),
    ("/score", {"queries": "a", "documents": {"content": [{"type": "image_url"}]}}, "documents"),
    ("/score", {"text_1": "a", "text_2": "b", "max_tokens_per_doc": 1 << 20}, "max_tokens_per_doc"),
    ("/rerank", {"documents": ["a"]}, "query"),
    ("/rerank", {"query": "a"}, "documents"),
    ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
    ("/rerank", {"query": "x" * 100_000, "documents": ["b"] * 1000}, "documents"),
    ("/classify", {}, "input"),
    ("/classify", {"input": "a" * 100_000}, "input"),
    ("/pooling", {"input": "a", "task": "sing"}, "task"),
]


def test_bad_requests_are_named(classify: Post) -> None:
    answers = [classify(path, **body) for path, body, _ in BAD_REQUESTS]
    assert (
        wrong_answers(
            ((path, body), (400, param), (answer.status_code, answer.json().get("error", {}).get("param")))
            for (path, body, param), answer in zip(BAD_REQUESTS, answers, strict=True)
        )
        == {}
    )
