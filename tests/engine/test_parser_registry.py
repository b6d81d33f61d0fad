"""The choice of a model's parsers, plugins, and the templates of families of models."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from argosy_engine import LLM
from argosy_engine.api import doctor, serve
from argosy_engine.checkpoint.model_folder import resolve_model
from argosy_engine.errors import ConfigError
from argosy_engine.frontend.chat_template import ChatTemplate
from argosy_engine.frontend.detokenizer import IncrementalDetokenizer
from argosy_engine.frontend.tokenizer import Tokenizer
from argosy_engine.params import SamplingParams
from argosy_engine.parsers.chat_parser import ChatParser
from argosy_engine.parsers.harmony_parser import HarmonyParser, OpenAIToolParser
from argosy_engine.parsers.parser_registry import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    choose_parsers,
    load_tool_parser_plugin,
)
from argosy_protocol.openai import ChatCompletionRequest, ChatMessage

CALLS = "{% for message in messages %}{% for call in message.tool_calls or [] %}%s{% endfor %}{% endfor %}"
TEMPLATES = {
    "hermes": '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>",
    "qwen3_coder": "<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for key, value in call.function.arguments.items() %}<parameter={{ key }}>\n{{ value }}\n</parameter>\n"
    "{% endfor %}</function>\n</tool_call>",
    "glm45": "<tool_call>{{ call.function.name }}\n{% for key, value in call.function.arguments.items() %}"
    "<arg_key>{{ key }}</arg_key>\n<arg_value>{{ value }}</arg_value>\n{% endfor %}</tool_call>",
    "hy_v3": "<tool_calls>\n<tool_call>{{ call.function.name }}<tool_sep>\n"
    "{% for key, value in call.function.arguments.items() %}<arg_key>{{ key }}</arg_key>\n"
    "<arg_value>{{ value }}</arg_value>\n{% endfor %}</tool_call>\n</tool_calls>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>"
    "{{ call.function.arguments | tojson }}<|tool_call_end|><|tool_calls_section_end|>",
    "deepseek_v3": "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' "
    "+ call.function.name + '\\n```json\\n' + call.function.arguments + '\\n```<｜tool▁call▁end｜>' }}"
    "<｜tool▁calls▁end｜>",
    "deepseek_v31": "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' "
    "+ call.function.arguments + '<｜tool▁call▁end｜><｜tool▁calls▁end｜>' }}",
    "mistral": "[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}",
    "llama3_json": '<|python_tag|>{"name": "{{ call.function.name }}", '
    '"parameters": {{ call.function.arguments | tojson }}}',
    "llama4_pythonic": "<|python_start|>[{{ call.function.name }}("
    "{% for key, value in call.function.arguments.items() %}"
    "{{ key }}={{ value | tojson }}{% endfor %})]<|python_end|>",
    "pythonic": "{# [func_name1(params_name1=params_value1)] #}[{{ call.function.name }}("
    "{% for key, value in call.function.arguments.items() %}{{ key }}={{ value | tojson }}{% endfor %})]",
    "seed_oss": "<seed:tool_call>\n<function={{ call.function.name }}>\n"
    "{% for key, value in call.function.arguments.items() %}<parameter={{ key }}>{{ value }}</parameter>\n"
    "{% endfor %}</function>\n</seed:tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="{{ call.function.name }}">\n'
    '{% for key, value in call.function.arguments.items() %}<parameter name="{{ key }}">{{ value }}</parameter>\n'
    "{% endfor %}</invoke>\n</minimax:tool_call>",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="{{ call.function.name }}">\n'
    "{% for key, value in call.function.arguments.items() %}"
    '<｜DSML｜parameter name="{{ key }}" string="true">{{ value }}</｜DSML｜parameter>\n'
    "{% endfor %}</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "deepseek_v4": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="{{ call.function.name }}">\n'
    "{% for key, value in call.function.arguments.items() %}"
    '<｜DSML｜parameter name="{{ key }}" string="true">{{ value }}</｜DSML｜parameter>\n'
    "{% endfor %}</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
    "solar_open": "<|tool_calls|><|tool_call:begin|>a1<|tool_call:name|>{{ call.function.name }}"
    "<|tool_call:args|>{{ call.function.arguments | tojson }}<|tool_call:end|><|calls|>",
    "gemma4": "<|tool_call>call:{{ call.function.name }}{{ '{' }}"
    '{% for key, value in call.function.arguments.items() %}{{ key }}:<|"|>{{ value }}<|"|>{% endfor %}'
    "{{ '}' }}<tool_call|>",
    "granite": '{# <|start_of_role|> #}<|tool_call|>[{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}]',
    "lfm2": "<|tool_call_start|>[{{ call.function.name }}("
    "{% for key, value in call.function.arguments.items() %}{{ key }}={{ value | tojson }}{% endfor %})]"
    "<|tool_call_end|>",
    "cohere_command3": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "{{ call.function.name }}", '
    '"parameters": {{ call.function.arguments | tojson }}}\n]<|END_ACTION|>',
    "nemotron_json": '<TOOLCALL>[{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}]</TOOLCALL>',
    "olmo3": "<function_calls>{{ call.function.name }}("
    "{% for key, value in call.function.arguments.items() %}{{ key }}={{ value | tojson }}{% endfor %})"
    "</function_calls>",
    "openai": "<|channel|>commentary to=functions.{{ call.function.name }} <|constrain|>json<|message|>"
    "{{ call.function.arguments | tojson }}<|call|>",
}
"""How each family's templates render the calls of earlier answers, which is how their models write new ones."""


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_family_is_chosen_by_its_template_and_reads_what_that_renders(family: str) -> None:
    source = CALLS.replace("%s", TEMPLATES[family])
    chosen = choose_parsers(source, {})
    assert chosen.tool_parser is TOOL_PARSERS[family]
    function = {"name": "book", "arguments": '{"city": "Oslo"}'}
    asked = {"id": "functions.book:0", "type": "function", "function": function}
    messages = [ChatMessage(role="assistant", tool_calls=[asked])]
    text = ChatTemplate(source, {}).render(ChatCompletionRequest(messages=messages))
    tools = chosen.tool_parser(({"type": "function", "function": {"name": "book"}},))
    parser: Any = (
        HarmonyParser(tools) if isinstance(tools, OpenAIToolParser) else ChatParser(tool_parser=tools)
    )
    parsed = parser.feed(text, True)
    assert [(call.name, call.arguments) for call in parsed.calls] == [("book", '{"city": "Oslo"}')]
    assert parsed.content == ""


