"""Sampling options at their limits, and requests that ask for a lot of work."""

from __future__ import annotations

from typing import Any

from ..fleet import MODEL
from ..target import CHAT, COMPLETIONS, Attack, Target

BOUNDS: tuple[dict[str, Any], ...] = (
    {"repetition_detection": {"max_pattern_size": 1024, "min_pattern_size": 1, "min_count": 2}},
    {"repetition_detection": {"max_pattern_size": 1024, "min_pattern_size": 1024, "min_count": 1024}},
    {"logit_bias": {str(token): 1.0 for token in range(1024)}},
    {"bad_words": [f"{word} " * 100 for word in range(128)]},
    {"stop": [f"{word:04}" * 250 for word in range(16)]},
    {"stop_token_ids": list(range(256)), "min_tokens": 500},
    {"allowed_token_ids": list(range(3, 1000))},
    {"logprobs": 20, "n": 32},
    {"prompt_logprobs": 20, "logprobs": 20},
    {"repetition_penalty": 10.0, "frequency_penalty": 2.0, "presence_penalty": -2.0, "min_p": 1.0},
    {"temperature": 100.0, "top_k": 1 << 20, "top_p": 1e-9},
    {"vllm_xargs": {str(n): [1] * 100 for n in range(64)}},
    {"use_beam_search": True, "n": 16, "temperature": 0},
)

LONG_CHOICES = [f"{number:04}" + "\u00e9" * 120 for number in range(512)]
"""A grammar of half a million characters."""


async def bounds(target: Target) -> None:
    async def once(number: int) -> None:
        option = BOUNDS[number % len(BOUNDS)]
        body = {"model": MODEL, "prompt": f"Say {number}: ", "max_tokens": 400, "ignore_eos": True, **option}
        await target.ask(COMPLETIONS, body)

    await target.volley(once)


async def repetition(target: Target) -> None:
    """Run generations with repetition detection, which searches at every token."""

    async def once(number: int) -> None:
        body = {
            "model": MODEL,
            "prompt": f"{number} " * 100,
            "max_tokens": 2000,
            "ignore_eos": True,
            "temperature": 2.0,
            "repetition_detection": {"max_pattern_size": 1024, "min_pattern_size": 1, "min_count": 3},
        }
        await target.ask(COMPLETIONS, body)

    await target.volley(once)


async def batches(target: Target) -> None:
    """Echo sixteen prompts of 3900 tokens with log probabilities in one request."""

    async def once(number: int) -> None:
        prompts = [[(number * 7 + row * 13 + at) % 900 + 50 for at in range(3900)] for row in range(16)]
        body = {"model": MODEL, "prompt": prompts, "max_tokens": 1, "echo": True, "logprobs": 5}
        await target.ask(COMPLETIONS, body)

    await target.volley(once, in_flight=2, most=4)


async def many_choices(target: Target) -> None:
    async def once(number: int) -> None:
        bodies: list[dict[str, Any]] = [
            {"prompt": [f"{number} {n}" for n in range(1024)], "max_tokens": 4},
            {"prompt": [f"{number} {n}" for n in range(1025)], "max_tokens": 4},
            {"prompt": f"{number}", "n": 128, "max_tokens": 64},
            {"prompt": [f"{number} {n}" for n in range(64)], "n": 128, "max_tokens": 64},
            {"prompt": "a", "max_tokens": 1 << 24, "stream": True},
            {
                "prompt": [f"{number} {n}" for n in range(1024)],
                "allowed_token_ids": [300 + n % 700 for n in range(200_000)],
            },
            {"prompt": [f"{number} {n}" for n in range(1024)], "allowed_token_ids": list(range(300, 1000))},
            {
                "prompt": [f"{number} {n}" for n in range(1024)],
                "structured_outputs": {"choice": LONG_CHOICES},
            },
        ]
        await target.ask(COMPLETIONS, {"model": MODEL, **bodies[number % len(bodies)]})

    await target.volley(once, in_flight=4)


async def long_prompts(target: Target) -> None:
    """Send distinct prompts of half the model's context length and more, which turn over all caches."""

    async def once(number: int) -> None:
        content = f"{target.until}-{number} " + "the quick brown fox jumps over the lazy dog " * (
            60 + number % 60
        )
        await target.ask(
            CHAT, {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": content}]}
        )

    await target.volley(once, in_flight=4)


ATTACKS = (
    Attack("sampling bounds", bounds),
    Attack("repetition detection", repetition),
    Attack("scored batches", batches),
    Attack("many choices", many_choices),
    Attack("long prompts", long_prompts),
)
