"""The rules for replies to natural prompts, and the lists themselves."""

import random
from typing import Any

import pytest

import acceptance
from corpus import plausible_tools, tool_catalog, tools

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
WANTED_CALL = [{"name": "get_weather", "arguments": {"city": "Rome"}}]


@pytest.mark.parametrize(
    ("rules", "reply", "accepted"),
    [
        ({"all": ["Tom", "Rome"]}, "tom lives in rome.", True),
        ({"all": ["Tom", "Rome"]}, "Tom lives here.", False),
        ({"any": ["hello", "hi!"]}, "Hello there.", True),
        ({"any": ["hello", "hi!"]}, "Goodbye!", False),
        ({"any": ["green"], "none": ["red"]}, "It is green and red.", False),
        ({"regex": r"\b9\b"}, "3 + 6 = 9.", True),
        ({"regex": r"\b9\b"}, "It is 99.", False),
        ({"any": ["OK"], "most_chars": 4}, "OK.", True),
        ({"any": ["OK"], "most_chars": 4}, "OK, I will.", False),
        ({"json": [{"a": 1, "b": None}]}, '{"b": null, "a": 1}', True),
        ({"json": [{"a": 1}]}, '{"a": "1"}', False),
        ({"json": [{"a": 1}]}, '{"a": 1', False),
        ({"call": WANTED_CALL}, CALL, True),
        ({"call": WANTED_CALL}, CALL + "\n" + CALL, False),
        ({"call": WANTED_CALL}, "Rome", False),
        ({"none": ["tool"], "any": ["9"]}, "<think>\nNo tool fits.\n</think>\n\n9", True),
    ],
)
def test_rules_accept_what_they_say(rules: dict[str, Any], reply: str, accepted: bool) -> None:
    assert acceptance.accepts(rules, reply) is accepted


def test_an_unknown_rule_is_an_error_that_lists_the_rules() -> None:
    with pytest.raises(ValueError, match="'contains' is not a rule; rules are all, any"):
        acceptance.accepts({"contains": ["x"]}, "x")


@pytest.mark.parametrize(("name", "count"), [("natural", 44), ("newcomer", 100), ("reported", 14)])
def test_lists_are_complete_and_reject_silence(name: str, count: int) -> None:
    cases = acceptance.cases(name)
    assert len({case["id"] for case in cases}) == len(cases) == count
    for case in cases:
        assert acceptance.user_texts(case), case["id"]
        assert set(case.get("tools", ())) <= set(acceptance.TOOLS), case["id"]
        assert not acceptance.accepts(case["accept"], ""), case["id"]


def test_all_tools_of_the_lists_but_one_are_unknown_to_the_generator() -> None:
    taught = {tool.name for tool in tool_catalog.CATALOG}
    assert set(acceptance.TOOLS) & taught == {"get_weather"}
    assert set(acceptance.TOOLS) - taught == tools.RESERVED_TOOLS
    rng = random.Random("tools")
    drawn = {
        plausible_tools.draw(rng, tools.RESERVED_TOOLS).name.lower().replace("_", "") for _ in range(6000)
    }
    assert not drawn & {name.replace("_", "") for name in tools.RESERVED_TOOLS}
    assert "bookroom" in drawn


def test_requests_of_plausible_tools_state_every_argument() -> None:
    rng = random.Random("requests")
    for _ in range(300):
        tool = plausible_tools.draw(rng, frozenset())
        schema = tool.schema(rng)["function"]["parameters"]
        request, arguments = tool.request(rng)
        assert set(arguments) == set(schema["properties"]) == set(schema["required"])
        assert all(str(value) in request for value in arguments.values())
        assert not set(request) & set("[]{}|")
