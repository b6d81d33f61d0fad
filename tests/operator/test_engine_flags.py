"""Arguments of the engine in a manifest are those that the engine's own parser takes."""

from __future__ import annotations

import json
from pathlib import Path

import celpy
import pytest
from builders import CONFIG, isvc

from argosy_engine.api.serve import parse_args
from argosy_operator.desired.children import deployment_problem, plan_children
from argosy_operator.observation import Observation
from argosy_resource import engine_arguments
from argosy_resource.engine_arguments import (
    FLAG_FIELDS,
    FLAGS,
    MAX_ARGUMENTS,
    OPERATOR_FLAGS,
    RULE_OF_TEXT,
    EngineFlag,
    argument_problems,
)
from argosy_resource.engine_command import engine_args
from argosy_resource.validation import ManifestError, load_manifests
from engine_flags.__main__ import render
from manifests_table import TINY, manifest

SETTABLE = [
    flag
    for flag in FLAGS.values()
    if not flag.refused and flag.name not in OPERATOR_FLAGS and f"--{flag.name}" not in FLAG_FIELDS
]
NUMBERS = [flag for flag in SETTABLE if flag.kind in ("integer", "number")]
JSON = {"allowed-origins": '["*"]', "allowed-methods": '["GET"]', "allowed-headers": '["*"]'}
TEXTS = {
    "otlp-traces-endpoint": "http://collector:4318/v1/traces",
    "warm-up-from": "http://engines.team.svc:8000",
    "tool-call-parser": "hermes",
    "reasoning-parser": "qwen3",
    "middleware": "package.Class",
    "logits-processors": "package:Class",
    "uvicorn-log-level": "info",
    "chat-template": "{{ messages }}",
}


def takes(argument: str) -> bool:
    """Whether the engine's own parser does."""
    try:
        parse_args(["builtin://tiny", argument])
    except SystemExit:
        return False
    return True


def is_valid(*arguments: str) -> bool:
    try:
        load_manifests(manifest(f"{TINY}\nengine: {{args: {json.dumps(arguments)}}}"))
    except ManifestError:
        return False
    return True


def test_the_flags_are_the_engines() -> None:
    file = Path(engine_arguments.__file__).with_name("engine_flags.json")
    assert file.read_text("utf-8") == render(), "run: make generate"


def example(flag: EngineFlag) -> str:
    """An argument with a value that the flag takes."""
    match flag.kind:
        case "switch":
            return f"--{flag.name}"
        case "json":
            return f"--{flag.name}={JSON.get(flag.name, '{}')}"
        case "text":
            return f"--{flag.name}={flag.choices[0] if flag.choices else TEXTS.get(flag.name, 'auto')}"
    return f"--{flag.name}={int(flag.le if flag.gt is not None and flag.le else flag.ge or 0)}"


def test_a_flag_with_a_value_of_its_type_is_accepted() -> None:
    arguments = {flag.name: example(flag) for flag in SETTABLE}
    problems = {name: argument_problems([argument]) for name, argument in arguments.items()}
    assert {name: found for name, found in problems.items() if found} == {}
    refused = [name for name, argument in arguments.items() if not takes(argument)]
    assert refused == ["allowed-local-media-path", "tool-parser-plugin"], "which name files"


def test_a_manifest_may_give_every_flag() -> None:
    arguments = [example(flag) for flag in SETTABLE]
    for start in range(0, len(arguments), MAX_ARGUMENTS):
        assert is_valid(*arguments[start : start + MAX_ARGUMENTS])


def test_numbers_have_the_engines_bounds() -> None:
    wrong: dict[str, object] = {}
    for flag in NUMBERS:
        least = flag.gt if flag.ge is None else flag.ge
        assert least is not None, flag
        assert flag.le is not None, flag
        for bound in (least, flag.le):
            argument = f"--{flag.name}={bound:.0f}"
            if (argument_problems([argument]) == []) is not (bound != flag.gt) and not bound % 1:
                wrong[argument] = argument_problems([argument])
        for value in (int(least) - (flag.gt is None), int(flag.le) + 1):
            argument = f"--{flag.name}={value}"
            problems = argument_problems([argument])
            is_told = [problem.startswith(f"--{flag.name} must be ") for problem in problems] == [True]
            if not is_told or takes(argument):
                wrong[argument] = problems
    assert wrong == {}


