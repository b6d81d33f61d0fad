"""A long system prompt, and the chunks that an engine announces once it has computed it."""

from __future__ import annotations

import json

from argosy_protocol.chunk_hash import chain_seed, chunk_hashes, prompt_segments
from argosy_protocol.openai import decode_request

from .fake_engine import MODEL
from .harness import chat

LONG = "a system prompt that many share. " * 60


def chain(content: str) -> dict[int, int]:
    """What an engine that computed this chat would announce."""
    request = decode_request("chat/completions", json.dumps(chat(content)).encode())
    hashes = chunk_hashes(prompt_segments(request)[0], chain_seed(MODEL))
    return {chunk: 64 * (number + 1) for number, chunk in enumerate(hashes)}
