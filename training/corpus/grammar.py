"""Paraphrase grammars: one pattern stands for many phrasings.

`[a|b]` chooses, also inside a choice; an empty choice leaves the words out. `{fields}` are left for `str.format`.
"""

import random
import re

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SPACES = re.compile(r" {2,}")
_STRAY = re.compile(r" +([.,!?]|'(?:m|s|re|ve|ll)\b)")


def expand(rng: random.Random, pattern: str) -> str:
    """One phrasing of a pattern, without double spaces and spaces before punctuation or `'s`."""
    while found := _CHOICE.search(pattern):
        pattern = pattern[: found.start()] + rng.choice(found[1].split("|")) + pattern[found.end() :]
    return _STRAY.sub(r"\1", _SPACES.sub(" ", pattern))


def pick(rng: random.Random, patterns: tuple[str, ...]) -> str:
    """One phrasing of one of the patterns, without spaces at its ends."""
    return expand(rng, rng.choice(patterns)).strip(" ")


def capital(text: str) -> str:
    """The text with its first letter upper case."""
    return text[:1].upper() + text[1:]
