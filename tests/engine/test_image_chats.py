"""Chats with images up to the core's request: tokens and tensors are those that transformers' own processor makes of
the whole chat, and no text of a client becomes an image."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
from PIL import Image

from argosy_engine.api import served_engine
from argosy_engine.api.served_engine import OpenAIServing
from argosy_engine.errors import InvalidRequest, PromptTooLong, ResourceBusy
from argosy_engine.frontend import input_processor
from argosy_engine.frontend.input_processor import InputProcessor, check_images
from argosy_engine.frontend.media import processor as media_processor
from argosy_engine.frontend.media.pool import MediaPool
from argosy_engine.frontend.media.processor import ChatImages, MediaProcessor, processor_args
from argosy_engine.frontend.media.worker import load_processor
from argosy_engine.frontend.observer import Observer
from argosy_engine.frontend.renderer import TokenizedPrompt
from argosy_engine.messages import EngineCoreRequest, MediaTensor
from argosy_engine.params import SamplingParams
from argosy_protocol.anthropic import as_chat, decode_messages_request
from argosy_protocol.chunk_hash import chain_seed, chunk_hashes, prompt_segments
from argosy_protocol.openai import ChatCompletionRequest, decode_request
from argosy_protocol.responses import decode_responses_request
from argosy_protocol.responses_chat import responses_as_chat
from argosy_protocol.skipped_content import Skipped
from image_processors import (
    FAMILIES,
    InProcessPool,
    data_url,
    encoded,
    image_part,
    make_folder,
    picture,
    resolved,
)

SIZES = ((90, 60), (40, 70), (90, 60))


class Served(NamedTuple):
    """The front end of a model that sees."""

    inputs: InputProcessor
    pool: InProcessPool
    reference: Any
    """transformers' processor, with all of the chat at once."""
    placeholder_id: int

    def load(self, request: ChatCompletionRequest, tenant: str = "") -> ChatImages | None:
        assert self.inputs.media is not None
        roles = self.inputs.renderer.image_roles(request)
        return asyncio.run(self.inputs.media.load(request, tenant, roles))

    def prompt(self, messages: list[dict[str, Any]], **fields: Any) -> TokenizedPrompt:
        request = chat(messages, **fields)
        return self.inputs.renderer.render_chat(request, self.load(request))

    def core_request(self, messages: list[dict[str, Any]], **fields: Any) -> EngineCoreRequest:
        prompt = self.prompt(messages, **fields)
        (made,) = self.inputs.process_inputs(prompt, SamplingParams(max_tokens=4))
        return made


def chat(messages: list[dict[str, Any]], **fields: Any) -> ChatCompletionRequest:
    request = decode_request("chat/completions", json.dumps({"messages": messages, **fields}).encode())
    assert isinstance(request, ChatCompletionRequest)
    return request


def serve(folder: Path, **media: Any) -> Served:
    config = resolved(folder, **media)
    processor = load_processor(processor_args(config))
    pool = InProcessPool(processor)
    made = MediaProcessor(config, cast("MediaPool", pool), processor.info)
    inputs = InputProcessor(config, made)
    return Served(inputs, pool, processor.call, processor.info.placeholder_id)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Served]:
    return cache(lambda family: serve(make_folder(family, tmp_path_factory.mktemp(family))))


def conversation(pictures: list[Image.Image], kind: str) -> list[dict[str, Any]]:
    """Interleave texts and images over two turns of a user."""
    texts = ["What is this?", " And that, next to it? ", "\n\nCompare them.", "Thanks."]
    parts: list[dict[str, Any]] = []
    for text, image in zip(texts, pictures, strict=False):
        part = image_part(image) if kind == "ours" else {"type": "image", "image": image}
        parts += [part, {"type": "text", "text": text}]
    if len(pictures) < 3:
        return [{"role": "user", "content": parts}]
    return [
        {"role": "user", "content": parts[:3]},
        {"role": "assistant", "content": [{"type": "text", "text": "A wall."}]},
        {"role": "user", "content": parts[3:]},
    ]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_tensors_are_those_of_the_whole_chat_by_transformers(
    family: str, count: int, served: Callable[[str], Served]
) -> None:
    model = served(family)
    if family == "smolvlm":  # which asks for the defaults of videos
        model.reference.video_processor = SimpleNamespace(num_frames=1, fps=1, model_input_names=[])
    pictures = [picture(width, height, seed) for seed, (width, height) in enumerate(SIZES[:count])]
    wanted = model.reference.apply_chat_template(
        conversation(pictures, "theirs"), add_generation_prompt=True, tokenize=True, return_dict=True,
        return_tensors="np", processor_kwargs={"add_special_tokens": False},
    )  # fmt: skip
    made = model.core_request(conversation(pictures, "ours"))
    assert made.prompt_token_ids == wanted["input_ids"][0].tolist()
    check_spans(made, model, count)
    for name in ("pixel_values", "image_grid_thw", "image_sizes", "pixel_attention_mask"):
        if name in wanted:
            check_tensor(name, [arrays(feature.inputs)[name] for feature in made.mm_features], wanted)


