"""What the user said of themselves: told and asked in one message, or asked after other turns."""

import random

from . import arithmetic, copying, facts, self_facts, small_talk
from .conversation import Conversation, Message, Turn, answer, system_prompt
from .grammar import expand
from .self_facts import SelfFact

REMEMBER = "Okay, I will remember that."
NOT_TOLD = "You have not told me."


def _said(fact: SelfFact) -> str:
    """The reply to a statement."""
    return f"Nice to meet you, {fact.value}!" if fact.subject == "name" else REMEMBER


def _ended(text: str) -> str:
    return text if text[-1] in ".?!" else text + "."


def one_message(rng: random.Random) -> Turn:
    """Statements and a question on one of them, or on something not told, in one message."""
    count = rng.choices((0, 1, 2, 3), (9, 56, 24, 11))[0]
    made = self_facts.several(rng, count + 1)
    told, other = made[:count], made[count]
    missing = not told or rng.random() < 0.12
    asked = other if missing else rng.choice(told)
    statements = [_ended(fact.told) for fact in told]
    if rng.random() < 0.15:
        statements += [fact.say(rng) for fact in facts.make(rng, rng.randint(1, 2))]
        rng.shuffle(statements)
    context = " ".join(statements)
    if not context:
        user = asked.asked
    elif rng.random() < 0.2:
        lead = expand(rng, "[||||I told you: |Remember: |Hint: |I said this: ]")
        user = f"{asked.asked.rstrip('?.')}? {lead}{context}"
    else:
        between = expand(
            rng, "[ | | | | |\n|\n|\n\n| So, | And now: | Now tell me: | Question: | Now a question: ]"
        )
        user = context + between + asked.asked
    if context and rng.random() < 0.05:
        user = f'"{context}" {asked.asked}'
    reply = NOT_TOLD if missing else asked.reply
    thought = "The user did not tell me." if missing else "The user told me."
    return Turn("told", user, reply, thought, key=f"told {asked.value} {user}")


_DISTRACTORS = (
    small_talk.sample,
    copying.echo,
    copying.spell,
    arithmetic.single,
    lambda rng: facts.sample(rng, 1),
)


def _distractor(rng: random.Random) -> Turn:
    while True:
        turn = rng.choices(_DISTRACTORS, (5, 2, 1, 2, 1))[0](rng)
        if (
            not turn.system
            and not turn.reply.startswith("Nice to meet")
            and len(turn.user) + len(turn.reply) < 160
        ):
            return turn


def sample(rng: random.Random, thinking: bool, dense: bool) -> Conversation:
    """Tell one to four things, talk about other things for 0 to 4 turns, ask for one (dense: for all)."""
    told = self_facts.several(rng, rng.choices((1, 2, 3, 4), (55, 28, 12, 5))[0])
    messages: list[Message] = []
    system = system_prompt(rng)
    if system:
        messages.append({"role": "system", "content": system})
    keys: list[str] = []

    def exchange(user: str, reply: str, thought: str) -> None:
        messages.append({"role": "user", "content": user})
        messages.append(answer(Turn("memory", user, reply, thought), thinking))

    def distract(most: int) -> None:
        for _ in range(rng.randint(0, most)):
            turn = _distractor(rng)
            keys.append(turn.key or turn.user)
            exchange(turn.user, turn.reply, turn.thought)

    unknown = rng.random() < 0.12
    for fact in told[1:] if unknown else told:
        distract(1)
        if rng.random() < 0.08:
            turn = _distractor(rng)
            keys.append(turn.key or turn.user)
            exchange(f"{_ended(fact.told)} {turn.user}", turn.reply, turn.thought)
        else:
            exchange(fact.told, _said(fact), "The user tells me something.")
    distract(rng.choice((0, 0, 1, 2, 3, 4)))
    asked = rng.sample(told, len(told)) if dense else [told[0] if unknown else rng.choice(told)]
    for fact in asked:
        missing = unknown and fact is told[0]
        keys.append(f"memory {fact.value} {fact.asked}")
        exchange(
            fact.asked,
            NOT_TOLD if missing else fact.reply,
            "The user did not tell me." if missing else "The user told me earlier.",
        )
    return Conversation("memory", messages, keys, thinking, dense=dense)
