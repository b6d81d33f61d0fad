"""Kinds of facts: how a text may state one, which questions it answers, and how an answer restates it."""

# ruff: noqa: E501  (tables of phrasings read best unwrapped)

import random
from collections.abc import Callable
from dataclasses import dataclass

from . import words
from .grammar import capital, pick


@dataclass(frozen=True)
class Fact:
    """A statement, the questions it answers, and what makes it clash with another fact."""

    statement: str
    """The form in which an answer restates it."""
    questions: tuple[str, ...]
    """Patterns of `grammar`."""
    subject: str
    wordings: tuple[str, ...] = ()
    """Patterns of other ways to state it."""
    kind: str = ""

    def say(self, rng: random.Random) -> str:
        """The fact as a text states it: as the answer will, or in other words."""
        if not self.wordings or rng.random() < 0.5:
            return self.statement
        return capital(pick(rng, self.wordings)) + "."

    def ask(self, rng: random.Random) -> str:
        """One of its questions."""
        return pick(rng, self.questions)


def _lives(rng: random.Random) -> Fact:
    who, where = words.name(rng), words.place(rng)
    return Fact(f"{who} lives in {where}.", (
        f"Where does {who} live?", f"In which city does {who} live?", f"What city does {who} live in?", f"Who lives in {where}?",
        f"What is the home town of {who}?", f"[Where|In which town|In which city] [does|did] {who} [live|live now|live at the moment]?", f"Where is {who}'s [home|house|flat]?",
    ), who, (
        f"{who} [moved|has moved] to {where}[|| last year| in May| for work]", f"{who} [stayed|settled|is at home|resides] in {where}", f"{who}[|, a friend of mine,|, my neighbour,] lives in {where}[|| with a cat| now]", f"{who} has a [house|flat] in {where}", f"the home of {who} is {where}",
    ))  # fmt: skip


def _is_in(rng: random.Random) -> Fact:
    thing, spot = (
        rng.choice((rng.choice(words.THINGS), words.any_word(rng).lower())),
        rng.choice((rng.choice(words.PLACES), words.any_word(rng).lower())),
    )
    return Fact(f"The {thing} is in the {spot}.", (
        f"Where is the {thing}?", f"Where can I find the {thing}?", f"What is in the {spot}?", f"In which place is the {thing}?", f"Where's my {thing}?", f"Where [did I put|did I leave|do they keep|is] the {thing}?", f"[In which room|Where exactly|In what place] is the {thing}?",
    ), thing, (
        f"[there is|there's] a [||red |blue |small |big |new ]{thing} in the {spot}", f"in the {spot} [there is|you find|they keep|is] [a|the] [||red |blue |small |old ]{thing}", f"[I|she|he|we] [put|left|hid|forgot] the {thing} [in|inside] the {spot}", f"the {thing} [lies|stands|is kept|can be found] in the {spot}", f"they keep the {thing} in the {spot}",
    ))  # fmt: skip


def _has(rng: random.Random) -> Fact:
    who, count, what = (
        words.name(rng),
        rng.randint(2, 99),
        rng.choice((rng.choice(words.THINGS), words.english(rng))),
    )
    what += "" if what.endswith("s") else "s"
    return Fact(f"{who} has {count} {what}.", (
        f"How many {what} does {who} have?", f"What does {who} have?", f"Who has {count} {what}?", f"How many {what} has {who} got?", f"How many {what} [belong to {who}|are {who}'s|does {who} own]?",
    ), who, (f"{who} [owns|has got|bought|keeps] {count} {what}", f"{count} {what} belong to {who}", f"there are {count} {what} in {who}'s house"))  # fmt: skip


def _works(rng: random.Random) -> Fact:
    who, job = words.name(rng), rng.choice((rng.choice(words.JOBS), words.any_word(rng).lower()))
    return Fact(f"{who} works as a {job}.", (
        f"What does {who} do?", f"What is {who}'s job?", f"Who works as a {job}?", f"What is the job of {who}?", f"What does {who} work as?", f"What does {who} do [for a living|for work]?", f"Which [job|profession] does {who} have?",
    ), who, (f"{who} is [a|the] {job}[|| by profession]", f"{who} [has a job as|earns money as|became] a {job}", f"{who}'s job is {job}", f"{who}, the {job}, [is at work|is here|lives next door]"))  # fmt: skip


