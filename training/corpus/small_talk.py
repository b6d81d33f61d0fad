"""Greetings, identity, thanks, tiny lists, and honest answers to what the model cannot do."""

# ruff: noqa: E501, SIM905  (tables of words and phrasings read best so)

import random

from . import greetings, words
from .conversation import Turn, phrase
from .grammar import capital, expand, pick
from .tool_catalog import CATALOG

DO_NOT_KNOW = "I do not know that. I only know what you tell me."
CANNOT = "I am a tiny model, so I cannot do that. I can repeat, spell, add and find facts."
"""Declines where no tools were given, and so does not speak of tools."""

NO_TOOL = "I do not have a tool for that."
"""Declines where tools were given, and none of them fits."""

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


_UNKNOWN_PATTERNS = (
    "[|||Do you know |Tell me, |Hey, ]who [invented|discovered|wrote|painted|built|founded|directed|designed|composed|owns|won|made|killed|sang] [the|a|] {w}[| in {y}| first| and why]?",
    "[|||Do you know |Tell me ]who [is|was] the [first|last|current|] [president|king|queen|mayor|author|inventor|founder|leader|owner|winner|champion|director|painter|chancellor] of {p}?",
    "How [tall|high|deep|old|big|long|heavy|far|fast|wide|large|hot|cold|expensive] [is|was] [the|Mount|Lake|a|the river|] {W}[| really| in meters| today]?",
    "[|||Can you |Could you |Please |Would you ][explain|tell me|describe|say] [|to me] [what {w} [is|means|does]|what a {w} is|how {w} [works|is made]|why {w} [is|was] {v}|who {n} [is|was]][.|?|]",
    "[|||Please ][explain|define|describe] [|the word |the term |the theory of |me ]{w}[| to me| in simple words| briefly][.|]",
    "When [was|did|is|will] [the|] {w} [born|invented|built|end|start|happen|begin|discovered|over]?",
    "Why [is|are|do|does|did|can] [the|a|] {w} [{v}|so {v}|{v} at night|not {v}]?",
    "[In|Since|Until] [which|what] [year|century|country] [was|is|did] [the|] {w} [{v}|built|begin|born|invented]?",
    "How many {w}s [are there|live|exist|were sold] in {p}?", "How do [I|you|we|people] [make|cook|fix|build|learn|clean|install|grow|repair|bake] [a|the|] {w}?",
    "What [happened|was going on|was built|was invented] [in {y}|in {p}|in {p} in {y}]?", "What [is|was] [the|a] [difference between {w} and {v}|history of {w}|reason for {w}|best {w}|largest {w}|capital of {w}|height of {w}|distance to {p}]?",
    "Which [{w}|country|language|animal|planet|river] is the [biggest|oldest|best|fastest|longest|smallest|tallest]?", "[Where|When] [is|was|can I find|do they sell] [the|] {W}?",
    "Is [it true that|] {w} [{v}|good for me|safe|dangerous|expensive|a {v}]?", "Who [is|was] {N}?", "[What do you|What can you] [know|tell me|say] about [{w}|{p}|the {w}|{n}]?",
)  # fmt: skip
"""Of what nobody has told the model."""

_LANGUAGES = "[French|German|Spanish|Italian|Dutch|English|Latin|Japanese|Chinese|Polish|Greek]"
_CREATIVE_PATTERNS = (
    "[Summarize|Summarise|Sum up|Shorten|Condense|Paraphrase|Rewrite|Rephrase|Improve|Correct|Proofread|Review|Analyze] [|||this|the text|this text|the following|this sentence|the text below|the following text|this for me|it]:[ | |\n]{t}",
    "[Summarize|Summarise|Sum up|Shorten|Rewrite|Rephrase|Paraphrase|Improve] [this|the following|the text][|| in one sentence| briefly| for me]:[ |\n]{t}", "{t}\n\n[Summarize|Sum up|Shorten|Rewrite|Rephrase] [this|the text above|that|it][|, please| in one sentence| for me].",
    "[|||Can you |Could you |Please ][summarize|summarise|sum up|translate|rewrite] [|this|the text|the following] [article|text|paragraph|document|book|page|mail] [for me|about {w}|of {n}|], [please|thanks][.|?]",
    "[Translate|Please translate|Can you translate|Could you translate] [\"{x}\"|'{x}'|the word {w}|this: {x}|{x}|the sentence \"{x}\"] [into|to] " + _LANGUAGES + "[.|?|| please]",
    "[How do you say|What is|How would I say] [\"{x}\"|'{x}'|{w}] in " + _LANGUAGES + "?", "[Translate|Please translate] [into|to] " + _LANGUAGES + ": {x}",
    "[|||Can you |Could you |Please |I want you to |I'd like you to ][write|compose|draft|create|make|invent|prepare] [|me |us ][a|one|another] [short|long|nice|funny|sad|little|great|] {k}[|| about [a|the] {w}| about {w} and {v}| for {n}| on {w}| about {a}s| about my {w}][.|?|]",
    "[|||Can you |Could you |Please ][write|implement|code|program|show me|generate] [a|some|the|me a] [Python|Java|C|bash|SQL|Rust|Go|JavaScript|] [function|script|program|query|class|code|method|loop] [that [sorts|counts|prints|reads|finds|adds|removes|sends|checks] [a|the|all|] {w}s|to [sort|count|print|read|find|send|parse] [a|the|all|] {w}s|for {w}][.|?|]",
    "[Give|Tell|Show|Send] me [a|an|some|ten|five|three] [recipe|tip|idea|plan|advice|list|outline|tips|ideas|facts] [for|about|on] [{w}|{f}|my {w}|{a}s][.|]", "[Plan|Organize|Design|Prepare] [a|my|our] [trip|party|wedding|day|week|menu|garden] [in {p}|for {n}|with {w}|for next week][.|]",
    "[Help me|Can you help me|Could you help me] [write|plan|draft|improve|fix|debug|translate] [a|my|this|the] [{k}|code|{w}|letter|application|essay][.|?]", "[Draw|Paint|Sketch] [me|] [a|the] [{a}|{w}|house]." , "[Tell|Read] me a [story|fairy tale|bedtime story][| about [a|the] {a}| about {n}| with a {w}][.|, please.]",
    "[Invent|Make up|Imagine|Think of|Come up with] [a|an|some] [story|name for my {w}|world|character|game|slogan|title for a {k}|character called {n}][.|]",
)  # fmt: skip
"""Of what the model cannot do, whoever asks."""