@pytest.mark.parametrize(
    ("template", "config", "tools", "thoughts"),
    [
        (None, {}, "hermes", "qwen3"),
        ("{{ messages }}", {"model_type": "llama"}, "llama3_json", "qwen3"),
        ('"parameters": dictionary of argument name', {"model_type": "llama4"}, "llama3_json", "qwen3"),
        ("[func_name1(", {"model_type": "llama4"}, "llama4_pythonic", "qwen3"),
        ("[func_name1(", {"model_type": "llama"}, "pythonic", "qwen3"),
        ("<think>", {"model_type": "kimi_k2"}, "kimi_k2", "qwen3"),
        ("<think><arg_key><arg_value>", {}, "glm45", "glm45"),
        ("<think><tool_sep><arg_key><arg_value>", {}, "hy_v3", "hy_v3"),
        (None, {"model_type": "hy_v3"}, "hy_v3", "qwen3"),
        ("[THINK][TOOL_CALLS]", {}, "mistral", "mistral"),
        ("<|channel|><|message|>", {}, "openai", "openai_gptoss"),
        ("<|channel>thought<channel|><|tool_call>call:", {"model_type": "gemma4"}, "gemma4", "gemma4"),
        ("<seed:think><seed:tool_call><function=<parameter=", {}, "seed_oss", "seed_oss"),
        ("<think><minimax:tool_call>", {"model_type": "minimax_m2"}, "minimax_m2", "qwen3"),
        ("<think><response></response><tool_call>", {"model_type": "ernie4_5_moe"}, "hermes", "ernie45"),
        ("<think><tool_call><function=a><parameter=b>", {"model_type": "nemotron_h"}, "qwen3_coder", "qwen3"),
        ("<|begin|><|think|><|tool_call:begin|><|tool_call:args|>", {}, "solar_open", "solar_open"),
        ("<think>{% set dsml = '｜DSML｜' %}function_calls", {}, "deepseek_v32", "qwen3"),
        (None, {"model_type": "solar_open"}, "solar_open", "qwen3"),
        ("List of tools: <|tool_list_start|>[", {"model_type": "lfm2"}, "lfm2", "qwen3"),
        ("List of tools: [", {"model_type": "lfm2_moe"}, "lfm2", "qwen3"),
        ("<|START_THINKING|><|START_ACTION|><|START_RESPONSE|>", {}, "cohere_command3", "cohere_command3"),
        ("<|START_THINKING|><|START_ACTION|><|START_TEXT|>", {}, "cohere_command4", "cohere_command4"),
        (
            "<|start_of_role|><|tool_call|>'Here is my thought process:' 'Here is my response:'",
            {"model_type": "granite"},
            "granite",
            "granite",
        ),
        (
            "<think></think><AVAILABLE_TOOLS><TOOLCALL>",
            {"model_type": "nemotron_h"},
            "nemotron_json",
            "qwen3",
        ),
    ],
)
def test_parsers_are_chosen_by_template_and_config(
    template: str | None, config: dict[str, Any], tools: str, thoughts: str
) -> None:
    chosen = choose_parsers(template, config)
    assert (chosen.tool_parser_name, chosen.reasoning_parser_name) == (tools, thoughts)


