"""Tokenizers of Mistral's, built at run time: a small tekken.json."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

BASIC = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")
BASIC += ("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "<pad>", "[PREFIX]", "[MIDDLE]", "[SUFFIX]")
BASIC += ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]")
ADDED = {"v11": ("[ARGS]", "[CALL_ID]"), "v13": ("[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]")}
ADDED["v15"] = (*ADDED["v13"], "[MODEL_SETTINGS]", "[/MODEL_SETTINGS]")
WORDS = (
    *(bytes([byte]) for byte in range(256)),
    b"he",
    b"ll",
    b"hell",
    b"hello",
    b" w",
    b"or",
    b" wor",
    b"ld",
)
WORDS += ("\u4f60".encode(), "\u4f60".encode()[:2], b" world", b"ab", b"ba", b"aba", b"abab")
"""Bytes, and tokens that merge them, of a part of a character among others. `aba` has two ways to be merged."""
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def special_tokens(version: str) -> tuple[str, ...]:
    return (*BASIC, *ADDED.get(version, ()))


def tekken(version: str = "v13", *, num_fillers: int = 3, num_padded: int = 5) -> dict[str, Any]:
    """Return the content of a tekken.json.

    Args:
        num_fillers: special tokens that the file counts and does not name.
        num_padded: tokens at the end of its vocabulary that the model does not have.
    """
    words = (*WORDS, *(b"padded %d" % number for number in range(num_padded)))
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(word).decode(), "token_str": None}
        for rank, word in enumerate(words)
    ]
    texts = special_tokens(version)
    config = {
        "pattern": PATTERN,
        "num_vocab_tokens": len(words),
        "default_vocab_size": len(WORDS) + len(texts) + num_fillers,
        "default_num_special_tokens": len(texts) + num_fillers,
        "version": version,
    }
    special = [{"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(texts)]
    made: dict[str, Any] = {"config": config, "vocab": vocab, "special_tokens": special}
    if version == "v15":
        efforts = {"type": "enum", "accepts_none": True, "default": "none", "values": ["none", "high"]}
        made["model_settings_builder"] = {"reasoning_effort": efforts, "json_schema": None}
    return made


def write_tekken(folder: Path, version: str = "v13") -> Path:
    """Write a tekken.json into a folder, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tekken.json").write_text(json.dumps(tekken(version)))
    return folder
