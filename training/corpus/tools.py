"""Conversations with tools: a call, its result, the answer; none fits; none is needed."""

# ruff: noqa: E501  (tables of phrasings read best unwrapped)

import json
import random
import re
from typing import Any

from . import copying, facts, plausible_tools, small_talk, words
from .conversation import Conversation, Message, answer, system_prompt
from .grammar import pick
from .tool_catalog import CATALOG, Tool, random_tool, trail

_ELSEWHERE = (
    "Book me a massage in {p}.", "Clean the {l}.", "Post this on my blog.",
    "Take a photo of the {w}.", "Print my {w}.", "Buy two {a}s for {n}.", "Fix my {t}.", "Cook {f} for me.",
    "Park my car in {p}.", "Call a taxi to {p}.", "Open the {l} door.", "Feed my {a}.", "Download the {w} file.", "Scan the {t}.",
    "Upload {w}.", "Invite {n} to the party.", "Walk my {a} at noon.", "Ship the {t} to {p}.",
    "Record my voice.", "Block {n}.",
)  # fmt: skip


FORGOTTEN_TOOLS_SHARE = 0.12
"""Of the requests with a result: clients that send the result back without the list of tools."""


def _call_message(calls: list[tuple[str, dict[str, Any]]], thinking: bool) -> Message:
    message: Message = {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls
    ]}  # fmt: skip
    if thinking:
        message["reasoning_content"] = f"I call {calls[0][0]}."
    return message


