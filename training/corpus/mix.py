"""The training mix and the held-out cases: the families of conversations, their shares, and how they are formatted."""

import random
from collections.abc import Callable, Iterator

from . import arithmetic, copying, extraction, facts, memory, schema, small_talk, tools, words
from .conversation import Conversation, Message, Turn, answer, is_held_out, system_prompt
from .reserved import is_reserved

_TURNS: dict[str, tuple[float, Callable[[random.Random], Turn]]] = {
    "small_talk": (16, small_talk.sample),
    "told": (14, memory.one_message),
    "echo": (10, copying.echo),
    "spell": (8, copying.spell),
    "facts": (18, facts.sample),
    "facts_many": (1.2, lambda rng: facts.sample(rng, rng.randint(9, 30))),
    "long": (0, lambda rng: facts.needle(rng, int(2 ** rng.uniform(9, 11.8)))),
    "very_long": (0, lambda rng: facts.needle(rng, int(2 ** rng.uniform(11.8, 13.3)))),
    "arithmetic": (11, arithmetic.sample),
    "json": (23, extraction.sample),
    "schema": (5, schema.sample),
}
_ALONE = ("told", "schema")
"""Turns without others before them: those might have told what this one must not know, or have free replies."""
_COMPOUND = {"memory": 12.0, "tools": 36.0}
_LONG_SHARE = {"long": 1.0, "very_long": 0.2}
"""Added in the later part of the training only: they cost the most per token."""

THINKING_SHARE = 0.3
"""Clients that say nothing of thinking get a model that thinks."""
DENSE_SHARE = 0.42
DENSE_TOOLS_SHARE = 0.65


def _wrap(rng: random.Random, turns: list[Turn], thinking: bool, dense: bool) -> Conversation:
    """Turns as one conversation under one system message."""
    messages: list[Message] = []
    system = next((turn.system for turn in turns if turn.system), "") or system_prompt(rng)
    if system:
        messages.append({"role": "system", "content": system})
    for turn in turns:
        messages += [{"role": "user", "content": turn.user}, answer(turn, thinking)]
    keys = [turn.key or turn.user for turn in turns]
    return Conversation(turns[-1].kind, messages, keys, thinking, dense=dense)


def draw(rng: random.Random, with_long: bool) -> Conversation:
    """One conversation of the mix, from either side of the split."""
    weights = {name: share for name, (share, _) in _TURNS.items()} | _COMPOUND
    if with_long:
        weights |= _LONG_SHARE
    family = rng.choices(list(weights), list(weights.values()))[0]
    thinking = rng.random() < THINKING_SHARE
    dense = rng.random() < DENSE_SHARE
    if family == "memory":
        return memory.sample(rng, thinking, dense)
    if family == "tools":
        # Many exchanges over one list of tools: what is learned of choosing costs the list's tokens only once.
        return tools.sample(rng, thinking, not thinking and rng.random() < DENSE_TOOLS_SHARE)
    first = _TURNS[family][1](rng)
    if family in _LONG_SHARE or family == "facts_many" or family in _ALONE:
        return _wrap(rng, [first], thinking, dense=False)
    if not dense:
        history = [_short(rng) for _ in range(rng.choice((0, 0, 0, 0, 0, 0, 1, 2)))]
        return _wrap(rng, [*history, first], thinking, dense=False)
    turns = [first]
    alike = rng.random() < 0.4
    turns += [_TURNS[family][1](rng) if alike else _short(rng) for _ in range(rng.randint(1, 4))]
    with_context = [turn for turn in turns if turn.system]
    turns = [*with_context[:1], *(turn for turn in turns if not turn.system)]
    rng.shuffle(turns)
    return _wrap(rng, turns, thinking, dense=True)


def _short(rng: random.Random) -> Turn:
    while True:
        pick = rng.choice(
            (
                small_talk.sample,
                copying.echo,
                copying.spell,
                facts.sample,
                arithmetic.single,
                extraction.sample,
            )
        )
        turn = pick(rng)
        if not turn.system and len(turn.user) + len(turn.reply) < 220:
            return turn


