"""Folders of tiny models that see images, as far as a front end reads them: tokenizer, chat template, processor.

The files are those that transformers writes for released models of each family, with small sizes.
"""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from argosy_engine.errors import InvalidRequest
from argosy_engine.frontend.media.worker import ImageJob, ImageRefused, ImageResult, Processor, decode
from argosy_engine.model_configs.vision_config import VisionSpec
from argosy_engine.resolved_config import MediaConfig, MemoryBudget, ResolvedConfig

_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for content in message.content %}{% if content.type == 'image' or 'image' in "
    "content or 'image_url' in content %}IMAGE{% elif 'text' in content %}{{ content.text }}"
    "{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% endif %}"
)
_IMAGES_FIRST = (
    "{% for message in messages %}<|im_start|>{{ message.role }} {% for content in message.content | "
    "selectattr('type', 'equalto', 'image') %}<image>\n{% endfor %}{% for content in message.content | "
    "selectattr('type', 'equalto', 'text') %}{{ content.text }}{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_QWEN = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_ROWS = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
_IDEFICS = (
    "<|im_start|>",
    "<fake_token_around_image>",
    "<image>",
    "<global-img>",
    "<end_of_utterance>",
    *_ROWS,
)
_IDEFICS_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message.role | capitalize }}{% if message.content[0].type == 'image' "
    "%}{{ ':' }}{% else %}{{ ': ' }}{% endif %}{% for line in message.content %}{% if line.type == 'text' %}"
    "{{ line.text }}{% elif line.type == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
_NORMAL = {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "do_convert_rgb": True,
           "image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28],
           "do_resize": True, "resample": 3}  # fmt: skip
_PINPOINTS = [[28, 56], [56, 28], [56, 56], [28, 84], [84, 28]]


def _qwen(patch_size: int) -> dict[str, Any]:
    return {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": patch_size, "temporal_patch_size": 2,
            "merge_size": 2, "min_pixels": 4 * (2 * patch_size) ** 2,
            "max_pixels": 24 * (2 * patch_size) ** 2}  # fmt: skip


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "tokens": _QWEN, "image": "<|image_pad|>", "class": "Qwen2_5_VLProcessor", "processor": _qwen(14),
        "template": _CHATML.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>"),
    },
    "qwen3_vl": {
        "tokens": _QWEN, "image": "<|image_pad|>", "class": "Qwen3VLProcessor", "processor": _qwen(16),
        "template": _CHATML.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>"),
    },
    "llava": {
        "tokens": ("<|im_start|>", "<|im_end|>", "<image>"), "image": "<image>", "class": "LlavaProcessor",
        "template": _IMAGES_FIRST,
        "processor": {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 56},
                      "crop_size": {"height": 56, "width": 56}, "do_center_crop": True},
        "fields": {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    },
    "mistral3": {
        "tokens": ("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[IMG]", "[IMG_BREAK]",
                   "[IMG_END]"),
        "image": "[IMG]", "class": "PixtralProcessor",
        "template": (
            "<s>{% for m in messages %}{% if m.role == 'system' %}[SYSTEM_PROMPT]{% if m.content is string %}"
            "{{ m.content }}{% else %}{{ m.content[0].text }}{% endif %}[/SYSTEM_PROMPT]{% elif m.role == 'user' %}"
            "[INST]{% if m.content is string %}{{ m.content }}{% else %}{% for block in m.content %}{% if block.type "
            "== 'text' %}{{ block.text }}{% elif block.type in ['image', 'image_url'] %}[IMG]{% endif %}{% endfor %}"
            "{% endif %}[/INST]{% else %}{% if m.content is string %}{{ m.content }}{% else %}{{ m.content[0].text }}"
            "{% endif %}</s>{% endif %}{% endfor %}"
        ),
        "processor": {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 112},
                      "patch_size": {"height": 14, "width": 14}},
        "fields": {"patch_size": 14, "spatial_merge_size": 2},
    },
    "internvl": {
        "tokens": ("<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        "image": "<IMG_CONTEXT>", "class": "InternVLProcessor",
        "template": _CHATML.replace("IMAGE", "<IMG_CONTEXT>\n"),
        "processor": {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 28, "width": 28},
                      "crop_to_patches": False, "min_patches": 1, "max_patches": 6},
        "fields": {"image_seq_length": 4},
        "extra": {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
                  "video_token": "<video>"},
    },
    "smolvlm": {
        "tokens": _IDEFICS, "image": "<image>", "class": "SmolVLMProcessor", "template": _IDEFICS_TEMPLATE,
        "processor": {"image_processor_type": "SmolVLMImageProcessor", "size": {"longest_edge": 112},
                      "max_image_size": {"longest_edge": 56}, "do_image_splitting": True, "do_pad": True},
        "fields": {"image_seq_len": 4},
    },
    "idefics3": {
        "tokens": _IDEFICS, "image": "<image>", "class": "Idefics3Processor", "template": _IDEFICS_TEMPLATE,
        "processor": {"image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 112},
                      "max_image_size": {"longest_edge": 56}, "do_image_splitting": True, "do_pad": True},
        "fields": {"image_seq_len": 4},
    },
    "llava_next": {
        "tokens": ("<|im_start|>", "<|im_end|>", "<image>"), "image": "<image>", "class": "LlavaNextProcessor",
        "template": _IMAGES_FIRST,
        "processor": {"image_processor_type": "LlavaNextImageProcessor", "size": {"shortest_edge": 28},
                      "crop_size": {"height": 28, "width": 28}, "do_center_crop": True,
                      "image_grid_pinpoints": _PINPOINTS},
        "fields": {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    },
    "llava_onevision": {
        "tokens": ("<|im_start|>", "<|im_end|>", "<image>", "<video>"), "image": "<image>",
        "class": "LlavaOnevisionProcessor", "template": _IMAGES_FIRST,
        "processor": {"image_processor_type": "LlavaOnevisionImageProcessor", "size": {"height": 28, "width": 28},
                      "do_pad": True, "image_grid_pinpoints": _PINPOINTS},
        "fields": {"num_image_tokens": 4, "vision_feature_select_strategy": "full",
                   "vision_aspect_ratio": "anyres_max_9"},
    },
    "gemma3": {
        "tokens": ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<image_soft_token>",
                   "<end_of_image>"),
        "image": "<image_soft_token>", "class": "Gemma3Processor",
        "template": (
            "<bos>{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
            "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}{% if c.type == 'image' %}"
            "<start_of_image>{% elif c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<end_of_turn>\n"
            "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
        ),
        "processor": {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 28, "width": 28}},
        "fields": {"image_seq_length": 4},
        "extra": {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>",
                  "image_token": "<image_soft_token>"},
    },
    "glm4v": {
        "tokens": ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|begin_of_image|>", "<|image|>",
                   "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>", "<|video|>"),
        "image": "<|image|>", "class": "Glm4vProcessor",
        "template": (
            "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{% if m.content is string %}{{ m.content }}{% else %}"
            "{% for c in m.content %}{% if c.type == 'image' %}<|begin_of_image|><|image|><|end_of_image|>{% elif "
            "c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
        ),
        "processor": {"image_processor_type": "Glm4vImageProcessor", "patch_size": 14, "temporal_patch_size": 2,
                      "merge_size": 2, "size": {"shortest_edge": 2 * 28 * 28 * 2, "longest_edge": 24 * 28 * 28 * 2}},
    },
}  # fmt: skip


