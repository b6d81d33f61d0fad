"""What users say about themselves: how each kind of fact is told, asked for and answered.

Invariant: an answer restates the fact in one form, however it was told.
"""

# ruff: noqa: E501, SIM905  (tables of words and phrasings read best so)

import random
from collections.abc import Callable
from dataclasses import dataclass

from . import words
from .grammar import capital, expand, pick

_TAIL = "[|||| again| now|, please|, if you know]"


@dataclass(frozen=True)
class SelfFact:
    """One fact about the user, phrased."""

    subject: str
    """What it is about: two facts of one subject would contradict each other."""
    told: str
    asked: str
    reply: str
    value: str


Maker = Callable[[random.Random], SelfFact]


def _fill(text: str, fields: dict[str, str]) -> str:
    return capital(text.format(**fields))


def question(rng: random.Random, patterns: tuple[str, ...], fields: dict[str, str]) -> str:
    """An asking sentence; those that begin with a question word may stand behind `do you know`, with their order turned
    by the pattern `direct / indirect`.
    """
    direct, _, indirect = pick(rng, patterns).partition(" / ")
    if indirect and rng.random() < 0.35:
        lead = pick(
            rng,
            (
                "[Do you know|Do you remember|Can you tell me|Could you tell me|Tell me|Please tell me|Can you recall|Do you still know|Remind me|I forgot|Any idea|I wonder]",
            ),
        )
        text = f"{lead} {indirect}{expand(rng, _TAIL)}"
        end = "." if lead.startswith(("Tell", "Please", "Remind", "I ")) else "?"
    else:
        text, end = direct + expand(rng, "[||||| again| now|, please|, do you know]"), "?"
        if direct.split()[0] in ("say", "tell", "repeat", "give", "remind", "name"):
            end = "."
    if rng.random() < 0.15:
        end = ""
    lead = expand(rng, "[|||||||||So, |And |Now, |Hey, |Ok, |Well, |Please: |Quick question: ]")
    return _fill(lead + (text if lead else capital(text)), fields) + end


def _told(rng: random.Random, patterns: tuple[str, ...], fields: dict[str, str]) -> str:
    text = pick(rng, patterns)
    lead = expand(
        rng,
        "[|||||||||Hi! |Hello, |By the way, |Just so you know, |Remember: |Please remember that |Note that |You should know that |For later: |Keep in mind that |I told you that |Listen, |Please keep in mind: ]",
    )
    end = rng.choice((".", ".", ".", ".", "!", ""))
    text = lead + (text if lead and not lead.endswith(("! ", ". ")) else capital(text))
    return _fill(text, fields) + end


def _made(
    rng: random.Random, subject: str, told: tuple[str, ...], asked: tuple[str, ...], reply: str, **fields: str
) -> SelfFact:
    value = fields.get("v", "")
    return SelfFact(
        subject, _told(rng, told, fields), question(rng, asked, fields), reply.format(**fields), value
    )


_NAME_ASKED = (
    "[what is|what's|what was] my name / what my name [is|was]", "who am I / who I am", "[how|what] am I called / what I am called", "what do [they|people|my friends] call me / what [they|people] call me",
    "what did I say my name [was|is] / what I said my name is", "which name did I [give|tell] you / which name I gave you", "[say|tell me|repeat|give me] my name", "do you [still|] [know|remember] [my name|who I am|what I'm called|what my name is]",
    "what should you call me / what you should call me", "my name is what", "you know my name, right", "can you [say|tell me|repeat|recall] my name", "remind me of my name",
)  # fmt: skip


def name(rng: random.Random) -> SelfFact:
    """The user's name."""
    return _made(rng, "name", (
        "[my name is|I am|I'm|my name's|call me|they call me|you can call me|people call me|everyone calls me|I go by|the name is|the name's|this is|you may call me] {v}[||||, by the way|, nice to meet you|, pleased to meet you]",
        "{v} [here|speaking|is my name|is what they call me|is how they call me][|, hello]", "you are [talking|speaking|writing] [to|with] {v}", "my [friends|parents|colleagues] call me {v}", "my [first|given] name is {v}",
    ), _NAME_ASKED, "Your name is {v}.", v=words.name(rng))  # fmt: skip


