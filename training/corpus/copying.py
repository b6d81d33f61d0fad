"""Repeat exactly; spell letter by letter; letters back into words."""

# ruff: noqa: E501  (tables of phrasings read best unwrapped)

import random
import string

from . import words
from .conversation import Turn, phrase
from .grammar import capital, pick

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
_SAY = "[say|repeat|echo|write|print|type|output|return|copy|reply with|answer with|respond with|write back|send back|give me back|write down|put out|say back]"
_ASKS = "[|||||Please |Now |Can you |Could you |I want you to |I'd like you to |Would you |Just |Simply |I ask you to ]"
_WHAT = "[||this|the following|this text|the text|the words|the word|these words|the phrase|the sentence|this sentence|the line|this line|this code|the code|this number|this message|this name|the string]"
_HOW = "[|||| exactly| word for word| as it is| and nothing else| once| without changes| back to me| for me| again]"
_ECHO_GRAMMAR = (
    _ASKS + _SAY + " " + _WHAT + _HOW + ":[ |\n]{x}", _ASKS + _SAY + " {x}", "[Repeat|Say|Echo] after me[:|,] {x}", "[Your answer|Your reply|The answer|The reply] [should be|must be|is]: {x}", "[I say|I write|I type]: {x}\n[Repeat|Echo|Copy] [it|that|this].",
    "{x}\n\n[Repeat|Copy|Echo|Say|Write] [the [line|text|sentence|words] above|that|it|what I wrote|this text][.|, please.| again.| once more.]", "[Only|Just] [say|write|answer|reply|output]:[ |\n]{x}",
)  # fmt: skip
_ECHO_QUOTED_GRAMMAR = (
    _ASKS + _SAY + " " + _WHAT + " {q}{x}{q}" + _HOW + "[.|?|]", "{q}{x}{q} - " + _SAY + " [that|this|it][, please|] [again|once more|for me|].", "[Repeat|Say|Echo] after me: {q}{x}{q}", "[My|The|Your] [text|line|sentence|word] is {q}{x}{q}. " + "[Repeat|Say|Write|Echo|Copy|Type] [it|that][.|, please.| again.]",
    "{q}{x}{q}\n[Repeat|Copy|Echo|Say|Write] [that|it|the text|what is in quotes][.|, please.]", "[What does it say here|What did I write|Read this aloud]: {q}{x}{q}", "[I want|I'd like] [you to say|to hear|to read] {q}{x}{q}[.|, nothing else.|]", "[Output|Answer|Reply] only {q}{x}{q}[.|, no other words.| and stop.|]",
)  # fmt: skip
_NAMED_GRAMMAR = (
    "[The|My|Our|This|Your] {k} is {x}. [Please |Now |Can you |][repeat|say|type|write|give me|tell me|echo|print|spell out] [the {k}|it|that {k}] [again|back|once more|for me|][.|, please.]",
    _ASKS + "[repeat|say|type|write|write back|echo|print|copy] [this|the|my|our] {k}[:|] {x}", "[Output|Say|Write|Type|Reply with] [just|only|exactly|] the word {w}[| and nothing else| once|, nothing more][.|]", "[Reply|Answer|Respond] [with|] [just|only|exactly] {w}[.||!]", "[Just|Only|Simply] [say|reply|answer|write|type] {w}[.||, please.]",
)  # fmt: skip
_CODE_KINDS = (
    "code",
    "number",
    "serial number",
    "order number",
    "id",
    "reference",
    "key",
    "token",
    "name",
    "address",
    "title",
    "ticket",
)
_COMMON = (
    "this is a test", "hello world", "the cat sat on the mat", "I like to eat apples", "we are the best", "yes I can",
    "one two three", "open the door", "I love you", "good morning everyone", "nothing", "where are you going",
    "this is only a test", "this is a message", "it is a nice day", "that was easy", "I am here", "you are welcome", "thank you very much",
    "how are you", "hello", "hello there", "what is this", "this works", "is this a test", "we will see", "it works", "good night",
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
    if chance < 0.95:
        said = rng.choice(_COMMON)
        return capital(said) if rng.random() < 0.3 else said
    if chance < 0.965:
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
    if rng.random() < 0.12:
        user = capital(pick(rng, _NAMED_GRAMMAR))
        text = words.any_word(rng) if "{w}" in user else rng.choice((words.code(rng), words.code(rng).upper(), words.any_word(rng), f"{words.code(rng)}-{words.code(rng)}".upper()))  # fmt: skip
        user = user.format(x=text, w=text, k=rng.choice(_CODE_KINDS))
        return Turn("echo", user, text, "I repeat it exactly.", key="echo " + text)
    if rng.random() < 0.5:
        is_quotable = '"' not in text and "'" not in text
        grammar = _ECHO_QUOTED_GRAMMAR if is_quotable and rng.random() < 0.45 else _ECHO_GRAMMAR
        template = pick(rng, grammar)
        template = capital(template) if rng.random() < 0.8 and template[0] != "{" else template
        user = template.format(x=text, q=rng.choice(('"', '"', '"', "'")))
        return Turn("echo", user, text, "I repeat it exactly.", key="echo " + text)
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
    "What does {l} spell?", "What word do the letters {l} give?", "Join {l} into a word.", "{l} - which word is that?", "Read this word: {l}", "The letters are {l}. What is the word?",
)  # fmt: skip


_SPELL_GRAMMAR = (
    "[|||Please |Can you |Could you |Would you ][spell|spell out] [|||for me |me ][|the word |the name |my name: ][{w}|\"{w}\"|'{w}'][| for me| please| letter by letter| slowly| with hyphens|, please][.|?|]",
    "[How|Tell me how|Do you know how|I forgot how] [is|was] [|the word |the name ]{w} [spelled|spelt|written][| correctly| exactly| again][?|.|]", "[How|Tell me how] [do|would|should|must] [I|you|we|people] [spell|write] [|the word |the name ][{w}|\"{w}\"][| correctly| letter by letter][?|.|]",
    "[I|People] [never know|always forget|forget|do not know|cannot remember] how [to spell|one spells|we spell] {w}. [Can|Could] you [help|spell it|write the letters][| for me]?", "{w}: [how is it spelled|how do you spell that|spell it|letter by letter, please|its letters][?|.|]",
    "[What|Which] letters [are in|does|make up|form] [|the word ]{w}[| have]?", "[Write|Say|Type|Give me|Show me] [|the word |the letters of ]{w} [letter by letter|one letter at a time|as letters|split into letters|with hyphens between the letters][.||, please]", "[What is|What's] the [spelling|correct spelling] of [|the word ][{w}|\"{w}\"]?",
    "[My name|The word|My word|The name] is {w}. [Spell it|Please spell it|Can you spell it|How do you spell that|How is it spelled][.|?]", "[Spell|Write out] [my name|this word|this name|this|the following][| for me]: {w}",
)  # fmt: skip


def spell(rng: random.Random) -> Turn:
    """Spell one word, several words, name a first or last letter, or join letters into a word."""
    word, key = _spellable(rng)
    letters = "-".join(word)
    chance = rng.random()
    if chance < 0.72:
        template = (
            phrase(rng, rng.choice(_SPELL)) if rng.random() < 0.5 else capital(pick(rng, _SPELL_GRAMMAR))
        )
        user = template.format(w=word)
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
