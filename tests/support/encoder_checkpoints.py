"""Tiny random checkpoints of encoders, with a tokenizer that joins pairs of texts as BERT's does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)

VOCAB_SIZE = 211
PADDING, FIRST, LAST = 1, 2, 3
"""Special tokens' ids."""
ENCODER_TYPES = (
    "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "eurobert", "gte", "jina_embeddings_v3",
    "modernbert", "mpnet", "nomic_bert", "roberta", "xlm-roberta", "xlm-roberta-xl",
)  # fmt: skip
_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "dim": 32, "embedding_size": 32, "intermediate_size": 48,
    "hidden_dim": 48, "num_hidden_layers": 3, "n_layers": 3, "num_attention_heads": 4, "n_heads": 4,
    "num_key_value_heads": 4, "head_dim": 8,
    "max_position_embeddings": 128, "type_vocab_size": 2, "pad_token_id": PADDING,
    "cls_token_id": FIRST, "sep_token_id": LAST, "bos_token_id": FIRST, "eos_token_id": LAST, "mask_token_id": 4,
}  # fmt: skip
_OF_TYPE: dict[str, dict[str, Any]] = {
    "modernbert": {"local_attention": 16, "global_attn_every_n_layers": 2},
    "deberta-v2": {"relative_attention": True, "position_buckets": 16, "pos_att_type": ["p2c", "c2p"]},
    "roberta": {"type_vocab_size": 1},
    "xlm-roberta": {"type_vocab_size": 1},
}
_CLASSES = {
    "embed": AutoModel,
    "masked": AutoModelForMaskedLM,
    "classify": AutoModelForSequenceClassification,
}


def encoder_config(model_type: str, **fields: Any) -> Any:
    """Return a small config of transformers'."""
    wanted = {**_SMALL, **_OF_TYPE.get(model_type, {}), **fields}
    default = CONFIG_MAPPING[model_type]()
    known = {name: value for name, value in wanted.items() if hasattr(default, name) or name in fields}
    return CONFIG_MAPPING[model_type](**known)


def write_encoder(model_type: str, path: Path, kind: str = "embed", **fields: Any) -> Any:
    """Write a checkpoint and its tokenizer; return the model in transformers.

    Args:
        kind: `embed` without a head, `masked` with that of a language model, `classify` with one for labels.
    """
    config = encoder_config(model_type, **fields)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = _CLASSES[kind].from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                scale = 0.3 if "embed" in name else 1.5 * parameter.shape[-1] ** -0.5
                parameter.copy_(noise * scale)
            else:
                parameter.add_(noise * 0.1)
    model = model.eval()
    model.save_pretrained(path)
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "architectures": [type(model).__name__]}))
    write_tokenizer(path)
    return model


def write_tokenizer(path: Path, *, has_types: bool = True) -> None:
    """Write a tokenizer of words: `w5` to `w210` by their ids."""
    words = {f"w{index}": index for index in range(5, VOCAB_SIZE)}
    special = {"[UNK]": 0, "[PAD]": PADDING, "[CLS]": FIRST, "[SEP]": LAST, "[MASK]": 4}
    tokenizer = Tokenizer(models.WordLevel({**special, **words}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(special))
    second = ":1" if has_types else ""
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair=f"[CLS] $A [SEP] $B{second} [SEP]{second}",
        special_tokens=[("[CLS]", FIRST), ("[SEP]", LAST)],
    )
    tokenizer.save(str(path / "tokenizer.json"))