def _home(rng: random.Random) -> SelfFact:
    return _made(rng, "home", (
        "I [live|am living|reside|have lived for years|'m living] in {v}[||| now| with my family| these days| at the moment| since {y}]", "I [moved|have moved|went to live] to {v}[| last year| in {y}| last month| for work]", "{v} is [my home|where I live|my home town|the city I live in|my city]",
        "my [home|home town|flat|house|family home] is in {v}", "I have a [flat|house|room] in {v}",
    ), (
        "where do I live / where I live", "[in which city|which city|what city|in which place] do I live[| in] / [in which city|which place] I live", "where is my [home|house|flat] / where my [home|house] is", "what is my home town / what my home town is",
        "where am I living / where I am living", "where did I say I live", "do you [know|remember] where I live", "what's the name of my home town", "which city is my home",
    ), "You live in {v}.", v=words.place(rng), y=str(rng.randint(1990, 2026)))  # fmt: skip


def _origin(rng: random.Random) -> SelfFact:
    place = rng.choice((words.place(rng), words.pseudo_word(rng).capitalize()))
    if rng.random() < 0.5:
        return _made(rng, "birth", ("I was born in {v}[|| in {y}| as a twin| long ago]", "{v} is where I was born", "my [place of birth|birth place] is {v}"),
            ("where was I born / where I was born", "[in which [city|country|place|town]] was I born / in which place I was born", "what is my [place of birth|birth place]"), "You were born in {v}.", v=place, y=str(rng.randint(1940, 2015)))  # fmt: skip
    return _made(rng, "origin", ("I [am|come|'m] from {v}[|| originally]", "my family comes from {v}", "{v} is where I come from"),
        ("where [do I come|am I] from / where I [come|am] from", "[which [city|country|place]] [do I come|am I] from / which place I come from"), "You come from {v}.", v=place)  # fmt: skip


def _age(rng: random.Random) -> SelfFact:
    return _made(rng, "age", ("I [am|'m] {v}[ years old|]", "I [just|] turned {v}[| last week| yesterday| in May]", "my age is {v}", "I am {v} years of age"),
        ("how old am I / how old I am", "what is my age / what my age is", "do you know my age", "[say|tell me] my age", "what's my age"), "You are {v} years old.", v=str(rng.randint(4, 99)))  # fmt: skip


def _job(rng: random.Random) -> SelfFact:
    return _made(rng, "job", ("I work as a {v}[||| in {p}| at night| for a bank| at the airport| in a small town]", "I [am|'m] a {v}[|| by profession| by trade| in {p}]", "my [job|profession|work] is {v}", "I [earn my money|make my living] as a {v}"),
        ("what is my [job|profession|work] / what my [job|profession] is", "what do I do[| for a living| for work] / what I do[| for a living]", "what do I work as / what I work as", "[which|what] job do I have / which job I have", "what's my [job|profession]", "what am I by profession"),
        "You work as a {v}.", v=rng.choice((rng.choice(words.JOBS), rng.choice(words.JOBS), words.any_word(rng).lower())), p=words.place(rng))  # fmt: skip


def _verb(rng: random.Random) -> SelfFact:
    """Something the user likes, plays, drives, and so on."""
    verb, noun, things = rng.choice((
        ("love", "", words.FOODS), ("like", "", words.FOODS), ("hate", "", words.FOODS), ("eat", "", words.FOODS), ("speak", "language", ()), ("study", "subject", ()),
        ("play", "instrument", ("the guitar", "the piano", "the drum", "chess", "tennis", "the violin", "football", "golf")), ("drive", "car", ()), ("need", "", words.THINGS), ("want", "", words.THINGS),
        ("collect", "", ()), ("sell", "", ()), ("teach", "subject", ()), ("drink", "drink", ("tea", "coffee", "milk", "water", "juice")), ("read", "book", ()), ("use", "tool", ()), ("ride", "", ("a bike", "a horse", "the bus")),
    ))  # fmt: skip
    value = rng.choice(things) if things and rng.random() < 0.6 else words.any_word(rng)
    if verb == "drive":
        value = "a " + expand(rng, "[|||red |blue |old |new |small |fast ]") + capital(value)
    elif verb in ("need", "want"):
        value = "a " + value.lower()
    asked = [
        f"what do I {verb} / what I {verb}",
        f"do you [know|remember] what I {verb}",
        f"what did I say I {verb}",
    ]
    if noun:
        asked += [f"[which|what] {noun} do I {verb} / which {noun} I {verb}"] * 2
    return _made(rng, verb, (f"I [|||really |always |mostly |still ]{verb} {{v}}[|| a lot| very much| every day| at home]",), tuple(asked), f"You {verb} {{v}}.", v=value)  # fmt: skip


