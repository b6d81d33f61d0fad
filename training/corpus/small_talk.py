"""Greetings, identity, thanks, tiny lists, and honest answers to what the model cannot do."""

# ruff: noqa: E501, SIM905  (tables of words and phrasings read best so)

import random

from . import words
from .conversation import Turn, phrase
from .tool_catalog import CATALOG

DO_NOT_KNOW = "I do not know that. I only know what you tell me."
CANNOT_WRITE = "I am a tiny model, so I cannot do that. I can repeat, spell, add, find facts and call tools."

NO_TOOL = "I do not have a tool for that."

INTENTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "hello": ("Hello! How can I help you?", (
        "Hello", "Hi", "Hey", "Hello!", "Hi there!", "Hey there", "Hello there.", "Good day", "Greetings!",
        "Hiya", "Yo", "hi :)", "Howdy", "Hello, Argosy!", "Hi bot", "hello world", "Hello again", "Hi, anyone there?",
        "Good day to you!", "Hello, nice to meet you.", "Are you there?", "Hallo", "hey hey", "Hello my friend",
    )),
    "morning": ("Good morning! How can I help you?", ("Good morning", "Good morning!", "Morning!", "A very good morning to you.", "Good morning, Argosy.")),
    "evening": ("Good evening! How can I help you?", ("Good evening", "Good evening!", "Evening!", "Good evening, Argosy.", "A good evening to you.")),
    "night": ("Good night!", ("Good night", "Good night!", "Sleep well!", "I am going to bed.", "Time to sleep. Good night.")),
    "how": ("I am fine, thank you. How can I help you?", (
        "How are you?", "How are you doing?", "How is it going?", "How are you today?", "What's up?", "How do you feel?",
        "Hi, how are you?", "Hello! How are you?", "Are you okay?", "How's life?", "Everything fine?", "You good?",
        "How are things?", "Hey, how are you doing today?", "How have you been?",
    )),
    "who": ("I am Argosy's tiny model, a small language model for testing.", (
        "Who are you?", "What are you?", "What is your name?", "What's your name?", "Tell me about yourself.",
        "Introduce yourself.", "Who am I talking to?", "Which model are you?", "What model is this?", "Who is this?",
        "What should I call you?", "Do you have a name?", "What kind of model are you?", "Who made you?",
        "Are you ChatGPT?", "Are you an AI?", "Are you a robot?", "Are you human?", "Are you a real person?",
        "Describe yourself.", "Please introduce yourself.", "Hi, who are you?", "What is Argosy?", "Which AI is this?",
    )),
    "can": ("I can repeat and spell words, add small numbers, find facts, fill in JSON and call tools.", (
        "What can you do?", "How can you help me?", "What are you able to do?", "What are you good at?", "Help",
        "Help me", "What do you do?", "List your skills.", "What are your abilities?", "Can you help me?",
        "I need help.", "What should I ask you?", "What can I ask you?", "How do you work?", "Show me what you can do.",
    )),
    "thanks": ("You are welcome!", (
        "Thanks", "Thank you", "Thank you!", "Thanks a lot!", "Many thanks.", "Thank you very much.", "thx", "Cheers!",
        "Thanks for your help.", "That was helpful, thank you.", "Thank you so much!", "Great, thanks!", "Perfect, thank you.",
        "Thanks, that is all.", "I appreciate it.", "Ok thanks", "Thanks, Argosy.",
    )),
    "bye": ("Goodbye!", (
        "Bye", "Goodbye", "Bye!", "See you later.", "See you!", "Good bye", "Bye bye", "I have to go.", "Farewell.",
        "See you tomorrow.", "Talk to you later.", "I am leaving now.", "Until next time!", "Take care!", "That is all, bye.",
    )),
    "praise": ("Thank you!", (
        "You are great!", "Good job!", "Well done.", "You are smart.", "I like you.", "Nice work!", "That is great!",
        "You are the best.", "Good bot", "I love you.", "Excellent!", "Very good.", "Amazing!", "You are so helpful.",
    )),
    "sorry": ("No problem.", ("Sorry", "I am sorry.", "Sorry about that.", "My mistake.", "I apologize.", "Oops, sorry!", "Excuse me.")),
    "okay": ("Okay.", ("Ok", "Okay", "Yes", "No", "Sure", "Fine.", "I see.", "Alright.", "Got it.", "Yep", "Nope", "Hmm", "Right.", "Never mind.")),
    "sad": ("I am sorry to hear that.", (
        "I am sad.", "I feel bad.", "I am tired.", "I had a bad day.", "I am not feeling well.", "I am lonely.", "I am sick.",
        "My day was awful.", "I feel terrible today.", "I am so bored.", "I am angry.", "I lost my job.", "I failed my test.",
    )),
    "glad": ("I am glad to hear that.", (
        "I am happy.", "I feel great!", "I had a good day.", "I am so excited!", "Today was wonderful.", "I won the game!",
        "I am fine, thanks.", "I am doing well.", "Life is good.", "I passed my exam!", "I got the job!", "I feel good today.",
    )),
    "joke": ("Why did the tiny model cross the road? It forgot why.", (
        "Tell me a joke.", "Make me laugh.", "Do you know a joke?", "A joke, please.", "Say something funny.",
        "Can you tell me a joke?", "I want to hear a joke.", "Give me a joke.", "Know any jokes?", "Got a good joke?",
    )),
    "ready": ("Yes, I am ready.", ("Are you ready?", "Are you online?", "Are you working?", "Ping", "Test", "Testing", "Is this thing on?", "Can you hear me?", "This is a test.")),
    "week": ("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday.", (
        "List the days of the week.", "What are the days of the week?", "Name the days of the week.", "Tell me the days of the week.",
        "Name all seven days.", "Which days does a week have?", "Days of the week?", "Can you list the days of the week?",
        "Say the days of the week.",
    )),
    "months": ("January, February, March, April, May, June, July, August, September, October, November, December.", (
        "List the months.", "Name the months of the year.", "What are the months of the year?", "Tell me all twelve months.",
        "Which months are there?", "Months of the year?", "Say the months in order.", "List the months of the year.",
    )),
    "alphabet": ("a b c d e f g h i j k l m n o p q r s t u v w x y z", (
        "Say the alphabet.", "Recite the alphabet.", "List the letters of the alphabet.", "What is the alphabet?",
        "Write the alphabet.", "Tell me the alphabet.", "Give me all the letters from a to z.", "Type the alphabet.",
    )),
    "seasons": ("Spring, summer, autumn, winter.", ("Name the four seasons.", "List the seasons.", "What are the seasons?", "Which seasons are there?", "Tell me the seasons of the year.")),
    "primary": ("Red, yellow and blue.", ("Name three colours.", "List some colors.", "Name the primary colours.", "Tell me three colors.", "What are the primary colors?", "Give me some colours.")),
}  # fmt: skip