@pytest.mark.parametrize("flag", [flag for flag in SETTABLE if flag.choices], ids=lambda flag: flag.name)
def test_choices_are_the_engines(flag: EngineFlag) -> None:
    for choice in flag.choices:
        assert argument_problems([f"--{flag.name}={choice}"]) == []
    assert argument_problems([f"--{flag.name}=other"]) == [
        f"--{flag.name} must be one of {', '.join(flag.choices)}"
    ]
    assert not is_valid(f"--{flag.name}=other")
    assert not takes(f"--{flag.name}=other")


@pytest.mark.parametrize(
    ("args", "problems"),
    [
        (["--max-logprob=5"], ["unknown flag --max-logprob; did you mean --max-logprobs?"]),
        (["--frobnicate"], ["unknown flag --frobnicate"]),
        (["max-logprobs=5"], ["'max-logprobs=5' is not --flag=value or --flag"]),
        (["--max-model-len=5"], ["--max-model-len is set by spec.engine.maxModelLen"]),
        (["--no-enable-prefix-caching"], ["--enable-prefix-caching is set by spec.engine.enablePrefixCaching"]),
        (["--revision=main"], [
            "--revision cannot be set here: name the revision in spec.model.source, such as hf://ORG/NAME@REVISION"
        ]),
        (["--enable-lora"], [
            "--enable-lora is not supported: adapters are not served yet; serve the merged model"
        ]),
        (["--enable-dbo"], ["--enable-dbo is not supported: the engine does not do that"]),
        (["--enforce-eager=yes"], ["--enforce-eager takes no value; write --enforce-eager or --no-enforce-eager"]),
        (["--max-logprobs"], ["--max-logprobs needs a value: --max-logprobs=VALUE"]),
        (["--max-logprobs=5.5"], [
            "--max-logprobs must be a whole number at least -1 and at most 1048576, not 5.5"
        ]),
        (["--watermark=0.6"], ["--watermark must be a number at least 0 and at most 0.5, not 0.6"]),
        (["--watermark=.4"], []),
        (["--watermark=4.E-1"], []),
        (["--watermark=."], ["--watermark must be a number at least 0 and at most 0.5, not ."]),
        (["--pooler-config={"], ["--pooler-config is not JSON: '{'"]),
        (["--seed=1", "--no-enforce-eager", "--seed=2", "--enforce-eager"], [
            "--seed is given 2 times; give it once", "--enforce-eager is given 2 times; give it once"
        ]),
        (["--middleware=a.b", "--middleware=c.d"], []),
        (["--structured-outputs-cache-bytes=2.5M"], []),
        (["--structured-outputs-cache-bytes=0.00001K"], [
            "--structured-outputs-cache-bytes must be a whole number at least 0 and at most 1099511627776, "
            "not 0.00001K"
        ]),
    ],
    ids=str,
)  # fmt: skip
def test_problems_name_the_flag_and_the_remedy(args: list[str], problems: list[str]) -> None:
    assert argument_problems(args) == problems


def refusals(*arguments: str) -> list[str]:
    """What is told of each rule that the arguments break."""
    try:
        load_manifests(manifest(f"{TINY}\nengine: {{args: {json.dumps(arguments)}}}"))
    except ManifestError as refused:
        return [str(error) for error in refused.errors]
    return []


REFUSED = [
    *("--port=1", "--no-enable-lora", "--max-num-seqs=4", "--no-enable-prefix-caching", "--revision=a"),
    *("--chat-template", "--pooler-config=a", "--kv-cache-dtype=a", "--watermark=a", "--runner"),
    *("--frobnicate", "--frobnicate=5", "--no-max-logprobs=5", "--max-logprobs=x", "--enforce-eager=1"),
    *("--limit-mm-per-prompt=image=2", "--limit-mm-per-prompt"),
    *("-tp=2", "max-logprobs=5", "--max-logprobs 5", "--port 9000", "--max-logprobs=5\n", "--", "-", "5"),
]


@pytest.mark.parametrize(("value", "is_taken"), [
    ('{"image": 0, "video": 0}', True), ("{}", True), ('{"image": 1}', True),
    ('{"video": {"count": 1, "num_frames": 32}}', True), ("image=0,video=4", False),
])  # fmt: skip
def test_limits_of_media_are_json(value: str, is_taken: bool) -> None:
    """A resource, `argosy up` and the engine's command line agree."""
    argument = f"--limit-mm-per-prompt={value}"
    told = [] if is_taken else [f"--limit-mm-per-prompt is not JSON: {value!r}"]
    assert argument_problems([argument]) == told
    assert takes(argument) is is_taken
    assert len(refusals(argument, "--seed=1")) == len(told)