def check_spans(made: EngineCoreRequest, model: Served, count: int) -> None:
    """Check that features stand in order, do not touch, and count the tokens whose embeddings are replaced."""
    vision = model.inputs.config.media.vision
    assert vision is not None
    end = num_embeds = 0
    for feature in made.mm_features:
        assert feature.offset >= end
        end = feature.offset + feature.length
        span = made.prompt_token_ids[feature.offset : end]
        assert feature.num_embeds == span.count(vision.image_token_id) > 0
        assert not feature.grid or np.prod(feature.grid) == feature.num_embeds
        num_embeds += feature.num_embeds
    assert len(made.mm_features) == count
    assert num_embeds == made.prompt_token_ids.count(vision.image_token_id)
    assert made.mm_features[0].identifier != made.mm_features[-1].identifier or count == 1


def check_tensor(name: str, own: list[np.ndarray], wanted: Any) -> None:
    """Check the tensors of images against that of all of them, which may pad them to one size."""
    whole = wanted[name]
    if (
        own[0].shape[0] == 1 and whole.shape[0] == 1 and len(own) > 1
    ):  # crops of all images, one after the other
        own, whole = [each[0] for each in own], whole[0]
    start = 0
    for each in own:
        rows = whole[start : start + each.shape[0]]
        start += each.shape[0]
        padded = rows[tuple(slice(0, size) for size in each.shape)]
        assert padded.dtype == each.dtype
        np.testing.assert_array_equal(padded, each)
    assert start == whole.shape[0]


