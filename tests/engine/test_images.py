"""Images in prompts: greedy tokens against those of transformers' whole model, for each kind of wrapper."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import time
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from argosy_engine.attention.cpu_attn import attend_segments
from argosy_engine.config import EngineArgs
from argosy_engine.core import engine_core, steps
from argosy_engine.core.proc.core_client import InprocClient
from argosy_engine.errors import ConfigError, ResourceBusy
from argosy_engine.messages import EngineCoreRequest, MediaTensor, MultimodalFeature
from argosy_engine.model_configs.transformers_config import read_hf_config
from argosy_engine.model_configs.vision_config import (
    SEEING_BY_TRANSFORMERS,
    SEEING_WRAPPERS,
    VisionSpec,
    largest_image,
)
from argosy_engine.models import image_encoder
from argosy_engine.models.config_file import load_model_config
from argosy_engine.models.image_encoder import ImageEncoder
from argosy_engine.native.library import kernels
from argosy_engine.params import SamplingParams
from argosy_engine.worker.image_inputs import divided
from image_checkpoints import (
    Image,
    generated,
    num_embeds,
    random_image,
    reference_tokens,
    requests_of,
)
from preemptions import PreemptionCounter
from thread_workers import thread_workers
from transformers_checkpoints import architecture_of, write_checkpoint

TYPES = (
    *(
        "gemma3",
        "glm4v",
        "glm4v_moe",
        "idefics3",
        "internvl",
        "llama4",
        "llava",
        "llava_next",
        "llava_onevision",
        "mistral3",
    ),
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "smolvlm"),
)
FOREIGN = ("aria", "aya_vision", "cohere2_vision", "deepseek_vl", "got_ocr2", "ovis2")
"""Those whose decoder is transformers'."""
SEGMENTS_OF_LAYERS = {
    "qwen2_5_vl": [1, 1],
    "qwen3_vl": [1, 1],
    "gemma3": [1, 1],
    "mistral3": [],
    "internvl": [1, 1],
    "smolvlm": [2, 2],
}
"""Calls of the kernels for an image, each with how many images, windows or parts of images are attended to."""
COUNT = 8
_OF_TEXT = re.compile(r"language_model|text_model|lm_head|^model\.(layers|embed_tokens|norm)\.")
"""Names of the tensors of decoders."""
EXACT: dict[str, Any] = {"dtype": "float32", "device": "cpu", "threads": 1, "max_model_len": 256}
Prompt = list[list[int] | Image]


def written(model_type: str, path: Path) -> Any:
    """Write a checkpoint; return the whole model of transformers."""
    write_checkpoint(model_type, path)
    model: Any = AutoModelForImageTextToText.from_pretrained(path, attn_implementation="eager")
    return model.float().eval()


def prompts_of(model: Any) -> list[Prompt]:
    """Return prompts with one image, three, none; with another image of one's size; and one of them again."""
    rng = random.Random(1)

    def text(count: int) -> list[int]:
        return [rng.randrange(30, 300) for _ in range(count)]

    a, b, c = (
        random_image(model, name, seed, rows, columns)
        for name, seed, rows, columns in (("a", 1, 4, 6), ("b", 2, 4, 6), ("c", 3, 6, 2))
    )
    one: Prompt = [text(5), a, text(7)]
    return [
        one,
        [text(5), a, text(3), b, text(2), c, text(4)],
        [text(20)],
        [a, text(3)],
        [one[0], b, one[2]],
        one,
    ]


def client_of(path: Path, **flags: Any) -> InprocClient:
    return InprocClient(EngineArgs.of(model=str(path), **{**EXACT, "num_gpu_blocks_override": 200, **flags}))


@pytest.mark.parametrize("model_type", [*TYPES, *FOREIGN])
def test_greedy_tokens_are_those_of_the_whole_model(model_type: str, tmp_path: Path) -> None:
    model = written(model_type, tmp_path)
    prompts = prompts_of(model)
    expected = [reference_tokens(model, each, COUNT) for each in prompts]
    assert expected[0] != expected[4] or model_type == "ovis2", (
        "the image does not matter"
    )  # Ovis 2's are faint
    with closing(client_of(tmp_path)) as client:
        assert generated(client, list(requests_of(model, prompts, COUNT))) == expected
        assert generated(client, list(requests_of(model, prompts, COUNT, 10))) == expected, "cached"
    with closing(client_of(tmp_path, max_num_batched_tokens=16, max_num_seqs=8)) as client:
        assert generated(client, list(requests_of(model, prompts, COUNT))) == expected, "in chunks"


