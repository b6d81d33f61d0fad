"""/v1/embeddings over a real socket, with the OpenAI SDK and plain JSON."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import numpy as np
import openai
import pytest
import torch

from argosy_engine import LLM
from argosy_engine.params import PoolingParams
from argosy_protocol.openai import ChatCompletionRequest
from case_tables import wrong_answers
from processes import Server
from served_engine import AUTHORIZED, KEY

TEXTS = ["A red lantern in the harbor.", "Two", "The river runs north. " * 12]


@pytest.fixture
def post(tiny_server: Server) -> Iterator[Any]:
    with httpx.Client(base_url=tiny_server.url, headers=AUTHORIZED, timeout=60) as http:
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


def test_the_sdk_gets_the_offline_vectors(tiny_server: Server, offline: LLM) -> None:
    with openai.OpenAI(base_url=f"{tiny_server.url}/v1", api_key=KEY, max_retries=0) as sdk:
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


BAD_REQUESTS: list[tuple[dict[str, Any], str]] = [
    ({}, "input"),
    ({"input": []}, "input"),
    ({"input": ""}, "input"),
    ({"input": [[]]}, "input[0]"),
    ({"input": ["a", [1]]}, "input"),
    ({"input": [1 << 20]}, "input"),
    ({"input": [5] * 5000}, "input"),
    ({"input": "a", "dimensions": 100000}, "dimensions"),
    ({"input": "a", "dimensions": 0}, "dimensions"),
    ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ({"input": "a", "pooling_type": "max"}, "pooling_type"),
    ({"input": "a", "encoding_format": "bytes"}, "encoding_format"),
    ({"input": "a", "encoding_format": "base64", "embed_dtype": "fp8_e4m3"}, "embed_dtype"),
    ({"input": "a", "truncate_prompt_tokens": 100000}, "truncate_prompt_tokens"),
    ({"input": "a", "messages": [{"role": "user", "content": "b"}]}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": "red " * 20000}]}, "messages"),
    ({"input": "a", "priority": 1}, "priority"),
]


def test_bad_requests_are_named(post: Any) -> None:
    told = []
    for body, param in BAD_REQUESTS:
        answer = post(**body)
        error = answer.json().get("error", {})
        is_helpful = body.get("encoding_format") != "int8" or error["message"].endswith(
            "; give one of float, base64"
        )
        came = (answer.status_code, error.get("type"), error.get("param"), is_helpful)
        told.append((body, (400, "invalid_request_error", param, True), came))
        assert post(input="still alive").status_code == 200, body
    assert wrong_answers(told) == {}


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({}, "<f4"),
        ({"embed_dtype": "float32", "endianness": "big"}, ">f4"),
        ({"embed_dtype": "float16", "endianness": "native"}, "<f2"),
        ({"embed_dtype": "float16", "endianness": "big"}, ">f2"),
        ({"embed_dtype": "bfloat16", "endianness": "little"}, "<u2"),
        ({"embed_dtype": "bfloat16", "endianness": "big"}, ">u2"),
    ],
    ids=str,
)
def test_the_numbers_of_base64(fields: dict[str, Any], dtype: str, post: Any) -> None:
    expected = post(input=TEXTS[0]).json()["data"][0]["embedding"]
    (item,) = post(input=TEXTS[0], encoding_format="base64", **fields).json()["data"]
    numbers = np.frombuffer(base64.b64decode(item["embedding"]), dtype)
    if dtype.endswith("u2"):
        rounded = torch.tensor(numbers.astype("i4")).to(torch.int16).view(torch.bfloat16)
        assert rounded.tolist() == pytest.approx(expected, rel=2**-8, abs=1e-4)
    else:
        assert numbers.tolist() == pytest.approx(expected, abs=1e-3)


def test_a_chat_is_embedded_by_its_template(post: Any, offline: LLM) -> None:
    messages = [{"role": "user", "content": "A red lantern."}]
    text = "<|im_start|>user\nA red lantern.<|im_end|>\n"
    assert offline.renderer.chat_text(
        msgspec.convert({"messages": messages, "add_generation_prompt": False}, ChatCompletionRequest)
    ).endswith(text)
    answer = post(messages=messages).json()
    rendered = offline.renderer.render_chat(
        msgspec.convert({"messages": messages, "add_generation_prompt": False}, ChatCompletionRequest)
    )
    assert answer["usage"]["prompt_tokens"] == len(rendered.token_ids)
    (expected,) = offline.encode([rendered.token_ids], use_tqdm=False)
    assert answer["data"][0]["embedding"] == pytest.approx(expected.outputs.embedding, abs=1e-4)


@pytest.mark.parametrize("side", [None, "right", "left"])
def test_long_inputs_are_cut(side: str | None, post: Any, offline: LLM) -> None:
    ids = offline.renderer.render_text(TEXTS[2]).token_ids
    kept = ids[-7:] if side == "left" else ids[:7]
    fields = {"truncate_prompt_tokens": 7} | ({} if side is None else {"truncation_side": side})
    (expected,) = offline.encode([kept], use_tqdm=False)
    for value in (TEXTS[2], ids):
        answer = post(input=value, **fields).json()
        assert answer["usage"]["prompt_tokens"] == 7
        assert answer["data"][0]["embedding"] == pytest.approx(expected.outputs.embedding, abs=1e-4)
    limit = offline.config.max_model_len
    assert post(input="red " * limit, truncate_prompt_tokens=-1).json()["usage"]["prompt_tokens"] == limit - 1


def test_the_newer_name_of_normalize(post: Any) -> None:
    raw = post(input=TEXTS[0], use_activation=False).json()["data"][0]["embedding"]
    assert sum(value * value for value in raw) > 2
    assert post(input=TEXTS[0], normalize=False).json()["data"][0]["embedding"] == pytest.approx(
        raw, abs=1e-4
    )
    both = post(input=TEXTS[0], normalize=False, use_activation=True).json()["data"][0]["embedding"]
    assert sum(value * value for value in both) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    ("path", "body", "remedy"),
    [
        ("/classify", {"input": "a"}, "--convert classify"),
        ("/pooling", {"input": "a"}, "--runner pooling"),
        ("/v1/score", {"queries": "a", "documents": "b"}, "--runner pooling"),
        ("/rerank", {"query": "a", "documents": ["b"]}, "--runner pooling"),
    ],
)
def test_what_a_generating_model_does_not_answer(
    path: str, body: dict[str, Any], remedy: str, tiny_server: Server
) -> None:
    answer = httpx.post(f"{tiny_server.url}{path}", json=body, headers=AUTHORIZED)
    assert answer.status_code == 400
    assert remedy in answer.json()["error"]["message"]


def test_embeddings_and_generations_run_side_by_side(tiny_server: Server, post: Any) -> None:
    alone = post(input=TEXTS[2]).json()["data"][0]["embedding"]
    with (
        openai.OpenAI(base_url=f"{tiny_server.url}/v1", api_key=KEY, max_retries=0) as sdk,
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


def test_the_key_and_the_model_are_checked(tiny_server: Server, post: Any) -> None:
    assert httpx.post(f"{tiny_server.url}/v1/embeddings", json={"input": "a"}).status_code == 401
    assert post(input="a", model="other").status_code == 404