_KINDS_OF_FAVOURITES: dict[str, tuple[str, ...] | list[str]] = {
    "colour": words.COLOURS, "color": words.COLOURS, "food": words.FOODS, "animal": words.ANIMALS, "word": (), "city": words.CITIES, "song": (), "book": (), "drink": ("tea", "coffee", "milk", "water", "juice", "beer"),
    "band": (), "team": (), "sport": ("tennis", "golf", "football", "chess", "swimming"), "fruit": ("apples", "mangoes", "cherries", "plums", "pears", "lemons", "grapes", "olives"), "game": (), "day": words.DAYS, "month": words.MONTHS, "movie": (), "season": ("spring", "summer", "autumn", "winter"),
    "number": (), "name": words.NAMES, "flower": (), "place": words.PLACES, "singer": words.NAMES, "film": (), "teacher": words.NAMES, "meal": words.FOODS,
}  # fmt: skip


def _favourite(rng: random.Random) -> SelfFact:
    kind, values = rng.choice(list(_KINDS_OF_FAVOURITES.items()))
    value = (
        rng.choice(values)
        if values and rng.random() < 0.65
        else str(rng.randint(0, 999))
        if kind == "number"
        else words.any_word(rng)
    )
    spelled = rng.choice(("favourite", "favorite"))
    return _made(rng, "favourite " + kind, (
        "my {s} {k} is {v}", "{v} is my {s} {k}", "I [really|] [like|love] the {k} {v}[, it is my {s}|, it's my {s}| more than any other| best]", "the {k} [that|] I [like|love] [best|most] is {v}", "of all {k}s I [like|love|prefer] {v}[| best| most]",
        "I [like|love] {v} best of all {k}s", "my {s} {k}? [It is|It's|That is] {v}", "I would say {v} is my {s} {k}", "I [like|love] {v}[, which is|: it is|, it's] my {s} {k}",
    ), (
        "[what is|what's|what was|which is] my {s} {k} / what my {s} {k} [is|was]", "[which|what] {k} is my {s} / which {k} is my {s}", "[which|what] {k} do I [like|love] [best|most] / which {k} I like [best|most]", "what {k} do I [like|love|prefer] / what {k} I [like|prefer]",
        "[say|tell me|repeat|name] my {s} {k}", "[remind me of|do you remember|do you know] my {s} {k}", "what did I say my {s} {k} [was|is]",
    ), "Your {s} {k} is {v}.", k=kind, v=value, s=spelled)  # fmt: skip


_ROLES = "brother sister mother father boss neighbour friend aunt uncle son daughter wife husband teacher doctor cousin".split()


def _relative(rng: random.Random) -> SelfFact:
    role = rng.choice(_ROLES)
    person, place = words.name(rng), words.place(rng)
    job = rng.choice(words.JOBS)
    chance = rng.random()
    if chance < 0.45:
        return _made(rng, role, ("my {r} is [called|named] {v}", "my {r}'s name is {v}", "the name of my {r} is {v}", "{v} is my {r}", "I have a {r} [called|named] {v}", "my {r} {v} [is visiting me|called me today|says hello|is very nice]"),
            ("[what is|what's|what was] my {r}'s name / what my {r}'s name is", "[what|how] is my {r} called / how my {r} is called", "what is the name of my {r}", "who is my {r} / who my {r} is", "[say|tell me] my {r}'s name"), "Your {r} is called {v}.", r=role, v=person)  # fmt: skip
    if chance < 0.75:
        return _made(rng, role, ("my {r}[|| {n}] lives in {v}[|| now]", "my {r}[|| {n}] moved to {v}[| last year| in May]", "{n}, my {r}, lives in {v}", "{v} is where my {r} lives"),
            ("where does my {r} live / where my {r} lives", "[in which city|which city] does my {r} live[| in] / in which city my {r} lives", "where is my {r}'s home"), "Your {r} lives in {v}.", r=role, v=place, n=person)  # fmt: skip
    return _made(rng, role, ("my {r}[|| {n}] is a {v}", "my {r}[|| {n}] works as a {v}"), ("what does my {r} do / what my {r} does", "what is my {r}'s job / what my {r}'s job is", "what does my {r} work as"), "Your {r} works as a {v}.", r=role, v=job, n=person)  # fmt: skip


