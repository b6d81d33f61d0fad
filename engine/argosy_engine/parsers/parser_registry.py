"""Registry of parsers: names as in vLLM, the choice for a model, plugins.

Parsers are registered by name. `choose_parsers` picks them by flags or, without flags, by the markers in the model's
chat template and the model type in its config.json.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from argosy_engine.errors import ConfigError
from argosy_engine.parsers.chat_parser import (
    CohereCommand3ReasoningParser,
    CohereCommand4ReasoningParser,
    DeepSeekR1ReasoningParser,
    Ernie45ReasoningParser,
    Gemma4ReasoningParser,
    Glm45ReasoningParser,
    GptOssReasoningParser,
    GraniteReasoningParser,
    MistralReasoningParser,
    Qwen3ReasoningParser,
    ReasoningParser,
    SeedOssReasoningParser,
    SolarOpenReasoningParser,
)
from argosy_engine.parsers.harmony_parser import OpenAIToolParser
from argosy_engine.parsers.tool_parsers.abstract_tool_parser import ToolParser
from argosy_engine.parsers.tool_parsers.json_tool_parsers import (
    CohereCommandToolParser,
    DeepSeekV3ToolParser,
    DeepSeekV31ToolParser,
    GraniteToolParser,
    HermesToolParser,
    KimiK2ToolParser,
    Llama3JsonToolParser,
    MistralToolParser,
    NemotronJsonToolParser,
    SolarOpenToolParser,
)
from argosy_engine.parsers.tool_parsers.pythonic_tool_parser import (
    Lfm2ToolParser,
    Llama4PythonicToolParser,
    Olmo3ToolParser,
    PythonicToolParser,
)
from argosy_engine.parsers.tool_parsers.xml_tool_parsers import (
    DeepSeekV4ToolParser,
    DeepSeekV32ToolParser,
    Gemma4ToolParser,
    Glm45ToolParser,
    HyV3ToolParser,
    MinimaxM2ToolParser,
    Qwen3CoderToolParser,
    SeedOssToolParser,
)

if TYPE_CHECKING:
    from argosy_engine.config import EngineArgs

_ParserType = TypeVar("_ParserType", bound=type[ToolParser])

TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesToolParser,
    "qwen3_json": HermesToolParser,
    "granite4": HermesToolParser,
    "ernie45": HermesToolParser,
    "qwen3_coder": Qwen3CoderToolParser,
    "qwen3_xml": Qwen3CoderToolParser,
    "llama3_json": Llama3JsonToolParser,
    "llama4_json": Llama3JsonToolParser,
    "llama4_pythonic": Llama4PythonicToolParser,
    "pythonic": PythonicToolParser,
    "mistral": MistralToolParser,
    "deepseek_v3": DeepSeekV3ToolParser,
    "deepseek_v31": DeepSeekV31ToolParser,
    "deepseek_v32": DeepSeekV32ToolParser,
    "deepseek_v4": DeepSeekV4ToolParser,
    "glm45": Glm45ToolParser,
    "glm47": Glm45ToolParser,
    "hy_v3": HyV3ToolParser,
    "kimi_k2": KimiK2ToolParser,
    "openai": OpenAIToolParser,
    "gemma4": Gemma4ToolParser,
    "granite": GraniteToolParser,
    "minimax_m2": MinimaxM2ToolParser,
    "olmo3": Olmo3ToolParser,
    "seed_oss": SeedOssToolParser,
    "solar_open": SolarOpenToolParser,
    "lfm2": Lfm2ToolParser,
    "cohere_command3": CohereCommandToolParser,
    "cohere_command4": CohereCommandToolParser,
    "nemotron_json": NemotronJsonToolParser,
    "llama_nemotron_json": NemotronJsonToolParser,
}
"""Tool parsers by vLLM's names, aliases included; the last two are those of NVIDIA's plugins for it."""
REASONING_PARSERS: dict[str, type[ReasoningParser]] = {
    "qwen3": Qwen3ReasoningParser,
    "deepseek_r1": DeepSeekR1ReasoningParser,
    "glm45": Glm45ReasoningParser,
    "glm47": Glm45ReasoningParser,
    "hy_v3": Qwen3ReasoningParser,
    "kimi_k2": Qwen3ReasoningParser,
    "mistral": MistralReasoningParser,
    "openai_gptoss": GptOssReasoningParser,
    "deepseek_v3": Qwen3ReasoningParser,
    "minimax_m2": Qwen3ReasoningParser,
    "nemotron_v3": Qwen3ReasoningParser,
    "olmo3": Qwen3ReasoningParser,
    "gemma4": Gemma4ReasoningParser,
    "seed_oss": SeedOssReasoningParser,
    "ernie45": Ernie45ReasoningParser,
    "solar_open": SolarOpenReasoningParser,
    "granite": GraniteReasoningParser,
    "cohere_command3": CohereCommand3ReasoningParser,
    "cohere_command4": CohereCommand4ReasoningParser,
}
"""Reasoning parsers by vLLM's names, aliases included."""
_TOOL_MARKS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>", "<|message|>"), "openai"),
    (("<|tool_call>call:",), "gemma4"),
    (("<|tool_call:begin|>", "<|tool_call:args|>"), "solar_open"),
    (("｜DSML｜", "function_calls"), "deepseek_v32"),
    (("｜DSML｜", "tool_calls"), "deepseek_v4"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("<tool_sep>", "<arg_key>"), "hy_v3"),
    (("<arg_key>", "<arg_value>"), "glm45"),
    (("<|tool_call_argument_begin|>",), "kimi_k2"),
    (("<｜tool▁call▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁call▁begin｜>",), "deepseek_v31"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|START_ACTION|>", "<|START_TEXT|>"), "cohere_command4"),
    (("<|START_ACTION|>",), "cohere_command3"),
    (("<TOOLCALL>",), "nemotron_json"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<|tool_list_start|>",), "lfm2"),
    (("<|tool_call|>", "<|start_of_role|>"), "granite"),
    (("<tool_call>",), "hermes"),
    (("<function_calls>",), "olmo3"),
    (("<|python_start|>",), "llama4_pythonic"),
    (("<|python_tag|>",), "llama3_json"),
    (("[func_name1(",), "pythonic"),
    (('"parameters": dictionary of argument name',), "llama3_json"),
)
"""Texts that a template has if its model writes calls in this form; the first entry of which all occur counts."""
_TOOLS_OF_TYPES: dict[str, str] = {
    "deepseek_v3": "deepseek_v3",
    "deepseek_v32": "deepseek_v32",
    "solar_open": "solar_open",
    "gemma4": "gemma4",
    "glm4_moe": "glm45",
    "hy_v3": "hy_v3",
    "gpt_oss": "openai",
    "kimi_k2": "kimi_k2",
    "minimax_m2": "minimax_m2",
    "seed_oss": "seed_oss",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2",
    "llama": "llama3_json",
    "llama4": "llama4_pythonic",
    "mistral": "mistral",
    "mistral3": "mistral",
    "mixtral": "mistral",
    "qwen3_next": "qwen3_coder",
}
"""Tool parsers by `model_type` of config.json, for models whose template tells nothing."""
_REASONING_MARKS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>", "<|message|>"), "openai_gptoss"),
    (("<|channel>", "<channel|>"), "gemma4"),
    (("<seed:think>",), "seed_oss"),
    (("<|think|>", "<|begin|>"), "solar_open"),
    (("[THINK]",), "mistral"),
    (("<|START_THINKING|>", "<|START_TEXT|>"), "cohere_command4"),
    (("<|START_THINKING|>",), "cohere_command3"),
    (("Here is my thought process:", "Here is my response:"), "granite"),
    (("<think>", "<response>", "</response>"), "ernie45"),
    (("<think>", "<tool_sep>"), "hy_v3"),
    (("<think>", "<arg_key>"), "glm45"),
    (("<think>",), "qwen3"),
)
_UNREAD_TOOL_MARKS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|tool|>", "<|/tool|>"), "phi4_mini_json"),
    (("<|action_start|>", "<|plugin|>"), "internlm"),
    (("<tool_sep",), "hy_v3 of Hy3, whose marks end with `:opensource`"),
    (("<tool_calls>",), "jamba, hunyuan_a13b"),
    (("<｜tool_calls_begin｜>",), "step3"),
    (("<start_function_call>",), "functiongemma"),
    (("<longcat_tool_call>",), "longcat"),
    (("<|tools_prefix|>",), "apertus"),
    (("Action:", "directly_answer"), "Cohere's first Command R"),
)
"""As `_TOOL_MARKS`, of forms that no parser here reads, with the names of vLLM's parsers or of the models."""
_DEFAULT_REASONING_PARSER = "qwen3"
_DEFAULT_TOOL_PARSER = "hermes"
_registered: list[str] = []
"""Names that the plugin which runs has registered so far."""
_plugins: dict[Path, tuple[str, ...]] = {}
"""Plugins that have run, with the names that they have registered."""


