"""Checkpoints with Mistral's own tokenizer, tekken.json: refused with a remedy, which makes them servable."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from transformers.integrations.mistral import convert_tekken_tokenizer

from argosy_engine.errors import ConfigError
from argosy_engine.frontend.tokenizer import Tokenizer

SPECIAL = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]")
WORDS = (*(bytes([byte]) for byte in range(256)), b"he", b"ll", b"hell", b"hello")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder with a small tekken.json."""
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(word).decode()} for rank, word in enumerate(WORDS)
    ]
    special = [{"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(SPECIAL)]
    config = {
        "pattern": r"[^\s]+|\s+",
        "default_vocab_size": len(WORDS) + len(SPECIAL),
        "default_num_special_tokens": len(SPECIAL),
        "version": "v11",
    }
    tekken = {"config": config, "vocab": vocab, "special_tokens": special}
    (tmp_path / "tekken.json").write_text(json.dumps(tekken))
    return tmp_path


def test_a_checkpoint_without_tokenizer_json_is_refused_with_the_remedy(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json; tekken\.json.*convert_tekken_tokenizer"):
        Tokenizer(checkpoint)


def test_the_remedy_makes_it_servable(checkpoint: Path) -> None:
    convert_tekken_tokenizer(str(checkpoint / "tekken.json")).save_pretrained(str(checkpoint))
    tokenizer = Tokenizer(checkpoint)
    text = "[INST]hello \u00e9[/INST]"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    byte = len(SPECIAL)
    assert ids == [3, byte + WORDS.index(b"hello"), byte + 32, byte + 0xC3, byte + 0xA9, 4]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
