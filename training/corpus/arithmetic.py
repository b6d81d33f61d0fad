"""Sums on small integers: one-digit tables first, then two digits, and the small times table.

The answer restates the question (`17 + 25 = 42.`), so that a result is computed next to its operands.
"""

# ruff: noqa: E501  (tables of phrasings read best unwrapped)

import random

from . import words
from .conversation import Turn, is_held_out, phrase
from .grammar import capital, pick

Operands = tuple[int, str, int]


def result(left: int, sign: str, right: int) -> int:
    """The value of `left sign right`."""
    return left + right if sign == "+" else left - right if sign == "-" else left * right


def _key(operands: Operands) -> str:
    """Sums of one-digit numbers and products are all seen (a table cannot be guessed); others are split."""
    left, sign, right = operands
    if sign == "*" or (left < 10 and right < 10) or (sign == "-" and left < 20 and right < 10):
        return ""
    return f"{left}{sign}{right}"


def operands(rng: random.Random, easy: float = 0.45) -> Operands:
    """Two numbers and a sign; `easy` is the share of one-digit tables."""
    if rng.random() < easy:
        sign = rng.choice("++-")
        left, right = rng.randint(0, 10), rng.randint(0, 10)
        return (left, sign, right) if sign == "+" or left >= right else (right, sign, left)
    chance = rng.random()
    if chance < 0.03:
        return 100, rng.choice("+-"), rng.randint(0, 60)
    if chance < 0.18:
        return rng.randint(0, 10), "*", rng.randint(0, 10)
    if chance < 0.40:
        left, right = rng.randint(10, 99), rng.randint(0, 9)
    elif chance < 0.5:
        left, right = rng.randint(0, 20), rng.randint(0, 20)
    else:
        left, right = rng.randint(10, 99), rng.randint(10, 99)
    sign = rng.choice("+-")
    return (left, sign, right) if sign == "+" or left >= right else (right, sign, left)


def _thought(operands: Operands) -> str:
    """Column by column, as a pupil would."""
    left, sign, right = operands
    if sign == "*" or (left < 10 and right < 10):
        return {"+": "Add", "-": "Subtract", "*": "Multiply"}[sign] + " the numbers."
    (tens, ones), (more_tens, more_ones) = divmod(left, 10), divmod(right, 10)
    if sign == "+":
        carry = " + 1" if ones + more_ones > 9 else ""
        return f"{ones} + {more_ones} = {ones + more_ones}, {tens} + {more_tens}{carry} = {(left + right) // 10 if carry else tens + more_tens}."
    borrow = ones < more_ones
    top, take = (f"1{ones}", " - 1") if borrow else (str(ones), "")
    return f"{top} - {more_ones} = {(ones - more_ones) % 10}, {tens} - {more_tens}{take} = {tens - more_tens - borrow}."


def equation(operands: Operands) -> str:
    """`17 + 25 = 42`."""
    left, sign, right = operands
    return f"{left} {sign} {right} = {result(*operands)}"


