"""Sizes of events: an echoed prompt is split, and outputs that wait for a slow reader are merged to a bound."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from argosy_engine.api.endpoints import completions
from argosy_engine.api.endpoints.choice_stream import LogprobsFormat, TextOffsets
from argosy_engine.api.endpoints.completions import CompletionFormat
from argosy_engine.frontend.output_processor import MAX_MERGED_VALUES, GenerationOutput, OutputCollector
from argosy_engine.frontend.renderer import TokenizedPrompt
from argosy_engine.frontend.tokenizer import Tokenizer
from argosy_engine.sample.token_logprobs import TokenLogprobs
from argosy_protocol.openai import Completion, CompletionChoice, CompletionRequest

MAX_BYTES = 1024 * 1024
"""A quarter of what a router forwards."""
PROMPT_TOKENS = 12_000
WIDTH = 20
IDS = list(range(300, 300 + WIDTH))


def scores(token_id: int) -> TokenLogprobs:
    return TokenLogprobs([token_id, *IDS], [-1.0 - n / 3.0 for n in range(WIDTH + 1)], 1)


def opening(tokenizer: Tokenizer, num_prompt_tokens: int, **fields: Any) -> list[CompletionChoice]:
    """The choices of the events that a first output makes."""
    given = {"model": "tiny", "prompt": "x", "echo": True, "stream": True, "max_tokens": 8, **fields}
    request = msgspec.convert(given, CompletionRequest)
    prompt = [300 + n % 500 for n in range(num_prompt_tokens)]
    output = GenerationOutput(0, "end", [301, 302], finish_reason="stop", num_prompt_tokens=len(prompt))
    if request.logprobs is not None:
        output.logprobs = [scores(token_id) for token_id in output.token_ids]
        output.prompt_logprobs = [scores(token_id) for token_id in prompt[1:]]
    formatted = CompletionFormat(
        tokenizer, request, "id", "tiny", [TokenizedPrompt(prompt, [])], [()], with_ids=True
    )
    return list(formatted.deltas(output))


@pytest.mark.parametrize(
    ("num_prompt_tokens", "fields"),
    [
        (PROMPT_TOKENS, {"logprobs": WIDTH}),
        (PROMPT_TOKENS, {"logprobs": 0}),
        (PROMPT_TOKENS, {"logprobs": 1, "max_tokens": 0}),
        (200_000, {}),
    ],
)
def test_a_long_echo_is_split(
    tokenizer: Tokenizer, num_prompt_tokens: int, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    *parts, end = opening(tokenizer, num_prompt_tokens, **fields)
    monkeypatch.setattr(completions, "MAX_ECHOED_VALUES", 10**9)
    monkeypatch.setattr(completions, "MAX_ECHOED_CHARS", 10**9)
    whole, same_end = opening(tokenizer, num_prompt_tokens, **fields)
    assert len(parts) > 1
    assert (end.text, end.token_ids, end.logprobs) == ("", [], None)
    assert end == same_end
    assert end.finish_reason
    for part in parts:
        event = Completion(id="id", created=1, model="tiny", choices=[part])
        assert len(msgspec.json.encode(event)) < MAX_BYTES
    assert "".join(part.text for part in parts) == whole.text
    if whole.logprobs is None:
        assert not any(part.logprobs for part in parts)
    else:
        for name in whole.logprobs.__struct_fields__:
            joined = [value for part in parts for value in getattr(part.logprobs, name)]
            assert joined == getattr(whole.logprobs, name), name
    assert [part.token_ids for part in parts] == [*([[]] * (len(parts) - 1)), whole.token_ids]
    assert {part.finish_reason for part in (*parts, whole)} == {None}


def test_a_short_echo_is_one_event_before_the_end(tokenizer: Tokenizer) -> None:
    assert len(opening(tokenizer, 100, logprobs=2)) == 2
    assert len(opening(tokenizer, 100)) == 2


def test_prompt_token_ids_come_once(tokenizer: Tokenizer) -> None:
    first, *others = opening(tokenizer, PROMPT_TOKENS, logprobs=WIDTH, return_token_ids=True)
    assert len(first.prompt_token_ids or []) == PROMPT_TOKENS
    assert not any(part.prompt_token_ids for part in others)


async def test_what_waits_for_a_slow_reader_is_merged_to_a_bound() -> None:
    collector = OutputCollector()
    count = 10 * MAX_MERGED_VALUES // (WIDTH + 2)
    for number in range(count):
        for choice in range(2):
            collector.put(GenerationOutput(choice, "x", [number], logprobs=[scores(number)]))
    assert collector.num_pending == 2
    outputs = await collector.take()
    assert len(outputs) < 2 * 12, "they are merged"
    assert max(output.num_values for output in outputs) < MAX_MERGED_VALUES + WIDTH + 2
    for choice in range(2):
        mine = [output for output in outputs if output.index == choice]
        assert [token_id for output in mine for token_id in output.token_ids] == list(range(count))
        assert all(len(output.text) == len(output.token_ids) for output in mine), "text comes with its tokens"
    collector.put(GenerationOutput(0, "later", [1]))
    assert [output.text for output in await collector.take()] == ["later"]


def test_an_echo_has_the_special_tokens_of_the_prompt(tokenizer: Tokenizer) -> None:
    text = "<|im_start|>user\nHi<|im_end|>\n"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    request = msgspec.convert({"prompt": text, "echo": True, "logprobs": 0}, CompletionRequest)
    output = GenerationOutput(0, "end", [301, ids[0]], finish_reason="stop")
    output.logprobs = [scores(301), scores(ids[0])]
    output.prompt_logprobs = [scores(token_id) for token_id in ids[1:]]
    formatted = CompletionFormat(tokenizer, request, "id", "tiny", [TokenizedPrompt(ids, [])], [()])
    (choice,) = formatted.response([output]).choices
    assert choice.text == text + "end"
    logprobs = choice.logprobs
    assert logprobs is not None
    for token, offset in zip(logprobs.tokens[: len(ids)], logprobs.text_offset, strict=False):
        assert text.startswith(token, offset)
    assert logprobs.text_offset[len(ids)] == len(text)


def test_an_echo_lacks_the_token_that_the_tokenizer_puts_first(tokenizer: Tokenizer) -> None:
    (first, *rest) = tokenizer.encode("<|im_start|>Hi", add_special_tokens=False).ids
    for prompt, text in (
        ("Hi", "Hi"),
        ([first, *rest], "<|im_start|>Hi"),
        ("<|im_start|>Hi", "<|im_start|>Hi"),
    ):
        request = msgspec.convert({"prompt": prompt, "echo": True}, CompletionRequest)
        formatted = CompletionFormat(
            tokenizer, request, "id", "tiny", [TokenizedPrompt([first, *rest], [])], [()]
        )
        (choice,) = formatted.response([GenerationOutput(0, "", [301], finish_reason="stop")]).choices
        assert choice.text == text


def test_the_sampled_token_is_first_of_the_best(tokenizer: Tokenizer) -> None:
    entry = TokenLogprobs([9, 5, 6, 9], [-1.0, -0.1, -0.5, -1.0], 3)
    formatted = LogprobsFormat(tokenizer, as_token_ids=True)
    (shown,) = formatted.chat([entry]).content
    assert [best.token for best in shown.top_logprobs] == ["token_id:9", "token_id:5", "token_id:6"]
    (unlikely,) = formatted.chat([TokenLogprobs([7, 5, 6], [-3.0, -0.1, -0.5], 40)]).content
    assert [best.token for best in unlikely.top_logprobs] == ["token_id:7", "token_id:5"]
    completion = formatted.completion([entry], TextOffsets(tokenizer, skip_special_tokens=True))
    assert list(completion.top_logprobs[0] or ()) == ["token_id:9", "token_id:5", "token_id:6"]