class ChosenParsers(NamedTuple):
    """The parsers of a model's output."""

    tool_parser_name: str
    tool_parser: type[ToolParser]
    reasoning_parser_name: str
    reasoning_parser: type[ReasoningParser]
    """Used if the template leaves room for reasoning, or the user has named it."""
    tool_doubt: str | None = None
    """What speaks against the tool parser, with the remedy: the template takes tools, and neither it nor a flag nor the
    model's type tells the form of calls, or it has one that no parser reads."""
    reasoning_doubt: str | None = None
    """As `tool_doubt`: the template has no marks of reasoning, and no flag names the parser."""

    def described(self, *, has_thinking: bool) -> str:
        """Return the choice as text, with what speaks against it.

        Args:
            has_thinking: whether the reasoning parser is used.
        """
        named = [("tool calls", self.tool_parser_name, self.tool_doubt)]
        reasoning = (self.reasoning_parser_name, self.reasoning_doubt) if has_thinking else ("none", None)
        named.append(("reasoning", *reasoning))
        return ", ".join(
            f"{what} {name} ({doubt})" if doubt else f"{what} {name}" for what, name, doubt in named
        )


def register_tool_parser(*names: str) -> Callable[[_ParserType], _ParserType]:
    """Register a subclass of ToolParser under names for `--tool-call-parser`; for plugins, as a decorator.

    Raises:
        ConfigError: no name is given, or something else than names.
    """
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(
            f'register_tool_parser takes names and decorates a class, as in @register_tool_parser("mine"); it was '
            f"given {names!r}"
        )

    def register(parser: _ParserType) -> _ParserType:
        if not issubclass(parser, ToolParser):
            raise ConfigError(f"{parser!r} is not a subclass of argosy_engine.parsers' ToolParser")
        TOOL_PARSERS.update(dict.fromkeys(names, parser))
        _registered.extend(names)
        return parser

    return register