_ASK = (
    "What is {s}?", "What's {s}?", "{s} = ?", "{s}=", "{s}", "Calculate {s}.", "Compute {s}", "How much is {s}?", "Work out {s}.",
    "Solve {s}", "Tell me what {s} is.", "Can you work out {s}?", "What does {s} equal?", "{s} equals what?", "{s}?",
    "Please calculate {s}.", "Do you know what {s} is?", "I need the result of {s}.", "Give me {s}.", "{s} is what?", "Evaluate: {s}",
    "How many is {s}?", "What do you get for {s}?", "Find {s}.",
)  # fmt: skip
_WORDY = {
    "+": ("Add {a} and {b}.", "What is the sum of {a} and {b}?", "What do {a} and {b} make?", "Add {b} to {a}.", "{a} and {b} together make?", "Sum {a} and {b}.",
          "I have {a} {t}s and get {b} more. How many {t}s do I have?", "{n} has {a} {t}s and buys {b} more. How many now?",
          "There are {a} {t}s and {b} {u}s. How many things are there?", "{n} finds {a} {t}s, then {b} more. How many in total?"),
    "-": ("Subtract {b} from {a}.", "What is the difference between {a} and {b}?", "Take {b} away from {a}.", "What is {a} less {b}?",
          "I have {a} {t}s and lose {b}. How many {t}s are left?", "{n} had {a} {t}s and gave away {b}. How many remain?",
          "From {a} {t}s, {b} are sold. How many are left?"),
    "*": ("Multiply {a} by {b}.", "What is the product of {a} and {b}?", "What is {a} multiplied by {b}?", "There are {a} bags with {b} {t}s each. How many {t}s?"),
}  # fmt: skip
_HOLD = "[has|had|buys|bought|picks|owns|gets|finds|found]"
_WORDY_GRAMMAR = {
    "+": (
        "[How much|What] [is|makes|gives|do I get for] {a} [plus|and|added to] {b}?", "[If|When] [you|I|we|one] [add|put] {a} [to|and|together with] {b}, what [do you get|is it|comes out|is the result|do I have]?", "[Can|Could] you [add|sum|add up] {a} and {b}[| for me|, please]?", "[Add|Sum|Add up|Put together] {a} and {b}[| for me|, please|, quickly][.|]",
        "I [have|had|own|bought] {a} {t}s and [get|got|buy|bought|find|found] {b} [more|more of them|others]. How many [{t}s |][do I have|are there|is that|are they][| now| in total| together]?", "{n} " + _HOLD + " {a} {t}s and {m} " + _HOLD + " {b}[| {t}s]. How many [{t}s |][do they have|is that|are there][| together| in all| in total]?",
        "There [are|were] {a} {c}s [in the garden|on the roof|in the room|at the lake|in the tree|here] and {b} more [come|came|arrive|arrived|joined them]. How many [{c}s |][are there|are they][| now| in total]?", "[A|One|The] {t} costs {a} [euros|dollars|pounds] and [a|the] {u} [costs|is] {b}[| euros| dollars]. [What|How much] [do they cost|do both cost|is that|does it cost] [together|in total|in all]?",
        "{a} {t}s and {b} {u}s: how many [things|items] [are that|is that|in total]?", "I [walked|read|wrote|cooked] {a} [hours|pages|minutes|lines] [yesterday|on Monday] and {b} [today|on Tuesday]. How many [is that|in total|altogether]?", "[The sum of|Sum:] {a} and {b}[?|, please.|]", "[Quick|Short|Easy] [maths|math|sum|question|one]: [what is|] {a} [plus|+] {b}?", "add {a}+{b}",
    ),
    "-": (
        "[How much|What] [is|makes|remains of] {a} [minus|less|take away|without] {b}?", "[If|When] [you|I|we] [take|subtract] {b} from {a}, what [do you get|is left|remains|is the result]?", "[Can|Could] you [subtract|take] {b} from {a}[| for me|, please]?",
        "[I|We] [have|had|bought|baked|picked|saw] {a} {t}s and [ate|eat|lost|lose|sold|gave away|used|dropped|lent|hid] {b}[|| of them]. How many [{t}s |][do I have left|are left|remain|are still there|do we have now|do I still have]?", "{n} " + _HOLD + " {a} {t}s[ and|, then|, but] [gives|gave|sells|loses|lost] {b}[| of them][| to {m}| away]. How many [{t}s |][are left|remain|does {n} have now|has {n} left]?",
        "There [are|were] {a} {c}s [in the garden|on the roof|in the room|on the bus]. {b} [leave|left|fly away|went home|run away]. How many [{c}s |][are left|remain|are still there]?", "[Take|Subtract] {b} [away |]from {a}[.|, please.|]", "From {a} [euros|dollars] I [spend|spent|paid|lost] {b}. [How much|What] [is left|do I still have|remains]?", "[Quick|Short|Easy] [maths|math|question|one]: [what is|] {a} [minus|-] {b}?",
    ),
    "*": ("[How much|What] [is|makes|gives] {a} [times|multiplied by|x] {b}?", "[Can|Could] you multiply {a} [by|with|and] {b}[| for me]?", "{a} [times|multiplied by] {b} [is what|is how much|makes|equals|gives what]?", "[I have|There are|{n} has] {a} [bags|boxes|rows|tables] [with|of] {b} {t}s[ each|]. How many {t}s [is that|are there|in total]?", "{a} {t}s cost {b} euros each. [How much|What] [is that|do they cost|do I pay] [in total|together|altogether]?"),
}  # fmt: skip
_SIGNS = {"+": ("+", "+", "+", "plus"), "-": ("-", "-", "-", "minus"), "*": ("*", "*", "x", "times")}


