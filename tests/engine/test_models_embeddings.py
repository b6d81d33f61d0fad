"""/v1/embeddings over a real socket, with the OpenAI SDK and plain JSON."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from argosy_engine import LLM
from argosy_engine.params.pooling_params import PoolingParams
from processes import Server, free_port, running

KEY = "test-key"
TEXTS = ["A red lantern in the harbor.", "Two", "The river runs north. " * 12]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port = free_port()
    arguments = ["argosy_engine.api.serve", "builtin://tiny", "--served-model-name", "tiny", "--threads", "1"]
    with running(
        [*arguments, "--port", str(port), "--dtype", "float32", "--hf-overrides", '{"is_matryoshka": true}'],
        tmp_path_factory.mktemp("serve") / "log",
        port=port,
        env={"ARGOSY_API_KEY": KEY},
    ) as up:
        yield up


@pytest.fixture
def post(server: Server) -> Iterator[Any]:
    with httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {KEY}"}, timeout=60) as http:
        yield lambda **body: http.post("/v1/embeddings", json={"model": "tiny", **body})


@pytest.fixture(scope="module")
def offline() -> Iterator[LLM]:
    overrides = {"is_matryoshka": True}
    llm = LLM(
        "builtin://tiny",
        dtype="float32",
        device="cpu",
        threads=1,
        num_gpu_blocks_override=64,
        hf_overrides=overrides,
    )
    yield llm
    llm.close()


def test_the_sdk_gets_the_offline_vectors(server: Server, offline: LLM) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as sdk:
        answer = sdk.embeddings.create(model="tiny", input=TEXTS)  # asks for base64
    expected = offline.embed(TEXTS, use_tqdm=False)
    assert [item.index for item in answer.data] == [0, 1, 2]
    for item, result in zip(answer.data, expected, strict=True):
        assert item.embedding == pytest.approx(result.outputs.embedding, abs=1e-4)
    assert answer.usage.prompt_tokens == sum(len(result.prompt_token_ids) for result in expected)


def test_every_form_of_input_and_option(post: Any, offline: LLM) -> None:
    ids = [offline.renderer.render_text(text).token_ids for text in TEXTS]
    mean = PoolingParams(pooling_type="mean", normalize=False, dimensions=9)
    options = {"pooling_type": "mean", "normalize": False, "dimensions": 9}
    expected = [result.outputs.embedding for result in offline.encode(TEXTS, mean, use_tqdm=False)]
    for value in (TEXTS, ids):
        data = post(input=value, **options).json()["data"]
        for item, vector in zip(data, expected, strict=True):
            assert item["embedding"] == pytest.approx(vector, abs=1e-4)
    for value in (TEXTS[0], ids[0]):
        (item,) = post(input=value, encoding_format="base64", **options).json()["data"]
        assert struct.unpack("<9f", base64.b64decode(item["embedding"])) == pytest.approx(
            expected[0], abs=1e-4
        )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a", [1]]}, "input"),
        ({"input": [1 << 20]}, "input"),
        ({"input": [5] * 5000}, "input"),
        ({"input": "a", "dimensions": 100000}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "pooling_type": "cls"}, "pooling_type"),
    ],
    ids=str,
)
def test_bad_requests_are_named(body: dict[str, Any], param: str | None, post: Any) -> None:
    answer = post(**body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert post(input="still alive").status_code == 200


def test_embeddings_and_generations_run_side_by_side(server: Server, post: Any) -> None:
    alone = post(input=TEXTS[2]).json()["data"][0]["embedding"]
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as sdk,
        ThreadPoolExecutor(8) as pool,
    ):
        texts = [
            pool.submit(sdk.completions.create, model="tiny", prompt=TEXTS[0], max_tokens=20, temperature=0)
            for _ in range(4)
        ]
        vectors = [pool.submit(post, input=TEXTS[2]) for _ in range(4)]
        assert len({future.result().choices[0].text for future in texts}) == 1
        for future in vectors:
            assert future.result().json()["data"][0]["embedding"] == pytest.approx(alone, abs=1e-4)


def test_the_key_and_the_model_are_checked(server: Server, post: Any) -> None:
    assert httpx.post(f"{server.url}/v1/embeddings", json={"input": "a"}).status_code == 401
    assert post(input="a", model="other").status_code == 404