def _intent(rng: random.Random) -> Turn:
    intent = rng.choice(list(INTENTS))
    reply, phrasings = INTENTS[intent]
    if rng.random() < 0.6:
        user = pick(rng, greetings.PATTERNS[intent])
        user = capital(user) if rng.random() < 0.7 else user
    else:
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
            expand(rng, "[|Tell me |And |So |Please tell me ][what|which] [|{t}] [comes|is|will be|follows|do we have] [right|directly|] [after|next after] {d}[|, please]?"),
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
        expand(rng, "[|And |So |Tell me |Please say ][what is|what's|which word is|give me|name] the [opposite|contrary|reverse|antonym] [of|to] [|the word ]{w}[|, please]?"),
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
    wider = (
        "[What|Which] [city|town|] is the [capital|capital city|main city] [of|in] {c}[| please| today]?",
        "[I am going|We travel|My flight goes] to {c}[,|.|:] [what|which city] is [its|the] capital[| there]?",
    )
    if rng.random() < 0.3:
        templates = (pick(rng, wider),)
    user = phrase(rng, rng.choice(templates)).format(c=country)
    return Turn(
        "small_talk", user, f"The capital of {country} is {_CAPITALS[country]}.", "This is about capitals."
    )


def _sound(rng: random.Random) -> Turn:
    animal = rng.choice(list(_SOUNDS))
    user = phrase(rng, rng.choice(("What does a {a} say?", "What sound does a {a} make?", "Which noise does the {a} make?", "How does a {a} sound?"))).format(a=animal)  # fmt: skip
    return Turn("small_talk", user, f"A {animal} says {_SOUNDS[animal]}.", "This is about animal sounds.")


def _fill(rng: random.Random, template: str) -> str:
    word = words.any_word(rng)
    return template.format(
        w=word.lower(), W=capital(word), v=words.english(rng), p=words.place(rng), q=words.place(rng),
        n=words.name(rng), N=f"{words.name(rng)} {words.pseudo_word(rng).capitalize()}", y=rng.randint(1200, 2030),
        f=rng.choice(words.FOODS), a=rng.choice(words.ANIMALS), k=rng.choice(_WORKS),
        t=" ".join(words.sentence(rng) for _ in range(rng.randint(1, 3))), x=words.sentence(rng, 1, 5)[:-1].lower(),
    )  # fmt: skip


def _unknown(rng: random.Random) -> Turn:
    if rng.random() < 0.5:
        template = phrase(rng, rng.choice(_UNKNOWN))
    else:
        template = capital(pick(rng, _UNKNOWN_PATTERNS))
    return Turn("small_talk", _fill(rng, template), DO_NOT_KNOW, "I do not know this.")


def _creative(rng: random.Random) -> Turn:
    if rng.random() < 0.35:
        template = phrase(rng, rng.choice(_CREATIVE))
    else:
        template = capital(pick(rng, _CREATIVE_PATTERNS))
    return Turn("small_talk", _fill(rng, template), CANNOT, "I cannot do this.")


def _meet(rng: random.Random) -> Turn:
    person = words.name(rng)
    user = phrase(rng, rng.choice((
        "Hello, I am {n}.", "Hi, my name is {n}.", "I am {n}.", "My name is {n}.", "Hi! I'm {n}.", "Call me {n}.", "You can call me {n}.",
        "I'm {n}, nice to meet you.", "They call me {n}.", "Hello! My name's {n}.", "This is {n} speaking.",
    )), polite=False).format(n=person)  # fmt: skip
    return Turn("small_talk", user, f"Nice to meet you, {person}!", "The user gives a name.")


def _unserved(rng: random.Random) -> Turn:
    """What a tool would be needed for, and none was given."""
    while True:
        tool = rng.choice(CATALOG)
        if tool.name != "calculate":
            return Turn("small_talk", tool.request(rng)[0], CANNOT, "I cannot do this.")


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
    return rng.choices(kinds, (46, 7, 6, 6, 3, 6, 2, 12, 13, 3, 7))[0](rng)


def sample_plain(rng: random.Random) -> Turn:
    """One small-talk turn that asks for nothing that a tool could do."""
    while (turn := sample(rng)).reply == CANNOT:
        pass
    return turn
