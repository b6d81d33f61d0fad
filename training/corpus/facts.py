"""Questions answered from facts given in the prompt; the answer restates the fact.

Needles in long junk text live here too: the same questions, hundreds of lines apart.
"""

# ruff: noqa: E501  (tables of phrasings read best unwrapped)

import random
from collections.abc import Callable
from dataclasses import dataclass

from . import words
from .conversation import Turn, phrase

NOT_GIVEN = "The text does not say."


@dataclass(frozen=True)
class Fact:
    """A statement, the questions it answers, and what makes it clash with another fact."""

    statement: str
    questions: tuple[str, ...]
    subject: str


def _lives(rng: random.Random) -> Fact:
    who, where = words.name(rng), words.place(rng)
    return Fact(f"{who} lives in {where}.", (
        f"Where does {who} live?", f"In which city does {who} live?", f"What city does {who} live in?", f"Who lives in {where}?",
        f"What is the home town of {who}?",
    ), who)  # fmt: skip


def _is_in(rng: random.Random) -> Fact:
    thing, spot = (
        rng.choice((rng.choice(words.THINGS), words.any_word(rng).lower())),
        rng.choice((rng.choice(words.PLACES), words.any_word(rng).lower())),
    )
    return Fact(f"The {thing} is in the {spot}.", (
        f"Where is the {thing}?", f"Where can I find the {thing}?", f"What is in the {spot}?", f"In which place is the {thing}?", f"Where's my {thing}?",
    ), thing)  # fmt: skip


def _has(rng: random.Random) -> Fact:
    who, count, what = (
        words.name(rng),
        rng.randint(2, 99),
        rng.choice((rng.choice(words.THINGS), words.english(rng))),
    )
    what += "" if what.endswith("s") else "s"
    return Fact(f"{who} has {count} {what}.", (
        f"How many {what} does {who} have?", f"What does {who} have?", f"Who has {count} {what}?", f"How many {what} has {who} got?",
    ), who)  # fmt: skip


def _works(rng: random.Random) -> Fact:
    who, job = words.name(rng), rng.choice((rng.choice(words.JOBS), words.any_word(rng).lower()))
    return Fact(f"{who} works as a {job}.", (
        f"What does {who} do?", f"What is {who}'s job?", f"Who works as a {job}?", f"What is the job of {who}?", f"What does {who} work as?",
    ), who)  # fmt: skip


def _called(rng: random.Random) -> Fact:
    who, pet, called = words.name(rng), rng.choice(words.ANIMALS), words.name(rng)
    return Fact(f"{who}'s {pet} is called {called}.", (
        f"What is {who}'s {pet} called?", f"What is the name of {who}'s {pet}?", f"How is {who}'s {pet} called?", f"What's the {pet} of {who} called?",
    ), who)  # fmt: skip


def _code(rng: random.Random) -> Fact:
    what = rng.choice(
        (
            "code",
            "password",
            "pin",
            "key",
            "number",
            "token",
            "secret",
            "id",
            "wifi password",
            "door code",
            "passphrase",
        )
    )
    secret = words.value(rng)
    if rng.random() < 0.5:
        return Fact(
            f"The {what} is {secret}.",
            (
                f"What is the {what}?",
                f"Tell me the {what}.",
                f"What's the {what}?",
                f"Which {what} do I need?",
            ),
            what,
        )
    owner = words.any_word(rng)
    return Fact(f"The {what} for {owner} is {secret}.", (
        f"What is the {what} for {owner}?", f"What's the {what} of {owner}?", f"Tell me the {what} for {owner}.", f"Which {what} is for {owner}?",
    ), owner)  # fmt: skip


def _colour(rng: random.Random) -> Fact:
    thing, colour = (
        rng.choice((rng.choice(words.THINGS), words.any_word(rng).lower())),
        rng.choice((*words.COLOURS, words.english(rng))),
    )
    return Fact(f"The {thing} is {colour}.", (
        f"What colour is the {thing}?", f"Which color is the {thing}?", f"What is {colour}?", f"What is the colour of the {thing}?",
        f"How is the {thing}?",
    ), thing)  # fmt: skip


def _likes(rng: random.Random) -> Fact:
    who, what = words.name(rng), rng.choice((rng.choice(words.FOODS), words.any_word(rng).lower()))
    verb = rng.choice(("likes", "loves", "hates", "wants", "sells", "eats", "needs"))
    return Fact(f"{who} {verb} {what}.", (f"What does {who} {verb[:-1]}?", f"Who {verb} {what}?"), who)