def _pet(rng: random.Random) -> SelfFact:
    animal, called = rng.choice(words.ANIMALS), words.name(rng)
    if rng.random() < 0.25:
        other = words.name(rng)
        return _made(rng, animal, ("I have [two|2] {a}s[,|:] {v} and {w}", "my {a}s are [called|named] {v} and {w}", "we have two {a}s called {v} and {w}", "{v} and {w} are my {a}s"),
            ("what are my {a}s called / what my {a}s are called", "what are the names of my {a}s", "how are my {a}s called", "what are my {a}s' names"), "Your {a}s are called {v} and {w}.", a=animal, v=called, w=other)  # fmt: skip
    return _made(rng, animal, ("my {a} is [called|named] {v}", "I [have|own|have got|got] a {a} [called|named] {v}", "my {a}'s name is {v}", "the name of my {a} is {v}", "I have a {a}, {v}", "I call my {a} {v}", "{v} is my {a}"),
        ("[what|how] is my {a} called / what my {a} is called", "[what is|what's] [the name of my {a}|my {a}'s name] / what my {a}'s name is", "what did I [call|name] my {a}", "[say|tell me] my {a}'s name", "what do I call my {a}"), "Your {a} is called {v}.", a=animal, v=called)  # fmt: skip


def _thing(rng: random.Random) -> SelfFact:
    thing = rng.choice((rng.choice(words.THINGS), rng.choice(words.THINGS), words.english(rng)))
    chance = rng.random()
    if chance < 0.35:
        return _made(rng, thing, ("my {t} is {v}", "I [have|own|bought|got] a {v} {t}", "I painted my {t} {v}", "the colour of my {t} is {v}"), ("[what|which] [colour|color] is my {t} / what colour my {t} is", "[what is|what's] the [colour|color] of my {t}", "what colour does my {t} have"), "Your {t} is {v}.", t=thing, v=rng.choice(words.COLOURS))  # fmt: skip
    if chance < 0.7:
        spot = rng.choice((rng.choice(words.PLACES), words.english(rng)))
        return _made(rng, thing, ("I [left|put|forgot|hid|keep] my {t} in the {v}", "my {t} is in the {v}", "in the {v} is my {t}", "I [left|put] my {t} on the table in the {v}"), ("where is my {t} / where my {t} is", "where did I [leave|put] my {t} / where I [left|put] my {t}", "where can I find my {t}", "where's my {t}"), "Your {t} is in the {v}.", t=thing, v=spot)  # fmt: skip
    verb, past = rng.choice(
        (
            ("have", "have"),
            ("own", "own"),
            ("buy", "bought"),
            ("see", "saw"),
            ("lose", "lost"),
            ("sell", "sold"),
        )
    )
    aux = "do" if verb in ("have", "own") else "did"
    plural = thing if thing.endswith("s") else thing + "s"
    return _made(rng, thing + "s", ("I {p} {v} {t}[||| today| at home| in all]", "{v} {t} [is what|are what] I {p}"), ("how many {t} {a} I {b} / how many {t} I {p}",), "You {p} {v} {t}.", t=plural, v=str(rng.randint(2, 99)), p=past, b=verb, a=aux)  # fmt: skip


def _plan(rng: random.Random) -> SelfFact:
    verb, ing = rng.choice(
        (
            ("fly", "flying"),
            ("travel", "travelling"),
            ("go", "going"),
            ("move", "moving"),
            ("drive", "driving"),
        )
    )
    place, day = (
        words.place(rng),
        rng.choice((rng.choice(words.DAYS), f"{rng.choice(words.MONTHS)} {rng.randint(1, 28)}")),
    )
    told = (
        f"I [am {ing}|will {verb}|'m {ing}] to {{p}} on {{d}}",
        f"on {{d}} I [am {ing}|{verb}|will {verb}] to {{p}}",
        f"I {verb} to {{p}} on {{d}}",
    )
    reply = f"You are {ing} to {{p}} on {{d}}."
    asked: tuple[str, ...] = (f"where am I {ing} / where I am {ing}", f"where [do|will] I {verb}")
    if rng.random() < 0.5:
        asked = (
            f"when am I {ing}[| to {{p}}] / when I am {ing}",
            f"on which day [do|will] I {verb} to {{p}}",
            f"when [do|will] I {verb} to {{p}}",
        )
    return _made(rng, "plan " + verb, told, asked, reply, p=place, d=day, v=place)


