"""Repeat exactly; spell letter by letter; letters back into words."""

# ruff: noqa: E501  (tables of phrasings read best unwrapped)

import random
import string

from . import words
from .conversation import Turn, phrase

_ECHO_OPEN = (
    "Repeat after me: {x}", "Repeat: {x}", "Say {x}", "Say: {x}", "Echo: {x}", "Repeat this: {x}", "Repeat {x}",
    "Repeat the following: {x}", "Repeat exactly: {x}", "Say the following: {x}", "Please say: {x}", "echo {x}",
    "Copy this text: {x}", "Copy: {x}", "Write this: {x}", "Type: {x}", "Repeat back to me: {x}", "Print: {x}",
    "Say exactly this: {x}", "Repeat the words: {x}", "Please repeat: {x}", "Can you say {x}", "Now say {x}",
    "Repeat the following text exactly:\n{x}", "Echo the next line.\n{x}", "Copy the line below:\n{x}", "Just say {x}",
    "Reply with: {x}", "Answer with exactly this: {x}", "Output: {x}", "Return this text: {x}", "I want you to say {x}",
)  # fmt: skip
_ECHO_QUOTED = (
    "Say \"{x}\".", "Repeat \"{x}\".", "Please say \"{x}\"", "Repeat '{x}'", "Repeat the words \"{x}\" exactly.",
    "Reply with \"{x}\" and nothing else.", "Can you repeat \"{x}\"?", "Say '{x}', please.", "Echo \"{x}\" back to me.",
    "Write \"{x}\".", "Repeat the phrase \"{x}\" to me.", "Could you say \"{x}\" for me?", "Respond only with \"{x}\".",
    "Type the text '{x}'.", "Please copy \"{x}\" word for word.",
)  # fmt: skip
_COMMON = (
    "this is a test", "hello world", "the cat sat on the mat", "I like to eat apples", "we are the best", "yes I can",
    "one two three", "open the door", "I love you", "good morning everyone", "nothing", "where are you going",
)  # fmt: skip
_MARKS = ("!", "?", ".", ",", ";", ":", " -", "...")
_ODD = (
    "café",
    "naïve",
    "über",
    "señor",
    "garçon",
    "día",
    "Zürich",
    "🙂",
    "🚀",
    "日本",
    "привет",
    "£5",
    "€20",
    "½",
    "→",
)


def _plain_words(rng: random.Random, count: int) -> str:
    return " ".join(
        rng.choice(words.GLUE) if rng.random() < 0.12 else words.any_word(rng) for _ in range(count)
    )


def payload(rng: random.Random) -> str:
    """Text to copy: words of all origins, codes, numbers, punctuation, a little beyond ASCII."""
    chance = rng.random()
    if chance < 0.55:
        return _plain_words(rng, rng.choice((1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 10)))
    if chance < 0.63:
        return " ".join(words.english(rng) for _ in range(rng.randint(1, 8)))
    if chance < 0.76:
        return " ".join(words.code(rng) for _ in range(rng.choice((1, 1, 1, 2, 3))))
    if chance < 0.86:
        return words.sentence(rng)[: -1 if rng.random() < 0.5 else None]
    if chance < 0.92:
        return " ".join(
            w + (rng.choice(_MARKS) if rng.random() < 0.4 else "")
            for w in _plain_words(rng, rng.randint(1, 5)).split()
        )
    if chance < 0.94:
        return rng.choice(_COMMON)
    if chance < 0.96:
        return _plain_words(rng, rng.randint(1, 3)).upper()
    if chance < 0.98:
        return rng.choice((
            f"{words.pseudo_word(rng)}@{words.english(rng)}.{rng.choice(('com', 'org', 'net'))}",
            f"https://{words.english(rng)}.{rng.choice(('com', 'org', 'io'))}/{words.any_word(rng)}",
            f"/{words.english(rng)}/{words.any_word(rng)}.txt",
            f"{words.english(rng)}_{words.english(rng)}({rng.randint(0, 99)})",
        ))  # fmt: skip
    return " ".join([*_plain_words(rng, rng.randint(0, 3)).split(), rng.choice(_ODD)])