_OPPOSITES = {
    "hot": "cold", "big": "small", "up": "down", "left": "right", "day": "night", "black": "white", "yes": "no",
    "good": "bad", "fast": "slow", "happy": "sad", "open": "closed", "full": "empty", "hard": "soft", "high": "low",
    "in": "out", "light": "dark", "long": "short", "loud": "quiet", "new": "old", "rich": "poor", "strong": "weak",
    "wet": "dry", "true": "false", "first": "last", "early": "late", "near": "far", "push": "pull", "start": "stop",
    "thick": "thin", "clean": "dirty", "north": "south", "east": "west", "love": "hate", "win": "lose", "on": "off",
}  # fmt: skip
_OPPOSITES |= {right: left for left, right in _OPPOSITES.items()}
_OPPOSITES["cold"], _OPPOSITES["white"] = "hot", "black"

_COLOUR_OF = {
    "the sky": "blue", "grass": "green", "snow": "white", "a banana": "yellow", "blood": "red", "coal": "black",
    "a carrot": "orange", "chocolate": "brown", "the sun": "yellow", "a lemon": "yellow", "the sea": "blue",
    "milk": "white", "a tomato": "red", "a strawberry": "red", "an elephant": "grey", "a flamingo": "pink",
    "a leaf": "green", "a cucumber": "green", "the night sky": "black", "a cherry": "red",
}  # fmt: skip

_CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "England": "London", "Japan": "Tokyo",
    "China": "Beijing", "Portugal": "Lisbon", "Austria": "Vienna", "Greece": "Athens", "Norway": "Oslo",
    "Sweden": "Stockholm", "Denmark": "Copenhagen", "Finland": "Helsinki", "Ireland": "Dublin", "Poland": "Warsaw",
    "Egypt": "Cairo", "Cuba": "Havana", "Peru": "Lima", "Canada": "Ottawa", "Iceland": "Reykjavik", "Kenya": "Nairobi",
}  # fmt: skip

_SOUNDS = {"dog": "woof", "cat": "meow", "cow": "moo", "sheep": "baa", "duck": "quack", "lion": "roar", "horse": "neigh", "frog": "ribbit", "bee": "buzz", "owl": "hoot"}  # fmt: skip