def make_folder(family: str, folder: Path, *, template: str | None = None) -> Path:
    """Write what a front end reads of a tiny model of this family; return the folder."""
    own = FAMILIES[family]
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    lines = ("\u010a", "\u010a\u010a", "\u010a\u010a\u010a\u010a")  # ends of lines, which are joined
    vocabulary = {text: number for number, text in enumerate((*alphabet, *lines[1:]))}
    tokenizer = Tokenizer(models.BPE(vocabulary, [(line, line) for line in lines[:2]]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in own["tokens"]])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template or own["template"])
    for name, content in {
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": own["tokens"][1],
                                  "extra_special_tokens": own.get("extra", {})},
        "config.json": {"model_type": family, "image_token_id": tokenizer.token_to_id(own["image"])},
        "preprocessor_config.json": {**_NORMAL, **own["processor"], "processor_class": own["class"]},
        "processor_config.json": {"processor_class": own["class"], **own.get("fields", {})},
    }.items():  # fmt: skip
        (folder / name).write_text(json.dumps(content))
    return folder


PLACEHOLDER = "<|image_pad|>"
"""Of Qwen's models."""


def make_model(folder: Path) -> int:
    """Write a tiny Qwen2.5-VL with its processor; return the token that stands for a part of an image."""
    from transformers_checkpoints import write_checkpoint  # imports torch

    write_checkpoint("qwen2_5_vl", folder, max_position_embeddings=2048)
    config = json.loads((folder / "config.json").read_text())
    make_folder("qwen2_5_vl", folder)
    token: int = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(PLACEHOLDER)
    (folder / "config.json").write_text(json.dumps({**config, "image_token_id": token}))
    return token