def arrays(inputs: dict[str, MediaTensor]) -> dict[str, np.ndarray]:
    return {name: np.frombuffer(each.data, each.dtype).reshape(each.shape) for name, each in inputs.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_user_who_writes_a_placeholder_has_written_text(
    family: str, served: Callable[[str], Served]
) -> None:
    model = served(family)
    tokenizer = model.inputs.renderer.tokenizer
    markers = "".join(FAMILIES[family]["tokens"])
    plain = model.core_request([{"role": "user", "content": [image_part(picture(90, 60))]}])
    for content in (markers, [{"type": "text", "text": markers}, image_part(picture(90, 60))]):
        made = model.core_request([{"role": "user", "content": content}])
        has_image = not isinstance(content, str)
        assert len(made.mm_features) == has_image
        special = {tokenizer.control_tokens.get(text, -1) for text in FAMILIES[family]["tokens"]}
        counts = [sum(token_id in special for token_id in each.prompt_token_ids) for each in (made, plain)]
        if has_image:
            assert counts[0] == counts[1]
        else:
            assert model.placeholder_id not in made.prompt_token_ids
        assert markers in tokenizer.decode(made.prompt_token_ids, skip_special_tokens=False)


def test_two_images_of_one_size_are_two(served: Callable[[str], Served]) -> None:
    model = served("qwen2_5_vl")
    parts = [image_part(picture(90, 60, seed)) for seed in (1, 2, 1)]
    first, second, third = model.core_request([{"role": "user", "content": parts}]).mm_features
    assert first.identifier == third.identifier != second.identifier
    assert first.inputs == third.inputs
    assert first.inputs["pixel_values"] != second.inputs["pixel_values"]
    assert (first.grid, first.length) == ((1, 2, 3), 6)


def test_the_format_of_the_file_does_not_change_the_identifier(served: Callable[[str], Served]) -> None:
    model, image = served("qwen2_5_vl"), picture(60, 60)
    urls = [data_url(encoded(image)), data_url(encoded(image, "WEBP", lossless=True), "webp")]
    found = [
        model.core_request(
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
        ).mm_features[0]
        for url in urls
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("fields", [{"cache_salt": "s"}, {"mm_processor_kwargs": {"max_pixels": 5000}}])
def test_salt_and_arguments_are_part_of_the_identifier(fields: dict[str, Any], tmp_path: Path) -> None:
    model = serve(make_folder("qwen2_5_vl", tmp_path), trusts_request_kwargs=True)
    messages = [{"role": "user", "content": [image_part(picture(200, 200))]}]
    plain, other = (model.core_request(messages, **each).mm_features[0] for each in ({}, fields))
    assert plain.identifier != other.identifier
    assert model.pool.num_jobs == 2  # nobody learns from the time what others have sent
    assert (plain.length > other.length) == ("mm_processor_kwargs" in fields)


def test_equal_images_are_processed_once_and_a_uuid_names_one(tmp_path: Path) -> None:
    model = serve(make_folder("llava", tmp_path))
    part = image_part(picture(50, 50), uuid="cat")
    made = model.core_request([{"role": "user", "content": [part, image_part(picture(50, 50))]}])
    again = model.core_request([{"role": "user", "content": [{"type": "image_url", "uuid": "cat"}]}])
    assert model.pool.num_jobs == 1
    assert len({feature.identifier for feature in (*made.mm_features, *again.mm_features)}) == 1
    request = chat([{"role": "user", "content": [{"type": "image_url", "image_url": None, "uuid": "cat"}]}])
    for tenant, salt, uuid in (("t", None, "cat"), ("", "s", "cat"), ("", None, "dog")):
        request.cache_salt = salt
        cast("list[Any]", request.messages[0].content)[0]["uuid"] = uuid
        with pytest.raises(InvalidRequest, match="no image is kept here for the uuid"):
            model.load(request, tenant)
    with pytest.raises(InvalidRequest, match="uuid must be a text of 1 to 256"):
        model.prompt([{"role": "user", "content": [{"type": "image_url", "uuid": 1}]}])


def test_a_uuid_with_other_content_stands_for_that(tmp_path: Path) -> None:
    model = serve(make_folder("llava", tmp_path))
    named = [{"role": "user", "content": [{"type": "image_url", "uuid": "cat"}]}]
    sent = [
        model.core_request([{"role": "user", "content": [image_part(picture(50, 50, seed), uuid="cat")]}])
        for seed in (1, 2)
    ]
    assert model.core_request(named).mm_features[0] == sent[1].mm_features[0] != sent[0].mm_features[0]


def test_a_uuid_stands_for_what_came_before_it(tmp_path: Path) -> None:
    """Also in one request, however long each of its images takes."""
    model = serve(make_folder("llava", tmp_path))
    first, second = (image_part(picture(50, 50, seed), uuid="cat") for seed in (1, 2))
    named = {"type": "image_url", "image_url": None, "uuid": "cat"}
    made = model.core_request([{"role": "user", "content": [first, named, second, named]}])
    one, again, other, last = (feature.identifier for feature in made.mm_features)
    assert one == again != other == last
    made = model.core_request([{"role": "user", "content": [named, first, named]}])
    assert [feature.identifier for feature in made.mm_features] == [other, one, one]
    assert model.core_request([{"role": "user", "content": [named]}]).mm_features[0].identifier == one


def test_images_that_requests_hold_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_processor, "MAX_HELD_BYTES", 5 * 3 * 56 * 56 * 4 // 2)
    model = serve(make_folder("llava", tmp_path), cache_bytes=0)
    chats = [chat([{"role": "user", "content": [image_part(picture(50, 50, seed))]}]) for seed in range(4)]
    held = [model.load(each) for each in chats[:2]]
    with pytest.raises(ResourceBusy, match="are held by requests"):
        model.load(chats[2])
    held.pop()
    gc.collect()
    assert model.load(chats[3])


def test_the_images_of_a_call_are_bounded(
    served: Callable[[str], Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = served("llava").prompt([{"role": "user", "content": [image_part(picture(50, 50))]}])
    size = sum(feature.num_bytes for feature in prompt.mm_features)
    monkeypatch.setattr(input_processor, "MAX_CALL_MEDIA_BYTES", 4 * size)
    check_images([prompt], 4)
    check_images([prompt, prompt], 2)
    for prompts, copies in (([prompt], 5), ([prompt] * 5, 1)):
        with pytest.raises(InvalidRequest, match="the images of all choices become"):
            check_images(prompts, copies)


def test_the_cache_drops_what_was_used_least_recently(tmp_path: Path) -> None:
    model = serve(make_folder("llava", tmp_path), cache_bytes=2 * (3 * 56 * 56 * 4 + 2000))
    for seed in (1, 2, 1, 3, 1, 2):
        model.prompt([{"role": "user", "content": [image_part(picture(50, 50, seed))]}])
    assert model.pool.num_jobs == 4


def test_chunk_ends_count_the_tokens_of_images(served: Callable[[str], Served]) -> None:
    model = served("qwen2_5_vl")
    messages = [
        {"role": "system", "content": "You see pictures and tell what is on them, in one sentence."},
        {
            "role": "user",
            "content": [image_part(picture(90, 60)), {"type": "text", "text": "What is it?" * 9}],
        },
    ]
    request = chat(messages)
    prompt = model.prompt(messages)
    (segments,) = prompt_segments(request)
    hashes = list(chunk_hashes(segments, chain_seed("m")))
    assert [each.hash for each in prompt.chunk_ends] == hashes
    (feature,) = prompt.mm_features
    ends = [each.token_end for each in prompt.chunk_ends]
    # role, text, role, image, text
    assert ends == sorted(ends)
    assert (
        ends[2]
        <= feature.offset
        < ends[3]
        == feature.offset + feature.length
        < ends[4]
        < len(prompt.token_ids)
    )


def test_a_template_that_takes_texts_gets_placeholders_in_them(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content + '' }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    model = serve(make_folder("qwen2_5_vl", tmp_path, template=template))
    parts = [
        {"type": "text", "text": "<|image_pad|>What?"},
        image_part(picture(90, 60)),
        {"type": "text", "text": "b"},
    ]
    made = model.core_request([{"role": "user", "content": parts}])
    text = model.inputs.renderer.tokenizer.decode(made.prompt_token_ids, skip_special_tokens=False)
    images = "<|vision_start|>" + "<|image_pad|>" * 6 + "<|vision_end|>"
    assert text == f"<|im_start|>user\n{images}\n<|image_pad|>What?\nb<|im_end|>\n<|im_start|>assistant\n"
    assert made.prompt_token_ids.count(model.placeholder_id) == 6 == made.mm_features[0].length


def test_images_of_a_role_that_the_template_does_not_render(served: Callable[[str], Served]) -> None:
    model = served("mistral3")
    user = {"role": "user", "content": "a"}
    history = [user, {"role": "assistant", "content": [image_part(picture(9, 9))]}, user]
    assert not model.prompt(history).mm_features
    with pytest.raises(InvalidRequest, match="content of type 'image_url' is not supported"):
        model.prompt([user, {"role": "system", "content": [image_part(picture(9, 9))]}])


@pytest.mark.parametrize(
    ("parts", "media", "message"),
    [
        ([image_part(picture(9, 9))] * 3, {"max_images": 2}, "the messages have 3 images, at most 2"),
        ([image_part(picture(90, 60))], {"max_model_len": 5}, "the images alone have more"),
        ([{"type": "image_url"}], {}, r"messages\[0\].content\[0\].image_url must be an object with the url"),
        ([{"type": "image_url", "image_url": {"url": 7}}], {}, "must be an object with the url"),
        ([{"type": "image_url", "image_url": "ftp://a/b"}], {}, "must be a URL that begins with data:"),
        (
            [{"type": "video_url", "video_url": {"url": "data:,"}}],
            {},
            "content of type 'video_url' is not supported",
        ),
        ([{"type": "input_audio", "input_audio": {}}], {}, "content of type 'input_audio' is not supported"),
    ],
)
def test_refusals(parts: list[Any], media: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = serve(make_folder("qwen2_5_vl", tmp_path), **media)
    with pytest.raises(InvalidRequest, match=message):
        model.prompt([{"role": "user", "content": parts}])


def test_a_prompt_with_images_is_too_long_in_the_usual_way_and_never_cut(tmp_path: Path) -> None:
    model = serve(make_folder("qwen2_5_vl", tmp_path), max_model_len=40)
    messages = [
        {"role": "user", "content": [image_part(picture(90, 60)), {"type": "text", "text": "a" * 30}]}
    ]
    with pytest.raises(PromptTooLong, match="maximum context length is 40 tokens, the prompt has 57"):
        model.prompt(messages)
    with pytest.raises(PromptTooLong, match="a prompt with images is not cut"):
        model.prompt(messages, truncate_prompt_tokens=-1)


def test_request_arguments_need_trust(served: Callable[[str], Served]) -> None:
    messages = [{"role": "user", "content": [image_part(picture(9, 9))]}]
    with pytest.raises(InvalidRequest, match="--trust-request-mm-kwargs"):
        served("llava").prompt(messages, mm_processor_kwargs={"do_resize": False})


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"image": {"rgba_background_color": [0, 0]}}, "three whole numbers"),
        ({"image": {"num_frames": 3}}, "there is no 'num_frames'"),
        ({"picture": {}}, "must have an object for image"),
    ],
)
def test_media_io_kwargs_are_checked(kwargs: Any, message: str, served: Callable[[str], Served]) -> None:
    messages = [{"role": "user", "content": [image_part(picture(9, 9))]}]
    with pytest.raises(InvalidRequest, match=message):
        served("llava").prompt(messages, media_io_kwargs=kwargs)


def test_the_background_of_transparent_pixels(served: Callable[[str], Served]) -> None:
    clear = Image.new("RGBA", (56, 56), (9, 9, 9, 0))
    url = data_url(encoded(clear))
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    model = served("llava")
    white, black = (
        model.core_request(messages, media_io_kwargs={"image": {"rgba_background_color": color}}).mm_features[
            0
        ]
        for color in ([255, 255, 255], [0, 0, 0])
    )
    assert white == model.core_request(messages).mm_features[0]
    assert arrays(white.inputs)["pixel_values"].min() > arrays(black.inputs)["pixel_values"].max()


def test_images_of_other_apis_and_of_tools_are_seen_or_leave_a_note(served: Callable[[str], Served]) -> None:
    url = data_url(encoded(picture(90, 60)))
    messages = json.dumps({
        "model": "m", "max_tokens": 4,
        "tools": [{"name": "f", "input_schema": {}}],
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": [
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png",
                                                 "data": url.partition(",")[2]}},
                ]},
                {"type": "text", "text": "What?"},
            ]},
        ],
    })  # fmt: skip
    responses = json.dumps(
        {"model": "m", "input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]}
    )
    model = served("qwen2_5_vl")
    for request in (
        as_chat(decode_messages_request(messages.encode())),
        responses_as_chat(decode_responses_request(responses.encode())),
    ):
        request.tools = None
        prompt = model.inputs.renderer.render_chat(request, model.load(request))
        assert [feature.length for feature in prompt.mm_features] == [6]
    request = as_chat(decode_messages_request(messages.encode()))
    request.tools = None
    blind = model.inputs.renderer.render_chat(request)
    assert "[image that the model does not get]" in model.inputs.renderer.tokenizer.decode(blind.token_ids)


def test_ten_thousand_parts_are_refused_before_any_is_loaded(served: Callable[[str], Served]) -> None:
    model = served("llava")
    done = model.pool.num_jobs
    parts = [image_part(picture(8, 8, seed)) for seed in range(3)] * 340
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "a"}] * 10
    with pytest.raises(InvalidRequest, match="the messages have 10200 images, at most 256"):
        model.prompt(messages)
    assert model.pool.num_jobs == done


