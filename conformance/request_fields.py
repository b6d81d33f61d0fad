"""Values for every field of chat completions and completions: valid, at a bound, of a wrong type, out of range.

A generated request has the minimum that its endpoint needs, and one or two of these fields.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
HELLO = {"role": "user", "content": "Hello!"}
NUMBERS: list[Any] = [0, 1, 0.5, -1, 2, 2.5, "1", "x", None, True, [], {}]
COUNTS: list[Any] = [0, 1, 2, 3, -1, 1.5, "2", "x", None, True, []]
FLAGS: list[Any] = [True, False, None, 1, "true", "x", []]
TEXTS: list[Any] = ["", "abc", None, 1, [], ["a"]]

KWARGS: list[Any] = [{}, None, {"max_pixels": 5000}, {"x": {}}, [], "x", 5, {"a" * 70: 1}]
COMMON: dict[str, list[Any]] = {
    "frequency_penalty": NUMBERS,
    "presence_penalty": NUMBERS,
    "repetition_penalty": NUMBERS,
    "temperature": NUMBERS,
    "top_p": NUMBERS,
    "min_p": NUMBERS,
    "top_k": COUNTS,
    "n": COUNTS,
    "max_tokens": [*COUNTS, 100_000],
    "min_tokens": [*COUNTS, 100],
    "seed": [0, 7, -1, 2**63, "7", 1.5, None, []],
    "stop": [[], "e", ["e", "a"], [""], "", ["a", "b", "c", "d", "e"], 5, [5], None],
    "stop_token_ids": [[], [5, 6], [-1], [100_000], ["5"], 5, None],
    "logit_bias": [{}, {"5": 10}, {"5": 101}, {"x": 1}, {"100000": 1}, {"-1": 1}, {"5": "x"}, [], None],
    "allowed_token_ids": [[5, 6, 7], [], [100_000], [-1], ["5"], 5, None],
    "bad_words": [[], ["a"], [""], [5], "a", None],
    "prompt_logprobs": [*COUNTS, 1000],
    "stream": FLAGS,
    "stream_options": [{}, {"include_usage": True}, {"include_usage": "x"}, {"nope": 1}, "x", None],
    "ignore_eos": FLAGS,
    "include_stop_str_in_output": FLAGS,
    "skip_special_tokens": FLAGS,
    "spaces_between_special_tokens": FLAGS,
    "use_beam_search": FLAGS,
    "length_penalty": NUMBERS,
    "truncate_prompt_tokens": [*COUNTS, 100_000],
    "truncation_side": ["left", "right", "up", 1, None],
    "return_token_ids": FLAGS,
    "return_tokens_as_token_ids": FLAGS,
    "add_special_tokens": FLAGS,
    "cache_salt": TEXTS,
    "priority": [0, 1, -1, "1", None],
    "request_id": TEXTS,
    "session_id": TEXTS,
    "user": TEXTS,
    "vllm_xargs": [{}, {"a": 1}, {"a": [1, 2]}, {"a": {}}, [], "x", None],
    "response_format": [
        {"type": "text"}, {"type": "json_object"}, JSON_SCHEMA, {"type": "json_schema"}, {"type": "nope"}, {}, "text",
        None,
    ],
    "structured_outputs": [
        {"choice": ["yes", "no"]}, {"regex": "[ab]{3}"}, {"json": SCHEMA}, {"grammar": 'root ::= "a"'},
        {"regex": "["}, {"grammar": "nope"}, {"choice": []}, {}, {"regex": "a", "choice": ["a"]}, "x", None,
    ],
    "repetition_detection": [
        {"max_pattern_size": 4, "min_count": 3}, {"max_pattern_size": -1}, {}, "x", None,
    ],
    "watermarking": FLAGS,
    "stream_interval": COUNTS,
    "model": ["nope", "", None, 5, []],
    "an_unknown_field": [1, None, {}],
}  # fmt: skip

CHAT: dict[str, list[Any]] = {
    "mm_processor_kwargs": KWARGS,
    "media_io_kwargs": [*KWARGS, {"image": {"rgba_background_color": [0, 0, 0]}}],
    "messages": [
        [], None, "hi", [HELLO, HELLO], [{"role": "user"}], [{"content": "hi"}], [{"role": "nope", "content": "hi"}],
        [{"role": "user", "content": None}], [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        [{"role": "user", "content": [{"type": "nope", "text": "hi"}]}], [{"role": "user", "content": []}],
        [{"role": "system", "content": "Be brief."}, HELLO], [{"role": "developer", "content": "Be brief."}, HELLO],
        [HELLO, {"role": "assistant", "content": "Hi"}], [{"role": "tool", "content": "5"}],
        [HELLO, {"role": "assistant", "tool_calls": []}],
    ],
    "max_completion_tokens": COUNTS,
    "logprobs": FLAGS,
    "top_logprobs": COUNTS,
    "tools": [[WEATHER], [], [{"type": "function"}], [{"type": "nope"}], {}, "x", None],
    "tool_choice": [
        "none", "auto", "required", "nope", {"type": "function", "function": {"name": "get_weather"}}, {}, None,
    ],
    "parallel_tool_calls": FLAGS,
    "reasoning_effort": ["none", "low", "high", "max", "nope", 5, None],
    "include_reasoning": FLAGS,
    "documents": [[], [{"title": "a", "text": "b"}], [1], "x", None],
    "chat_template_kwargs": [{}, {"enable_thinking": False}, {"nope": 1}, [], "x", None],
    "chat_template": ["{{ messages[0].content }}", "", 5, None],
    "add_generation_prompt": FLAGS,
    "continue_final_message": FLAGS,
    "echo": FLAGS,
    "functions": [[], [{"name": "a"}], None],
    "function_call": ["auto", None],
    "modalities": [["text"], ["audio"], None],
    "metadata": [{}, {"a": "b"}, None],
    "store": FLAGS,
    "service_tier": ["auto", "nope", None],
}  # fmt: skip

COMPLETION: dict[str, list[Any]] = {
    "prompt": [
        "", "A", ["A", "B"], [5, 6], [[5], [6]], [], [[]], [-1], [100_000], ["A", 5], [1.5], 5, None, {},
    ],
    "logprobs": [*COUNTS, 1000],
    "echo": FLAGS,
    "suffix": ["", "end", 5, None],
    "best_of": COUNTS,
}  # fmt: skip


@dataclass(frozen=True)
class GeneratedRequest:
    """A request: its path, its JSON body, and the fields that were drawn for it."""

    path: str
    body: dict[str, Any]
    fields: tuple[str, ...]


def generated_requests(count: int, seed: int) -> Iterator[GeneratedRequest]:
    """Draw requests: first each field's values once around, then pairs of fields.

    Args:
        count: number of requests.
        seed: of the random choices; equal seeds give equal requests.
    """
    source = random.Random(seed)
    for number in range(count):
        is_chat = number % 3 != 2
        table = {**COMMON, **(CHAT if is_chat else COMPLETION)}
        names = list(table)
        first = names[(number // 3 * (2 if is_chat else 1) + number % 3) % len(names)]
        fields = [first] if number < count * 0.7 else [first, source.choice(names)]
        body: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "temperature": 0}
        body |= {"messages": [HELLO]} if is_chat else {"prompt": "Once upon a time"}
        for name in dict.fromkeys(fields):
            body[name] = source.choice(table[name])
        path = "/v1/chat/completions" if is_chat else "/v1/completions"
        yield GeneratedRequest(path, body, tuple(dict.fromkeys(fields)))