def _called(rng: random.Random) -> Fact:
    who, pet, called = words.name(rng), rng.choice(words.ANIMALS), words.name(rng)
    return Fact(f"{who}'s {pet} is called {called}.", (
        f"What is {who}'s {pet} called?", f"What is the name of {who}'s {pet}?", f"How is {who}'s {pet} called?", f"What's the {pet} of {who} called?",
    ), who, (f"{who} has a {pet} [called|named] {called}", f"{called} is the {pet} of {who}", f"the name of {who}'s {pet} is {called}", f"{who} calls the {pet} {called}"))  # fmt: skip


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
    if rng.random() < 0.25:
        about = words.english(rng)
        what = rng.choice(("code", "key", "number", "password", "id", "name", "word", "address"))
        return Fact(f"The {about} {what} is {secret}.", (
            f"[What is|What's|Tell me|Give me|I need] the {about} {what}[?|, please?]", f"Which {what} [do I use|do I need|is right|is there|do you have] for [a|the] {about}?", f"What {what} does the {about} [have|need]?", f"What is the {what} [of|for] the {about}?",
        ), about, (f"use {secret} as the {about} {what}", f"{about} {what}: {secret}", f"the {what} for [the|a] {about} is {secret}", f"for [a|the] {about} [use|take|enter] the {what} {secret}", f"our {about} {what} is {secret}"))  # fmt: skip
    if rng.random() < 0.5:
        return Fact(
            f"The {what} is {secret}.",
            (
                f"What is the {what}?",
                f"Tell me the {what}.",
                f"What's the {what}?",
                f"Which {what} do I need?",
                f"Which {what} [do I use|should I use|is right|is valid|do they use]?",
                f"[Can you give me|Do you know|I need|Remind me of] the {what}[|, please]?",
            ),
            what,
            (
                f"[use|take|enter] {secret} as the {what}",
                f"the [new|current|right|] {what} [here|] is {secret}",
                f"{what}: {secret}",
                f"{secret} is the {what}",
                f"the {what} [at our office|of this house|for guests] is {secret}",
            ),
        )
    owner = words.any_word(rng)
    return Fact(f"The {what} for {owner} is {secret}.", (
        f"What is the {what} for {owner}?", f"What's the {what} of {owner}?", f"Tell me the {what} for {owner}.", f"Which {what} is for {owner}?", f"Which {what} do I [use|need] for {owner}?",
    ), owner, (f"for {owner} the {what} is {secret}", f"{owner}'s {what} is {secret}", f"[use|take|enter] {secret} as the {what} for {owner}", f"{what} for {owner}: {secret}"))  # fmt: skip


def _colour(rng: random.Random) -> Fact:
    thing, colour = (
        rng.choice((rng.choice(words.THINGS), words.any_word(rng).lower())),
        rng.choice((*words.COLOURS, words.english(rng))),
    )
    return Fact(f"The {thing} is {colour}.", (
        f"What colour is the {thing}?", f"Which color is the {thing}?", f"What is {colour}?", f"What is the colour of the {thing}?",
        f"How is the {thing}?", f"What [colour|color] does the {thing} have?", f"[Is it known|Tell me] what colour the {thing} is.",
    ), thing, (f"the [colour|color] of the {thing} is {colour}", f"[we have|I see|there is|they bought] a {colour} {thing}", f"the {thing} [was painted|has been painted|looks] {colour}"))  # fmt: skip


def _likes(rng: random.Random) -> Fact:
    who, what = words.name(rng), rng.choice((rng.choice(words.FOODS), words.any_word(rng).lower()))
    verb = rng.choice(("likes", "loves", "hates", "wants", "sells", "eats", "needs"))
    return Fact(
        f"{who} {verb} {what}.",
        (
            f"What does {who} {verb[:-1]}?",
            f"Who {verb} {what}?",
            f"[Which thing|What exactly] does {who} {verb[:-1]}?",
        ),
        who,
        (f"{who} [really|always|still|often] {verb} {what}", f"{what} is what {who} {verb}"),
    )


def _capital(rng: random.Random) -> Fact:
    land, city = words.pseudo_word(rng).capitalize(), words.place(rng)
    what = rng.choice(("capital", "king", "queen", "president", "biggest city", "river", "currency", "mayor"))
    return Fact(f"The {what} of {land} is {city}.", (
        f"What is the {what} of {land}?", f"Name the {what} of {land}.", f"What's the {what} of {land}?", f"Tell me the {what} of {land}.",
    ), land, (f"{city} is the {what} of {land}", f"{land}'s {what} is {city}", f"{land} has {city} as its {what}"))  # fmt: skip