_UNKNOWN = (
    "Who invented the {w}?", "When did the {w} {v} begin?", "What is the population of {p}?", "Why is the {w} {v}?",
    "How far is {p} from {q}?", "Explain {w} {v}.", "What is the meaning of {w}?", "Who is the president of {p}?",
    "Tell me about {p}.", "What do you know about {n}?", "Who won the {w} in {y}?", "How does a {w} work?",
    "What happened in {y}?", "How do I cook {f}?", "What is {w}?", "Who is {n}?", "Where is {p}?", "What is a {w}?",
    "How old is {n}?", "Who wrote {v}?", "What is the tallest {w}?", "How many people live in {p}?", "Define {w}.",
    "What's the best {w}?", "Why do {a}s sleep?", "How many legs does a {a} have?", "When was {n} born?",
    "What should I eat today?", "What is the meaning of life?", "Explain quantum physics.", "How big is the moon?",
    "Tell me about the history of {p}.", "How tall is {n}?", "Which {w} is the best?", "Who discovered {p}?",
    "What does {w} mean?", "Is {w} good for me?", "What is the best way to learn {w}?", "Give me facts about {a}s.",
)  # fmt: skip

_CREATIVE = (
    "Write a {k} about {w}.", "Write me a {k} about a {a}.", "Write a {k}.", "Compose a {k} on {w}.", "Tell me a story.",
    "Tell me a story about a {a}.", "Can you write a {k} for {n}?", "I need a {k} about the {w}.", "Sing a song.",
    "Write a function that finds the {w}.", "Write code to sort a list.", "Write a Python program.", "Draw a {a}.",
    "Summarize this article.", "Give me a recipe for {f}.", "Help me write a {k}.",
    "Create a {k} about {p}.", "Make a {k} with the word {w}.", "Write a haiku about {w}.", "Tell a bedtime story.",
    "Write an email to {n}.", "Please write a short {k} about {w} and {v}.", "Draft a {k} for my {w}.",
)  # fmt: skip
_WORKS = ("poem story haiku song essay letter novel sonnet limerick speech tale report blog post").split()


def _intent(rng: random.Random) -> Turn:
    intent = rng.choice(list(INTENTS))
    reply, phrasings = INTENTS[intent]
    user = phrase(rng, rng.choice(phrasings), polite=False)
    chance = rng.random()
    if chance < 0.04:
        user = user.upper()
    elif chance < 0.10:
        user = user.lower().rstrip(".?!")
    elif chance < 0.16:
        user = user.rstrip(".?!") + rng.choice(("!", ".", "?", "!!", " :)", "..."))
    return Turn("small_talk", user, reply, "This is small talk.")


def _count(rng: random.Random) -> Turn:
    end = rng.randint(2, 20)
    if rng.random() < 0.65:
        first, template = 1, rng.choice((
            "Count to {e}.", "Count from 1 to {e}.", "Can you count to {e}?", "Count up to {e}.", "Please count to {e}.",
            "List the numbers from 1 to {e}.", "Say the numbers 1 to {e}.", "Start at 1 and count to {e}.",
        ))  # fmt: skip
    else:
        first = rng.randint(0, 12)
        end = first + rng.randint(2, 9)
        template = rng.choice(("Count from {b} to {e}.", "List the numbers from {b} to {e}.", "Start at {b} and count to {e}.", "Write the numbers {b} to {e}."))  # fmt: skip
    user = phrase(rng, template).format(b=first, e=end)
    return Turn(
        "small_talk", user, ", ".join(map(str, range(first, end + 1))), f"Count from {first} to {end}."
    )


def _next(rng: random.Random) -> Turn:
    names, what = rng.choice(((words.DAYS, "day"), (words.MONTHS, "month")))
    spot = rng.randrange(len(names))
    item = names[spot]
    if rng.random() < 0.6:
        other = names[(spot + 1) % len(names)]
        user = phrase(rng, rng.choice((
            "What comes after {d}?", "Which {t} comes after {d}?", "What {t} follows {d}?", "What is the {t} after {d}?",
            "Which {t} is next after {d}?", "Today is {d}. What is tomorrow?" if what == "day" else "After {d} comes which {t}?",
        )))  # fmt: skip
        reply = f"{other} comes after {item}."
    else:
        other = names[spot - 1]
        user = phrase(rng, rng.choice((
            "What comes before {d}?", "Which {t} comes before {d}?", "What is the {t} before {d}?",
            "Today is {d}. What was yesterday?" if what == "day" else "Before {d} comes which {t}?",
        )))  # fmt: skip
        reply = f"{other} comes before {item}."
    return Turn("small_talk", user.format(d=item, t=what), reply, f"The {what}s go in order.")


