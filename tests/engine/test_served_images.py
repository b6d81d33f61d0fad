"""Chats with pictures through a server: tokens are those of transformers' processor and whole model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from transformers import AutoModelForImageTextToText, Qwen2VLImageProcessorPil

from image_processors import PLACEHOLDER, make_model, picture, user
from processes import descendants, free_port, running

COUNT = 8
COUNTED = (
    "vllm:mm_cache_queries", "vllm:mm_cache_hits", "argosy_engine_encoder_cache_queries",
    "argosy_engine_encoder_cache_hits",
)  # fmt: skip


def write_model(folder: Path) -> Any:
    """Write a tiny Qwen2.5-VL with its processor; return transformers' model of it."""
    make_model(folder)
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")
    return model.float().eval()


@torch.inference_mode()
def reference(folder: Path, model: Any, content: list[str | Image.Image]) -> list[int]:
    """Return the greedy tokens after a user's message, none of them the placeholder of images."""
    images = [each for each in content if not isinstance(each, str)]
    given: dict[str, torch.Tensor] = {}
    if images:
        given = dict(Qwen2VLImageProcessorPil.from_pretrained(folder)(images, return_tensors="pt"))
    counts = iter((given["image_grid_thw"].prod(-1) // 4).tolist() if images else ())
    parts = [
        each if isinstance(each, str) else f"<|vision_start|>{PLACEHOLDER * next(counts)}<|vision_end|>"
        for each in content
    ]
    text = f"<|im_start|>user\n{''.join(parts)}<|im_end|>\n<|im_start|>assistant\n"
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    placeholder = model.config.image_token_id
    for _ in range(COUNT):
        model.base_model.rope_deltas = None
        found = torch.tensor([ids])
        types = {"mm_token_type_ids": (found == placeholder).int()} if images else {}
        logits = model(input_ids=found, use_cache=False, **given, **types).logits[0, -1]
        logits[placeholder] = -torch.inf
        ids.append(int(logits.argmax()))
    return ids[-COUNT:]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "flags",
    [(), ("--api-server-count", "2", "--max-num-batched-tokens", "64", "--mm-tensor-ipc", "torch_shm")],
    ids=str,
)
def test_a_server_sees_pictures(flags: tuple[str, ...], tmp_path: Path) -> None:
    folder, log = tmp_path / "model", tmp_path / "log"
    model = write_model(folder)
    a, b, c = picture(90, 60, 1), picture(90, 60, 2), picture(40, 70, 3)
    chats: list[list[str | Image.Image]] = [
        ["What is this?", a],
        ["What is this?", b],
        [a, "and", c, "and", b, "?"],
        ["Nothing to see"],
        ["What is this?", a],
    ]
    port = free_port()
    command = [
        "argosy_engine.api.serve",
        "--model",
        str(folder),
        "--served-model-name",
        "seer",
    ]
    command += ["--port", str(port), "--device", "cpu", "--threads", "1", "--dtype", "float32"]
    command += ["--max-model-len", "1024", "--num-gpu-blocks-override", "200", *flags]
    image_token = model.config.image_token_id
    with running(command, log, port=port) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        for content in chats:
            body = {
                "model": "seer", "messages": [user(*content)], "temperature": 0, "max_tokens": COUNT,
                "ignore_eos": True, "return_token_ids": True, "logit_bias": {str(image_token): -100},
            }  # fmt: skip
            answer = client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            (choice,) = answer.json()["choices"]
            assert choice["token_ids"] == reference(folder, model, content)
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, (
            "the last chat was the first"
        )
        metrics = client.get("/metrics").text
        found = {
            name: sum(map(float, re.findall(rf"^{name}_total\{{.*\}} (\S+)$", metrics, re.M)))
            for name in COUNTED
        }
        assert found["vllm:mm_cache_queries"] == 6
        assert found["vllm:mm_cache_hits"] == 3 or (flags and found["vllm:mm_cache_hits"] < 3), (
            "of two processes"
        )
        assert found["argosy_engine_encoder_cache_queries"] == 5, (
            "the last chat's image was in the prefix cache"
        )
        assert found["argosy_engine_encoder_cache_hits"] == 2
        mapped = [
            each
            for each in (server.process.pid, *descendants(server.process.pid))
            if "argosy-image" in Path(f"/proc/{each}/maps").read_text()
        ]
        assert bool(mapped) == ("torch_shm" in flags), "files of images that an API process keeps"
    assert "travel in frames" not in log.read_text()