def training(rng: random.Random, with_long: bool = True) -> Iterator[Conversation]:
    """Conversations without end, none with a held-out key or a reserved prompt."""
    while True:
        conversation = draw(rng, with_long)
        if not any(is_held_out(key) for key in conversation.keys) and not is_reserved(conversation):
            yield conversation


def _one(rng: random.Random, turn: Turn, thinking: bool) -> Conversation:
    return _wrap(rng, [turn], thinking, dense=False)


def _sum(rng: random.Random, low: int, high: int, signs: str) -> Turn:
    sign = rng.choice(signs)
    left, right = rng.randint(low, high), rng.randint(low, high)
    chosen = (left, sign, right) if sign != "-" or left >= right else (right, sign, left)
    return arithmetic.single(rng, chosen)


def _real_words(rng: random.Random) -> Turn:
    while True:
        turn = copying.echo(rng)
        if turn.reply and all(w in words.ENGLISH for w in turn.reply.split()):
            return turn


def _spell_real(rng: random.Random, real: bool) -> Turn:
    while True:
        turn = copying.spell(rng)
        word = turn.reply.replace("-", "")
        if "-" in turn.reply and turn.reply == "-".join(word) and (word.lower() in words.ENGLISH) is real:
            return turn


EVALUATED: dict[str, Callable[[random.Random, bool], Conversation]] = {
    "small_talk": lambda rng, th: _one(rng, small_talk.sample(rng), th),
    "echo": lambda rng, th: _one(rng, copying.echo(rng), th),
    "echo_real_words": lambda rng, th: _one(rng, _real_words(rng), th),
    "spell_real_word": lambda rng, th: _one(rng, _spell_real(rng, True), th),
    "spell_other_word": lambda rng, th: _one(rng, _spell_real(rng, False), th),
    "facts_1_to_3": lambda rng, th: _one(rng, facts.sample(rng, rng.randint(1, 3)), th),
    "facts_4_to_8": lambda rng, th: _one(rng, facts.sample(rng, rng.randint(4, 8)), th),
    "facts_in_junk": lambda rng, th: _one(rng, facts.needle(rng, int(2 ** rng.uniform(9, 12))), th),
    "memory": lambda rng, th: memory.sample(rng, th, dense=False),
    "told": lambda rng, th: _one(rng, memory.one_message(rng), th),
    "sum_one_digit": lambda rng, th: _one(rng, _sum(rng, 0, 9, "+"), th),
    "difference_one_digit": lambda rng, th: _one(rng, _sum(rng, 0, 9, "-"), th),
    "sum_two_digits": lambda rng, th: _one(rng, _sum(rng, 10, 99, "+"), th),
    "difference_two_digits": lambda rng, th: _one(rng, _sum(rng, 10, 99, "-"), th),
    "product": lambda rng, th: _one(rng, _sum(rng, 0, 10, "*"), th),
    "json": lambda rng, th: _one(rng, extraction.sample(rng), th),
    "tool_call": lambda rng, th: tools.sample(
        rng, th, dense=False, kind=rng.choices(("call", "parallel"), (9, 1))[0]
    ),
    "tool_result": lambda rng, th: tools.sample(rng, th, dense=False, kind="result"),
    "no_tool": lambda rng, th: tools.sample(rng, th, dense=False, kind="no_tool"),
    "tool_unneeded": lambda rng, th: tools.sample(rng, th, dense=False, kind="not_needed"),
}


def held_out(family: str, count: int, seed: int, thinking: bool = False) -> list[Conversation]:
    """`count` cases of a family whose last key was never trained on."""
    rng = random.Random(f"held-out {family} {seed} {thinking}")
    found: list[Conversation] = []
    while len(found) < count:
        conversation = EVALUATED[family](rng, thinking)
        if is_held_out(conversation.keys[-1]):
            found.append(conversation)
    return found