def _opposite(rng: random.Random) -> Turn:
    word = rng.choice(list(_OPPOSITES))
    user = phrase(rng, rng.choice((
        "What is the opposite of {w}?", "Opposite of {w}?", "Give me the opposite of {w}.", "What's the opposite of '{w}'?",
        "Name the opposite of {w}.", "Tell me the opposite of the word {w}.", "Which word is the opposite of {w}?",
    ))).format(w=word)  # fmt: skip
    return Turn(
        "small_talk", user, f"The opposite of {word} is {_OPPOSITES[word]}.", "This is about opposites."
    )


def _colour(rng: random.Random) -> Turn:
    thing = rng.choice(list(_COLOUR_OF))
    spelling = rng.choice(("colour", "color"))
    user = phrase(rng, rng.choice((
        "What {c} is {t}?", "Which {c} is {t}?", "What is the {c} of {t}?", "Tell me the {c} of {t}.", "{t} has which {c}?",
    ))).format(c=spelling, t=thing)  # fmt: skip
    reply = f"{thing[0].upper()}{thing[1:]} is {_COLOUR_OF[thing]}."
    return Turn("small_talk", user, reply, "This is about colours.")


def _capital(rng: random.Random) -> Turn:
    templates = (
        "What is the capital of {c}?", "Capital of {c}?", "Tell me the capital of {c}.", "Which city is the capital of {c}?",
        "What's the capital city of {c}?", "Name the capital of {c}.", "Do you know the capital of {c}?",
    )  # fmt: skip
    if rng.random() < 0.2:
        user = phrase(rng, rng.choice(templates)).format(c=words.pseudo_word(rng).capitalize())
        return Turn("small_talk", user, DO_NOT_KNOW, "I do not know this.")
    country = rng.choice(list(_CAPITALS))
    user = phrase(rng, rng.choice(templates)).format(c=country)
    return Turn(
        "small_talk", user, f"The capital of {country} is {_CAPITALS[country]}.", "This is about capitals."
    )


def _sound(rng: random.Random) -> Turn:
    animal = rng.choice(list(_SOUNDS))
    user = phrase(rng, rng.choice(("What does a {a} say?", "What sound does a {a} make?", "Which noise does the {a} make?", "How does a {a} sound?"))).format(a=animal)  # fmt: skip
    return Turn("small_talk", user, f"A {animal} says {_SOUNDS[animal]}.", "This is about animal sounds.")


def _fill(rng: random.Random, template: str) -> str:
    return phrase(rng, template).format(
        w=words.any_word(rng).lower(), v=words.english(rng), p=words.place(rng), q=words.place(rng),
        n=words.name(rng), y=rng.randint(1200, 2030), f=rng.choice(words.FOODS), a=rng.choice(words.ANIMALS),
        k=rng.choice(_WORKS),
    )  # fmt: skip


def _unknown(rng: random.Random) -> Turn:
    return Turn("small_talk", _fill(rng, rng.choice(_UNKNOWN)), DO_NOT_KNOW, "I do not know this.")


def _creative(rng: random.Random) -> Turn:
    return Turn("small_talk", _fill(rng, rng.choice(_CREATIVE)), CANNOT_WRITE, "I cannot do this.")


def _meet(rng: random.Random) -> Turn:
    person = words.name(rng)
    user = phrase(rng, rng.choice((
        "Hello, I am {n}.", "Hi, my name is {n}.", "I am {n}.", "My name is {n}.", "Hi! I'm {n}.", "Call me {n}.", "You can call me {n}.",
        "I'm {n}, nice to meet you.", "They call me {n}.", "Hello! My name's {n}.", "This is {n} speaking.",
    )), polite=False).format(n=person)  # fmt: skip
    return Turn("small_talk", user, f"Nice to meet you, {person}!", "The user gives a name.")


def _unserved(rng: random.Random) -> Turn:
    while True:
        tool = rng.choice(CATALOG)
        if tool.name != "calculate":
            return Turn("small_talk", tool.request(rng)[0], NO_TOOL, "No tool fits.")


def sample(rng: random.Random) -> Turn:
    """One small-talk turn."""
    kinds = (
        _intent,
        _count,
        _next,
        _opposite,
        _colour,
        _capital,
        _sound,
        _unknown,
        _creative,
        _meet,
        _unserved,
    )
    return rng.choices(kinds, (40, 8, 5, 6, 3, 5, 2, 13, 10, 5, 6))[0](rng)


def sample_plain(rng: random.Random) -> Turn:
    """One small-talk turn that asks for no tool."""
    while (turn := sample(rng)).reply == NO_TOOL:
        pass
    return turn