def _costs(rng: random.Random) -> Fact:
    thing, price = (
        rng.choice((rng.choice(words.THINGS), rng.choice(words.FOODS), words.any_word(rng).lower())),
        rng.randint(1, 999),
    )
    unit = rng.choice(("dollars", "euros", "coins", "pounds"))
    return Fact(f"The {thing} costs {price} {unit}.", (
        f"How much does the {thing} cost?", f"What does the {thing} cost?", f"What is the price of the {thing}?", f"What costs {price} {unit}?",
        f"How much is the {thing}?", f"How much [do I pay|must I pay|is it] for [a|the] {thing}?", f"What [is|does] a {thing} [cost|worth]?", f"What's the price of [a|one] {thing}?",
    ), thing, (
        f"[a|the|one] {thing} is {price} {unit}", f"{thing}: {price} {unit}", f"{thing} - {price} {unit}", f"you pay {price} {unit} for [a|the] {thing}", f"{price} {unit} for [a|the] {thing}", f"the price of the {thing} is {price} {unit}", f"they sell the {thing} for {price} {unit}", f"{thing} costs {price} {unit}",
    ))  # fmt: skip


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
        f"What {verb} {link} {when}?", f"[On which day|At what hour|When exactly] does the {what} {verb[:-1]}?",
    ), what, (f"{link} {when} the {what} {verb}", f"our {what} {verb} {link} {when}[|| in room {rng.randint(1, 30)}| from platform {rng.randint(1, 9)}| as always]", f"the {what} [to {words.place(rng)}|with {words.name(rng)}|today] {verb} {link} {when}"))  # fmt: skip


def _born(rng: random.Random) -> Fact:
    who = words.name(rng)
    if rng.random() < 0.5:
        year = rng.randint(1400, 2020)
        return Fact(
            f"{who} was born in {year}.",
            (f"When was {who} born?", f"In which year was {who} born?", f"Who was born in {year}?"),
            who,
            (
                f"in {year} {who} was born",
                f"{who}[, born in|, born] {year}[, is here|, lives in {words.place(rng)}]",
            ),
        )
    age = rng.randint(2, 99)
    return Fact(
        f"{who} is {age} years old.",
        (
            f"How old is {who}?",
            f"What is {who}'s age?",
            f"Who is {age} years old?",
            f"What age [is|has] {who}?",
        ),
        who,
        (
            f"{who} is {age}",
            f"{who} [just|] turned {age}",
            f"{who}'s age is {age}",
            f"{who} ({age}) [likes tea|is here|works a lot]",
        ),
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
        (
            f"{other}'s {role} is [called|] {who}",
            f"{other} has a {role} called {who}",
            f"the {role} of {other} is {who}",
        ),
    )


def _attribute(rng: random.Random) -> Fact:
    attribute, owner, value = words.any_word(rng).lower(), words.any_word(rng), words.value(rng)
    return Fact(f"The {attribute} of {owner} is {value}.", (
        f"What is the {attribute} of {owner}?", f"What's the {attribute} of {owner}?", f"Give me the {attribute} of {owner}.",
        f"Which {attribute} does {owner} have?",
    ), owner, (f"{owner} has the {attribute} {value}", f"{owner}'s {attribute} is {value}", f"{value} is the {attribute} of {owner}"))  # fmt: skip


def _plain(rng: random.Random) -> Fact:
    subject, value = words.any_word(rng), words.value(rng)
    return Fact(
        f"{subject} is {value}.",
        (f"What is {subject}?", f"What's {subject}?", f"Tell me what {subject} is."),
        subject,
    )


def _runs(rng: random.Random) -> Fact:
    """Something that happens, works or stands somewhere."""
    what = rng.choice(
        (
            rng.choice(("server", "project", "team", "shop", "bus", "machine", "group", "ship", "class"))
            + " "
            + words.any_word(rng),
            words.any_word(rng).lower(),
        )
    )
    verb, bare = rng.choice((("runs", "run"), ("works", "work"), ("sleeps", "sleep"), ("stands", "stand"), ("stays", "stay"), ("plays", "play"), ("waits", "wait"), ("grows", "grow"), ("hides", "hide")))  # fmt: skip
    where = rng.choice(
        (
            words.place(rng),
            f"the {rng.choice(words.PLACES)}",
            f"the {words.english(rng)}",
            f"room {rng.randint(1, 400)}",
        )
    )
    return Fact(f"The {what} {verb} in {where}.", (f"Where does the {what} {bare}?", f"[Where|In which place] does the {what} {bare}?", f"What {verb} in {where}?"), what,
        (f"{what} {verb} in {where}", f"in {where} {verb} the {what}", f"our {what} {verb} in {where}[| now| today]"))  # fmt: skip


