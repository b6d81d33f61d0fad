"""Natural prompts and the rules by which a reply to one is accepted.

A list is a JSON file of cases: `id`, `messages` (a string is a user's message that the model answers; an object is
given as it is: an assistant's call, a tool's result), optional `system`, `tools` (names of `TOOLS`), `thinking`,
`begins` (text that a grammar would force at the start of the reply), and `accept`, whose rules must all hold.
Rules look at the reply alone, never at the model, and an empty reply fails each list's every case.
"""

import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LISTS = {
    "natural": HERE / "natural_prompts.json",
    "newcomer": HERE / "newcomer_prompts.json",
    "reported": HERE / "reported_prompts.json",
}
"""By name: the first list, the one of 100 that was written before the second training, and what users reported."""

Case = dict[str, Any]

_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


def _tool(name: str, description: str, /, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = {
    tool["function"]["name"]: tool
    for tool in (
        _tool("get_weather", "Get the weather in a city", city="string"),
        _tool("reserve_table", "Reserve a table at a restaurant", restaurant="string", people="integer"),
        _tool("scale_deployment", "Change the number of replicas", name="string", replicas="integer"),
        _tool("create_ticket", "Open a support ticket", title="string", priority="string"),
        _tool("restart_service", "Restart a service", service="string"),
        _tool("list_files", "List the files of a folder", folder="string"),
        _tool("convert_currency", "Convert money", amount="number", source="string", target="string"),
        _tool("book_taxi", "Book a taxi", pickup="string", passengers="integer"),
    )
}


def cases(name: str) -> list[Case]:
    """The cases of a list of `LISTS`."""
    return json.loads(LISTS[name].read_text())


def user_texts(case: Case) -> list[str]:
    """What the user says in a case, in order."""
    return [message for message in case["messages"] if isinstance(message, str)]


def _object(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def answer(reply: str) -> str:
    """The reply without its think block."""
    return reply.rpartition("</think>")[2].strip()


def accepts(rules: dict[str, Any], reply: str) -> bool:
    """Whether all rules hold for a reply; texts are compared without regard to case.

    `all`, `any`, `none`: substrings. `regex`: found in the reply (case counts). `most_chars`: length. `json`: the
    reply is one of these values. `call`: it is one call, one of these.

    Raises ValueError for a rule that is not known.
    """
    text = answer(reply)
    low = text.lower()
    for rule, wanted in rules.items():
        if rule == "all":
            good = all(part.lower() in low for part in wanted)
        elif rule == "any":
            good = any(part.lower() in low for part in wanted)
        elif rule == "none":
            good = not any(part.lower() in low for part in wanted)
        elif rule == "regex":
            good = re.search(wanted, text) is not None
        elif rule == "most_chars":
            good = len(text) <= wanted
        elif rule == "json":
            good = _object(text) in wanted
        elif rule == "call":
            calls = _CALL.findall(text)
            good = len(calls) == 1 and _object(calls[0]) in wanted
        else:
            raise ValueError(
                f"{rule!r} is not a rule; rules are all, any, none, regex, most_chars, json, call"
            )
        if not good:
            return False
    return True