def _capital(rng: random.Random) -> Fact:
    land, city = words.pseudo_word(rng).capitalize(), words.place(rng)
    what = rng.choice(("capital", "king", "queen", "president", "biggest city", "river", "currency", "mayor"))
    return Fact(f"The {what} of {land} is {city}.", (
        f"What is the {what} of {land}?", f"Name the {what} of {land}.", f"What's the {what} of {land}?", f"Tell me the {what} of {land}.",
    ), land)  # fmt: skip


def _costs(rng: random.Random) -> Fact:
    thing, price = (
        rng.choice((rng.choice(words.THINGS), rng.choice(words.FOODS), words.any_word(rng).lower())),
        rng.randint(1, 999),
    )
    unit = rng.choice(("dollars", "euros", "coins", "pounds"))
    return Fact(f"The {thing} costs {price} {unit}.", (
        f"How much does the {thing} cost?", f"What does the {thing} cost?", f"What is the price of the {thing}?", f"What costs {price} {unit}?",
        f"How much is the {thing}?",
    ), thing)  # fmt: skip


def _time(rng: random.Random) -> Fact:
    what = rng.choice(
        (
            "train",
            "meeting",
            "shop",
            "film",
            "bus",
            "class",
            "party",
            "flight",
            "concert",
            words.any_word(rng).lower(),
        )
    )
    verb = rng.choice(("starts", "leaves", "opens", "closes", "ends", "begins"))
    when = rng.choice(
        (
            f"{rng.randint(0, 23)}:{rng.choice('012345')}{rng.choice('05')}",
            rng.choice(words.DAYS),
            f"{rng.randint(1, 12)} o'clock",
        )
    )
    link = "on" if when in words.DAYS else "at"
    return Fact(f"The {what} {verb} {link} {when}.", (
        f"When does the {what} {verb[:-1]}?", f"What time does the {what} {verb[:-1]}?", f"At what time does the {what} {verb[:-1]}?",
        f"What {verb} {link} {when}?",
    ), what)  # fmt: skip


def _born(rng: random.Random) -> Fact:
    who = words.name(rng)
    if rng.random() < 0.5:
        year = rng.randint(1400, 2020)
        return Fact(
            f"{who} was born in {year}.",
            (f"When was {who} born?", f"In which year was {who} born?", f"Who was born in {year}?"),
            who,
        )
    age = rng.randint(2, 99)
    return Fact(
        f"{who} is {age} years old.",
        (f"How old is {who}?", f"What is {who}'s age?", f"Who is {age} years old?"),
        who,
    )


def _relation(rng: random.Random) -> Fact:
    who, other = words.name(rng), words.name(rng)
    role = rng.choice(
        [
            "brother",
            "sister",
            "mother",
            "father",
            "boss",
            "teacher",
            "doctor",
            "friend",
            "uncle",
            "aunt",
            "son",
            "daughter",
        ]
    )
    return Fact(
        f"{who} is the {role} of {other}.",
        (f"Who is the {role} of {other}?", f"Who is {other}'s {role}?", f"Who is {who}?"),
        other,
    )


def _attribute(rng: random.Random) -> Fact:
    attribute, owner, value = words.any_word(rng).lower(), words.any_word(rng), words.value(rng)
    return Fact(f"The {attribute} of {owner} is {value}.", (
        f"What is the {attribute} of {owner}?", f"What's the {attribute} of {owner}?", f"Give me the {attribute} of {owner}.",
        f"Which {attribute} does {owner} have?",
    ), owner)  # fmt: skip


def _plain(rng: random.Random) -> Fact:
    subject, value = words.any_word(rng), words.value(rng)
    return Fact(
        f"{subject} is {value}.",
        (f"What is {subject}?", f"What's {subject}?", f"Tell me what {subject} is."),
        subject,
    )


_KINDS: tuple[Callable[[random.Random], Fact], ...] = (
    _lives, _is_in, _has, _works, _called, _code, _code, _colour, _likes, _capital, _costs, _time, _born, _relation, _attribute, _plain,
)  # fmt: skip