def _date(rng: random.Random) -> SelfFact:
    what = rng.choice(
        (
            "meeting",
            "exam",
            "flight",
            "appointment",
            "lesson",
            "party",
            "train",
            "interview",
            "holiday",
            "wedding",
            "match",
            "test",
        )
    )
    if rng.random() < 0.5:
        when, link = rng.choice(words.DAYS), "on"
    else:
        when, link = f"{rng.randint(0, 23)}:{rng.choice('012345')}{rng.choice('05')}", "at"
    return _made(rng, what, ("my {t} is {l} {v}", "I have a {t} {l} {v}", "{l} {v} I have a {t}", "my {t} [starts|begins|will be] {l} {v}"), ("when is my {t} / when my {t} is", "when do I have [my|a] {t} / when I have my {t}", "[at what time|on which day|when] does my {t} [start|begin]" if link == "at" else "on which day is my {t}"), "Your {t} is {l} {v}.", t=what, l=link, v=when)  # fmt: skip


_ATTRIBUTES: dict[str, Callable[[random.Random], str]] = {
    "password": words.value, "code": words.code, "secret": words.value, "secret word": words.any_word, "room number": lambda rng: str(rng.randint(1, 999)), "phone number": lambda rng: str(rng.randint(100000, 9999999)), "lucky number": lambda rng: str(rng.randint(0, 99)),
    "birthday": lambda rng: f"{rng.choice(words.MONTHS)} {rng.randint(1, 28)}", "order number": words.code, "car": words.any_word, "team": lambda rng: words.any_word(rng).capitalize(), "pin": words.code, "nickname": words.name, "hobby": words.any_word,
    "email": lambda rng: f"{words.any_word(rng).lower()}@{words.english(rng)}.com", "last name": lambda rng: words.pseudo_word(rng).capitalize(), "dream": words.any_word, "street": lambda rng: words.any_word(rng).capitalize(), "shoe size": lambda rng: str(rng.randint(20, 50)), "company": lambda rng: words.any_word(rng).capitalize(),
}  # fmt: skip


def _attribute(rng: random.Random) -> SelfFact:
    if rng.random() < 0.3:
        attribute = words.english(rng)
        if rng.random() < 0.5:
            attribute, value = attribute + " number", str(rng.randint(1, 9999))
            return _made(rng, attribute, ("my {a} is {v}", "my {k} has the number {v}", "the number of my {k} is {v}", "I have {k} number {v}"), ("[what is|what's|what was] my {a} / what my {a} is", "[which|what] number [does my {k} have|has my {k}|is my {k}] / which number my {k} has", "what is the number of my {k}"), "Your {a} is {v}.", a=attribute, v=value, k=attribute.removesuffix(" number"))  # fmt: skip
        value = words.value(rng)
    else:
        attribute, make = rng.choice(list(_ATTRIBUTES.items()))
        value = make(rng)
    return _made(rng, attribute, ("my {a} is {v}", "my {a} is {v}", "{v} is my {a}", "my {a}? It is {v}", "as my {a} I [use|have|chose] {v}", "the {a} [I use|I have|of mine] is {v}"), (
        "[what is|what's|what was|which is] my {a} / what my {a} [is|was]", "[say|tell me|repeat|give me] my {a}", "[do you remember|do you know|can you tell me|can you recall|remind me of] my {a}", "what did I say my {a} [was|is]", "[which|what] {a} [do I have|did I tell you|did I give you] / which {a} I have",
    ), "Your {a} is {v}.", a=attribute, v=value)  # fmt: skip


_MAKERS: tuple[tuple[Maker, int], ...] = (
    (name, 22), (_home, 12), (_origin, 6), (_age, 8), (_job, 8), (_verb, 9), (_favourite, 14), (_relative, 8), (_pet, 8), (_thing, 8), (_plan, 3), (_date, 4), (_attribute, 16),
)  # fmt: skip


def sample(rng: random.Random) -> SelfFact:
    """One fact of any kind."""
    return rng.choices([m for m, _ in _MAKERS], [w for _, w in _MAKERS])[0](rng)


def several(rng: random.Random, count: int) -> list[SelfFact]:
    """`count` facts of different subjects and values."""
    found: list[SelfFact] = []
    while len(found) < count:
        fact = sample(rng)
        if all(fact.subject != other.subject and fact.value != other.value for other in found):
            found.append(fact)
    return found