@pytest.mark.parametrize(
    ("template", "flags", "told"),
    [
        (
            "{{ tools }}{{ enable_thinking }}",
            {},
            r"tool calls hermes \(a guess: .*--tool-call-parser\), reasoning qwen3 \(a guess: .*--reasoning-parser\)",
        ),
        (
            "{{ '<|tool|>' + tools + '<|/tool|>' }}",
            {},
            r"tool calls hermes \(the chat template .* \(phi4_mini_json\): .*--tool-parser-plugin .*\), reasoning none",
        ),
        (
            "{{ tools }}{{ '<tool_calls{}><tool_sep{}>'.format(':opensource') }}",
            {},
            r"tool calls hermes \(the chat template .* \(hy_v3 of Hy3, .*\): .*-plugin .*\), reasoning none",
        ),
        ("{{ tools }}", {"tool_call_parser": "lfm2"}, "tool calls lfm2, reasoning none"),
        ("{{ messages }}", {}, "tool calls hermes, reasoning none"),
        ("{{ tools }}<tool_call><think>", {}, "tool calls hermes, reasoning qwen3"),
    ],
)
def test_the_choice_tells_what_speaks_against_it(template: str, flags: dict[str, str], told: str) -> None:
    chosen = choose_parsers(template, {}, **flags)
    described = chosen.described(has_thinking=ChatTemplate(template, {}).has_thinking)
    assert re.fullmatch(told, described)


def test_flags_take_precedence_and_unknown_names_are_refused() -> None:
    chosen = choose_parsers("<tool_call>", {}, tool_call_parser="llama4_json", reasoning_parser="deepseek_r1")
    assert (chosen.tool_parser_name, chosen.reasoning_parser_name) == ("llama4_json", "deepseek_r1")
    with pytest.raises(ConfigError, match=r"--tool-call-parser nope: .*hermes"):
        choose_parsers(None, {}, tool_call_parser="nope")
    with pytest.raises(ConfigError, match=r"--reasoning-parser nope: .*qwen3"):
        choose_parsers(None, {}, reasoning_parser="nope")


