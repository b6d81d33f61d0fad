"""Questions answered from facts given in the prompt; the answer restates the fact.

Needles in long junk text live here too: the same questions, hundreds of lines apart.
"""

# ruff: noqa: E501  (tables of phrasings read best unwrapped)

import dataclasses
import random

from . import words
from .conversation import Turn, phrase
from .fact_kinds import KINDS, Fact
from .grammar import expand

NOT_GIVEN = "The text does not say."


def make(rng: random.Random, count: int) -> list[Fact]:
    """`count` facts that do not answer each other's questions."""
    same = rng.choice(KINDS) if count > 1 and rng.random() < 0.5 else None
    found: list[Fact] = []
    used: set[str] = set()
    while len(found) < count:
        maker = same or rng.choice(KINDS)
        fact = dataclasses.replace(maker(rng), kind=maker.__name__)
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


def _joined(rng: random.Random, statements: list[str]) -> str:
    """Statements as clauses of longer sentences, or as one line of a list."""
    if rng.random() < 0.25:
        head = expand(rng, "[||List: |Menu: |Notes: |Facts: |We know: |Today: ]")
        return head + rng.choice((", ", "; ", ", ")).join(_clause(s) for s in statements) + "."
    text = ""
    for number, statement in enumerate(statements):
        if number and text[-1] != "." and rng.random() < 0.75:
            text += expand(rng, "[ and |, and |, but |, while |; |, | and ]") + _clause(statement)
        else:
            text += (". " if number and text[-1] != "." else " " if number else "") + statement.rstrip(".")
    return text + "."


def _clause(statement: str) -> str:
    """A statement inside a sentence: no full stop; `The` and the like are lower case."""
    first, _, rest = statement.rstrip(".").partition(" ")
    small = first in (
        "The",
        "There",
        "In",
        "On",
        "At",
        "They",
        "Our",
        "For",
        "A",
        "You",
        "We",
        "She",
        "He",
        "One",
        "Use",
        "Take",
        "Enter",
        "Every",
    )
    return f"{first.lower() if small else first} {rest}"


def listed(rng: random.Random, statements: list[str]) -> str:
    """Statements as running text, lines, or a bulleted or numbered list."""
    style = rng.randrange(7)
    if style >= 5 and len(statements) > 1:
        return _joined(rng, statements)
    if style <= 1 or style >= 5:
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
    "Notes:\n{c}\n{q}", "\"{c}\" {q}", "Question: {q}\nContext: {c}", "Remember: {c} {q}", "{c} Now tell me: {q}", "'{c}' {q}", "{c} - {q}", "{q}\n\"{c}\"", "I have a question: {q} {c}", "{q} Here is what I know: {c}", "Use this text to answer. Text: {c} Question: {q}",
    "Please read: {c}\n\n{q}", "<text>\n{c}\n</text>\n{q}", "Document: {c}\n\nAnswer this: {q}", "Based on this, {q}\n{c}", "{c} And now my question: {q}", "{c} So: {q}",
)  # fmt: skip


def _count(rng: random.Random) -> int:
    return rng.choices((1, 2, 3, 4, 5, 6, 7, 8), (30, 24, 22, 8, 5, 4, 3, 4))[0]


def _question(rng: random.Random, facts: list[Fact]) -> tuple[str, str, str]:
    """A question, its answer, and the thought before it; now and then one that nothing answers."""
    if rng.random() < 0.1:
        kind = rng.choice(facts).kind
        other = next((m for m in KINDS if m.__name__ == kind and rng.random() < 0.5), rng.choice(KINDS))(rng)
        said = " ".join(f.statement for f in facts).lower()
        if other.subject.lower() not in said:
            question = expand(rng, other.questions[0]).strip()
            return phrase(rng, question, polite=False), NOT_GIVEN, "No fact answers this."
    fact = rng.choice(facts)
    return phrase(rng, fact.ask(rng), polite=False), fact.statement, "One fact answers this."


def sample(rng: random.Random, count: int | None = None) -> Turn:
    """A question on 1 to 8 facts, in the user's message or in the system message."""
    facts = make(rng, count or _count(rng))
    question, reply, thought = _question(rng, facts)
    statements = [f.say(rng) for f in facts]
    if rng.random() < 0.12:
        intro = rng.choice(("", "Use these facts. ", "You know this: ", "You are a helpful assistant. "))
        return Turn(
            "facts", question, reply, thought, system=intro + listed(rng, statements), key=reply + question
        )
    context = listed(rng, statements)
    frame = rng.choice(_FRAMES)
    if frame.startswith(("{q} ", "I have a question", "Based")) and question[-1] not in "?.":
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
        junk.insert(rng.randint(0, len(junk)), each.say(rng))
    text = rng.choice((" ", "\n")).join(junk)
    question = phrase(rng, fact.ask(rng), polite=False)
    frame = rng.choice(_FRAMES[:10])
    return Turn(
        "long",
        frame.format(c=text, q=question),
        fact.statement,
        "One fact answers this.",
        key=fact.statement + question,
    )