def make(rng: random.Random, count: int) -> list[Fact]:
    """`count` facts that do not answer each other's questions."""
    same = rng.choice(_KINDS) if count > 1 and rng.random() < 0.5 else None
    found: list[Fact] = []
    used: set[str] = set()
    while len(found) < count:
        fact = (same or rng.choice(_KINDS))(rng)
        if same is not None and len(found) > count // 2 and rng.random() < 0.3:
            same = None
        tail = fact.statement.rstrip(".").split()[-1]
        if fact.subject.lower() in used or fact.statement in used or tail in used:
            if same is not None and rng.random() < 0.1:
                same = None
            continue
        used |= {fact.subject.lower(), fact.statement, tail}
        found.append(fact)
    return found


def listed(rng: random.Random, statements: list[str]) -> str:
    """Statements as running text, lines, or a bulleted or numbered list."""
    style = rng.randrange(5)
    if style <= 1:
        return " ".join(statements)
    if style == 2:
        return "\n".join(statements)
    if style == 3:
        return "\n".join(f"- {s}" for s in statements)
    return "\n".join(f"{i}. {s}" for i, s in enumerate(statements, 1))


_FRAMES = (
    "{c} {q}", "{c}\n{q}", "{c}\n\n{q}", "Facts:\n{c}\n\nQuestion: {q}", "Context: {c}\nQuestion: {q}", "Read this: {c} {q}",
    "{c}\nQuestion: {q}", "Here are some facts. {c} {q}", "Given that: {c}\n{q}", "Use the facts to answer.\n{c}\n{q}",
    "{q} {c}", "{q}\n\n{c}", "Answer the question: {q}\nText: {c}", "Text:\n{c}\n\n{q}", "I tell you this: {c} {q}",
    "Notes:\n{c}\n{q}", "\"{c}\" {q}", "Question: {q}\nContext: {c}", "Remember: {c} {q}", "{c} Now tell me: {q}",
)  # fmt: skip


def _count(rng: random.Random) -> int:
    return rng.choices((1, 2, 3, 4, 5, 6, 7, 8), (30, 24, 22, 8, 5, 4, 3, 4))[0]


def _question(rng: random.Random, facts: list[Fact]) -> tuple[str, str, str]:
    """A question, its answer, and the thought before it; now and then one that nothing answers."""
    if rng.random() < 0.08:
        other = make(rng, 1)[0]
        said = " ".join(f.statement for f in facts).lower()
        if other.subject.lower() not in said:
            return phrase(rng, other.questions[0], polite=False), NOT_GIVEN, "No fact answers this."
    fact = rng.choice(facts)
    return phrase(rng, rng.choice(fact.questions), polite=False), fact.statement, "One fact answers this."


def sample(rng: random.Random, count: int | None = None) -> Turn:
    """A question on 1 to 8 facts, in the user's message or in the system message."""
    facts = make(rng, count or _count(rng))
    question, reply, thought = _question(rng, facts)
    statements = [f.statement for f in facts]
    if rng.random() < 0.12:
        intro = rng.choice(("", "Use these facts. ", "You know this: ", "You are a helpful assistant. "))
        return Turn(
            "facts", question, reply, thought, system=intro + listed(rng, statements), key=reply + question
        )
    context = listed(rng, statements)
    frame = rng.choice(_FRAMES)
    if frame.startswith("{q} ") and question[-1] not in "?.":
        question += "?"
    return Turn("facts", frame.format(c=context, q=question), reply, thought, key=reply + question)


def needle(rng: random.Random, length: int) -> Turn:
    """One or two facts inside about `length` characters of junk, and a question on one of them."""
    facts = make(rng, rng.choice((1, 1, 2)))
    junk: list[str] = []
    style = rng.randrange(3)
    size = 0
    line = words.sentence(rng)
    while size < length:
        if style == 0:
            line = words.sentence(rng, 4, 14)
        elif style == 1:
            line = f"{words.any_word(rng)} {words.code(rng)} {words.any_word(rng)}"
        elif rng.random() < 0.2:
            line = words.sentence(rng)
        junk.append(line)
        size += len(line) + 1
    fact = rng.choice(facts)
    for each in facts:
        junk.insert(rng.randint(0, len(junk)), each.statement)
    text = rng.choice((" ", "\n")).join(junk)
    question = phrase(rng, rng.choice(fact.questions), polite=False)
    frame = rng.choice(_FRAMES[:10])
    return Turn(
        "long",
        frame.format(c=text, q=question),
        fact.statement,
        "One fact answers this.",
        key=fact.statement + question,
    )