def _say(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def _phrase(rng: random.Random) -> str:
    """A result in a few words, as tools that answer in plain text give it."""
    pattern = "[{d} degrees [and|but] {s}|{d} C, {s}|{s}, {d} degrees|{w} {v}|{n} {w}s|{s} and {t}|{n} {w}s [found|left|sold]|{p}, {n}]"
    return pick(rng, (pattern,)).format(
        d=rng.randint(-9, 39), s=rng.choice(("sunny", "cloudy", "rainy", "clear", "foggy", "windy")), t=rng.choice(("dry", "mild", "warm", "cold", "wet")),
        w=words.english(rng), v=words.english(rng), n=rng.randint(2, 900), p=words.place(rng),
    )  # fmt: skip


def _result(rng: random.Random) -> tuple[str, str]:
    """A tool's result and what the assistant says about it."""
    chance = rng.random()
    if chance < 0.12:
        result: Any = {"status": rng.choice(("ok", "done", "success"))}
        return json.dumps(result), "Done."
    if chance < 0.20:
        text = rng.choice(
            ("not found", "timeout", "access denied", "service is down", f"unknown {words.english(rng)}")
        )
        return json.dumps({"error": text}), f"The tool failed: {text}."
    if chance < 0.34:
        plain = rng.choice((words.value, words.value, words.place, words.name, _phrase, _phrase))(rng)
        return plain, f"The result is {plain}."
    if chance < 0.40:
        listed = [str(words.any_word(rng)) for _ in range(rng.randint(1, 4))]
        if rng.random() < 0.4:
            listed = [f"{each.lower()}.{rng.choice(('txt', 'md', 'py', 'csv'))}" for each in listed]
        said = ", ".join(listed[:-1]) + " and " + listed[-1] if len(listed) > 1 else listed[0]
        shown = (
            json.dumps(listed, ensure_ascii=False)
            if rng.random() < 0.6
            else rng.choice(("\n", ", ")).join(listed)
        )
        return shown, f"The result is {said}."
    result = {}
    for _ in range(rng.choices((1, 2, 3), (5, 4, 1))[0]):
        if rng.random() < 0.4:
            key, value = rng.choice((
                ("temperature", rng.randint(-20, 40)), ("sky", rng.choice(("sunny", "cloudy", "rainy", "clear"))), ("time", f"{rng.randint(0, 23)}:{rng.randint(10, 59)}"),
                ("price", rng.randint(1, 9000) / 10), ("name", words.name(rng)), ("id", rng.randint(1, 99999)), ("city", words.place(rng)),
                ("result", rng.randint(0, 9999)), ("condition", rng.choice(("rain", "snow", "sun", "fog"))), ("wind", rng.randint(0, 90)),
            ))  # fmt: skip
        else:
            key = (
                words.any_word(rng).lower()
                if rng.random() < 0.8
                else f"{words.english(rng)}_{words.english(rng)}"
            )
            value = rng.choice(
                (
                    rng.randint(0, 9999),
                    words.any_word(rng),
                    words.code(rng),
                    words.name(rng),
                    rng.random() < 0.5,
                )
            )
        result[key] = value
    clauses = [f"the {key.replace('_', ' ')} is {_say(value)}" for key, value in result.items()]
    said = " and ".join(clauses)
    if rng.random() < 0.1:
        result = {rng.choice(("result", "data", "current", "value", "output")): result}
    return json.dumps(result, ensure_ascii=False), said[0].upper() + said[1:] + "."


_ALIKE = ({"buy", "order_food"}, {"create_note", "create_task", "add_event"}, {"send_message", "send_email"}, {"get_user", "list_users"}, {"search", "read_file"})  # fmt: skip
"""Tools of the catalogue that may serve each other's requests."""


def _with_alike(names: set[str]) -> set[str]:
    """The names, and those of tools that may serve the same requests."""
    return names.union(*(group for group in _ALIKE if names & group))


RESERVED_TOOLS = frozenset(
    [
        "reserve_table",
        "scale_deployment",
        "create_ticket",
        "restart_service",
        "list_files",
        "convert_currency",
        "book_taxi",
    ]
)
"""Tools of the natural prompts: never drawn."""


def _draw(rng: random.Random) -> Tool:
    """A tool of any origin."""
    chance = rng.random()
    if chance < 0.38:
        return rng.choice(CATALOG)
    if chance < 0.68:
        return plausible_tools.draw(rng, RESERVED_TOOLS)
    return random_tool(rng)


def _toolbox(rng: random.Random) -> list[Tool]:
    chosen: list[Tool] = []
    for _ in range(rng.choices((1, 2, 3, 4), (30, 34, 24, 12))[0]):
        tool = _draw(rng)
        taken = _with_alike({other.name for other in chosen})
        if tool.name not in taken and all(tool.description != other.description for other in chosen):
            chosen.append(tool)
    return chosen


def _nouns(tool: Tool) -> list[str]:
    """What a tool is about, by its name; a tool about the same thing might serve its requests."""
    parts = re.findall(r"[A-Z]?[a-z]+", tool.name)
    return [part.lower() for part in parts[1:] if len(part) > 2]


def _unfit(rng: random.Random, toolbox: list[Tool]) -> str:
    """A request that none of these tools serves."""
    names = _with_alike({tool.name for tool in toolbox})
    described = " ".join(f"{tool.name} {tool.description}".lower() for tool in toolbox)
    if rng.random() < 0.4:
        template = trail(rng, rng.choice(_ELSEWHERE))
        return template.format(p=words.place(rng), w=words.any_word(rng).lower(), a=rng.choice(words.ANIMALS), n=words.name(rng), t=rng.choice(words.THINGS), f=rng.choice(words.FOODS), l=rng.choice(words.PLACES))  # fmt: skip
    while True:
        other = rng.choice(CATALOG) if rng.random() < 0.4 else _draw(rng)
        if other.name in names or other.name == "calculate":
            continue
        if any(noun in described for noun in _nouns(other)):
            continue
        user = other.request(rng)[0]
        if not any(name in user for name in names):
            return user


def kind_of(rng: random.Random) -> str:
    """What a tool conversation's exchange is about."""
    return rng.choices(("call", "result", "no_tool", "not_needed", "parallel"), (38, 12, 34, 9, 7))[0]


def sample(rng: random.Random, thinking: bool, dense: bool, kind: str | None = None) -> Conversation:
    """One conversation with tools; the last exchange is of `kind`, dense ones hold several exchanges."""
    toolbox = _toolbox(rng)
    messages: list[Message] = []
    system = system_prompt(rng)
    if system:
        messages.append({"role": "system", "content": system})
    keys: list[str] = []
    last = kind or kind_of(rng)
    kinds = [kind_of(rng) for _ in range(rng.randint(2, 7) if dense else rng.choice((0, 0, 0, 0, 1)))] + [
        last
    ]
    for number, each in enumerate(kinds):
        _exchange(rng, messages, keys, toolbox, each, thinking, is_last=number == len(kinds) - 1)
    family = {
        "call": "tool_call",
        "parallel": "tool_call",
        "result": "tool_result",
        "no_tool": "no_tool",
        "not_needed": "tool_unneeded",
    }[last]
    schemas = [tool.schema(rng) for tool in toolbox]
    if last == "result" and len(kinds) == 1 and rng.random() < FORGOTTEN_TOOLS_SHARE:
        schemas = []
    return Conversation(family, messages, keys, thinking, schemas, dense)


def _exchange(
    rng: random.Random,
    messages: list[Message],
    keys: list[str],
    toolbox: list[Tool],
    kind: str,
    thinking: bool,
    is_last: bool,
) -> None:
    """Append one exchange; a call that is not last is followed by its result and answer."""
    thought: Message = {"reasoning_content": "No tool fits."} if thinking else {}
    if kind == "no_tool":
        user = _unfit(rng, toolbox)
        keys.append("no_tool " + user)
        messages += [
            {"role": "user", "content": user},
            {"role": "assistant", "content": small_talk.NO_TOOL} | thought,
        ]
        return
    if kind == "not_needed":
        turn = rng.choice(
            (small_talk.sample_plain, small_talk.sample_plain, copying.echo, lambda r: facts.sample(r, 1))
        )(rng)
        if turn.system:
            turn = copying.echo(rng)
        keys.append(turn.key or turn.user)
        messages += [{"role": "user", "content": turn.user}, answer(turn, thinking)]
        return
    tool = rng.choice(toolbox)
    user, arguments = tool.request(rng)
    calls = [(tool.name, arguments)]
    if kind == "parallel":
        second, more = tool.request(rng)
        user, calls = (
            f"{user.rstrip('.?! ')} {rng.choice(('and also:', 'and then:', 'and'))} {second}",
            [*calls, (tool.name, more)],
        )
    keys.append(json.dumps(calls))
    messages += [{"role": "user", "content": user}, _call_message(calls, thinking)]
    if kind == "result" or not is_last:
        said: list[str] = []
        results: list[str] = []
        for _ in calls:
            result, text = _result(rng)
            said.append(text)
            results.append(result)
            messages.append({"role": "tool", "content": result})
        keys.append(" ".join((user, *results)))
        final: Message = {"role": "assistant", "content": " ".join(said)}
        messages.append(final | ({"reasoning_content": "The tool has answered."} if thinking else {}))
