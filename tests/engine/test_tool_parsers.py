"""Tool calls in the forms that families of models write, whole and in pieces."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Set
from random import Random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from argosy_engine.parsers.chat_parser import ChatParser
from argosy_engine.parsers.harmony_parser import HarmonyParser, OpenAIToolParser
from argosy_engine.parsers.parsed_output import Parsed, ParsedCall
from argosy_engine.parsers.parser_registry import REASONING_PARSERS, TOOL_PARSERS
from argosy_engine.parsers.scanners import MAX_HEAD_CHARS
from argosy_engine.structured.structural_tag import tool_call_tag
from cpu_times import least_ratio
from parsed_parts import cut, however_cut, joined

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "book",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "nights": {"type": "integer"},
                    "price": {"type": "number"},
                    "pets": {"type": "boolean"},
                    "tags": {"type": "array"},
                    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
TERSE_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "book",
            "parameters": {
                "type": "object",
                "properties": {"nights": {"type": "integer"}, "kind": {"enum": ["inn", "tent"]}},
                "required": ["kind"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
"""Functions whose arguments have an end in a random walk through their grammar."""
REASONING = {"mistral": "mistral", "openai": "openai_gptoss"}
REASONING |= {name: name for name in ("glm45", "gemma4", "seed_oss", "ernie45", "solar_open", "granite")}
REASONING |= {name: name for name in ("cohere_command3", "cohere_command4")}
"""Reasoning parsers of the families that have their own marks; others use `<think>`."""


def new_parser(
    family: str, *, is_reasoning: bool = False, with_tools: bool = True
) -> ChatParser | HarmonyParser:
    tool_parser = TOOL_PARSERS[family](TOOLS)
    if isinstance(tool_parser, OpenAIToolParser):
        return HarmonyParser(tool_parser if with_tools else None)
    return ChatParser(
        reasoning_parser=REASONING_PARSERS[REASONING.get(family, "qwen3")](),
        tool_parser=tool_parser if with_tools else None,
        is_reasoning=is_reasoning,
        calls_end_reasoning=True,
    )


def parse(parser: ChatParser | HarmonyParser, parts: list[str]) -> Parsed:
    return joined([*(parser.feed(part) for part in parts), parser.feed("", True)])


def pieces(text: str, size: int) -> list[str]:
    return [text[begin : begin + size] for begin in range(0, len(text), size)]


def call(name: str, id_: str = "", **arguments: Any) -> ParsedCall:
    return ParsedCall(name, json.dumps(arguments, ensure_ascii=False), id_)


OSLO, NOW = call("book", city="Oslo", nights=2), call("now")
DEEPSEEK_SECTION = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_CALL, DEEPSEEK_SEP, DEEPSEEK_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
QWEN_OSLO = (
    "<tool_call>\n<function=book>\n<parameter=city>\nOslo\n</parameter>\n<parameter=nights>\n2\n</parameter>\n"
    "</function>\n</tool_call>"
)
GLM_OSLO = (
    "<tool_call>book\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>nights</arg_key>\n"
    "<arg_value>2</arg_value>\n</tool_call>"
)
HY_OSLO = GLM_OSLO.replace("book", "book<tool_sep>")
KIMI_OSLO = (
    "<|tool_call_begin|>functions.book:0<|tool_call_argument_begin|>"
    '{"city": "Oslo", "nights": 2}<|tool_call_end|>'
)
KIMI_NOW = "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
V3_OSLO = (
    f'{DEEPSEEK_CALL}function{DEEPSEEK_SEP}book\n```json\n{{"city": "Oslo", "nights": 2}}\n```{DEEPSEEK_END}'
)
V3_NOW = f"{DEEPSEEK_CALL}function{DEEPSEEK_SEP}now\n```json\n{{}}\n```{DEEPSEEK_END}"
V31_OSLO = f'{DEEPSEEK_CALL}book{DEEPSEEK_SEP}{{"city": "Oslo", "nights": 2}}{DEEPSEEK_END}'
V31_NOW = f"{DEEPSEEK_CALL}now{DEEPSEEK_SEP}{{}}{DEEPSEEK_END}"
HARMONY_OSLO = (
    "<|channel|>commentary to=functions.book <|constrain|>json"
    '<|message|>{"city": "Oslo", "nights": 2}<|call|>'
)
SEED_OSLO = QWEN_OSLO.replace("tool_call>", "seed:tool_call>")
MINIMAX_OSLO = (
    '<invoke name="book">\n<parameter name="city">Oslo</parameter>\n'
    '<parameter name="nights">2</parameter>\n</invoke>'
)
DSML_OSLO = (
    '<｜DSML｜invoke name="book">\n<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="nights" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>'
)
SOLAR_OSLO = (
    "<|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>book<|tool_call:args|>"
    '{"city": "Oslo", "nights": 2}<|tool_call:end|>'
)
SOLAR_NOW = "<|tool_call:begin|>f6<|tool_call:name|>now<|tool_call:args|>{}<|tool_call:end|>"
GEMMA_OSLO = '<|tool_call>call:book{city:<|"|>Oslo<|"|>,nights:2}<tool_call|>'
LONG = "x" * (MAX_HEAD_CHARS - 6)
"""Text after which a marker reaches beyond the characters in which a call must look like one."""
COHERE_OSLO = '{"tool_call_id": "0", "tool_name": "book", "parameters": {"city": "Oslo", "nights": 2}}'
COHERE_NOW = '{"tool_call_id": "1", "tool_name": "now", "parameters": {}}'
NEMOTRON_OSLO = '{"name": "book", "arguments": {"city": "Oslo", "nights": 2}}'
LFM_CALLS = "<|tool_call_start|>[book(city='Oslo', nights=2), now()]<|tool_call_end|>"
MISTRAL_OSLO = '[TOOL_CALLS]book[ARGS]{"city": "Oslo", "nights": 2}'

OUTPUTS: list[tuple[str, str, Parsed]] = [
    # family, what the model writes, what it means
    # A section without calls leaves nothing.
    ("kimi_k2", "Done.<|tool_calls_section_begin|><|tool_calls_section_end|>", Parsed("", "Done.")),
    ("deepseek_v31", "\n".join(DEEPSEEK_SECTION) + "Done.", Parsed("", "Done.")),
    ("llama4_pythonic", "Done. <|python_start|><|python_end|>", Parsed("", "Done. ")),
    # The object of the arguments may be quoted.
    ("hermes", '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>', Parsed("", "", (NOW,))),
    (
        "mistral",
        r'[TOOL_CALLS] [{"name": "book", "arguments": "{\"city\": \"Oslo\", \"nights\": 2}"}]',
        Parsed("", "", (OSLO,)),
    ),
    (
        "hermes",
        '<tool_call>{"name": "now", "arguments": "none"}</tool_call>',
        Parsed("", '<tool_call>{"name": "now", "arguments": "none"}</tool_call>'),
    ),
    # A mark that no call follows does not hide the call after the next one.
    (
        "mistral",
        '[TOOL_CALLS] [TOOL_CALLS] [{"name": "now", "arguments": {}}]',
        Parsed("", "[TOOL_CALLS] ", (NOW,)),
    ),
    ("mistral", f"[TOOL_CALLS]{MISTRAL_OSLO}", Parsed("", "[TOOL_CALLS]", (OSLO,))),
    # What follows calls stays apart from what stands before them.
    ("qwen3_coder", f"Booking.\n\n{QWEN_OSLO}\n\nDone.", Parsed("", "Booking.\n\nDone.", (OSLO,))),
    ("qwen3_coder", f"Booking.\n{QWEN_OSLO}\n{QWEN_OSLO}\n", Parsed("", "Booking.", (OSLO, OSLO))),
    ("qwen3_coder", f"{QWEN_OSLO}\n\nDone.", Parsed("", "Done.", (OSLO,))),
    (
        "kimi_k2",
        f"a\n<|tool_calls_section_begin|>{KIMI_OSLO}<|tool_calls_section_end|>\nb",
        Parsed("", "a\nb", (OSLO._replace(id="functions.book:0"),)),
    ),
    # The output's end cuts off an argument.
    (
        "glm45",
        "<tool_call>book\n<arg_key>city</arg_key>\n<arg_value>Os",
        Parsed("", "", (ParsedCall("book", '{"city": "Os'),)),
    ),
    (
        "glm45",
        "<tool_call>book\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>nights</arg_key>\n"
        "<arg_value>1</arg",
        Parsed("", "", (ParsedCall("book", '{"city": "Oslo", "nights": '),)),
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=book>\n<parameter=city>\nOs",
        Parsed("", "", (ParsedCall("book", '{"city": "Os'),)),
    ),
    (
        "glm45",
        "<tool_call>book\n<arg_key>city</arg_key>\n<arg_value>Oslo\n<tool_call>now</tool_call>",
        Parsed("", "<arg_key>city</arg_key>\n<arg_value>Oslo", (ParsedCall("book", ""), NOW)),
    ),
    ("hermes", "<tool_call>{}</tool_call>", Parsed("", "<tool_call>{}</tool_call>")),
    (
        "hermes",
        'Mark: <tool_call>.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        Parsed("", "Mark: <tool_call>.", (NOW,)),
    ),
    (
        "hermes",
        '<tool_call>{"name": "now"}\n<tool_call>{"name": "now"}</tool_call>',
        Parsed("", "", (NOW, NOW)),
    ),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}}', Parsed("", "", (NOW,))),
    (
        "hermes",
        "<tool_call>[1]</tool_call> <tool_call>\n</tool_call>",
        Parsed("", "<tool_call>[1]</tool_call> <tool_call>\n</tool_call>"),
    ),
    ("qwen3_coder", "Booking.\n\n" + QWEN_OSLO, Parsed("", "Booking.", (OSLO,))),
    (
        "qwen3_coder",
        f"<think>Hm.</think>\n\n{QWEN_OSLO}\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        Parsed("Hm.", "", (OSLO, NOW)),
    ),
    ("qwen3_coder", "<function=now>\n</function>", Parsed("", "", (NOW,))),
    (
        "qwen3_coder",
        "<tool_call>\n<function=book>\n<parameter=city>\na\n\nb <b>\n</parameter>\n<parameter=price>\n1.5\n"
        '</parameter>\n<parameter=pets>\nTrue\n</parameter>\n<parameter=tags>\n[1, "x"]\n</parameter>\n'
        "<parameter=note>\nnull\n</parameter>\n<parameter=other>\n7\n</parameter>\n</function>\n</tool_call>",
        Parsed(
            "",
            "",
            (call("book", city="a\n\nb <b>", price=1.5, pets=True, tags=[1, "x"], note=None, other="7"),),
        ),
    ),
    (
        "qwen3_coder",
        "<tool_call><function=book><parameter=city>Oslo<parameter=nights>2</parameter></function></tool_call>",
        Parsed("", "", (OSLO,)),
    ),
    ("qwen3_coder", "<tool_call>nope</tool_call>", Parsed("", "<tool_call>nope</tool_call>")),
    ("qwen3_coder", "<tool_call>\n<function=now>", Parsed("", "<tool_call>\n<function=now>")),
    ("glm45", f"\n<think>Hm.</think>\nBooking.\n{GLM_OSLO}\n", Parsed("Hm.", "Booking.", (OSLO,))),
    ("glm45", "<tool_call>now</tool_call><tool_call>now\n</tool_call>", Parsed("", "", (NOW, NOW))),
    (
        "hy_v3",
        f"<think>Hm.</think>\nBooking.\n<tool_calls>\n{HY_OSLO}\n<tool_call>now<tool_sep></tool_call>\n</tool_calls>",
        Parsed("Hm.", "Booking.", (OSLO, NOW)),
    ),
    ("hy_v3", "Write <tool_call>name<tool_sep>.", Parsed("", "Write <tool_call>name<tool_sep>.")),
    ("glm45", "<tool_call>no <b></tool_call>", Parsed("", "<tool_call>no <b></tool_call>")),
    ("glm45", "Write <tool_call>name</tool_call>.", Parsed("", "Write <tool_call>name</tool_call>.")),
    (
        "glm45",
        "Put <tool_call> before it, </tool_call> after.<tool_call>now</tool_call>",
        Parsed("", "Put <tool_call> before it, </tool_call> after.", (NOW,)),
    ),
    (
        "glm45",
        "<tool_call>v2.other-1<arg_key>a</arg_key><arg_value>b</arg_value></tool_call>",
        Parsed("", "", (call("v2.other-1", a="b"),)),
    ),
    (
        "glm45",
        "<tool_call>book<arg_key>city</arg_key></tool_call>",
        Parsed("", "<tool_call>book<arg_key>city</arg_key></tool_call>"),
    ),
    (
        "kimi_k2",
        f"Hm.<|tool_calls_section_begin|>{KIMI_OSLO}{KIMI_NOW}<|tool_calls_section_end|>",
        Parsed(
            "",
            "Hm.",
            (call("book", "functions.book:0", city="Oslo", nights=2), call("now", "functions.now:1")),
        ),
    ),
    (
        "kimi_k2",
        f"<think>I ask.<|tool_calls_section_begin|>{KIMI_NOW}<|tool_calls_section_end|>\n",
        Parsed("I ask.", "", (call("now", "functions.now:1"),)),
    ),
    (
        "kimi_k2",
        f"<think>I ask.<|tool_calls_section_begin|>{KIMI_NOW}<|tool_calls_section_end|></think>Done.",
        Parsed(f"I ask.<|tool_calls_section_begin|>{KIMI_NOW}<|tool_calls_section_end|>", "Done."),
    ),
    ("kimi_k2", "<|tool_calls_section_begin|>oops", Parsed("", "<|tool_calls_section_begin|>oops")),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>now<|tool_call_end|>",
        Parsed("", "<|tool_calls_section_begin|><|tool_call_begin|>now<|tool_call_end|>"),
    ),
    (
        "deepseek_v3",
        f"Hm.{DEEPSEEK_SECTION[0]}{V3_OSLO}\n{V3_NOW}{DEEPSEEK_SECTION[1]}",
        Parsed("", "Hm.", (OSLO, NOW)),
    ),
    (
        "deepseek_v31",
        f"{DEEPSEEK_SECTION[0]}{V31_OSLO}{V31_NOW}{DEEPSEEK_SECTION[1]}",
        Parsed("", "", (OSLO, NOW)),
    ),
    (
        "deepseek_v31",
        V31_OSLO.replace("}", ""),
        Parsed("", "", (ParsedCall("book", '{"city": "Oslo", "nights": 2'),)),
    ),
    ("mistral", "Hm.[TOOL_CALLS]now[ARGS]{}" + MISTRAL_OSLO, Parsed("", "Hm.", (NOW, OSLO))),
    ("mistral", '[TOOL_CALLS]book{"city": "Oslo", "nights": 2}', Parsed("", "", (OSLO,))),
    ("mistral", "[TOOL_CALLS]now[CALL_ID]a1B2c3D4e[ARGS]{}", Parsed("", "", (call("now", "a1B2c3D4e"),))),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "book", "arguments": {"city": "Oslo", "nights": 2}}, {"name": "now"}]',
        Parsed("", "", (OSLO, NOW)),
    ),
    ("mistral", "[THINK]Hm.[/THINK]Yes.", Parsed("Hm.", "Yes.")),
    ("mistral", "[TOOL_CALLS]other[ARGS] {}", Parsed("", "", (call("other"),))),
    ("mistral", '[TOOL_CALLS]The result {"a": 1}', Parsed("", '[TOOL_CALLS]The result {"a": 1}')),
    ("mistral", '[TOOL_CALLS]result {"a": 1}', Parsed("", '[TOOL_CALLS]result {"a": 1}')),
    ("mistral", "[TOOL_CALLS]Hm, [TOOL_CALLS]now[ARGS]{}", Parsed("", "[TOOL_CALLS]Hm, ", (NOW,))),
    ("mistral", f"[TOOL_CALLS]{LONG}[TOOL_CALLS]now[ARGS]{{}}", Parsed("", f"[TOOL_CALLS]{LONG}", (NOW,))),
    ("mistral", f"[THINK]A [TOOL_CALLS]{LONG}[/THINK]Yes.", Parsed(f"A [TOOL_CALLS]{LONG}", "Yes.")),
    ("mistral", "[TOOL_CALLS] or not", Parsed("", "[TOOL_CALLS] or not")),
    ("mistral", '[TOOL_CALLS]now[ARGS]{"a": ]}', Parsed("", "", (ParsedCall("now", '{"a": ]}'),))),
    ("mistral", "[TOOL_CALLS]now[ARGS]{oops}", Parsed("", "[TOOL_CALLS]now[ARGS]{oops}")),
    ("llama3_json", '{"name": "book", "parameters": {"city": "Oslo", "nights": 2}}', Parsed("", "", (OSLO,))),
    (
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "now", "parameters": {}}; {"name": "now", "arguments": {}}',
        Parsed("", "", (NOW, NOW)),
    ),
    (
        "llama3_json",
        'Let me see: {"name": "now", "parameters": {}} Done.',
        Parsed("", "Let me see:  Done.", (NOW,)),
    ),
    ("llama3_json", '{"answer": {"name": "now"}}', Parsed("", '{"answer": {"name": "now"}}')),
    ("llama3_json", '{"name": "Tom", "age": 3}', Parsed("", '{"name": "Tom", "age": 3}')),
    ("llama3_json", '<think>Key {"name"</think>Yes.', Parsed('Key {"name"', "Yes.")),
    ("llama3_json", '{\n{"name": "now", "parameters": {}}', Parsed("", "{", (NOW,))),
    (
        "llama3_json",
        '<|python_tag|><|python_tag|>{"name": "now", "parameters": {}}',
        Parsed("", "<|python_tag|>", (NOW,)),
    ),
    ("llama3_json", "<|python_tag|>print(1)", Parsed("", "<|python_tag|>print(1)")),
    (
        "llama3_json",
        '{"name": "book", "parameters": {"city": "}{", "nights": {"a": [1]}}}',
        Parsed("", "", (call("book", city="}{", nights={"a": [1]}),)),
    ),
    ("pythonic", "[book(city='Oslo', nights=2), now()]", Parsed("", "", (OSLO, NOW))),
    (
        "pythonic",
        "[book(city=\"it's\", tags=[1, -2.5, None, True, {'a': 'b\\n'}], pets=false, note=null)]",
        Parsed(
            "",
            "",
            (call("book", city="it's", tags=[1, -2.5, None, True, {"a": "b\n"}], pets=False, note=None),),
        ),
    ),
    ("pythonic", '[{"name": "now", "parameters": {}}]', Parsed("", "", (NOW,))),
    ("pythonic", "[1] says it's so.", Parsed("", "[1] says it's so.")),
    ("pythonic", "[book(city=open('x'))]", Parsed("", "[book(city=open('x'))]")),
    ("pythonic", "[book('Oslo')]", Parsed("", "[book('Oslo')]")),
    ("pythonic", "[book(city='Os", Parsed("", "[book(city='Os")),
    ("pythonic", "Sure: [now()]", Parsed("", "Sure: [now()]")),
    ("llama4_pythonic", "<|python_start|>[now()]<|python_end|>", Parsed("", "", (NOW,))),
    ("llama4_pythonic", "[now()]", Parsed("", "", (NOW,))),
    (
        "openai",
        f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{HARMONY_OSLO}",
        Parsed("Hm.", "", (OSLO,)),
    ),
    (
        "openai",
        "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>Two.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.now"
        "<|channel|>commentary json<|message|>{}",
        Parsed("One.\nTwo.", "I look.", (NOW,)),
    ),
    ("openai", "<|channel|>final<|message|>Yes.<|return|>", Parsed("", "Yes.")),
    ("openai", "Yes, plainly.", Parsed("", "Yes, plainly.")),
    (
        "openai",
        "<|channel|>commentary to=functions.now<|message|>{oops<|call|>",
        Parsed("", "<|channel|>commentary to=functions.now<|message|>{oops"),
    ),
    ("seed_oss", f"<seed:think>Hm.</seed:think>Booking.\n{SEED_OSLO}", Parsed("Hm.", "Booking.", (OSLO,))),
    (
        "seed_oss",
        f"{SEED_OSLO}\n<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
        Parsed("", "", (OSLO, NOW)),
    ),
    (
        "seed_oss",
        "<seed:tool_call>nope</seed:tool_call>",
        Parsed("", "<seed:tool_call>nope</seed:tool_call>"),
    ),
    (
        "minimax_m2",
        f"<think>Hm.</think>\n\n<minimax:tool_call>\n{MINIMAX_OSLO}\n"
        '<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        Parsed("Hm.", "", (OSLO, NOW)),
    ),
    (
        "minimax_m2",
        'I look.\n<minimax:tool_call>\n<invoke name="book">\n<parameter name="city">a\n\nb <b></parameter>\n'
        '<parameter name="tags">[1, "x"]</parameter>\n<parameter name="pets">true</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
        Parsed("", "I look.", (call("book", city="a\n\nb <b>", tags=[1, "x"], pets=True),)),
    ),
    ("minimax_m2", '<invoke name="now">Yes.</invoke>', Parsed("", '<invoke name="now">Yes.</invoke>')),
    ("minimax_m2", '<invoke name="now">', Parsed("", '<invoke name="now">')),
    (
        "deepseek_v32",
        f"<think>Hm.</think>\n\nI look.\n\n<｜DSML｜function_calls>\n{DSML_OSLO}\n"
        '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        Parsed("Hm.", "I look.", (OSLO, NOW)),
    ),
    (
        "deepseek_v32",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="book">\n'
        '<｜DSML｜parameter name="city" string="true">\n007 <b></｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="tags" string="false">[1, "x"]</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="note" string="false">oops</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="pets">true</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        Parsed("", "", (call("book", city="\n007 <b>", tags=[1, "x"], note="oops", pets=True),)),
    ),
    (
        "deepseek_v32",
        '<｜DSML｜invoke name="now">Yes.</｜DSML｜invoke>',
        Parsed("", '<｜DSML｜invoke name="now">Yes.</｜DSML｜invoke>'),
    ),
    ("deepseek_v32", "Write <｜DSML｜invoke.", Parsed("", "Write <｜DSML｜invoke.")),
    (
        "deepseek_v4",
        f"<｜DSML｜tool_calls>\n{DSML_OSLO}\n</｜DSML｜tool_calls>",
        Parsed("", "", (OSLO,)),
    ),
    (
        "solar_open",
        f"<|think|>Hm.<|end|><|begin|>assistant<|tool_calls|>{SOLAR_OSLO}{SOLAR_NOW}<|calls|>",
        Parsed("Hm.", "", (OSLO._replace(id="a1b2c3d4e5"), NOW._replace(id="f6"))),
    ),
    (
        "solar_open",
        "<|think|>Hm.<|end|><|begin|>assistant<|content|>\n\nYes, the assistant.\n<|end|>",
        Parsed("Hm.", "Yes, the assistant."),
    ),
    (
        "solar_open",
        f"<|content|>I look.\n<|end|><|begin|>assistant<|tool_calls|>{SOLAR_OSLO}",
        Parsed("", "I look.", (OSLO._replace(id="a1b2c3d4e5"),)),
    ),
    (
        "solar_open",
        "<|tool_calls|><|tool_call:begin|>f6<|tool_call:name|>a b<|tool_call:args|>{}<|tool_call:end|>",
        Parsed(
            "",
            "<|tool_calls|><|tool_call:begin|>f6<|tool_call:name|>a b<|tool_call:args|>{}<|tool_call:end|>",
        ),
    ),
    (
        "ernie45",
        "<think>\nHm.\n</think>\n\n<response>\nYes.\n\nNo.\n</response>\n",
        Parsed("Hm.", "Yes.\n\nNo."),
    ),
    (
        "ernie45",
        '<think>Hm.</think>\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n',
        Parsed("Hm.", "", (NOW,)),
    ),
    ("ernie45", "<think>Hm.</think>\nYes, a <respon", Parsed("Hm.", "Yes, a <respon")),
    ("gemma4", f"<|channel>thought\nHm.<channel|>{GEMMA_OSLO}", Parsed("Hm.", "", (OSLO,))),
    (
        "gemma4",
        'I look.<|tool_call>call:book{city:<|"|>a "b", {c}<|"|>,price:-1.5,pets:true,note:null,'
        'tags:[<|"|>x<|"|>,1,{a:<|"|>b<|"|>}]}<tool_call|><|tool_call>call:now{}<tool_call|>',
        Parsed(
            "",
            "I look.",
            (
                call("book", city='a "b", {c}', price=-1.5, pets=True, note=None, tags=["x", 1, {"a": "b"}]),
                NOW,
            ),
        ),
    ),
    (
        "gemma4",
        '<|tool_call>call:book{city:<|"|>a <tool_call|> b<|"|>}<tool_call|>',
        Parsed("", "", (call("book", city="a <tool_call|> b"),)),
    ),
    ("gemma4", "<|tool_call>call:now{a}<tool_call|>", Parsed("", "<|tool_call>call:now{a}<tool_call|>")),
    ("gemma4", "<|tool_call>now", Parsed("", "<|tool_call>now")),
    (
        "olmo3",
        "<think>Hm.</think>I look.<function_calls>\nbook(city='Oslo', nights=2)\nnow()\n</function_calls>",
        Parsed("Hm.", "I look.", (OSLO, NOW)),
    ),
    (
        "olmo3",
        "<function_calls>now(1)</function_calls>",
        Parsed("", "<function_calls>now(1)</function_calls>"),
    ),
    ("olmo3", "<function_calls>now(", Parsed("", "<function_calls>now(")),
    (
        "granite",
        '<|tool_call|>[{"name": "book", "arguments": {"city": "Oslo", "nights": 2}}, {"name": "now", "arguments": {}}]',
        Parsed("", "", (OSLO, NOW)),
    ),
    ("granite", '<tool_call>[{"name": "now", "arguments": {}}]', Parsed("", "", (NOW,))),
    ("granite", '<|tool_call|>["now"] Yes.', Parsed("", '<|tool_call|>["now"] Yes.')),
    (
        "granite",
        "Here is my thought process:\n\nHm: so. Here is my\n\nHere is my response:\n\nYes: now.",
        Parsed("Hm: so. Here is my", "Yes: now."),
    ),
    (
        "granite",
        "Here's my thought process: Hm.\nHere's my response:<|tool_call|>" + f"[{NEMOTRON_OSLO}]",
        Parsed(" Hm.", "", (OSLO,)),
    ),
    (
        "granite",
        "Here is my thought, Here is my response: Yes.",
        Parsed("", "Here is my thought, Here is my response: Yes."),
    ),
    (
        "granite",
        'Here is my thought process:I may write <|tool_call|>[{"name"\nHere\'s my response:Yes.',
        Parsed('I may write <|tool_call|>[{"name"', "Yes."),
    ),
    ("lfm2", LFM_CALLS, Parsed("", "", (OSLO, NOW))),
    ("lfm2", f"<think>Hm.</think>I look.{LFM_CALLS}I look.", Parsed("Hm.", "I look.I look.", (OSLO, NOW))),
    (
        "lfm2",
        """<|tool_call_start|>[book(city="a <|tool_call_end|> \\"b\\" ]", pets=True, note=None, """
        """tags=['x', {"a": 1.5}])]"""
        "<|tool_call_end|>",
        Parsed(
            "",
            "",
            (call("book", city='a <|tool_call_end|> "b" ]', pets=True, note=None, tags=["x", {"a": 1.5}]),),
        ),
    ),
    (
        "lfm2",
        '<|tool_call_start|>[{"name": "now", "arguments": {}}]<|tool_call_end|>',
        Parsed("", "", (NOW,)),
    ),
    ("lfm2", "<|tool_call_start|>[now()]", Parsed("", "", (NOW,))),
    ("lfm2", "[now()]", Parsed("", "[now()]")),
    (
        "lfm2",
        "<|tool_call_start|>[now(1)]<|tool_call_end|>",
        Parsed("", "<|tool_call_start|>[now(1)]<|tool_call_end|>"),
    ),
    ("lfm2", "<|tool_call_start|>oops", Parsed("", "<|tool_call_start|>oops")),
    (
        "cohere_command3",
        f"<|START_THINKING|>I look.<|END_THINKING|><|START_ACTION|>[\n    {COHERE_OSLO},\n    {COHERE_NOW}\n]"
        "<|END_ACTION|>",
        Parsed("I look.", "", (OSLO, NOW)),
    ),
    (
        "cohere_command3",
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes, <|END_ACT<|END_RESPONSE|>",
        Parsed("Hm.", "Yes, <|END_ACT"),
    ),
    (
        "cohere_command3",
        '<|START_ACTION|>[{"tool_name": "book", "parameters": {"city": "a <|END_ACTION|> b"}}]<|END_ACTION|>',
        Parsed("", "", (call("book", city="a <|END_ACTION|> b"),)),
    ),
    ("cohere_command3", f"<|START_ACTION|>{COHERE_NOW}", Parsed("", "", (NOW,))),
    (
        "cohere_command3",
        '<|START_ACTION|>[{"tool_name": 1}]<|END_ACTION|>',
        Parsed("", '<|START_ACTION|>[{"tool_name": 1}]<|END_ACTION|>'),
    ),
    (
        "cohere_command4",
        f"<|START_THINKING|>Hm.<|END_THINKING|><|START_TEXT|>Yes.<|END_TEXT|><|START_ACTION|>[{COHERE_OSLO}]"
        "<|END_ACTION|>",
        Parsed("Hm.", "Yes.", (OSLO,)),
    ),
    (
        "nemotron_json",
        f'<think>\nHm.\n</think>\n\n<TOOLCALL>[{NEMOTRON_OSLO}, {{"name": "now", "arguments": {{}}}}]</TOOLCALL>',
        Parsed("Hm.", "", (OSLO, NOW)),
    ),
    ("nemotron_json", f"I look.<TOOLCALL>{NEMOTRON_OSLO}</TOOLCALL>", Parsed("", "I look.", (OSLO,))),
    (
        "nemotron_json",
        '<TOOLCALL>[{"name": "book", "arguments": {"city": "a </TOOLCALL> b"}}]</TOOLCALL>',
        Parsed("", "", (call("book", city="a </TOOLCALL> b"),)),
    ),
    ("nemotron_json", "<TOOLCALL>[]</TOOLCALL>", Parsed("", "<TOOLCALL>[]</TOOLCALL>")),
    ("nemotron_json", f"<TOOLCALL>[{NEMOTRON_OSLO}]", Parsed("", "", (OSLO,))),
    ("openai", "<|channel|>final", Parsed("", "<|channel|>final")),
    ("openai", "<|channel|>analysis to=python<|message|>1+1<|call|>", Parsed("1+1", "")),
]
FAMILIES = sorted({family for family, _, _ in OUTPUTS})
ALPHABET = {
    family: sorted(
        {
            piece
            for name, text, _ in OUTPUTS
            if name == family
            for piece in text.replace(">", ">\0").split("\0")
        }
        | {*"{}[]\"'\\<|a \n;,", "<think>", "</think>", *TOOL_PARSERS[family].markers()}
    )
    for family in FAMILIES
}
"""Pieces of which outputs of a family, and what looks like them, are made."""


@pytest.mark.parametrize(("family", "text", "expected"), OUTPUTS)
@however_cut
def test_output_of_a_family(family: str, text: str, expected: Parsed, cuts: Set[int]) -> None:
    assert parse(new_parser(family), cut(text, cuts)) == expected


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": "null"}</tool_call>'),
        ("llama3_json", '{"name": "now", "parameters": null}'),
        ("llama3_json", '{"name": "now", "arguments": null, "parameters": {}}'),
        ("pythonic", '[{"name": "now", "arguments": null}]'),
        ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": null}]'),
        ("nemotron_json", '<TOOLCALL>[{"name": "now", "arguments": null}]</TOOLCALL>'),
        ("cohere_command3", '<|START_ACTION|>[{"tool_name": "now", "parameters": null}]<|END_ACTION|>'),
        ("kimi_k2", KIMI_NOW.replace("{}", "null")),
        ("deepseek_v3", V3_NOW.replace("{}", "null")),
        ("deepseek_v31", f"{DEEPSEEK_CALL}now{DEEPSEEK_SEP}null{DEEPSEEK_END}"),
        ("openai", "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>null<|call|>"),
    ],
)
@however_cut
def test_arguments_of_null_are_none(family: str, text: str, cuts: Set[int]) -> None:
    parsed = parse(new_parser(family), cut(text, cuts))
    assert (parsed.content, [each.name for each in parsed.calls]) == ("", ["now"])
    assert parsed.calls[0].arguments == "{}"


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_the_result_does_not_depend_on_how_an_output_is_cut(family: str, data: st.DataObject) -> None:
    parts = data.draw(st.lists(st.sampled_from(ALPHABET[family]), max_size=14))
    text, is_reasoning = "".join(parts), data.draw(st.booleans())
    cuts = data.draw(st.sets(st.integers(0, max(len(text) - 1, 0)), max_size=20))
    edges = [0, *sorted(cuts), len(text)]
    whole = parse(new_parser(family, is_reasoning=is_reasoning), [text])
    cut = parse(
        new_parser(family, is_reasoning=is_reasoning), [text[a:b] for a, b in itertools.pairwise(edges)]
    )
    assert cut == whole
    assert all(found.arguments[:1] in ("", "{") for found in whole.calls)
    if not whole.calls:
        kept = "".join((whole.reasoning + whole.content).split())
        if family != "openai":  # whose marks are dropped, and whose messages are interleaved
            text = "".join(text.split())
            section = TOOL_PARSERS[family].section
            if section:  # one around nothing is dropped, but where it belongs to a call that has no end
                text, kept = text.replace("".join(section), ""), kept.replace("".join(section), "")
            thoughts = REASONING_PARSERS[REASONING.get(family, "qwen3")]
            marks = (thoughts.start, *thoughts.other_starts, thoughts.text_end or thoughts.end)
            for mark in (*marks, *thoughts.other_ends, *thoughts.answer_marks):
                mark = "".join(mark.split())
                text, kept = text.replace(mark, ""), kept.replace(mark, "")
            assert kept == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hm.</think>\nYes.", Parsed("Hm.", "Yes.")),
        ("<think>Hm.</think>Yes.", Parsed("Hm.", "Yes.")),
        ("Hm.", Parsed("Hm.", "")),
    ],
)
@however_cut
def test_reasoning_without_its_first_mark(text: str, expected: Parsed, cuts: Set[int]) -> None:
    parser = ChatParser(reasoning_parser=REASONING_PARSERS["deepseek_r1"](), starts_open=True)
    assert parse(parser, cut(text, cuts)) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_an_output_that_is_cut_has_only_calls_of_the_whole_output(family: str) -> None:
    text = max((text for name, text, expected in OUTPUTS if name == family and expected.calls), key=len)
    whole = parse(new_parser(family), [text])
    for end in range(len(text)):
        cut = parse(new_parser(family), [text[:end]])
        for found, expected in zip(cut.calls, whole.calls, strict=False):
            assert expected.arguments.startswith(found.arguments), text[:end]
            assert found == expected._replace(arguments=found.arguments), text[:end]
        assert all(isinstance(json.loads(call.arguments), dict) for call in cut.calls[:-1])


@pytest.mark.parametrize(
    ("family", "text", "closed"),
    [
        ("kimi_k2", "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>\n", "<|tool_call_end|>"),
        ("openai", "<|channel|>commentary to=functions.now<|message|>\n", "<|call|>"),
        ("glm45", "<tool_call>now\n", "</tool_call>"),
    ],
)
def test_a_call_without_arguments_needs_its_end(family: str, text: str, closed: str) -> None:
    assert parse(new_parser(family), [text]) == Parsed("", text)
    (found,) = parse(new_parser(family), [text + closed]).calls
    assert (found.name, found.arguments) == ("now", "{}")


@pytest.mark.parametrize(
    ("family", "text", "end"),
    [
        ("hermes", '<tool_call>{"name": "book", "arguments": {"city": "Oslo"}}</tool_call>', "</tool_call>"),
        ("qwen3_coder", QWEN_OSLO, "</tool_call>"),
        ("qwen3_coder", QWEN_OSLO, "</function>"),
        ("glm45", GLM_OSLO, "</tool_call>"),
        ("kimi_k2", KIMI_OSLO, "<|tool_call_end|>"),
        ("deepseek_v3", V3_OSLO, DEEPSEEK_END),
        ("deepseek_v31", V31_OSLO, DEEPSEEK_END),
        ("openai", HARMONY_OSLO, "<|call|>"),
        ("openai", HARMONY_OSLO, '\\"<|start|>assistant<|channel|>final<|message|>'),
    ],
)
@however_cut
def test_an_argument_may_contain_the_end_of_a_call(family: str, text: str, end: str, cuts: Set[int]) -> None:
    city = f"a {end} b {end}"
    found = parse(new_parser(family), cut(f"{text.replace('Oslo', city)}{text}", cuts))
    read = city.replace("\\", "")
    assert [json.loads(call.arguments)["city"] for call in found.calls] == [read, "Oslo"]
    assert found.content == ""


@pytest.mark.parametrize(
    "text",
    ['<tool_call>{"a </tool_call> or ', '<tool_call>{"a </tool_call>\nor ', '<tool_call>"</tool_call>'],
)
@however_cut
def test_an_argument_without_an_end_hides_no_later_call(text: str, cuts: Set[int]) -> None:
    calls = '<tool_call>{"name": "now"}</tool_call>' * 2
    assert parse(new_parser("hermes"), cut(text + calls, cuts)) == Parsed("", text, (NOW, NOW))
    assert parse(new_parser("hermes"), cut(text * 9 + calls, cuts)).calls == (NOW, NOW)


@pytest.mark.parametrize("arguments", ['{"a ', '{"a\n ', '{"a": "b'])
@however_cut
def test_an_argument_without_an_end_hides_no_later_message(arguments: str, cuts: Set[int]) -> None:
    begun = f"<|channel|>commentary to=functions.now<|message|>{arguments}"
    for num_broken in (1, 2, 9):
        text = f"{begun}<|call|>" * num_broken + HARMONY_OSLO
        parsed = parse(new_parser("openai"), cut(text, cuts))
        broken = [call.arguments for call in parsed.calls[:-1]] + parsed.content.split("\n<|channel|>")
        assert parsed.calls[-1] == OSLO
        assert len([text for text in broken if text]) == num_broken


@pytest.mark.parametrize(
    ("family", "text", "written"),
    [
        (
            "hermes",
            '<tool_call>\n{"name": "book", "arguments": {"city": "Oslo"}}\n</tool_call>',
            '{"city": "Oslo"}',
        ),
        ("llama3_json", '{"name": "book", "parameters": {"city": "Oslo"}}', '{"city": "Oslo"}'),
        ("mistral", MISTRAL_OSLO, OSLO.arguments),
        ("deepseek_v3", f"{DEEPSEEK_SECTION[0]}{V3_OSLO}", OSLO.arguments),
        ("deepseek_v31", f"{DEEPSEEK_SECTION[0]}{V31_OSLO}", OSLO.arguments),
        ("kimi_k2", f"<|tool_calls_section_begin|>{KIMI_OSLO}", OSLO.arguments),
        ("openai", HARMONY_OSLO, OSLO.arguments),
    ],
)
def test_arguments_in_json_follow_the_text(family: str, text: str, written: str) -> None:
    """After each character the client has all of the arguments but what may be the beginning of a mark."""
    parser, shown, begun = new_parser(family), "", []
    first = text.index(written)
    for number, char in enumerate(text):
        parsed = parser.feed(char)
        begun += parsed.calls
        shown += parsed.arguments + "".join(call.arguments for call in parsed.calls)
        if first < number < first + len(written):
            assert begun, text[: number + 1]
            assert shown == written[: number + 1 - first]
    assert [call.name for call in begun] == ["book"]
    assert shown == written


@pytest.mark.parametrize(
    ("family", "text"), [("qwen3_coder", QWEN_OSLO), ("glm45", GLM_OSLO), ("hy_v3", HY_OSLO)]
)
def test_arguments_in_plain_text_follow_once_each_is_complete(family: str, text: str) -> None:
    parser = new_parser(family)
    parts = [parser.feed(char) for char in text]
    assert [part.arguments for part in parts if part.arguments] == ['{"city": "Oslo"', ', "nights": 2', "}"]
    assert joined(parts).calls == (OSLO,)


@pytest.mark.parametrize(
    ("family", "text", "arguments", "content"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b}</tool_call>Yes.', '{"a": "b}', "Yes."),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1}}</tool_call>Yes.', '{"a": [1}}', "Yes."),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>\nYes.', '{"a": 1}', "Yes."),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}\nYes.', "{}", "Yes."),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b\n}</tool_call>"', '{"a": "b\n}', '"'),
        ("qwen3_coder", "<function=f><parameter=a>b</parameter>Yes.", '{"a": "b"}', "Yes."),
        (
            "qwen3_coder",
            "<function=f><parameter=a>b</parameter><parameter=c>d",
            '{"a": "b", "c": "d',
            "",
        ),
        (
            "glm45",
            "<tool_call>f<arg_key>a</arg_key><arg_value>b</arg_value>Yes.",
            '{"a": "b"}',
            "Yes.",
        ),
    ],
)
@however_cut
def test_a_call_that_turns_out_malformed_keeps_what_was_read(
    family: str, text: str, arguments: str, content: str, cuts: Set[int]
) -> None:
    parsed = parse(new_parser(family), cut(text, cuts))
    assert parsed == Parsed("", content, (ParsedCall("f", arguments),))


@pytest.mark.parametrize(("family", "text"), [("glm45", GLM_OSLO), ("hy_v3", HY_OSLO)])
def test_marks_that_may_be_special_tokens_are_kept_in_the_text(family: str, text: str) -> None:
    assert {*re.findall(r"</?[a-z_]+>", text)} <= {*TOOL_PARSERS[family].markers()}


@pytest.mark.parametrize(
    ("family", "text"), [("glm45", GLM_OSLO), ("hy_v3", f"<tool_calls>\n{HY_OSLO}\n</tool_calls>")]
)
def test_required_calls_have_the_form_of_the_templates(family: str, text: str) -> None:
    form, (arguments,) = TOOL_PARSERS[family].call_form, re.findall(r"<arg_key>.*</arg_value>", text, re.S)
    begin = form.begin.replace("{name}", "book")
    assert f"{form.first}{begin}{arguments}{form.end}{form.last}" == text


@pytest.mark.parametrize("family", FAMILIES)
def test_without_tools_calls_are_text(family: str) -> None:
    text = next(text for name, text, expected in OUTPUTS if name == family and expected.calls)
    assert parse(new_parser(family, with_tools=False), [text]).calls == ()


@pytest.mark.parametrize("family", FAMILIES)
def test_hostile_outputs_are_read_in_linear_time(family: str) -> None:
    parser = TOOL_PARSERS[family]
    starts = [*parser.starts, *parser.first_starts, *(parser.section or ())] or ["<|channel|>"]
    hostile = [(mark, mark) for mark in {*starts, *parser.markers()}]
    hostile += [(starts[0], mark) for mark in ("<parameter=", "\\", '"', "</think>", "[a(")]
    hostile += [("", f'{starts[0]}{{"{mark}') for mark in parser.other_markers[:2]]

    def parsing(begin: str, mark: str, count: int) -> Callable[[], object]:
        parts = pieces(begin + mark * (count // len(mark)), 1 << 13)
        return lambda: parse(new_parser(family), parts)

    ratios = {
        (begin, mark): least_ratio(
            parsing(begin, mark, 1 << 14), parsing(begin, mark, 1 << 17), 24, least_s=0.01
        )
        for begin, mark in hostile
    }
    assert {which: ratio for which, ratio in ratios.items() if ratio >= 24} == {}


def allowed_tokens(matcher: Any, bitmask: Any, count: int) -> list[int]:
    matcher.fill_next_token_bitmask(bitmask, 0)
    return [token for token in range(count) if int(bitmask[0, token // 32]) >> token % 32 & 1]


@pytest.mark.parametrize("name", ["book", None], ids=["named", "required"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_grammar_of_required_calls_allows_what_the_parser_reads(family: str, name: str | None) -> None:
    import xgrammar

    texts = [*map(chr, range(32, 127)), "\n", "｜", "▁", ""]
    end = len(texts) - 1
    info = xgrammar.TokenizerInfo(texts, vocab_size=len(texts), stop_token_ids=[end])
    tag = tool_call_tag(TERSE_TOOLS, name=name, form=TOOL_PARSERS[family].call_form)
    grammar = xgrammar.GrammarCompiler(info, max_threads=1).compile_structural_tag(tag)
    bitmask = xgrammar.allocate_token_bitmask(1, len(texts))
    for seed in range(3):
        random, matcher, output = Random(seed), xgrammar.GrammarMatcher(grammar), ""
        for _ in range(2000):
            allowed = allowed_tokens(matcher, bitmask, len(texts))
            if end in allowed:
                break
            closing = [token for token in allowed if texts[token] in '"}]<']
            token = random.choice(closing if closing and random.random() < 0.7 else allowed)
            assert matcher.accept_token(token)
            output += texts[token]
        parsed = parse(new_parser(family), [output])
        names = {call.name for call in parsed.calls}
        assert names, output
        assert names <= ({"book", "now"} if name is None else {name})
        assert parsed.content == ""


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_of_calls_are_repeatable(family: str) -> None:
    parser = TOOL_PARSERS[family]()
    ids = [parser.call_id("r", choice, number, NOW) for choice, number in ((0, 0), (0, 1), (1, 0))]
    assert len(set(ids[:2])) == 2
    if family != "kimi_k2":  # the model writes the same ids in each choice
        assert len(set(ids)) == 3
    assert ids[0] == TOOL_PARSERS[family]().call_id("r", 0, 0, NOW)
    if family == "mistral":  # its templates refuse others
        assert all(len(id_) == 9 and id_.isalnum() for id_ in ids)


@pytest.mark.parametrize(
    ("family", "text", "finished", "cut_off"),
    [
        ("glm45", GLM_OSLO.removesuffix("</tool_call>"), OSLO.arguments, OSLO.arguments[:-1]),
        ("qwen3_coder", QWEN_OSLO.partition("</function>")[0], OSLO.arguments, OSLO.arguments[:-1]),
        ("qwen3_coder", QWEN_OSLO, OSLO.arguments, OSLO.arguments),
        (
            "glm45",
            GLM_OSLO.rpartition("2")[0],
            '{"city": "Oslo", "nights": ',
            '{"city": "Oslo", "nights": ',
        ),
    ],
)
def test_arguments_whose_end_is_missing_are_closed_if_the_model_has_finished(
    family: str, text: str, finished: str, cut_off: str
) -> None:
    for is_finished, arguments in ((True, finished), (False, cut_off)):
        for size in (1, 7, len(text)):
            parser = new_parser(family)
            parts = [parser.feed(piece) for piece in pieces(text, size)]
            parsed = joined([*parts, parser.feed("", True, is_finished=is_finished)])
            assert parsed == Parsed("", "", (ParsedCall("book", arguments),))
