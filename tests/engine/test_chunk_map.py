"""Mapping a prompt's chunks to the positions of its tokens."""

from __future__ import annotations

import json

from argosy_engine.frontend.chat_template import ChatTemplate
from argosy_engine.frontend.prompts import map_chunks, map_token_chunks
from argosy_engine.frontend.tokenizer import Tokenizer
from argosy_protocol.chunk_hash import chain_seed, chunk_hashes, prompt_segments
from argosy_protocol.openai import decode_request
from chat_requests import chat


def test_chunk_ends_lie_where_the_text_ends(template: ChatTemplate, tokenizer: Tokenizer) -> None:
    system, question = "You know the sea. " * 40, "Where is the lantern?"
    request = chat(messages=[{"role": "system", "content": system}, {"role": "user", "content": question}])
    text = template.render(request)
    encoded = tokenizer.encode(text, add_special_tokens=False)
    (segments,) = prompt_segments(request)
    ends = map_chunks(segments, 1, text, encoded.ends)
    assert [end.hash for end in ends] == list(chunk_hashes(segments, 1))
    counts = [end.token_end for end in ends]
    assert counts == sorted(counts)
    # role, three chunks of 256 bytes (the last one shorter), role, question
    for end, value in ((ends[1], system[:256]), (ends[3], system), (ends[5], question)):
        offset = text.index(value) + len(value)
        assert encoded.ends[end.token_end - 1] <= offset
        assert encoded.ends[end.token_end] > offset - 12


def test_two_requests_that_share_chunks_share_tokens(template: ChatTemplate, tokenizer: Tokenizer) -> None:
    def ends(question: str) -> tuple[list[int], dict[int, int]]:
        request = chat(
            messages=[{"role": "system", "content": "Facts. " * 90}, {"role": "user", "content": question}]
        )
        text = template.render(request)
        encoded = tokenizer.encode(text, add_special_tokens=False)
        mapped = map_chunks(prompt_segments(request)[0], chain_seed("m"), text, encoded.ends)
        return encoded.ids, {end.hash: end.token_end for end in mapped}

    ids_a, ends_a = ends("What is red?")
    ids_b, ends_b = ends("Who walks there?")
    shared = max(ends_a[chunk] for chunk in ends_a.keys() & ends_b.keys())
    assert shared > 90
    assert ids_a[:shared] == ids_b[:shared]


def test_dropped_text_rounds_chunk_ends_down(tokenizer: Tokenizer) -> None:
    request = chat(
        messages=[
            {"role": "user", "content": "kept text, long enough to be found in the prompt"},
            {"role": "user", "content": "yes"},
        ]
    )
    text = "kept text, long enough to be found in the prompt" + " filler" * 200 + " yes"
    encoded = tokenizer.encode(text, add_special_tokens=False)
    mapped = map_chunks(prompt_segments(request)[0], 1, text, encoded.ends)
    kept = mapped[1].token_end
    assert kept > 5
    assert mapped[-1].token_end <= kept


def test_token_prompts_map_exactly() -> None:
    request = decode_request("completions", json.dumps({"prompt": list(range(150))}).encode())
    (segments,) = prompt_segments(request)
    assert [end.token_end for end in map_token_chunks(segments, 1)] == [64, 128, 150]