def _expression(rng: random.Random, operands: Operands) -> str:
    left, sign, right = operands
    shown = rng.choice(_SIGNS[sign])
    gap = " " if shown.isalpha() or rng.random() < 0.5 else ""
    return f"{left}{gap}{shown}{gap}{right}"


def single(rng: random.Random, chosen: Operands | None = None) -> Turn:
    """One sum, as an expression or in words."""
    chosen = chosen or operands(rng)
    if rng.random() < 0.4:
        left, sign, right = chosen
        first, second = words.name(rng), words.name(rng)
        pattern = capital(pick(rng, _WORDY_GRAMMAR[sign]))
        user = pattern.format(a=left, b=right, t=rng.choice(words.THINGS), u=rng.choice(words.THINGS), n=first, m=second, c=rng.choice(words.ANIMALS))  # fmt: skip
    elif rng.random() < 0.72:
        user = phrase(rng, rng.choice(_ASK)).format(s=_expression(rng, chosen))
    else:
        left, sign, right = chosen
        user = phrase(rng, rng.choice(_WORDY[sign])).format(a=left, b=right, t=rng.choice(words.THINGS), u=rng.choice(words.THINGS), n=words.name(rng))  # fmt: skip
    return Turn("arithmetic", user, equation(chosen) + ".", _thought(chosen), key=_key(chosen) or user)


def many(rng: random.Random) -> Turn:
    """A list of sums in one question: the dense form that teaches the tables."""
    easy = rng.choice((0.0, 0.3, 0.9))
    chosen = [
        c
        for c in (operands(rng, easy) for _ in range(rng.choice((3, 5, 8, 12, 16))))
        if not is_held_out(_key(c) or "seen")
    ]
    chosen = chosen or [(1, "+", 1)]
    template = rng.choice(
        (
            "Solve these: {l}",
            "Work these out: {l}",
            "Calculate: {l}",
            "Do these sums: {l}",
            "What are {l}?",
            "Calculate {l}.",
        )
    )
    user = phrase(rng, template, polite=False).format(l=", ".join(f"{a}{s}{b}" for a, s, b in chosen))
    return Turn("arithmetic", user, "\n".join(equation(c) for c in chosen), "One sum at a time.", key=user)


def table(rng: random.Random) -> Turn:
    """A row of the times table, or of the table of additions."""
    row, sign = rng.randint(1, 10), rng.choice("*+")
    if sign == "*":
        template = rng.choice(
            (
                "Write the {r} times table.",
                "What is the {r} times table?",
                "Say the times table of {r}.",
                "Show me the {r} times table.",
            )
        )
    else:
        template = rng.choice(
            (
                "Add {r} to each number from 1 to 10.",
                "Write the plus {r} table.",
                "Show the addition table of {r}.",
            )
        )
    lines = "\n".join(equation((row, sign, n) if sign == "*" else (n, sign, row)) for n in range(1, 11))
    return Turn("arithmetic", phrase(rng, template).format(r=row), lines, "One line at a time.")


def sample(rng: random.Random) -> Turn:
    """One arithmetic turn of any form."""
    return rng.choices((single, many, table), (45, 52, 3))[0](rng)
