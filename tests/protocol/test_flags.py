"""Flags made from configuration classes: spelling, order of sources, and what bad values are told."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from msgspec import Meta, Struct

from argosy_protocol.program.flags import Flag, FlagParser, InvalidValue, convert_arguments


@dataclass(frozen=True, kw_only=True)
class Limits:
    timeout_s: Annotated[float, Meta(gt=0, le=60, description="how long"), Flag(group="times")] = 5.0
    retries: Annotated[int, Meta(ge=0), Flag(is_hidden=True)] = 3


@dataclass(frozen=True, kw_only=True)
class Config:
    port: Annotated[int, Meta(ge=0, le=65535, description="where")] = 80
    urls: Annotated[tuple[str, ...], Meta(description="which"), Flag(name="url", is_repeatable=True)] = ()
    mode: Annotated[Literal["fast", "safe"], Meta(description="how")] = "fast"
    check: Annotated[bool, Meta(description="whether")] = True
    no_rest: Annotated[bool, Meta(description="whether not")] = False
    memory: Annotated[int, Meta(ge=1, description="how much"), Flag(is_size=True)] = 1
    token: Annotated[str, Meta(description="who"), Flag(environment="TOKEN")] = ""
    secret: Annotated[bytes, Flag(is_hidden=True, environment="SECRET")] = b""
    tokens: Annotated[
        tuple[str, ...], Meta(description="all"), Flag(is_repeatable=True, environment="TOKENS")
    ] = ()
    keys: Annotated[
        tuple[str, ...],
        Meta(description="keys"),
        Flag(name="key", is_repeatable=True, takes_several=True, environment="KEY"),
    ] = ()
    limits: Limits = field(default_factory=Limits)


class Shape(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    form: Literal["round", "square"] = "round"
    sizes: tuple[Annotated[int, Meta(ge=1)], ...] = ()


class Other(Struct, frozen=True, kw_only=True):
    names: Annotated[tuple[str, ...], Meta(description="of whom")] = ()
    options: Annotated[dict[str, int] | None, Meta(description="what else"), Flag(is_json=True)] = None
    shape: Annotated[Shape, Meta(description="JSON"), Flag(is_json=True, other_keys="draw other shapes")] = (
        Shape()
    )
    length: Annotated[
        int | Literal["auto"] | None,
        Meta(description="how long"),
        Flag(is_size=True, form="must be a number or auto"),
    ] = None
    colours: Annotated[tuple[str, ...], Meta(description="JSON list"), Flag(is_json=True)] = ("red",)


def read(
    arguments: list[str],
    environment: dict[str, str] | None = None,
    *,
    file: Path | None = None,
    **others: Any,
) -> tuple[Config, Other]:
    parser = FlagParser("prog", "Does it.")
    parser.add_config(Config)
    parser.add_config(Other, "others")
    options = parser.parse_args([*arguments, *(["--config", str(file)] if file else [])])
    return parser.build(Config, options, environment, **others), parser.build(Other, options)


def test_every_field_is_a_flag_nested_ones_too() -> None:
    numbers = ["--port", "8080", "--memory", "2K", "--timeout", "1.5"]
    lists = ["--url", "a", "--url", "b", "--names", "x", "y"]
    config, other = read([*numbers, *lists, "--mode", "safe", "--no-check", "--options", '{"k": 1}'])
    assert config == Config(
        port=8080, urls=("a", "b"), mode="safe", check=False, memory=2048, limits=Limits(timeout_s=1.5)
    )
    assert other == Other(names=("x", "y"), options={"k": 1})


def test_a_repeatable_flag_may_take_several_values_each_time(tmp_path: Path) -> None:
    assert read(["--key", "a", "b", "--port", "1", "--key=c", "--key", "d"])[0].keys == ("a", "b", "c", "d")
    (tmp_path / "flags.yaml").write_text("key: [a, b]\n")
    assert read([], file=tmp_path / "flags.yaml")[0].keys == ("a", "b")
    assert read([], {"KEY": "e"}, file=tmp_path / "flags.yaml")[0].keys == ("e",)
    assert read(["--key", "f", "g"], {"KEY": "e"}, file=tmp_path / "flags.yaml")[0].keys == ("f", "g")


@pytest.mark.parametrize("colours", [(), ("blue",), ("blue", "green")])
def test_a_list_may_be_one_flag_with_a_json_list(tmp_path: Path, colours: tuple[str, ...]) -> None:
    text = json.dumps(colours)
    assert read(["--colours", text])[1].colours == colours
    (tmp_path / "flags.yaml").write_text(f"colours: {text}\n")
    assert read([], file=tmp_path / "flags.yaml")[1].colours == colours


def test_a_json_list_must_be_one() -> None:
    assert read([])[1].colours == ("red",)
    for text, told in (("blue", "--colours is not JSON: 'blue'"), ('"blue"', "--colours: Expected `array`")):
        with pytest.raises(InvalidValue, match=re.escape(told)):
            read(["--colours", text])


def test_a_configuration_class_may_be_one_flag_with_a_json_object(tmp_path: Path) -> None:
    shape = Shape(form="square", sizes=(1, 2))
    _, other = read(["--shape", '{"form": "square", "sizes": [1, 2]}'])
    assert other.shape == shape
    file = tmp_path / "config.yaml"
    file.write_text("shape: {form: square, sizes: [1, 2]}\n")
    _, other = read([], file=file)
    assert other.shape == shape
    assert convert_arguments({"shape": {"form": "square", "sizes": [1, 2]}}, Other).shape == shape
    with pytest.raises(SystemExit):
        read(["--form", "square"])  # it is a key, not a flag


def test_json_may_be_given_by_keys(capsys: pytest.CaptureFixture[str]) -> None:
    _, other = read(["--shape.form", "square", "--options.a=1", "--shape.sizes+", "1,2", "--options.b", "2"])
    assert (other.shape, other.options) == (Shape(form="square", sizes=(1, 2)), {"a": 1, "b": 2})
    _, other = read(["--options.a", "1", "--options", '{"b": 2}'])
    assert other.options == {"a": 1}, "as in vLLM"
    for words, told in (
        (["--shape.form"], "--shape.form needs a value"),
        (["--shape.", "1"], "--shape. needs a key"),
        (["--shape.form", "round", "--shape.form.x", "1"], "form has a value already"),
        (["--shape.size", "1"], "unknown field `size`"),
        (["--port.x", "1"], "unknown argument --port.x"),
        (["--other.x", "1"], "unknown argument --other.x"),
    ):
        with pytest.raises((SystemExit, InvalidValue)) as raised:
            read(words)
        assert told in f"{raised.value}{capsys.readouterr().err}"


def test_words_with_dots_that_are_no_keys() -> None:
    config, other = read(["--token=a.b", "--names", "x.y"])
    assert (config.token, other.names) == ("a.b", ("x.y",))


def test_a_negative_switch_has_no_negation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "flags.yaml"
    for value in (True, False):
        file.write_text(json.dumps({"no-rest": value}))
        assert read([], file=file)[0].no_rest is value
    assert read(["--no-rest"])[0].no_rest
    with pytest.raises(SystemExit):
        read(["--no-no-rest"])
    assert "--no-no-rest" in capsys.readouterr().err


def test_defaults_without_any_source() -> None:
    assert read([]) == (Config(), Other())


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("token: file\nport: 1\ntokens: [a, b]\nlimits: 3\n")
    with pytest.raises(SystemExit):
        read([], file=file)  # `limits` is no flag
    file.write_text("token: file\nport: 1\ntokens: [a, b]\ntimeout: 3\n")
    environment = {"TOKEN": "environment", "SECRET": "s", "TOKENS": "c", "PORT": "2"}
    config, _ = read([], file=file)
    assert (config.token, config.port, config.tokens, config.limits.timeout_s) == ("file", 1, ("a", "b"), 3.0)
    config, _ = read([], environment, file=file)
    assert (config.token, config.secret, config.tokens, config.port) == ("environment", b"s", ("c",), 1)
    config, _ = read(["--token", "line", "--tokens", "d"], environment, file=file)
    assert (config.token, config.tokens) == ("line", ("d",))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "x"], "--port: must be a whole number from 0 to 65535, not 'x'"),
        (["--port", "8_0"], "--port: must be a whole number from 0 to 65535, not '8_0'"),
        (["--timeout", "nan"], "--timeout: must be a number above 0 and at most 60, not 'nan'"),
        (["--timeout", "inf"], "--timeout: must be a number above 0 and at most 60, not 'inf'"),
        (["--timeout", "6_0"], "--timeout: must be a number above 0 and at most 60, not '6_0'"),
        (["--timeout", "61."], "--timeout: must be a number above 0 and at most 60, not 61.0"),
        (["--length", "abc"], "--length: must be a number or auto, not 'abc'"),
        (["--port", "65536"], "--port: must be a whole number from 0 to 65535"),
        (["--timeout", "0"], "--timeout: must be a number above 0 and at most 60"),
        (["--memory", "0"], "--memory: must be a whole number at least 1"),
        (["--memory", "1.0001k"], "--memory 1.0001k is not a whole number"),
        (["--options", "{"], "--options is not JSON"),
        (["--options", '{"k": 1'], "is not JSON: '{\"k\": 1' .Expecting ',' delimiter at character 8."),
        (["--options", "9" * 5000], "a number is too long"),
        (["--options", '{"k": "v"}'], "--options: Expected `int`"),
        (["--shape", "{"], "--shape is not JSON"),
        (["--shape", '{"form": "flat"}'], "--shape: form: must be one of round, square, not 'flat'"),
        (["--shape", '{"sizes": [0]}'], "--shape: sizes: Expected `int` >= 1"),
        (
            ["--shape", '{"form2": "flat"}'],
            "--shape: Object contains unknown field `form2`; there are form, sizes; draw other shapes",
        ),
    ],
)
def test_a_bad_value_is_told_by_its_flag_and_in_words(arguments: list[str], message: str) -> None:
    with pytest.raises(InvalidValue, match=message.replace("{", r"\{")):
        read(arguments)


def test_a_file_that_cannot_be_read_is_told_with_the_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "flags.yaml"
    with pytest.raises(SystemExit):
        read([], file=path)
    assert f"cannot read {path}: No such file or directory; " in capsys.readouterr().err
    path.write_text("port: 1\ncolours: [")
    with pytest.raises(SystemExit):
        read([], file=path)
    assert " at line 2, column 11" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "number"), [(".9", 0.9), ("5.", 5.0), ("+.5", 0.5), (" 1 ", 1.0), ("1e1", 10.0), ("007", 7.0)]
)
def test_numbers_are_what_float_and_int_take(text: str, number: float) -> None:
    config, _ = read([f"--timeout={text}"])
    assert config.limits.timeout_s == number
    assert convert_arguments({"timeout_s": text}, Limits).timeout_s == number
    config, _ = read(["--port", "+080"])
    assert config.port == 80


def test_flags_may_be_spelt_with_underscores_as_in_vllm() -> None:
    config, _ = read(["--no_check", "--url=http://a_b", "--token", "a_b"])
    assert (config.check, config.urls, config.token) == (False, ("http://a_b",), "a_b")


@pytest.mark.parametrize(
    ("unknown", "suggestion"),
    [
        ("--prot", "; did you mean --port?"),
        ("--port-number=1", ""),
        ("--tokken", "; did you mean --token?"),
        ("--memry=4k", "; did you mean --memory?"),
        ("--time-outs", "; did you mean --timeout?"),
        ("--no_chek", "; did you mean --no-check?"),
        ("--cors", ""),
        ("--tensor", ""),
        ("-x", ""),
        ("--", ""),
    ],
)
def test_an_unknown_flag_gets_a_suggestion_if_one_is_close(
    unknown: str, suggestion: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        read([unknown, "1"])
    assert left.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"prog: unknown argument {unknown}{suggestion}; `prog --help` lists the flags"


@dataclass(frozen=True, kw_only=True)
class Longer:
    max_model_len: int = 1
    gpu_memory_utilization: float = 1.0


@pytest.mark.parametrize(
    ("unknown", "suggestion"),
    [
        ("--max-len", "; did you mean --max-model-len?"),
        ("--gpu-memory", "; did you mean --gpu-memory-utilization?"),
        ("--model", ""),
        ("--len", ""),
    ],
)
def test_a_flag_that_lacks_a_word_gets_a_suggestion(
    unknown: str, suggestion: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = FlagParser("prog", "Does it.")
    parser.add_config(Longer)
    with pytest.raises(SystemExit):
        parser.parse_args([unknown, "1"])
    assert capsys.readouterr().err.startswith(f"prog: unknown argument {unknown}{suggestion}; `prog --help`")


def test_hidden_fields_have_no_flag_and_may_be_given_otherwise() -> None:
    with pytest.raises(SystemExit):
        read(["--secret", "x"])
    with pytest.raises(SystemExit):
        read(["--retries", "1"])
    config, _ = read([], secret=b"given")
    assert config.secret == b"given"


def test_help_tells_defaults_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    parser = FlagParser("prog", "Does it.")
    parser.add_config(Config)
    text = parser.format_help()
    assert "where (default: 80)" in text
    assert "whether (default: on)" in text
    assert "which\n" in text
    assert "how long (default: 5)" in text


def test_arguments_of_python_take_what_flags_take() -> None:
    assert convert_arguments({"memory": "64M", "port": 8080}, Config) == Config(memory=64 << 20, port=8080)
    for memory in ("64X", 0):
        with pytest.raises(InvalidValue, match="memory: must be a whole number at least 1"):
            convert_arguments({"memory": memory}, Config)


@pytest.mark.parametrize(("name", "hint"), [("prot", "; did you mean port?"), ("colour", "")])
def test_an_unknown_argument_is_named_with_the_one_that_is_meant(name: str, hint: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        convert_arguments({name: 1}, Config)
    assert str(refused.value) == f"there is no argument {name}{hint}"