def load_tool_parser_plugin(path: str) -> tuple[str, ...]:
    """Run a Python file that registers tool parsers, unless this process has run it, and return their names.

    Its path comes from the command line, never from a client.

    Raises:
        ConfigError: the file cannot be run, or registers nothing.
    """
    file = Path(path).absolute()
    if file in _plugins:
        return _plugins[file]
    spec = importlib.util.spec_from_file_location(f"argosy_tool_parser_plugin_{file.stem}", file)
    _registered.clear()
    try:
        if spec is None or spec.loader is None or not file.is_file():
            raise FileNotFoundError("no such Python file")
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
        if not _registered:
            raise ConfigError("it registers no parser")
    except Exception as error:  # a user's module may raise anything
        reason = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"--tool-parser-plugin {path}: {reason}; give a Python file that registers a subclass of ToolParser with "
            "argosy_engine.parsers.parser_registry.register_tool_parser"
        ) from error
    _plugins[file] = tuple(_registered)
    return _plugins[file]


def check_parser_flags(args: EngineArgs) -> None:
    """Check the flags that name parsers, which needs no model. Runs the plugin.

    Raises:
        ConfigError: the plugin cannot be run or registers nothing, or there is no parser of that name.
    """
    if args.tool_parser_plugin is not None:
        load_tool_parser_plugin(args.tool_parser_plugin)
    if args.tool_call_parser is not None and args.tool_call_parser not in TOOL_PARSERS:
        raise _unknown("--tool-call-parser", args.tool_call_parser, TOOL_PARSERS)
    if args.reasoning_parser is not None and args.reasoning_parser not in REASONING_PARSERS:
        raise _unknown("--reasoning-parser", args.reasoning_parser, REASONING_PARSERS)