def test_every_wrapper_that_sees_is_tried() -> None:
    assert {architecture_of(each) for each in TYPES} == SEEING_WRAPPERS
    assert {architecture_of(each) for each in FOREIGN} == SEEING_BY_TRANSFORMERS


@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen3_5", "mistral3"])
@pytest.mark.parametrize(
    "flags",
    [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"async_scheduling": False}],
    ids=str,
)
def test_of_several_ranks_each_encodes(model_type: str, flags: dict[str, Any], tmp_path: Path) -> None:
    model = written(model_type, tmp_path)
    prompts = prompts_of(model)[:3]
    expected = [reference_tokens(model, each, COUNT) for each in prompts]
    with closing(client_of(tmp_path, max_num_batched_tokens=32, max_num_seqs=8, **flags)) as client:
        assert generated(client, list(requests_of(model, prompts, COUNT))) == expected


@pytest.mark.parametrize(
    ("model_type", "flags"),
    [
        ("qwen3_vl", {"pipeline_parallel_size": 2}),
        ("qwen3_vl", {"pipeline_parallel_size": 4, "max_num_batched_tokens": 16}),
        ("qwen3_vl", {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "mm_encoder_tp_mode": "data"}),
        ("gemma3", {"pipeline_parallel_size": 2}),
        ("qwen3_5", {"pipeline_parallel_size": 2}),
    ],
    ids=str,
)
def test_the_first_stage_of_a_pipeline_encodes(
    model_type: str, flags: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others get what their layers add, which is the case with the second one of Qwen3-VL."""
    model = written(model_type, tmp_path)
    prompts = prompts_of(model)
    expected = [reference_tokens(model, each, COUNT) for each in prompts]
    loaded: list[Path] = []
    load = image_encoder.load_image_encoder

    def noted(path: Path, *args: Any, **kwargs: Any) -> ImageEncoder | None:
        loaded.append(path)
        return load(path, *args, **kwargs)

    monkeypatch.setattr(image_encoder, "load_image_encoder", noted)
    with thread_workers(), closing(client_of(tmp_path, max_num_seqs=8, **flags)) as client:
        assert generated(client, list(requests_of(model, prompts, COUNT))) == expected
    assert len(loaded) == flags.get("tensor_parallel_size", 1)


@pytest.mark.parametrize("model_type", ["qwen3_vl", "gemma3"])
def test_ranks_share_the_images_of_a_step(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = written(model_type, tmp_path)
    prompts = prompts_of(model)[1:3]  # with three images, in one step
    expected = [reference_tokens(model, each, COUNT) for each in prompts]
    encode = ImageEncoder.encode
    shares: dict[ImageEncoder, list[bytes]] = defaultdict(list)

    def noted(self: ImageEncoder, inputs: Any, num_embeds: int) -> torch.Tensor:
        shares[self].append(inputs["pixel_values"].numpy().tobytes())
        return encode(self, inputs, num_embeds)

    monkeypatch.setattr(ImageEncoder, "encode", noted)
    flags: dict[str, Any] = {"tensor_parallel_size": 2, "mm_encoder_tp_mode": "data"}
    with thread_workers(), closing(client_of(tmp_path, **flags)) as client:
        assert generated(client, list(requests_of(model, prompts, COUNT))) == expected
    one, two = shares.values()
    assert sorted(map(len, (one, two))) == [1, 2]
    assert not {*one} & {*two}


def test_images_are_divided_by_their_costs() -> None:
    assert divided([5, 1, 9, 3], 2) == [1, 1, 0, 1]
    assert divided([4, 4, 4], 2) == [0, 1, 0]
    assert divided([7], 3) == [0]
    assert divided([], 2) == []


@pytest.mark.skipif(kernels() is None, reason="no variant of the kernels for this CPU")
@pytest.mark.parametrize(("model_type", "segments"), list(SEGMENTS_OF_LAYERS.items()))
def test_encoders_attend_by_our_kernels(
    model_type: str, segments: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All windows and images of a layer in one call; but where a module has a mask, it is torch's to honour."""
    model = written(model_type, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    spec = load_model_config(tmp_path).vision
    assert spec is not None
    image = random_image(model, "an image", 1)
    calls: list[int] = []

    def counted(*args: Any) -> torch.Tensor:
        calls.append(len(args[4]) - 1)
        return attend_segments(*args)

    monkeypatch.setattr(image_encoder, "attend_segments", counted)
    made = []
    ours = image_encoder.use_kernels
    for use_kernels in (lambda _: None, ours):
        monkeypatch.setattr(image_encoder, "use_kernels", use_kernels)
        encoder = image_encoder.load_image_encoder(
            tmp_path, spec, config["text_config"]["hidden_size"],
            dtype=torch.float32, device=torch.device("cpu"), seed=None,
        )  # fmt: skip
        assert encoder is not None
        made.append(encoder.encode(image.inputs, num_embeds(model, image)))
        assert calls == ([] if use_kernels is not ours else segments), calls
    torch.testing.assert_close(made[0], made[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("flags", [{"attention_backend": "torch"}, {"max_num_batched_tokens": 16}], ids=str)
def test_tokens_of_an_image_attend_to_all_of_it(flags: dict[str, Any], tmp_path: Path) -> None:
    model = written("gemma3", tmp_path)
    prompts = prompts_of(model)
    expected = [reference_tokens(model, each, COUNT) for each in prompts]
    with closing(client_of(tmp_path, max_num_seqs=4, **flags)) as client:
        assert generated(client, list(requests_of(model, prompts, COUNT))) == expected
        assert generated(client, list(requests_of(model, prompts, COUNT, 10))) == expected, "cached"


def test_an_image_that_no_step_has_room_for_is_refused(tmp_path: Path) -> None:
    written("gemma3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "mm_tokens_per_image": 36}))
    model: Any = AutoModelForImageTextToText.from_pretrained(tmp_path, attn_implementation="eager").eval()
    request = next(iter(requests_of(model, prompts_of(model), COUNT)))
    with closing(client_of(tmp_path, max_num_batched_tokens=32, max_num_seqs=4)) as client:
        with pytest.raises(ValueError, match="36 tokens of an image"):
            client.add_request(request)
        assert generated(client, list(requests_of(model, [[[40, 41, 42]]], COUNT)))


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "llava", "gemma3"])
def test_a_request_that_is_preempted_sees_its_images_again(model_type: str, tmp_path: Path) -> None:
    model = written(model_type, tmp_path)
    prompts = [each for each in prompts_of(model) if len(each) > 1]
    expected = [reference_tokens(model, each, 24) for each in prompts]
    with closing(client_of(tmp_path, num_gpu_blocks_override=9, max_model_len=96)) as client:
        counter = PreemptionCounter(client)
        assert generated(client, list(requests_of(model, prompts, 24))) == expected
        assert counter.total > 0


@pytest.mark.parametrize("model_type", ["qwen3_vl", "gemma3"])
def test_a_stream_goes_on_where_another_engine_has_left_it(model_type: str, tmp_path: Path) -> None:
    model = written(model_type, tmp_path)
    prompt = prompts_of(model)[1]
    expected = reference_tokens(model, prompt, COUNT)
    (request,) = requests_of(model, [prompt], COUNT)
    request.resume_token_ids = expected[:3]
    with closing(client_of(tmp_path, max_num_batched_tokens=16, max_num_seqs=8)) as client:
        assert generated(client, [request]) == [expected[3:]]


def test_outputs_are_dropped_when_room_is_needed(tmp_path: Path) -> None:
    model = written("qwen2_5_vl", tmp_path)
    flags = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "max_model_len": 48}
    with closing(client_of(tmp_path, **flags)) as client:
        for seed in range(12):  # of six embeddings each, where 48 fit
            prompt: Prompt = [[40, 41], random_image(model, f"image {seed}", seed), [42 + seed]]
            (found,) = generated(client, list(requests_of(model, [prompt], 3, seed)))
            assert found == reference_tokens(model, prompt, 3)


def test_an_item_that_cannot_be_encoded_ends_its_requests_alone(tmp_path: Path) -> None:
    model = written("qwen2_5_vl", tmp_path)
    prompts = prompts_of(model)
    good, bad = (next(iter(requests_of(model, [prompts[index]], COUNT, index))) for index in (1, 4))
    torn = MediaTensor("float32", (1, 5), b"\0" * 20)
    bad.mm_features = [
        replace(each, identifier="torn", inputs={**each.inputs, "pixel_values": torn})
        for each in bad.mm_features
    ]
    twin = replace(bad, request_id="twin")
    with closing(client_of(tmp_path)) as client:
        for request in (good, bad, twin):
            client.add_request(request)
        tokens: dict[str, list[int]] = {}
        errors: dict[str, str] = {}
        while client.has_work:
            for output in client.step().outputs:
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.error is not None:
                    errors[output.request_id] = output.error
        assert errors.keys() == {"4", "twin"}
        assert "could not be encoded" in errors["twin"]
        assert tokens[good.request_id] == reference_tokens(model, prompts[1], COUNT)
        again = replace(bad, request_id="again", mm_features=[])
        (found,) = generated(client, [again])  # nothing of the bad one was kept
        assert len(found) == COUNT


@pytest.mark.parametrize(
    ("flags", "failing"),
    [
        ({"async_scheduling": False}, 0),
        ({"async_scheduling": True}, 0),
        ({"tensor_parallel_size": 2}, 0),
        ({"tensor_parallel_size": 2}, 1),
        ({"tensor_parallel_size": 2, "mm_encoder_tp_mode": "data"}, 0),
        ({"pipeline_parallel_size": 2}, 0),
    ],
    ids=str,
)
def test_an_item_without_memory_ends_its_requests_alone(
    flags: dict[str, Any], failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the next step, which computes more of it, is planned already, or if only one of two ranks has none."""
    model = written("qwen2_5_vl", tmp_path)
    encode, texts, calls = ImageEncoder.encode, list(range(60, 67)), itertools.count()
    good, bad = ([texts, *prompts_of(model)[index]] for index in (4, 0))

    def without_memory(self: ImageEncoder, inputs: Any, num_embeds: int) -> torch.Tensor:
        if inputs["pixel_values"].numpy().tobytes() == lacking.data and next(calls) == failing:
            raise torch.OutOfMemoryError("no memory")
        return encode(self, inputs, num_embeds)

    monkeypatch.setattr(ImageEncoder, "encode", without_memory)
    flags = {"max_num_batched_tokens": 16, "max_num_seqs": 4, **flags}
    with thread_workers(), closing(client_of(tmp_path, **flags)) as client:
        requests = [
            *requests_of(model, [bad], COUNT, 0),
            *requests_of(model, [bad], COUNT, 1),
            *requests_of(model, [good], COUNT, 2),
        ]
        lacking = requests[0].mm_features[0].inputs["pixel_values"]
        for request in requests:
            client.add_request(request)
        errors: dict[str, str] = {}
        tokens: list[int] = []
        while client.has_work:
            for output in client.step().outputs:
                if output.error is not None:
                    errors[output.request_id] = output.error
                tokens += output.new_token_ids
        assert errors.keys() == {request.request_id for request in requests[:2]}
        assert all("not enough memory" in error for error in errors.values())
        assert tokens == reference_tokens(model, good, COUNT)
        client.core.scheduler.check()


def test_an_image_of_a_step_that_computes_nothing_is_encoded_later(tmp_path: Path) -> None:
    """The first request holds the blocks that the second one needs, until its last token arrives."""
    model = written("qwen2_5_vl", tmp_path)
    (first,) = requests_of(model, [[list(range(40, 110))]], 1, 1)
    prompt = [*prompts_of(model)[0], list(range(60, 90))]
    (second,) = requests_of(model, [prompt], COUNT, 2)
    flags = {"num_gpu_blocks_override": 7, "max_model_len": 80, "enable_prefix_caching": False}
    with closing(client_of(tmp_path, async_scheduling=True, **flags)) as client:
        client.add_request(first)
        client.step()
        client.add_request(second)
        tokens: list[int] = []
        while client.has_work:
            for output in client.step().outputs:
                tokens += output.new_token_ids if output.request_id == second.request_id else []
            client.core.scheduler.check()
        assert tokens == reference_tokens(model, prompt, COUNT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offset": 3}, "placeholders"),
        ({"num_embeds": 5}, "placeholders"),
        ({"length": 4000}, "beyond"),
        ({"grid": (1, 2, 2)}, "grid"),
        ({"identifier": ""}, "identifier"),
    ],
)
def test_a_feature_that_does_not_fit_its_prompt_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = written("qwen2_5_vl", tmp_path)
    request = next(iter(requests_of(model, prompts_of(model)[:1], COUNT)))
    request.mm_features = [replace(each, **change) for each in request.mm_features]
    with closing(client_of(tmp_path)) as client, pytest.raises(ValueError, match=message):
        client.add_request(request)


def test_images_of_unfinished_requests_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = written("qwen2_5_vl", tmp_path)
    first, second, third = list(requests_of(model, [prompts_of(model)[0]] * 3, COUNT))
    size = sum(len(each.data) for feature in first.mm_features for each in feature.inputs.values())
    monkeypatch.setattr(engine_core, "MAX_MEDIA_BYTES", 2 * size)
    with closing(client_of(tmp_path)) as client:
        client.add_request(first)
        client.add_request(second)
        with pytest.raises(ResourceBusy, match="try again"):
            client.add_request(third)
        client.abort_requests([first.request_id])
        client.add_request(third)
        while client.has_work:
            client.step()
        assert not client.core.scheduler.media_bytes.total


def test_a_tenant_leaves_room_for_images_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = written("qwen2_5_vl", tmp_path)
    *many, last = list(requests_of(model, [prompts_of(model)[0]] * 5, COUNT))
    size = sum(feature.num_bytes for feature in last.mm_features)
    monkeypatch.setattr(engine_core, "MAX_MEDIA_BYTES", 4 * size)
    for request, tenant in zip((*many, last), "aaaab", strict=True):
        request.tenant = tenant
    with closing(client_of(tmp_path)) as client:
        for request in many[:3]:
            client.add_request(request)
        with pytest.raises(ResourceBusy, match="of the same key"):
            client.add_request(many[3])
        client.add_request(last)
        while client.has_work:
            client.step()
        client.core.scheduler.check()


def test_what_a_step_encodes_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers get it in one message, and a core whose message is too large ends."""
    monkeypatch.setattr(steps, "MAX_ENCODED_BYTES", 100)
    items = [
        MultimodalFeature("image", "a", 0, 1, 1, inputs={"x": MediaTensor("uint8", (size,), bytes(size))})
        for size in (60, 40, 1, 101)
    ]
    plan = steps.StepPlan(1000, 1000, 0, 1000)
    for item in items[:2]:
        assert plan.may_encode(item)
        plan.encode(item)
    assert not plan.may_encode(items[2])
    assert steps.StepPlan(1000, 1000, 0, 1000).may_encode(items[3])  # alone in its step


def test_a_text_model_refuses_features(tmp_path: Path) -> None:
    write_checkpoint("qwen3", tmp_path)
    feature = MultimodalFeature("image", "a", 1, 2, 2)
    request = EngineCoreRequest(
        "a", [5, 6, 7, 8], SamplingParams(max_tokens=1), time.time(), mm_features=[feature]
    )
    with closing(client_of(tmp_path)) as client, pytest.raises(ValueError, match="no images"):
        client.add_request(request)


def test_a_checkpoint_without_its_encoder_serves_texts_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_checkpoint("qwen2_5_vl", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name: each for name, each in load_file(file).items() if "visual" not in name}
    save_file(tensors, file, metadata={"format": "pt"})
    client_of(tmp_path).close()
    assert "no encoder of images" in caplog.text


@pytest.mark.parametrize("model_type", [*TYPES, *FOREIGN])
def test_the_largest_image_can_be_encoded(model_type: str, tmp_path: Path) -> None:
    """A start on a GPU does, to measure its memory."""
    write_checkpoint(model_type, tmp_path)
    if model_type == "mistral3":  # transformers fails with an image of one embedding
        fields = json.loads((tmp_path / "config.json").read_text())
        fields["vision_config"]["image_size"] = 56
        (tmp_path / "config.json").write_text(json.dumps(fields))
    config = load_model_config(tmp_path)
    spec = config.vision
    assert spec is not None
    encoder = image_encoder.load_image_encoder(
        tmp_path, spec, config.hidden_size, dtype=torch.float32, device=torch.device("cpu"), seed=0
    )
    assert encoder is not None
    whole = read_hf_config(json.loads(spec.fields))
    image = largest_image(whole, {}, {}, 60)
    with torch.inference_mode():
        count = encoder.encode_largest(image)
    assert 0 < count <= image.num_patches + (image.num_patches if "llava" in model_type else 0)
    assert count <= 60 or "temporal_patch_size" not in whole.vision_config.to_dict()


@pytest.mark.parametrize(
    ("model_type", "processor", "kwargs", "num_patches"),
    [
        ("qwen2_5_vl", {"max_pixels": 28 * 28 * 64}, {}, 64 * 4),
        ("qwen2_5_vl", {"max_pixels": 28 * 28 * 64}, {"max_pixels": 28 * 28 * 16}, 16 * 4),
        ("qwen3_vl", {"size": {"longest_edge": 28 * 28 * 36}}, {}, 36 * 4),
        ("qwen3_vl", {}, {}, 31 * 32 * 4),  # as many as a prompt of 1,000 tokens has
        ("mistral3", {"size": {"longest_edge": 28}}, {}, 4),
        ("idefics3", {"size": {"longest_edge": 84}, "max_image_size": {"longest_edge": 28}}, {}, 10 * 4),
        ("idefics3", {"do_image_splitting": False}, {}, 4),
        ("internvl", {"max_patches": 5}, {}, 6 * 4),
        ("internvl", {"max_patches": 5, "crop_to_patches": False}, {}, 4),
        ("llava_next", {}, {}, 5 * 4),
        ("llava", {}, {}, 4),
        ("gemma3", {}, {}, 36),
        ("gemma3", {"do_pan_and_scan": True, "pan_and_scan_max_num_crops": 3}, {}, 4 * 36),
        ("aria", {"split_image": True}, {}, 9 * 4),
    ],
)
def test_the_largest_image_is_what_the_processor_makes(
    model_type: str, processor: dict[str, Any], kwargs: dict[str, Any], num_patches: int, tmp_path: Path
) -> None:
    write_checkpoint(model_type, tmp_path)
    spec = load_model_config(tmp_path).vision
    assert spec is not None
    config = read_hf_config(json.loads(spec.fields))
    image = largest_image(config, processor, kwargs, 1000)
    assert image.num_patches == num_patches
    requested = largest_image(config, processor, kwargs, 1000, trusts_request_kwargs=True)
    assert requested.num_patches >= num_patches
    assert requested.activation_bytes(2) >= image.activation_bytes(2) > 4 * math.prod(image.pixels)


def test_the_kv_cache_leaves_room_for_the_largest_image(tmp_path: Path) -> None:
    write_checkpoint("qwen2_5_vl", tmp_path)
    flags = {"max_model_len": 512, "max_num_batched_tokens": 16, "max_num_seqs": 2}
    memory = {}
    for side in (2, 16):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({"max_pixels": (28 * side) ** 2}))
        with closing(client_of(tmp_path, **flags)) as client:
            memory[side] = client.config.memory
    more = memory[16].activation_bytes - memory[2].activation_bytes
    assert more > (16 * 16 - 2 * 2) * 4 * 3 * 2 * 14 * 14 * 4, "not even the pixels"
    (tmp_path / "preprocessor_config.json").write_text('{"max_pixels": "many"}')
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json.*--language-model-only"):
        client_of(tmp_path)


def test_an_encoder_that_lacks_tensors_is_refused(tmp_path: Path) -> None:
    write_checkpoint("qwen2_5_vl", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors[next(name for name in tensors if "visual" in name and "qkv" in name)]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"qkv.*--language-model-only"):
        client_of(tmp_path)


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_an_encoder_that_is_quantised_is_refused(model_type: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Of the shape of one that is not, transformers' loader takes its weights for numbers without a scale."""
    write_checkpoint(model_type, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name in [each for each in tensors if not _OF_TEXT.search(each) and tensors[each].ndim == 2]:
        tensors[name] = (tensors[name] * 10).to(dtype)
        tensors[f"{name}_scale"] = torch.tensor(0.1)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"encoder of images .* is quantised, .*--language-model-only"):
        client_of(tmp_path)
    client_of(tmp_path, language_model_only=True).close()


def test_pairs_turn_by_the_axes_of_transformers() -> None:
    spec = VisionSpec(fields="{}", image_token_id=0, mrope_section=(2, 1, 3))
    assert spec.axes(6) == [0, 0, 1, 2, 2, 2]
    interleaved = VisionSpec(
        fields="{}", image_token_id=0, mrope_section=(4, 2, 2), is_mrope_interleaved=True
    )
    assert interleaved.axes(8) == [0, 1, 2, 0, 1, 2, 0, 0]
    assert VisionSpec(fields="{}", image_token_id=0).axes(8) is None
    with pytest.raises(ConfigError, match="mrope_section"):
        spec.axes(5)