async def test_looking_for_images_does_not_hold_the_event_loop(
    served: Callable[[str], Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template is tried with each role, and one that a request brings may take long; so may many parts."""
    threads: list[bool] = []
    model = served("llava")

    def image_roles(request: ChatCompletionRequest) -> Callable[[str], bool]:
        threads.append(threading.current_thread() is threading.main_thread())
        return lambda role: False

    def look(request: ChatCompletionRequest) -> frozenset[str]:
        threads.append(threading.current_thread() is threading.main_thread())
        return media_processor.image_roles(request)

    renderer = SimpleNamespace(image_roles=image_roles)
    llm = SimpleNamespace(input_processor=model.inputs, renderer=renderer)
    serving = OpenAIServing(cast(Any, llm), ("tiny",))
    monkeypatch.setattr(served_engine, "image_roles", look)
    part = image_part(picture(8, 8))
    for fields, count, expected in (({}, 1, [True, True]), ({"chat_template": "a"}, 1, [True, False]),
                                    ({}, 32, [False, True])):  # fmt: skip
        threads.clear()
        request = chat([{"role": "user", "content": [part] * min(count * count, 1000)}] * count, **fields)
        assert await serving.images_of(request, 10) == (None, 10)
        assert threads == expected
    many = chat([{"role": f"role {number}", "content": [part]} for number in range(17)])
    with pytest.raises(InvalidRequest, match="the messages have 17 roles; at most 16"):
        await serving.images_of(many, 10)
    serving.close()


def test_an_image_after_one_that_fails_is_not_waited_for(served: Callable[[str], Served]) -> None:
    broken = {"type": "image_url", "image_url": {"url": data_url(encoded(picture(90, 60))[:500])}}
    with pytest.raises(InvalidRequest, match=r"messages\[0\].content\[1\].image_url: the image is damaged"):
        served("llava").prompt([{"role": "user", "content": [image_part(picture(9, 9)), broken, broken]}])


BROKEN: dict[str, Any] = {"type": "image_url", "image_url": {"url": data_url(encoded(picture(90, 60))[:500])}}


@pytest.mark.parametrize(
    "gone",
    [
        BROKEN,
        {"type": "image_url", "image_url": {"url": "https://images.example.com/a.png"}},
        {"type": "image_url", "image_url": None, "uuid": "of another process"},
        {"type": "image_url", "image_url": {"url": 7}},
        {**BROKEN, "uuid": "broken"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}, "uuid": 7},
    ],
    ids=["damaged", "not allowed", "not kept", "no url", "damaged, with a uuid", "bad uuid"],
)
def test_history_is_not_refused_for_an_image_that_is_gone(gone: Any, served: Callable[[str], Served]) -> None:
    model = served("qwen2_5_vl")
    decode = model.inputs.renderer.tokenizer.decode
    history = [
        {
            "role": "user",
            "content": [gone, {"type": "text", "text": "And this?"}, image_part(picture(90, 60))],
        },
        {"role": "assistant", "content": "A wall."},
    ]
    request = chat(
        [
            *history,
            {"role": "user", "content": [image_part(picture(40, 70)), {"type": "text", "text": "This?"}]},
        ]
    )
    images = model.load(request)
    assert images is not None
    assert (len(images), images.num_left_out) == (2, 1)
    prompt = model.inputs.renderer.render_chat(request, images)
    assert len(prompt.mm_features) == 2
    assert decode(prompt.token_ids).count("[image that the model does not get]") == 1
    with pytest.raises(InvalidRequest, match=r"messages\[1\].content\[0\]"):
        model.prompt([*history[1:], {"role": "user", "content": [gone]}])
    alone = chat([*history[:1], history[1], {"role": "user", "content": "And now?"}])
    alone.messages[0].content.pop()  # type: ignore[union-attr]
    images = model.load(alone)
    assert images is not None
    assert (len(images), images.num_left_out) == (0, 1)
    assert model.inputs.renderer.render_chat(alone, images).mm_features == []


def test_what_names_an_image_that_is_left_out_is_refused_if_it_is_new(
    served: Callable[[str], Served],
) -> None:
    named = {**BROKEN, "uuid": "x"}
    again = {"type": "image_url", "image_url": None, "uuid": "x"}
    old = [{"role": "user", "content": [named, again]}, {"role": "assistant", "content": "?"}]
    model = served("qwen2_5_vl")
    assert model.prompt([*old, {"role": "user", "content": "Well?"}]).mm_features == []
    with pytest.raises(InvalidRequest, match=r"messages\[2\].content\[0\].image_url: no image is kept here"):
        model.prompt([*old, {"role": "user", "content": [again]}])


async def test_images_that_are_left_out_are_counted(served: Callable[[str], Served]) -> None:
    class Counting(Observer):
        def on_skipped(self, api: str, skipped: Skipped) -> None:
            counted.append((api, dict(skipped.content)))

    counted: list[Any] = []
    model = served("qwen2_5_vl")
    inputs = model.inputs
    llm = SimpleNamespace(input_processor=inputs, renderer=inputs.renderer, observers=[Counting()])
    serving = OpenAIServing(cast(Any, llm), ("m",))
    request = chat([{"role": "user", "content": [BROKEN, BROKEN]}, {"role": "user", "content": "Well?"}])
    images, size = await serving.images_of(request, 5000)
    assert images is not None
    assert (len(images), size) == (0, 5000)
    assert counted == [("chat_completions", {"image_url": 2})]
    serving.close()