def echo(rng: random.Random) -> Turn:
    """Repeat a payload, verbatim."""
    text = payload(rng)
    if rng.random() < 0.07 and len(text) < 30 and "\n" not in text:
        times = rng.randint(2, 5)
        word = {2: "two", 3: "three", 4: "four", 5: "five"}[times]
        template = phrase(rng, rng.choice(("Say \"{x}\" {t} times.", "Repeat \"{x}\" {t} times.", "Write \"{x}\" {t} times.", "Repeat the words \"{x}\" {t} times.")))  # fmt: skip
        user = template.format(x=text, t=rng.choice((word, str(times))))
        return Turn("echo", user, " ".join([text] * times), f"Repeat it {word} times.", key="echo " + text)
    if rng.random() < 0.6 or '"' in text or "'" in text:
        user = phrase(rng, rng.choice(_ECHO_OPEN), polite=False).format(x=text)
    else:
        user = phrase(rng, rng.choice(_ECHO_QUOTED)).format(x=text)
    return Turn("echo", user, text, "I repeat it exactly.", key="echo " + text)


def _spellable(rng: random.Random) -> tuple[str, str]:
    """A word to spell and its split key: invented words are held out themselves, real ones by prompt."""
    chance = rng.random()
    if chance < 0.45:
        word = words.english(rng)
        return (word.capitalize() if rng.random() < 0.06 else word), ""
    if chance < 0.60:
        return words.piece_word(rng), ""
    if chance < 0.85:
        word = words.pseudo_word(rng)
        return word, "spell " + word
    if chance < 0.95:
        return rng.choice((rng.choice(words.NAMES), rng.choice(words.CITIES))), ""
    word = "".join(rng.choice(string.ascii_uppercase) for _ in range(rng.randint(2, 6)))
    return word, "spell " + word


_SPELL = (
    "Spell {w}.", "Spell the word {w}.", "How do you spell {w}?", "Spell \"{w}\".", "Can you spell {w}?", "Spell out {w}.",
    "Please spell the word {w}.", "How is {w} spelled?", "Spell: {w}", "Spell {w} letter by letter.", "Spell '{w}' for me.",
    "What are the letters of {w}?", "Give me the letters in {w}.", "Write {w} letter by letter.", "I can't spell {w}. Can you?",
    "What letters are in the word {w}?", "Spell out the word \"{w}\".", "How would you spell {w}?", "Tell me how to spell {w}.",
    "Show me the spelling of {w}.",
)  # fmt: skip
_JOIN = (
    "Which word is {l}?", "What word is {l}?", "Join the letters {l}.", "{l} spells what?", "Put these letters together: {l}",
    "What does {l} spell?",
)  # fmt: skip


def spell(rng: random.Random) -> Turn:
    """Spell one word, several words, name a first or last letter, or join letters into a word."""
    word, key = _spellable(rng)
    letters = "-".join(word)
    chance = rng.random()
    if chance < 0.72:
        user = phrase(rng, rng.choice(_SPELL)).format(w=word)
        return Turn("spell", user, letters, "One letter at a time.", key=key or user)
    if chance < 0.86:
        listed = [word] + [_spellable(rng)[0] for _ in range(rng.randint(1, 4))]
        template = rng.choice(
            ("Spell these words: {l}", "Spell each word: {l}", "Spell {l}.", "Spell the words {l}.")
        )
        user = phrase(rng, template, polite=False).format(l=", ".join(listed))
        return Turn(
            "spell",
            user,
            "\n".join(f"{w}: {'-'.join(w)}" for w in listed),
            "One word at a time.",
            key=key or user,
        )
    if chance < 0.94:
        end = rng.choice(("first", "last"))
        template = rng.choice(("What is the {e} letter of {w}?", "What's the {e} letter in {w}?", "Tell me the {e} letter of \"{w}\".", "Which letter comes {e} in {w}?"))  # fmt: skip
        user = phrase(rng, template).format(e=end, w=word)
        letter = word[0] if end == "first" else word[-1]
        return Turn(
            "spell",
            user,
            f"The {end} letter of {word} is {letter}.",
            f"Look at the {end} letter.",
            key=key or user,
        )
    user = phrase(rng, rng.choice(_JOIN), polite=False).format(l=letters)
    return Turn("spell", user, word, "Join the letters.", key=key or user)
