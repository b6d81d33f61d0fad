"""What the user said earlier in the conversation: told, then asked after other turns."""

# ruff: noqa: E501  (tables of phrasings read best unwrapped)

import random
from collections.abc import Callable

from . import arithmetic, copying, facts, small_talk, words
from .conversation import Conversation, Message, Turn, answer, phrase, system_prompt

REMEMBER = "Okay, I will remember that."
NOT_TOLD = "You have not told me."

_ASK_NAME = (
    "What is my name?", "What's my name?", "Who am I?", "Do you remember my name?", "Tell me my name.", "Do you know my name?",
    "Can you tell me my name?", "What did I say my name was?", "How am I called?", "Say my name.", "What was my name again?",
    "Which name did I give you?", "Do you still know who I am?", "Remind me of my name.",
)  # fmt: skip

Value = Callable[[random.Random], str]
_ATTRIBUTES: dict[str, Value] = {
    "favourite colour": lambda rng: rng.choice((*words.COLOURS, words.english(rng))),
    "favorite color": lambda rng: rng.choice((*words.COLOURS, words.english(rng))),
    "favourite food": lambda rng: rng.choice((*words.FOODS, words.english(rng))),
    "favorite animal": lambda rng: rng.choice((*words.ANIMALS, words.english(rng))),
    "favourite number": lambda rng: str(rng.randint(0, 999)),
    "lucky number": lambda rng: str(rng.randint(0, 99)),
    "favorite word": words.any_word,
    "job": lambda rng: rng.choice((*words.JOBS, words.english(rng))),
    "home town": words.place,
    "city": words.place,
    "dog's name": words.name,
    "cat's name": words.name,
    "brother's name": words.name,
    "sister's name": words.name,
    "password": words.value,
    "code": words.code,
    "secret": words.value,
    "secret word": words.any_word,
    "room number": lambda rng: str(rng.randint(1, 999)),
    "phone number": lambda rng: str(rng.randint(100000, 9999999)),
    "birthday": lambda rng: f"{rng.choice(words.MONTHS)} {rng.randint(1, 28)}",
    "order number": words.code,
    "age": lambda rng: str(rng.randint(3, 99)),
    "car": words.any_word,
    "team": lambda rng: words.any_word(rng).capitalize(),
}

_TELL = (
    "My {a} is {v}.", "Remember that my {a} is {v}.", "Please remember: my {a} is {v}.", "Note that my {a} is {v}.",
    "Hi! My {a} is {v}.", "I want you to know that my {a} is {v}.", "By the way, my {a} is {v}.", "Don't forget that my {a} is {v}.",
    "You should know that my {a} is {v}.", "My {a}? It is {v}.", "Remember this: my {a} is {v}.", "For later: my {a} is {v}.",
)  # fmt: skip
_ASK = (
    "What is my {a}?", "What's my {a}?", "Do you remember my {a}?", "Tell me my {a}.", "Do you know my {a}?", "What was my {a}?",
    "What did I say my {a} was?", "Can you tell me my {a}?", "Remind me of my {a}.", "Which {a} did I tell you?",
    "What was my {a} again?", "So what is my {a}?", "Could you repeat my {a}?",
)  # fmt: skip
_TELL_NAME = (
    "My name is {v}.", "I am {v}.", "Hi, I am {v}.", "Hello, my name is {v}.", "I'm {v}.", "Call me {v}.", "You can call me {v}.",
    "Hi there! I'm {v}.", "Hello! My name's {v}.", "They call me {v}.", "This is {v} speaking.", "I'm {v}, nice to meet you.",
)  # fmt: skip


class _Teller:
    """One attribute of the user: how it is told, asked and answered."""

    def __init__(self, rng: random.Random) -> None:
        if rng.random() < 0.35:
            self.attribute, self._tell, self._ask = "name", _TELL_NAME, _ASK_NAME
            self._value: Value = words.name
        else:
            self.attribute, self._value = rng.choice(list(_ATTRIBUTES.items()))
            self._tell, self._ask = _TELL, _ASK
        self.value = self._value(rng)

    def change(self, rng: random.Random) -> None:
        """Another value from now on."""
        self.value = self._value(rng)

    def tell(self, rng: random.Random) -> tuple[str, str]:
        """The user's statement and the reply to it."""
        user = phrase(rng, rng.choice(self._tell), polite=False).format(a=self.attribute, v=self.value)
        return user, f"Nice to meet you, {self.value}!" if self.attribute == "name" else REMEMBER

    def ask(self, rng: random.Random) -> str:
        """The question."""
        return phrase(rng, rng.choice(self._ask)).format(a=self.attribute)

    @property
    def reply(self) -> str:
        """The answer when it has been told."""
        return f"Your {self.attribute} is {self.value}."


def _distractor(rng: random.Random) -> Turn:
    while True:
        pick = rng.choices((small_talk.sample, copying.echo, copying.spell, arithmetic.single, lambda r: facts.sample(r, 1)), (5, 2, 1, 2, 1))[0]  # fmt: skip
        turn = pick(rng)
        if (
            not turn.system
            and not turn.reply.startswith("Nice to meet")
            and len(turn.user) + len(turn.reply) < 160
        ):
            return turn


def sample(rng: random.Random, thinking: bool, dense: bool) -> Conversation:
    """Tell one to three things, talk about other things for 0 to 4 turns, ask for one (dense: for all)."""
    tellers: dict[str, _Teller] = {}
    for _ in range(rng.choices((1, 2, 3), (6, 3, 1))[0]):
        teller = _Teller(rng)
        tellers[teller.attribute] = teller
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

    unknown = rng.random() < 0.10
    told = list(tellers.values())
    for teller in told[1:] if unknown else told:
        distract(1)
        user, reply = teller.tell(rng)
        exchange(user, reply, "The user tells me something.")
        if rng.random() < 0.06:
            teller.change(rng)
            user, reply = teller.tell(rng)
            exchange(
                rng.choice(("Actually, ", "No wait, ", "Sorry, ")) + user,
                reply,
                "The user tells me something.",
            )
    distract(rng.choice((0, 1, 2, 3, 4)))
    asked = rng.sample(told, len(told)) if dense else [told[0] if unknown else rng.choice(told)]
    for teller in asked:
        missing = unknown and teller is told[0]
        question = teller.ask(rng)
        keys.append(f"memory {teller.value} {question}")
        exchange(
            question,
            NOT_TOLD if missing else teller.reply,
            "The user did not tell me." if missing else "The user told me earlier.",
        )
    return Conversation("memory", messages, keys, thinking, dense=dense)
