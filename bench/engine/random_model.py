"""Write a Qwen3 checkpoint with random weights, for measuring speed: `tiny` (5 M parameters), `m06` (449 M), `q06`
(596 M: Qwen3-0.6B, whose vocabulary is 18 times as large), or `q35` (752 M: Qwen3.5-0.8B's text part, three of four
layers Gated DeltaNet). `vl` is Qwen2.5-VL: a text part like `tiny`'s behind an encoder of four layers, 5 M parameters.

    python bench/engine/random_model.py FOLDER tiny

The tokenizer is a byte-level BPE of 8192 tokens over Python's standard library: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SHAPES = {
    "tiny": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 8,
             "num_key_value_heads": 4, "head_dim": 32},
    "m06": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
            "num_key_value_heads": 8, "head_dim": 128},
    "q06": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
    "q35": {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8,
            "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
            "linear_key_head_dim": 128, "linear_value_head_dim": 128, "vocab_size": 248320},
    "vl": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 8,
           "num_key_value_heads": 4, "head_dim": 32},
}  # fmt: skip
VISION = {"depth": 4, "hidden_size": 256, "intermediate_size": 768, "num_heads": 8, "out_hidden_size": 256,
          "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
          "fullatt_block_indexes": [3], "hidden_act": "silu"}  # fmt: skip
"""The encoder of `vl`."""
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
VOCAB_SIZE = 8192
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% else %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write(folder: Path, shape: str) -> Path:
    """Write the checkpoint unless the folder has one; return the folder."""
    if (folder / "model.safetensors").exists():
        return folder
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3_5TextConfig, Qwen3Config

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[
            "<|endoftext|>",
            "<|im_start|>",
            "<|im_end|>",
            *(VISION_TOKENS if shape == "vl" else ()),
        ],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train([str(path) for path in Path(sysconfig.get_paths()["stdlib"]).glob("*.py")], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    if shape == "vl":
        return _write_vl(folder, fast)
    config_class = Qwen3_5TextConfig if shape == "q35" else Qwen3Config
    config = config_class(
        max_position_embeddings=4096,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
        tie_word_embeddings=True,
        **{"vocab_size": VOCAB_SIZE} | SHAPES[shape],
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def _write_vl(folder: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    start, end, image, video = tokenizer.convert_tokens_to_ids(list(VISION_TOKENS))
    sizes = {**SHAPES["vl"]}
    sizes.pop("head_dim")
    text = {
        **sizes, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 4096, "tie_word_embeddings": True,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]},
    }  # fmt: skip
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=VISION, image_token_id=image, video_token_id=video,
        vision_start_token_id=start, vision_end_token_id=end, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen2_5_VLForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(folder)
    normal = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28], "patch_size": 14,
              "temporal_patch_size": 2, "merge_size": 2, "min_pixels": 3136, "max_pixels": 1003520}  # fmt: skip
    for name, fields in {
        "preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessor", **normal},
        "video_preprocessor_config.json": {"video_processor_type": "Qwen2VLVideoProcessor", **normal},
        "processor_config.json": {},
    }.items():
        fields = {"processor_class": "Qwen2_5_VLProcessor", **fields}
        (folder / name).write_text(json.dumps(fields, indent=1) + "\n")
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("shape", choices=SHAPES)
    options = parser.parse_args()
    print(write(options.folder, options.shape))
