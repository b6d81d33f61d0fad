"""Write a Qwen3 checkpoint with random weights, for measuring speed: `tiny` (5 M parameters), `m06` (449 M), `q06`
(596 M: Qwen3-0.6B, whose vocabulary is 18 times as large), or `q35` (752 M: Qwen3.5-0.8B's text part, three of four
layers Gated DeltaNet).

    python bench/engine/random_model.py FOLDER tiny

The tokenizer is a byte-level BPE of 8192 tokens over Python's standard library: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

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
}  # fmt: skip
VOCAB_SIZE = 8192
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
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
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train([str(path) for path in Path(sysconfig.get_paths()["stdlib"]).glob("*.py")], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("shape", choices=SHAPES)
    options = parser.parse_args()
    print(write(options.folder, options.shape))