def choose_parsers(
    template: str | None,
    model_config: Mapping[str, Any],
    *,
    tool_call_parser: str | None = None,
    reasoning_parser: str | None = None,
) -> ChosenParsers:
    """Choose the parsers of a model.

    Args:
        template: source of the chat template, if the model has one.
        model_config: the model's config.json.
        tool_call_parser: name given by `--tool-call-parser`; None: choose.
        reasoning_parser: name given by `--reasoning-parser`; None: choose.

    Raises:
        ConfigError: there is no parser of that name.
    """
    model_type = str(model_config.get("model_type"))
    tools = tool_call_parser or _chosen(template, _TOOL_MARKS)
    tool_doubt = reasoning_doubt = None
    if tools is None:
        unread = _chosen(template, _UNREAD_TOOL_MARKS)
        tools = _TOOLS_OF_TYPES.get(model_type)
        if unread is not None:
            tool_doubt = (
                f"the chat template has calls in a form that no parser here reads ({unread}): they arrive as content; "
                "--tool-parser-plugin adds a parser"
            )
        elif tools is None and template is not None and "tool" in template:
            tool_doubt = (
                "a guess: neither chat template nor model type tells a known form of calls; if the model calls tools "
                "in another, name it with --tool-call-parser"
            )
        tools = tools or _DEFAULT_TOOL_PARSER
    if tools == "pythonic" and model_type == "llama4" and tool_call_parser is None:
        tools = "llama4_pythonic"
    thoughts = reasoning_parser or _chosen(template, _REASONING_MARKS)
    if thoughts is None:
        thoughts = _DEFAULT_REASONING_PARSER
        reasoning_doubt = (
            "a guess: the chat template has no marks of reasoning; if the model writes others than "
            f"{REASONING_PARSERS[thoughts].start}, name its form with --reasoning-parser"
        )
    if tools not in TOOL_PARSERS:
        raise _unknown("--tool-call-parser", tools, TOOL_PARSERS)
    if thoughts not in REASONING_PARSERS:
        raise _unknown("--reasoning-parser", thoughts, REASONING_PARSERS)
    return ChosenParsers(
        tools, TOOL_PARSERS[tools], thoughts, REASONING_PARSERS[thoughts], tool_doubt, reasoning_doubt
    )


def has_reasoning(template: str) -> bool:
    """Whether a chat template has the marks of a model that reasons."""
    return _chosen(template, _REASONING_MARKS) is not None


def _chosen(template: str | None, marks: tuple[tuple[tuple[str, ...], str], ...]) -> str | None:
    if template is None:
        return None
    return next((name for texts, name in marks if all(text in template for text in texts)), None)


def _unknown(flag: str, name: str, known: Mapping[str, object]) -> ConfigError:
    return ConfigError(
        f"{flag} {name}: there is no such parser; leave the flag out, and the chat template tells the form, or give "
        f"one of {', '.join(sorted(known))}"
    )
