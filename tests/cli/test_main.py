"""The table of commands: help, errors, and which modules it does not import."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from argosy import main as cli
from argosy.errors import EXIT_CODES, CommandError, UsageError
from argosy.main import COMMANDS, Command, main
from argosy_engine.api import serve
from argosy_router import main as router

HEAVY = ("torch", "numpy", "fastapi", "uvicorn", "kopf", "kubernetes", "rich", "yaml", "jsonschema", "celpy")
HEAVY_OF_OURS = (
    "argosy_engine",
    "argosy_router",
    "argosy_operator",
    "argosy_resource",
    "asyncio",
    "argparse",
    "difflib",
)


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_and_version_import_nothing_heavy(argument: str) -> None:
    script = (
        "import sys; from argosy.main import main; code = main(sys.argv[1:]); "
        "print(*sys.modules, file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, argument], capture_output=True, text=True, check=True
    )
    loaded = set(done.stderr.split())
    assert loaded & set(HEAVY) == set()
    if argument == "--help":
        assert loaded & set(HEAVY_OF_OURS) == set()
        assert all(f"  {command.name} " in done.stdout for command in COMMANDS)
    else:
        assert done.stdout.startswith("argosy ")


def test_every_listed_command_exists() -> None:
    for command in COMMANDS:
        module, _, function = command.target.partition(":")
        spec = importlib.util.find_spec(module)
        assert spec is not None, command.name
        assert spec.origin is not None
        with open(spec.origin, encoding="utf-8") as source:
            assert f"def {function}(" in source.read(), command.name


@pytest.mark.parametrize("command", [c.name for c in COMMANDS if c.target.startswith("argosy.")])
def test_a_command_shows_its_arguments(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        main([command, "--help"])
    assert ending.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: argosy {command}")


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (["pss"], 2, "argosy: 'pss' is not a command; did you mean 'ps'?\n"),
        (["xyzzy"], 2, "argosy: 'xyzzy' is not a command; `argosy --help` lists the commands\n"),
        (["down", "--grace", "never"], 2, "argosy down: argument --grace: invalid"),
        (["up"], 2, "argosy up: the following arguments are required: -f/--file; `argosy up --help` shows"),
        (["up", "-f", "missing.yaml"], 2, "argosy up: cannot read missing.yaml: No such file or directory\n"),
        (["chat", "tiny", "hi", "--url", "ftp://x"], 2, "argosy chat: 'ftp://x' is not an http"),
        (
            [
                "route",
                "tiny",
                "--session",
                "s",
                "hi",
                "--admin-url",
                "http://127.0.0.1:1",
            ],  # a flag in between
            1,
            "argosy route: no answer from http://127.0.0.1:1: Connection refused",
        ),
        (
            ["chat", "tiny", "hi", "--url", "http://127.0.0.1:1"],
            1,
            "argosy chat: no answer from http://127.0.0.1:1: Connection refused; is the fleet up",
        ),
    ],
)
def test_errors_are_one_line_with_the_remedy(
    arguments: list[str], code: int, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == code
    text = capsys.readouterr().err
    assert text.startswith(error)
    assert text.count("\n") == 1


def test_the_help_lists_every_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    _, _, listed = capsys.readouterr().out.partition("exit codes:\n")
    assert [int(line.split()[0]) for line in listed.splitlines()] == list(EXIT_CODES)
    assert set(EXIT_CODES) >= {error.exit_code for error in (CommandError, UsageError)}
    assert EXIT_CODES.keys() >= {
        router.EXIT_USAGE,
        router.EXIT_ADDRESS,
        serve.EXIT_ADDRESS,
        serve.EXIT_INTERRUPTED,
    }


def test_no_arguments_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("usage: argosy COMMAND")


def test_a_missing_extra_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    command = Command("serve", "no_such_package.serve:main", "help", "engine")
    monkeypatch.setattr(cli, "COMMANDS", (command,))
    assert main(["serve"]) == 1
    assert (
        "needs the package 'no_such_package': `pip install '.[engine]'` in the checkout"
        in capsys.readouterr().err
    )


def test_crd_prints_the_definition(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["crd"]) == 0
    assert "kind: CustomResourceDefinition" in capsys.readouterr().out


def test_benchmarks_are_named_to_whoever_chooses_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        main(["bench"])
    assert ending.value.code == 2
    assert "choose a benchmark: serve, throughput, latency, router; " in capsys.readouterr().err
