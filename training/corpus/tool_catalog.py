"""Tools with their JSON schemas and requests that call them: handwritten ones and random ones.

Random tools (names, parameters, types and descriptions drawn anew) make the model read the schema
instead of remembering a catalogue.
"""

# ruff: noqa: E501, SIM905  (tables of words and phrasings read best so)

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import tool_requests, words
from .conversation import phrase
from .grammar import expand

Value = Callable[[random.Random], Any]
_FIELD = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Parameter:
    """One argument: its JSON type, and how values are drawn."""

    name: str
    type: str
    value: Value
    description: str = ""
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tool:
    """A function the model may call. `requests` are templates over parameter names."""

    name: str
    description: str
    parameters: tuple[Parameter, ...]
    requests: tuple[str, ...]

    def schema(self, rng: random.Random) -> dict[str, Any]:
        """The OpenAI tool object; descriptions of parameters come and go."""
        described = rng.random() < 0.4
        properties: dict[str, Any] = {}
        for parameter in self.parameters:
            entry: dict[str, Any] = {"type": parameter.type}
            if described and parameter.description:
                entry["description"] = parameter.description
            if parameter.choices:
                entry["enum"] = list(parameter.choices)
            if parameter.type == "array":
                entry["items"] = {"type": "string"}
            properties[parameter.name] = entry
        required = [
            p.name for p in self.parameters if any("{" + p.name + "}" in r for r in self.requests[:1])
        ]
        schema = {"type": "object", "properties": properties, "required": required}
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": schema},
        }

    def request(self, rng: random.Random) -> tuple[str, dict[str, Any]]:
        """A user's request and the arguments it states, in the schema's order."""
        template = rng.choice(self.requests)
        names = {p.name for p in self.parameters}
        wider = [r for r in tool_requests.REQUESTS.get(self.name, ()) if names.issuperset(_FIELD.findall(r))]
        if wider and rng.random() < 0.6:
            template = rng.choice(wider)
        template = expand(rng, template).strip()
        arguments = {p.name: p.value(rng) for p in self.parameters if "{" + p.name + "}" in template}
        shown = {name: show(rng, value) for name, value in arguments.items()}
        return trail(rng, phrase(rng, template)).format(**shown), arguments