def test_an_argument_is_refused_once() -> None:
    told = {argument: refusals("--seed=1", argument, "--enforce-eager") for argument in REFUSED}
    assert {argument: messages for argument, messages in told.items() if len(messages) != 1} == {}


@pytest.mark.parametrize("engine", ["argosy", "vllm"])
def test_the_rules_are_evaluated_as_an_api_server_does(engine: str) -> None:
    environment = celpy.Environment()
    for text, rule in RULE_OF_TEXT.items():
        program = environment.program(environment.compile(text))
        for argument in REFUSED if "kv-cache-dtype" in text else REFUSED[::3]:
            args = [argument, "--seed=1"]
            value = celpy.json_to_cel({"type": engine, "args": args})
            assert bool(program.evaluate({"self": value})) is (rule.refused(args, engine) == []), (text, args)


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--max-num-seqs=4"], ["spec.engine.args: Invalid value: --max-num-seqs is set by spec.engine.maxNumSeqs"]),
        (["--max-logprobs", "5"], [
            "spec.engine.args[1]: Invalid value: \"5\": must be one flag with two dashes, and its value behind '=': "
            "--flag=value, or --flag alone"
        ]),
        (["--max-logprob=5", "--frobnicate"], [
            "spec.engine.args: Invalid value: the engine does not have the flag [\"--max-logprob=5\", "
            "\"--frobnicate\"]; `argosy serve --help` and docs/reference/engine-flags.md list the flags "
            "(unknown flag --max-logprob; did you mean --max-logprobs?; unknown flag --frobnicate)"
        ]),
        (["--dtype=auto", "--enforce-eager=1"], [
            "spec.engine.args: Invalid value: --dtype is set by spec.engine.dtype",
            "spec.engine.args: Invalid value: a switch takes no value, as in [\"--enforce-eager=1\"]; write --flag or "
            "--no-flag (--enforce-eager takes no value; write --enforce-eager or --no-enforce-eager)"
        ]),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_told_of_an_argument_is_true(args: list[str], told: list[str]) -> None:
    assert refusals(*args) == told


def test_numbers_are_written_as_on_the_command_line() -> None:
    for number in ("0.4", ".4", "+.4", "4e-1", "4.E-1", "0"):
        assert refusals(f"--watermark={number}") == []
        _, engine = parse_args(["--model=tiny", f"--watermark={number}"])
        assert engine.watermark == float(number)
    for number in (".", "e5", "0.4.1", "+.4x", "nan", "inf"):
        assert len(refusals(f"--watermark={number}")) == 1
    for whole in ("7", "+7", "-1"):
        assert refusals(f"--max-logprobs={whole}") == []
        _, engine = parse_args(["--model=tiny", f"--max-logprobs={whole}"])
        assert engine.max_logprobs == int(whole)
    assert len(refusals("--max-logprobs=+-7")) == 1
    assert refusals("--seed=+9223372036854775807") == []
    assert len(refusals("--structured-outputs-cache-bytes=+4096")) == 1, "sizes have no sign"


def test_a_manifest_with_an_unknown_flag_is_told_the_nearest() -> None:
    with pytest.raises(ManifestError, match="unknown flag --enforce-eagr; did you mean --enforce-eager"):
        load_manifests(manifest(f"{TINY}\nengine: {{args: [--enforce-eagr]}}"))


def test_arguments_come_last() -> None:
    service = isvc(engine={"args": ["--max-logprobs=5", "--enforce-eager"]})
    assert engine_args(service)[-2:] == ["--max-logprobs=5", "--enforce-eager"]
    _, engine = parse_args(engine_args(service)[1:])
    assert (engine.max_logprobs, engine.enforce_eager) == (5, True)


def test_arguments_reach_the_engine_as_they_are() -> None:
    """Kubernetes would put the value of a variable in the place of $(NAME)."""
    service = isvc(engine={"args": ["--chat-template=$(ARGOSY_API_KEY)"]})
    (container,) = plan_children(service, Observation(), CONFIG).deployment["spec"]["template"]["spec"][
        "containers"
    ]
    assert container["args"][-1] == "--chat-template=$$(ARGOSY_API_KEY)"


def test_what_the_api_server_cannot_tell_is_a_condition() -> None:
    problem = deployment_problem(isvc(engine={"args": ["--max-logprobs=-2"]}), CONFIG)
    assert problem is not None
    assert problem.reason == "InvalidEngineArgs"
    assert problem.message.startswith("spec.engine.args: --max-logprobs must be a whole number")
    assert deployment_problem(isvc(engine={"args": ["--max-logprobs=2"]}), CONFIG) is None