def _possession(rng: random.Random) -> Fact:
    who, colour, thing = (
        words.name(rng),
        rng.choice(words.COLOURS),
        rng.choice((rng.choice(words.THINGS), words.english(rng))),
    )
    return Fact(f"{who}'s {thing} is {colour}.", (f"[What|Which] [colour|color] is {who}'s {thing}?", f"[What|Which] [colour|color] [has|does] the {thing} of {who}[| have]?", f"What is the [colour|color] of {who}'s {thing}?"), who,
        (f"{who} [has|owns|bought|drives|carries] a {colour} {thing}", f"the {thing} of {who} is {colour}", f"{who} painted the {thing} {colour}"))  # fmt: skip


def _did(rng: random.Random) -> Fact:
    who, what = (
        words.name(rng),
        rng.choice(
            (
                f"a {rng.choice(words.THINGS)}",
                f"the {words.english(rng)}",
                rng.choice(words.FOODS),
                f"{rng.randint(2, 40)} {rng.choice(words.THINGS)}s",
            )
        ),
    )
    past, bare = rng.choice((("bought", "buy"), ("found", "find"), ("lost", "lose"), ("broke", "break"), ("ate", "eat"), ("sold", "sell"), ("saw", "see"), ("made", "make"), ("drew", "draw"), ("ordered", "order"), ("opened", "open")))  # fmt: skip
    return Fact(f"{who} {past} {what}.", (f"What did {who} {bare}?", f"Who {past} {what}?", f"What [was it that|has] {who} {past}?"), who,
        (f"[yesterday|today|last week|on {rng.choice(words.DAYS)}] {who} {past} {what}", f"{who} {past} {what} [yesterday|in {words.place(rng)}|last week|for a friend|this morning]"))  # fmt: skip


def _open(rng: random.Random) -> Fact:
    what = rng.choice(
        (
            "shop",
            "museum",
            "pool",
            "office",
            "bank",
            "library",
            "kitchen",
            "gate",
            "market",
            "cafe",
            words.english(rng),
        )
    )
    state, day = rng.choice(("closed", "open", "empty", "full", "free", "busy")), rng.choice(words.DAYS)
    return Fact(f"The {what} is {state} on {day}.", (f"When is the {what} {state}?", f"On which day is the {what} {state}?", f"[When|On what day] will the {what} be {state}?"), what,
        (f"on {day}s the {what} is {state}", f"the {what} is {state} on {day}s", f"every {day} the {what} is {state}"))  # fmt: skip


def _spot(rng: random.Random) -> Fact:
    what, number = (
        rng.choice(
            (
                "office",
                "room",
                "flat",
                "meeting",
                "train",
                "bus",
                "gate",
                "seat",
                "class",
                "car",
                words.english(rng),
            )
        ),
        rng.randint(1, 60),
    )
    ordinal = rng.choice(("first", "second", "third", "fourth", "fifth", "sixth", "top", "last"))
    kind = rng.choice(("floor", "platform", "row", "page", "street", "level", "line"))
    if rng.random() < 0.5:
        return Fact(f"The {what} is on the {ordinal} {kind}.", (f"On which {kind} is the {what}?", f"Where is the {what}?", f"Which {kind} is the {what} on?"), what, (f"our {what} is on the {ordinal} {kind}", f"you find the {what} on the {ordinal} {kind}", f"on the {ordinal} {kind} [is|you find] the {what}"))  # fmt: skip
    return Fact(f"The {what} is on {kind} {number}.", (f"On which {kind} is the {what}?", f"What {kind} is the {what} on?", f"Where is the {what}?"), what, (f"our {what} is on {kind} {number}", f"the {what} [to {words.place(rng)}|of {words.name(rng)}] is on {kind} {number}", f"on {kind} {number} [is|you find] the {what}"))  # fmt: skip


KINDS: tuple[Callable[[random.Random], Fact], ...] = (
    _lives, _is_in, _has, _works, _called, _code, _code, _colour, _likes, _capital, _costs, _time, _born, _relation, _attribute, _plain,
    _runs, _possession, _did, _open, _spot,
)  # fmt: skip