def show(rng: random.Random, value: Any) -> str:
    """How a user writes a value."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return ", ".join(value[:-1]) + rng.choice((" and ", ", ")) + value[-1] if len(value) > 1 else value[0]
    return str(value)


_TRAILS = ("right now", "please", "today", "for me", "now", "quickly", "if you can", "at once", "thanks")


def trail(rng: random.Random, template: str) -> str:
    """The template with words after the last argument, now and then."""
    if rng.random() > 0.22:
        return template
    mark = template[-1] if template[-1] in ".?!" else ""
    return f"{template.rstrip('.?!')} {rng.choice(_TRAILS)}{mark}"


def any_text(rng: random.Random) -> str:
    """One to five words."""
    return " ".join(words.any_word(rng) for _ in range(rng.randint(1, 5)))


def _word(rng: random.Random) -> str:
    return words.any_word(rng)


def _tags(rng: random.Random) -> list[str]:
    return [words.any_word(rng).lower() for _ in range(rng.randint(1, 4))]


def _int(low: int, high: int) -> Value:
    return lambda rng: rng.randint(low, high)


def _number(rng: random.Random) -> float:
    return round(rng.randint(1, 999) + rng.randint(1, 9) / 10, 1)


def _clock(rng: random.Random) -> str:
    return f"{rng.randint(0, 23)}:{rng.choice('012345')}{rng.choice('05')}"


def _string(name: str, value: Value, description: str = "") -> Parameter:
    return Parameter(name, "string", value, description)


def _enum(name: str, *choices: str) -> Parameter:
    return Parameter(name, "string", lambda rng: rng.choice(choices), choices=choices)


_CITY = _string("city", words.place, "Name of the city")
CATALOG = (
    Tool("get_weather", "Get the current weather in a city.", (_CITY,), (
        "What is the weather in {city}?", "How is the weather in {city}?", "What's the weather like in {city}?", "Weather in {city}",
        "Is it raining in {city}?", "Is it cold in {city}?", "Tell me the weather for {city}.", "Do I need an umbrella in {city}?",
        "Check the weather in {city}.", "How warm is it in {city}?", "Give me the weather report of {city}.",
    )),
    Tool("get_weather", "Get the weather forecast.", (_string("location", words.place, "The city"), _enum("unit", "celsius", "fahrenheit")), (
        "What is the weather in {location}?", "How warm is it in {location} in {unit}?", "What is the temperature in {location} in {unit}?",
        "Weather in {location}, {unit}.", "Tell me the temperature in {location}.", "Give me the weather for {location} in {unit}.",
        "How hot is {location}?",
    )),
    Tool("get_time", "Get the current time in a city.", (_CITY,), (
        "What time is it in {city}?", "What is the time in {city}?", "Tell me the time in {city}.", "Current time in {city}?", "How late is it in {city}?",
    )),
    Tool("set_timer", "Start a timer.", (Parameter("minutes", "integer", _int(1, 120), "Length in minutes"),), (
        "Set a timer for {minutes} minutes.", "Start a {minutes} minute timer.", "Timer: {minutes} minutes", "Wake me in {minutes} minutes.",
        "I need a timer of {minutes} minutes.", "Count down {minutes} minutes.",
    )),
    Tool("send_message", "Send a text message to a person.", (_string("to", words.name), _string("text", any_text)), (
        "Send a message to {to}: {text}", "Text {to}: {text}", "Tell {to} this: {text}", "Send {to} the message \"{text}\".",
        "Message {to} saying \"{text}\".",
    )),
    Tool("send_email", "Send an email.", (
        _string("to", lambda r: f"{words.any_word(r).lower()}@{words.english(r)}.com"), _string("subject", _word), _string("body", any_text)), (
        "Send an email to {to} with subject {subject} and body \"{body}\".", "Email {to}, subject {subject}: {body}",
        "Write to {to}. Subject: {subject}. Text: {body}",
    )),
    Tool("search", "Search the web.", (_string("query", any_text, "What to search for"),), (
        "Search for {query}", "Search the web for {query}", "Look up {query}", "Find pages about {query}", "Google {query}", "Web search: {query}",
    )),
    Tool("play_music", "Play a song.", (_string("song", any_text),), (
        "Play {song}", "Play the song {song}", "I want to hear {song}", "Put on {song}", "Play \"{song}\".", "Can you play \"{song}\"?",
    )),
    Tool("set_light", "Turn a light on or off.", (_string("room", lambda r: r.choice(words.PLACES)), Parameter("on", "boolean", lambda r: r.random() < 0.5)), (
        "Turn {on} the light in the {room}.", "Turn the {room} light {on}.", "Switch the lights in the {room} {on}.", "{room} light {on}",
        "Switch {on} the {room} lamp.",
    )),
    Tool("set_temperature", "Set the heating of a room.", (_string("room", lambda r: r.choice(words.PLACES)), Parameter("degrees", "number", lambda r: r.randint(10, 30))), (
        "Set the {room} to {degrees} degrees.", "Heat the {room} to {degrees} degrees.", "Make it {degrees} degrees in the {room}.",
        "Change the temperature in the {room} to {degrees}.",
    )),
    Tool("book_flight", "Book a flight.", (_string("origin", words.place), _string("destination", words.place), _string("date", lambda r: r.choice(words.DAYS))), (
        "Book a flight from {origin} to {destination} on {date}.", "I want to fly from {origin} to {destination} on {date}.",
        "Get me a ticket from {origin} to {destination} for {date}.", "On {date} I fly to {destination} from {origin}. Book it.",
    )),
    Tool("book_hotel", "Book a hotel room.", (_CITY, Parameter("nights", "integer", _int(1, 14)), Parameter("breakfast", "boolean", lambda r: r.random() < 0.5)), (
        "Book a hotel in {city} for {nights} nights.", "I need a room in {city} for {nights} nights.", "Hotel in {city}, {nights} nights.",
        "Reserve {nights} nights in {city}.",
    )),
    Tool("add_event", "Add an event to the calendar.", (_string("title", _word), _string("date", lambda r: r.choice((r.choice(words.DAYS), f"{r.choice(words.MONTHS)} {r.randint(1, 28)}"))), _string("time", _clock)), (
        "Add {title} to my calendar on {date}.", "Put {title} on my calendar for {date} at {time}.", "Schedule {title} on {date} at {time}.",
        "New event: {title}, {date}, {time}", "Plan {title} for {date}.",
    )),
    Tool("calculate", "Evaluate an arithmetic expression.", (_string("expression", lambda r: f"{r.randint(2, 9999)} {r.choice('+-*/')} {r.randint(2, 999)}"),), (
        "Calculate {expression}", "Use the tool to work out {expression}", "What is {expression}?", "Compute {expression}.", "Evaluate {expression}.",
    )),
    Tool("convert", "Convert an amount between units.", (Parameter("amount", "number", lambda r: r.choice((r.randint(1, 5000), _number(r)))), _string("from_unit", lambda r: r.choice(("miles", "feet", "pounds", "dollars", "euros", "inches"))), _string("to_unit", lambda r: r.choice(("kilometers", "meters", "grams", "yen", "francs", "liters")))), (
        "Convert {amount} {from_unit} to {to_unit}.", "How much is {amount} {from_unit} in {to_unit}?", "Change {amount} {from_unit} into {to_unit}.",
        "How many {to_unit} are {amount} {from_unit}?",
    )),
    Tool("get_stock_price", "Get the price of a stock.", (_string("symbol", lambda r: "".join(r.choice("ABCDEFGHKLMNPRSTVXYZ") for _ in range(r.randint(3, 4)))),), (
        "What is the stock price of {symbol}?", "Price of {symbol}?", "How is {symbol} doing?", "Get the {symbol} stock price.", "What does {symbol} trade at?",
    )),
    Tool("translate", "Translate text into another language.", (_string("text", any_text), _enum("language", "French", "German", "Spanish", "Italian", "Dutch")), (
        "Translate \"{text}\" into {language}.", "How do you say \"{text}\" in {language}?", "Translate to {language}: {text}",
    )),
    Tool("create_note", "Save a note.", (_string("text", any_text), Parameter("tags", "array", _tags)), (
        "Save the note \"{text}\".", "Note \"{text}\" with tags {tags}.", "Make a note \"{text}\" tagged {tags}.", "Write down \"{text}\".",
    )),
    Tool("buy", "Add items to the shopping list.", (Parameter("items", "array", _tags),), (
        "Buy {items}.", "Add {items} to the shopping list.", "Put {items} on my list.", "I need {items} from the shop.",
    )),
    Tool("delete_file", "Delete a file.", (_string("path", lambda r: f"{words.any_word(r).lower()}.{r.choice(('txt', 'pdf', 'png', 'csv'))}"),), (
        "Delete {path}", "Delete the file {path}", "Remove {path} from my disk.", "Please erase {path}.",
    )),
    Tool("get_order", "Look up an order.", (_string("order_id", words.code),), (
        "Where is my order {order_id}?", "Look up order {order_id}.", "What is the status of order {order_id}?", "Track order {order_id}.", "Find my order {order_id}.",
    )),
    Tool("get_user", "Look up a user by id.", (Parameter("id", "integer", _int(1, 99999)),), (
        "Who is user {id}?", "Look up user {id}.", "Get the user with id {id}.", "Show me user {id}.",
    )),
    Tool("call_phone", "Call a person.", (_string("name", words.name),), ("Call {name}.", "Phone {name}.", "Give {name} a call.", "Ring {name} up.", "I want to talk to {name} on the phone.")),
    Tool("roll_dice", "Roll dice.", (Parameter("count", "integer", _int(1, 9)), Parameter("sides", "integer", lambda r: r.choice((4, 6, 8, 10, 12, 20)))), (
        "Roll {count} dice with {sides} sides.", "Throw {count} dice with {sides} sides.", "Roll {count} dice, {sides} sides each.",
    )),
    Tool("rent_car", "Rent a car.", (_CITY, Parameter("days", "integer", _int(1, 30))), (
        "[Rent|Book|Get] [me |]a car in {city} for {days} days.", "I need a car in {city} for {days} days.", "[Car|Rental car] in {city}, {days} days", "For {days} days I [need|want] a [car|rental car] in {city}.",
    )),
    Tool("restart_server", "Restart a server.", (_string("host", _word),), (
        "[Restart|Reboot] [the server |server |]{host}[| now].", "[The server |Server |]{host} [is down|hangs|does not answer|is stuck][, please restart it|. Restart it|, reboot it].", "[Can|Could] you [restart|reboot] {host}?", "{host} [needs|wants] a [restart|reboot].",
    )),
    Tool("create_task", "Add a task to a list.", (_string("title", any_text), _enum("priority", "low", "normal", "high", "urgent")), (
        "[Create|Add|Open|Make] a task \"{title}\" with {priority} priority.", "[New task|Task]: \"{title}\", priority {priority}", "[Add|Create] the {priority} priority task \"{title}\".", "[Note|Add] a task called \"{title}\", it is {priority}.", "[Open|Add] a {priority} task titled \"{title}\".",
    )),
    Tool("resize_cluster", "Set the number of nodes of a cluster.", (_string("cluster", _word), Parameter("nodes", "integer", _int(1, 60))), (
        "[Resize|Scale|Set|Change] [the cluster |cluster |]{cluster} to {nodes} nodes[| now].", "[Give|Run] [the cluster |]{cluster} [with |]{nodes} nodes.", "[I want|We need] {nodes} nodes [in|for] [the cluster |]{cluster}.", "{cluster} [needs|should have] {nodes} nodes.", "[Cluster |]{cluster}: {nodes} nodes[, please|]",
    )),
    Tool("order_food", "Order food from a restaurant.", (_string("restaurant", words.name), _string("dish", lambda r: r.choice(words.FOODS)), Parameter("count", "integer", _int(1, 9))), (
        "[Order|Get|Buy] {count} {dish} [at|from] {restaurant}.", "[From|At] {restaurant} [I want|order|get me] {count} {dish}.", "{count} {dish} from {restaurant}[, please|].", "[We are hungry|I am hungry]: {count} {dish} from {restaurant}.",
    )),
    Tool("book_seats", "Book seats for a show.", (_string("show", _word), Parameter("seats", "integer", _int(1, 12)), _string("day", lambda r: r.choice(words.DAYS))), (
        "[Book|Reserve|Get] {seats} seats for {show} on {day}.", "[We are|There are] {seats} of us for {show} on {day}, [book|reserve] seats.", "{seats} seats for {show}, {day}", "[I need|We want|I'd like] {seats} [seats|tickets] for {show} on {day}.", "[Book|Reserve] {seats} seats for {show}.",
    )),
    Tool("read_file", "Read a file.", (_string("path", lambda r: f"{words.any_word(r).lower()}.{r.choice(('txt', 'md', 'py', 'csv'))}"),), (
        "[Read|Open|Show|Print|Display] [me |][the file |]{path}[.|]", "[What is|What's|What stands|What does it say] in [the file |]{path}?", "[Can|Could] you [open|read|show me] {path}?", "[I need|Let me see] [the content of |]{path}[.|]", "Which lines are in {path}?",
    )),
    Tool("list_users", "List the members of a group.", (_string("group", _word),), (
        "[Who|Which users|Which people] [is|are] in the group {group}?", "[List|Show|Give me] [all |the |]members of [the group |]{group}.", "[Members|Users] of {group}[?|, please]", "Who belongs to {group}?",
    )),
    Tool("pay", "Send money to a person.", (_string("to", words.name), Parameter("amount", "integer", _int(1, 900)), _enum("currency", "euros", "dollars", "pounds")), (
        "[Pay|Send|Give|Transfer] {amount} {currency} to {to}.", "[Pay|Send|Give] {to} {amount} {currency}.", "[I owe|We owe] {to} {amount} {currency}[, pay it|, send it].", "{to} [gets|should get] {amount} {currency} from me.",
    )),
    Tool("get_distance", "Get the distance between two cities.", (_string("start", words.place), _string("end", words.place)), (
        "How far is it from {start} to {end}?", "[What is|What's] the distance [between|from] {start} [and|to] {end}?", "[Distance|Way] from {start} to {end}[?|, please]", "How [many kilometers|long] is it from {start} to {end}?",
    )),
)  # fmt: skip

_VERBS = (
    "get find list open close move start stop create update check fetch show cancel read load count sort "
    "lock order"
).split()
_TYPES = ("string", "string", "string", "integer", "integer", "number", "boolean", "enum", "array")


def _random_parameter(rng: random.Random, taken: set[str]) -> Parameter:
    while True:
        name = (
            words.any_word(rng).lower()
            if rng.random() < 0.8
            else f"{words.english(rng)}_{words.english(rng)}"
        )
        if name not in taken:
            taken.add(name)
            break
    kind = rng.choice(_TYPES)
    description = f"The {name.replace('_', ' ')}"
    if kind == "enum":
        choices = tuple(dict.fromkeys(words.any_word(rng).lower() for _ in range(rng.randint(2, 4))))
        return Parameter(name, "string", lambda r: r.choice(choices), description, choices)
    values: dict[str, Value] = {
        "string": rng.choice((_word, words.code, words.name, words.place, any_text)),
        "integer": _int(0, rng.choice((20, 200, 9999))),
        "number": _number,
        "boolean": lambda r: r.random() < 0.5,
        "array": _tags,
    }
    return Parameter(name, kind, values[kind], description)


def random_tool(rng: random.Random) -> Tool:
    """A tool nobody has seen: random name, parameters and types; requests that name its parts."""
    verb = rng.choice(_VERBS) if rng.random() < 0.6 else words.any_word(rng).lower()
    noun = words.any_word(rng).lower()
    taken: set[str] = set()
    parameters = tuple(
        _random_parameter(rng, taken) for _ in range(rng.choices((1, 2, 3, 4), (4, 4, 2, 1))[0])
    )
    shown = parameters if rng.random() < 0.8 or len(parameters) == 1 else parameters[:-1]
    spoken = [p.name.replace("_", " ") for p in shown]
    fields = ["{" + p.name + "}" for p in shown]
    joined = " and ".join(f"{s} {f}" for s, f in zip(spoken, fields, strict=True))
    listed = ", ".join(f"{s}: {f}" for s, f in zip(spoken, fields, strict=True))
    equals = ", ".join(f"{p.name}={f}" for p, f in zip(shown, fields, strict=True))
    is_set = ", ".join(f"{s} is {f}" for s, f in zip(spoken, fields, strict=True))
    name = rng.choice((f"{verb}_{noun}", f"{verb}_{noun}", f"{verb}{noun.capitalize()}", f"{noun}_{verb}"))
    requests = [
        f"{verb.capitalize()} the {noun} with {joined}.", f"{verb.capitalize()} {noun} with {joined}.", f"Please {verb} a {noun}, {listed}.",
        f"Can you {verb} the {noun}? {listed}", f"Call {name} with {equals}.", f"Use {name}: {listed}", f"{verb.capitalize()} the {noun}. The {is_set}.",
        f"I want to {verb} the {noun} with {joined}.", f"Use the tool {name} with {joined}.",
    ]  # fmt: skip
    if len(shown) == 1:
        requests += [
            f"{verb.capitalize()} the {noun} {fields[0]}.",
            f"Could you {verb} the {noun} for {fields[0]}?",
            f"{verb} {noun} {fields[0]}",
        ]
    elif len(shown) == 2:
        requests += [
            f"{verb.capitalize()} the {noun} for {fields[0]} with {spoken[1]} {fields[1]}.",
            f"{verb.capitalize()} the {noun} {fields[0]}, {spoken[1]} {fields[1]}.",
            f"[Please |Can you |]{verb} [a|the] {noun} [at|for|in|from|of|called|named|] {fields[0]} [for|with|to|at|and|of] {fields[1]} {spoken[1]}.",
            f"{verb.capitalize()} [the|a|my] {noun} {fields[0]} [to|with|at|for|on] {fields[1]} [{spoken[1]}|].",
            f"[I need|I want|I'd like|We need] [a|the] {noun} [at|for|in|from|called] {fields[0]} [for|with|and] {fields[1]} {spoken[1]}[|. Please {verb} it].",
            f"{fields[0]} [needs|wants|should have] {fields[1]} {spoken[1]}, {verb} the {noun}.",
            f'[{verb.capitalize()}|Please {verb}] [a|the] {noun} {spoken[0]} "{fields[0]}" [with|and] {fields[1]} {spoken[1]}.',
        ]
    if len(shown) == 1:
        requests += [
            f"The {noun} {fields[0]} [is waiting|is there|has a problem][, please {verb} it|. {verb.capitalize()} it|, can you {verb} it?]",
            f"[Which|What] {noun} [is|are] [in|at|of|for] [the {spoken[0]} |]{fields[0]}?",
            f'[Please |Can you |Could you |I want you to ]{verb} [the|a|my] {noun} [of|in|for|called|] ["{fields[0]}"|{fields[0]}][.|?|]',
            f"[The {spoken[0]} is|My {spoken[0]} is|{spoken[0]}:] {fields[0]}. [{verb.capitalize()} [the|a] {noun}|Now {verb} the {noun}][.|, please.]",
        ]
    description = rng.choice(
        (
            f"{verb.capitalize()} the {noun}.",
            f"{verb.capitalize()} a {noun}.",
            f"Tool to {verb} the {noun}.",
            f"{verb.capitalize()} a {noun}",
            f"{verb.capitalize()} the {noun} by {spoken[0]}.",
        )
    )
    return Tool(name, description, parameters, tuple(requests))