@pytest.mark.parametrize(
    ("flag", "value"),
    [("tool_call_parser", "foo"), ("reasoning_parser", "qwen"), ("tool_parser_plugin", "/missing/plugin.py")],
)
def test_wrong_flags_are_refused_before_the_model_is_read(
    flag: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"--{flag.replace('_', '-')}"
    with pytest.raises(ConfigError, match=f"^{name} {value}: "):
        LLM(str(tmp_path / "missing"), **{flag: value})
    for program in (doctor.main, serve.parse_args):
        with pytest.raises(SystemExit) as ended:
            program([str(tmp_path / "missing"), name, value])
        assert ended.value.code == 2
        assert f"{name} {value}: " in capsys.readouterr().err


def test_a_plugin_registers_a_parser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("argosy_engine.parsers.parser_registry.TOOL_PARSERS", dict(TOOL_PARSERS))
    plugin = tmp_path / "shout.py"
    plugin.write_text(
        "from argosy_engine.parsers.parser_registry import register_tool_parser\n"
        "from argosy_engine.parsers.tool_parsers.json_tool_parsers import HermesToolParser\n"
        '@register_tool_parser("shout")\n'
        "class ShoutToolParser(HermesToolParser):\n    pass\n"
    )
    load_tool_parser_plugin(str(plugin))
    assert choose_parsers(None, {}, tool_call_parser="shout").tool_parser.__name__ == "ShoutToolParser"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import vllm_that_is_not_here", "ModuleNotFoundError: No module named 'vllm_that_is_not_here'"),
        ("", "it registers no parser"),
        (
            'register_tool_parser("mine", HermesToolParser)',
            "takes names and decorates a class, .*it was given",
        ),
        ("register_tool_parser()(HermesToolParser)", "takes names and decorates a class"),
        ('register_tool_parser("mine")(dict)', "<class 'dict'> is not a subclass"),
    ],
)
def test_a_plugin_that_registers_nothing_is_refused(code: str, reason: str, tmp_path: Path) -> None:
    plugin = tmp_path / "plugin.py"
    plugin.write_text(
        "from argosy_engine.parsers.parser_registry import register_tool_parser\n"
        f"from argosy_engine.parsers.tool_parsers.json_tool_parsers import HermesToolParser\n{code}\n"
    )
    with pytest.raises(ConfigError, match=f"^--tool-parser-plugin .*{reason}.*; give a Python file"):
        load_tool_parser_plugin(str(plugin))


def test_the_example_reads_calls_and_the_log_tells_that_it_is_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("argosy_engine.parsers.parser_registry.TOOL_PARSERS", dict(TOOL_PARSERS))
    plugin = str(Path(__file__).parents[2] / "examples" / "tool_parser.py")
    with (
        caplog.at_level("INFO", "argosy.frontend"),
        LLM("builtin://tiny", threads=1, tool_parser_plugin=plugin, tool_call_parser="call_tag") as llm,
    ):
        chosen = llm.renderer.parsers
    assert f"{plugin} registers the tool parsers call_tag" in caplog.messages
    assert "parsers: tool calls call_tag, reasoning qwen3" in caplog.messages
    form = chosen.tool_parser.call_form
    call = form.begin.replace("{name}", "book") + '{"city": "Oslo"}' + form.end
    parsed = ChatParser(tool_parser=chosen.tool_parser()).feed(f"Well: {call}, <call x>y</call>", True)
    assert [(call.name, call.arguments) for call in parsed.calls] == [("book", '{"city": "Oslo"}')]
    assert parsed.content == "Well: , <call x>y</call>"


def test_the_help_lists_the_parsers() -> None:
    text = " ".join(serve.build_parser().format_help().split())
    for flag, names in (("--tool-call-parser", TOOL_PARSERS), ("--reasoning-parser", REASONING_PARSERS)):
        assert f"{', '.join(sorted(names))}; default" in text.partition(f"{flag} ")[2]


def test_special_tokens_that_a_parser_reads_stay_in_the_text() -> None:
    tokenizer = Tokenizer(resolve_model("builtin://tiny"))
    kept, dropped = sorted(tokenizer.special_ids)[:2]
    word = tokenizer.encode("Hello", add_special_tokens=False).ids
    text = {}
    for ids in ((), (kept,)):
        params = SamplingParams(kept_special_token_ids=ids)
        text[ids] = IncrementalDetokenizer(tokenizer, params, word).update([dropped, kept, *word], True)
    assert text[()] == "Hello"
    assert text[(kept,)] == tokenizer.token_text(kept) + "Hello"