def resolved(folder: Path, *, max_model_len: int = 4096, **media: Any) -> ResolvedConfig:
    """Return the config of an engine that serves a folder of `make_folder`.

    Args:
        media: fields of `MediaConfig`.
    """
    config = json.loads((folder / "config.json").read_text())
    vision = VisionSpec(fields=json.dumps(config), image_token_id=config["image_token_id"])
    memory = MemoryBudget(
        device="cpu", total_bytes=1, available_bytes=1, utilization=0.5, weights_bytes=1, activation_bytes=1,
        block_bytes=1, block_size=16, num_blocks=2, request_blocks=1, max_model_len=max_model_len,
        limited_by="memory",
    )  # fmt: skip
    return ResolvedConfig(
        model_path=str(folder), model_name="m", model_fingerprint="f", architecture="A", device="cpu", dtype="float32",
        max_model_len=max_model_len, vocab_size=1024, embedding_size=8, is_matryoshka=False, matryoshka_dimensions=(),
        block_size=16, num_gpu_blocks=2, max_num_seqs=2, max_num_batched_tokens=max_model_len, max_num_queued_reqs=16,
        max_num_queued_tokens=None, scheduling_policy="fcfs", async_scheduling=False, epoch="e", eos_token_ids=(1,),
        logits_processors=(), max_logprobs=20, logprobs_mode="raw_logprobs", startup_phases=(), memory=memory,
        media=MediaConfig(**{"vision": vision, "cache_bytes": 1 << 24, **media}),
    )  # fmt: skip


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return an image of noise, so that no two are alike."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def data_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def image_part(image: Image.Image, **fields: Any) -> dict[str, Any]:
    """Return a chat's part with an image."""
    return {"type": "image_url", "image_url": {"url": data_url(encoded(image))}, **fields}


def user(*content: str | Image.Image) -> dict[str, Any]:
    """Return a chat's message with texts and images."""
    parts = [
        {"type": "text", "text": each} if isinstance(each, str) else image_part(each) for each in content
    ]
    return {"role": "user", "content": parts}


class InProcessPool:
    """A `MediaPool` without processes.

    Args:
        processor: of `worker.load_processor`.
    """

    def __init__(self, processor: Processor) -> None:
        self.processor = processor
        self.num_jobs = 0

    async def run(self, job: ImageJob, data: bytes, where: str, tenant: str = "") -> ImageResult:
        self.num_jobs += 1
        try:
            image, digest = decode(data, job.format, job.background)
            result = self.processor.process(image, job.kwargs, is_among_others=job.is_among_others)
        except ImageRefused as error:
            raise InvalidRequest(f"{where}: the image {error}", param=where) from None
        return msgspec.structs.replace(result, pixels=digest)

    def close(self) -> None:
        pass
