"""The gate: its table of lanes is complete, and what it forgives and refuses is what CONTRIBUTING promises."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

import gate.__main__ as gate_main
from gate import bases, environments, outcomes, repeated, steps, weight, wheels
from gate.__main__ import main
from gate.bases import Selection
from gate.lanes import UNITS, BadTable, Lanes
from gate.outcomes import Outcomes, why_not_again

ROOT = Path(__file__).parents[1]
TABLE = Lanes.read()


def tracked() -> list[str]:
    return bases.git("ls-files", "-z", root=ROOT).strip("\0").split("\0")


def test_every_path_of_the_repository_has_a_row() -> None:
    """A path without one selects every lane, which is safe and slow."""
    missing = [path for path in tracked() if not path.startswith("tests/") and not TABLE.rows_of(path)]
    assert missing == []


def test_every_row_names_something_that_exists() -> None:
    paths = [path.relative_to(ROOT).as_posix() for path in (ROOT / ".ci").rglob("*")] + tracked()
    unused = [
        row for row in (*TABLE.paths, *TABLE.tests) if not any(fnmatchcase(path, row) for path in paths)
    ]
    assert unused == []


def test_product_sources_select_a_lane_that_runs_them() -> None:
    """All that is shipped is tried by more than its unit tests when it changes."""
    without = [
        path
        for path in tracked()
        if path.split("/")[0] in weight.PACKAGES
        and path.endswith(".py")
        and TABLE.selected_by(path) == {UNITS}
    ]
    assert without == []


def test_one_lane_runs_its_own_tests_alone() -> None:
    """Smokes start engines, which take minutes: they belong to `units`, which every change runs."""
    smoke, own = TABLE.smokes[0], "tests/fetcher/test_object_store.py::test_it"
    assert not TABLE.holds(smoke, frozenset({"fetcher"}))
    assert TABLE.holds(own, frozenset({"fetcher"}))
    assert TABLE.holds(f"{smoke}[1]", frozenset({UNITS}))
    assert not TABLE.holds(own, frozenset({UNITS}))


def test_smokes_are_tests_of_other_lanes() -> None:
    wrong = []
    for smoke in TABLE.smokes:
        path, _, name = smoke.partition("::")
        source = (ROOT / path).read_text() if (ROOT / path).is_file() else ""
        if f"def {name.partition('[')[0]}(" not in source or TABLE.of_test(path) == UNITS:
            wrong.append(smoke)
    assert wrong == []


@pytest.mark.parametrize(
    ("path", "lanes"),
    [
        ("docs/serving.md", {"units"}),
        ("engine/argosy_engine/triton_kernels/rms_norm.py", {"units", "processes", "gpu"}),
        ("router/argosy_router/native/xxh3.c", {"units", "processes", "wheel", "clients", "sanitizers"}),
        ("charts/argosy/values.yaml", {"units", "e2e"}),
        ("tests/gpu/test_sampling.py", {"units", "gpu"}),
        ("tests/engine/test_scheduler.py", {"units"}),
        ("tests/router/test_native_modules.py", {"units", "sanitizers"}),
        ("tests/router/harness.py", {"units", "processes", "wheel"}),
        ("protocol/argosy_protocol/fleet.py", {*TABLE.purposes}),
        ("unknown/new_folder.py", {*TABLE.purposes}),
    ],
)
def test_lanes_of_a_changed_path(path: str, lanes: set[str]) -> None:
    assert TABLE.selected_by(path) == lanes


def test_an_unknown_lane_is_refused() -> None:
    with pytest.raises(BadTable, match="no lane gpus; there are units, gpu"):
        TABLE.parse(["units", "gpus"])


class Repository:
    """A repository of one file, in which commits are made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.git("init", "-q")

    def git(self, *arguments: str) -> str:
        identity = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.com"]
        return bases.git(*identity, *arguments, root=self.folder)

    def commit(self, path: str) -> str:
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        with (self.folder / path).open("a") as file:
            file.write("a line\n")
        self.git("add", path)
        self.git("commit", "-qm", f"change {path}")
        return self.git("rev-parse", "HEAD").strip()


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def passed_at(commit: str) -> dict[str, dict[str, str]]:
    return {lane: {"commit": commit} for lane in TABLE.purposes}


def test_a_change_selects_the_lanes_of_its_paths(repository: Repository) -> None:
    base = repository.commit("docs/a.md")
    repository.commit("router/argosy_router/server.py")
    (repository.folder / "charts").mkdir()
    (repository.folder / "charts" / "new.yaml").touch()  # not yet committed
    selection = bases.select(TABLE, passed_at(base), repository.folder)
    assert selection.lanes == {"units", "processes", "wheel", "clients", "e2e"}
    assert "charts/new.yaml changed since" in selection.reasons["e2e"]


def test_a_lane_keeps_its_own_base(repository: Repository) -> None:
    base = repository.commit("docs/a.md")
    later = repository.commit("router/argosy_router/server.py")
    passed = {**passed_at(later), "wheel": {"commit": base}}
    assert bases.select(TABLE, passed, repository.folder).lanes == {"units", "wheel"}


@pytest.mark.parametrize("base", [None, "a" * 40])
def test_a_base_that_is_not_there_selects_everything(base: str | None, repository: Repository) -> None:
    repository.commit("docs/a.md")
    passed = passed_at(base) if base else {}
    assert bases.select(TABLE, passed, repository.folder).lanes == {*TABLE.purposes}


def test_a_base_on_another_branch_selects_everything(repository: Repository) -> None:
    repository.commit("docs/a.md")
    repository.git("checkout", "-qb", "other")
    elsewhere = repository.commit("docs/b.md")
    repository.git("checkout", "-q", "-")
    assert bases.select(TABLE, passed_at(elsewhere), repository.folder).lanes == {*TABLE.purposes}


def test_a_shallow_clone_selects_everything(
    repository: Repository, tmp_path_factory: pytest.TempPathFactory
) -> None:
    base = repository.commit("docs/a.md")
    repository.commit("docs/b.md")
    clone = tmp_path_factory.mktemp("elsewhere") / "clone"
    bases.git("clone", "-q", "--depth", "1", repository.folder.as_uri(), str(clone), root=clone.parent)
    assert bases.select(TABLE, passed_at(base), repository.folder).lanes == {UNITS}
    assert bases.select(TABLE, passed_at(base), clone).lanes == {*TABLE.purposes}


# What came of a run


def report(path: Path, text: str) -> Path:
    path.write_text(f'<testsuites><testsuite name="pytest">{text}</testsuite></testsuites>')
    return path


def case(name: str, inner: str = "", file: str = "tests/test_a.py") -> str:
    return f'<testcase classname="tests.test_a" name="{name}" file="{file}" time="0.5">{inner}</testcase>'


FAILURE = '<failure message="AssertionError: no">def test(): ...</failure>'


def test_a_report_is_read(tmp_path: Path) -> None:
    read = Outcomes.read(
        report(
            tmp_path / "report.xml",
            case("test_one")
            + case("test_two[a]", FAILURE)
            + case("test_three", '<skipped message="no GPU"/>')
            + case("test_four", '<error message="failed on teardown">text</error>'),
        )
    )
    assert read.passed == ["tests/test_a.py::test_one"]
    assert set(read.failed) == {"tests/test_a.py::test_two[a]", "tests/test_a.py::test_four"}
    assert read.skipped == {"tests/test_a.py::test_three": "no GPU"}


def test_a_skip_that_nobody_listed_is_told(tmp_path: Path) -> None:
    listed = tmp_path / "skips.toml"
    listed.write_text('skip = [{ test = "tests/test_a.py::test_b*", reason = "needs a GPU" }]')
    skipped = {"tests/test_a.py::test_b[1]": "", "tests/test_c.py::test_d": ""}
    assert outcomes.unlisted_skips(skipped, listed) == ["tests/test_c.py::test_d"]


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A test that imports a support module, which starts a program of the engine by its name."""
    files = {
        "tests/engine/test_a.py": "from served import SERVE",
        "tests/engine/conftest.py": "import shared",
        "tests/support/served.py": 'SERVE = ["argosy_engine.api.serve", "builtin://tiny"]',
        "tests/support/shared.py": "",
        "tests/support/other.py": "",
        "engine/argosy_engine/__init__.py": "",
        "engine/argosy_engine/api/__init__.py": "",
        "engine/argosy_engine/api/serve.py": "from argosy_engine.api.deep import f",
        "engine/argosy_engine/api/deep.py": "",
        "pyproject.toml": "",
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def test_what_a_test_imports_is_found(sources: Path) -> None:
    reached = outcomes.reached_from("tests/engine/test_a.py", sources)
    assert {
        "tests/engine/test_a.py", "tests/engine/conftest.py", "tests/support/served.py", "tests/support/shared.py",
        "engine/argosy_engine/api/serve.py", "engine/argosy_engine/api/deep.py", "pyproject.toml",
    } <= reached  # fmt: skip
    assert "tests/support/other.py" not in reached


A = "tests/engine/test_a.py::test_x"


@pytest.mark.parametrize(
    ("failed", "changed", "reason"),
    [
        ({A: "AssertionError"}, ["tests/support/other.py", "docs/x.md"], None),
        ({A: "AssertionError"}, ["engine/argosy_engine/api/deep.py"], "which the test imports"),
        ({A: "AssertionError"}, ["tests/engine/test_a.py"], "which the test imports"),
        ({f"{A}{number}": "" for number in range(4)}, [], "4 tests failed"),
        ({A: "worker 'gw1' crashed while running 'x'"}, [], "crashed"),
        ({A: "ERROR: AddressSanitizer: heap-use-after-free"}, [], "sanitizer"),
        ({A: "Falsifying example: test_x(a=1)"}, [], "Hypothesis"),
        ({"tests/known.py::test_y": ""}, [], "not mended"),
    ],
)
def test_what_may_run_again(
    failed: dict[str, str], changed: list[str], reason: str | None, sources: Path
) -> None:
    found = why_not_again(failed, {"tests/known.py::test_y"}, changed, sources)
    assert (found is None) if reason is None else (found is not None and reason in found)


# The gate, with a Makefile that plays the steps

MAKEFILE = """
lint:
\t@true
test:
\t@{command}
bad:
\t@exit 3
"""


@pytest.fixture
def gate(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[bool, str]]:
    """Runs steps in a repository whose `make test` writes one report after another."""
    root = repository.folder
    base = repository.commit("docs/a.md")
    monkeypatch.setattr(bases, "read_passed", lambda: passed_at(base))
    monkeypatch.setattr(steps, "flaky_tests", lambda: {"tests/listed.py::test_z"})
    monkeypatch.setattr(steps, "unlisted_skips", lambda skipped: [test for test in skipped if "new" in test])

    def run(*reports: str, step: str = "test") -> tuple[bool, str]:
        for number, text in enumerate(reports):
            report(root / f"{number}.xml", text)
        script = (
            "import pathlib, re, sys; "
            "path = re.search('--junitxml=(\\\\\\\\S+)', sys.argv[1])[1]; "
            "number = len(list(pathlib.Path().glob('run-*'))); "
            "pathlib.Path(f'run-{number}').write_text(' '.join(sys.argv)); "
            "text = pathlib.Path(f'{number}.xml').read_text(); "
            "pathlib.Path(path).write_text(text); sys.exit('<failure' in text)"
        )
        command = f"'{sys.executable}' -c \"{script}\" '$(PYTEST_ARGS)' '$(TESTS)'"
        (root / "Makefile").write_text(MAKEFILE.format(command=command))
        tried = steps.Gate(root, TABLE, Selection({UNITS: ""}, {"wheel": "unchanged"}))
        plan = [
            steps.Step("bad", step),
            steps.Step("tests", "test", tests="TESTS", reports=True),
            steps.Step("wheel", "test-wheel", "wheel"),
            steps.Step("lint", "lint"),
        ]
        passed = tried.run(plan[1:] if step == "test" else plan)
        return passed, tried.summary()

    return run


def test_a_green_run_counts(gate: Callable[..., tuple[bool, str]], repository: Repository) -> None:
    passed, summary = gate(case("test_one") + case("test_two"))
    assert passed
    assert summary.endswith("2 passed, 0 failed, 0 skipped")
    written = json.loads((repository.folder / "build" / "gate" / "summary.json").read_text())
    assert "wheel" not in written["lanes"]
    assert UNITS in written["lanes"]


def test_a_failed_step_does_not_end_the_run(gate: Callable[..., tuple[bool, str]]) -> None:
    passed, summary = gate(case("test_one"), step="bad")
    assert not passed
    assert "FAILED: bad" in summary
    assert summary.endswith("1 passed, 1 failed, 0 skipped")


def test_a_test_that_passes_alone_is_flaky(
    gate: Callable[..., tuple[bool, str]], repository: Repository
) -> None:
    passed, summary = gate(case("test_one", FAILURE) + case("test_two"), case("test_one"))
    assert passed
    (line,) = [line for line in summary.splitlines() if line.startswith("FLAKY {")]
    row = json.loads(line.removeprefix("FLAKY "))
    assert row["test"] == "tests/test_a.py::test_one"
    assert row["load"] >= 0
    assert "def test(): ..." in summary
    assert "tests-failed.txt" in (repository.folder / "run-1").read_text()


def test_a_test_that_fails_twice_is_red(gate: Callable[..., tuple[bool, str]]) -> None:
    passed, summary = gate(case("test_one", FAILURE), case("test_one", FAILURE))
    assert not passed
    assert "failed: tests/test_a.py::test_one" in summary


def test_a_listed_test_is_not_forgiven_twice(gate: Callable[..., tuple[bool, str]]) -> None:
    passed, summary = gate(case("test_z", FAILURE, "tests/listed.py"), case("test_z", file="tests/listed.py"))
    assert not passed
    assert "failed by chance before" in summary


def test_a_new_skip_is_red(gate: Callable[..., tuple[bool, str]]) -> None:
    passed, summary = gate(case("test_new", '<skipped message="no tool"/>') + case("test_two"))
    assert not passed
    assert "new skip: tests/test_a.py::test_new: no tool" in summary


def test_a_run_without_a_report_is_red(gate: Callable[..., tuple[bool, str]], repository: Repository) -> None:
    passed, _ = gate(case("test_one", FAILURE))  # the second run finds no report to write
    assert not passed


def test_a_full_run_goes_on_and_a_step_is_due_again_after_thirty_commits(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = repository.folder
    (root / ".gitignore").write_text("build/\nran-*\n")
    (root / "Makefile").write_text("one two three:\n\t@echo >>ran-$@; test ! -e fails-$@\n")
    record = root / ".ci" / "gate" / "passed.json"
    record.parent.mkdir(parents=True, exist_ok=True)
    (root / ".git" / "info" / "exclude").write_text("fails-*\n")
    repository.git("add", "-A")
    repository.git("commit", "-qm", "a tree")
    names = ("one", "two", "three")
    monkeypatch.setattr(steps, "full_steps", lambda: [steps.Step(name, name) for name in names])
    monkeypatch.setattr(bases, "PASSED", record)
    monkeypatch.setattr(bases, "read_passed", functools.partial(bases.read_passed, record))
    monkeypatch.setattr(gate_main, "ROOT", root)
    monkeypatch.chdir(root)

    def full(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["gate", "full", *arguments])
        return gate_main.main()

    def runs() -> list[int]:
        files = [root / f"ran-{name}" for name in names]
        return [len(file.read_text().splitlines()) if file.exists() else 0 for file in files]

    (root / "fails-two").touch()
    assert full("--continue", "--steps", "one,two") == 1
    assert runs() == [1, 1, 0]
    (root / "fails-two").unlink()
    assert full("--continue") == 0
    assert runs() == [1, 2, 1], "what passed is left out"
    assert "one: passed at" in capsys.readouterr().out
    assert full("--continue") == 0
    assert runs() == [1, 2, 1]
    assert not {UNITS, "e2e"} & set(bases.read_passed()), "parts of `full` are no pass of a lane"
    for number in range(steps.FULL_LASTS - 1):
        repository.commit(f"docs/{number}.md")
    monkeypatch.setattr(sys, "argv", ["gate", "lanes"])
    assert set(steps.seen_lately(bases.read_passed(), root)) == {*names}
    repository.commit("docs/last.md")
    assert not steps.seen_lately(bases.read_passed(), root)
    (root / "docs" / "own.md").write_text("not committed")
    assert full("--steps", "one") == 0
    assert full("--continue", "--steps", "one") == 0
    assert runs() == [3, 2, 1], "a tree that is no commit's is not recorded"
    assert "nothing is recorded" in capsys.readouterr().err
    assert full("--steps", "four") == 2
    assert "no step four; there are one, two, three" in capsys.readouterr().err


# Environments


def test_an_environment_that_is_not_whole_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "module.py").write_text("x = 1")
    environments.finish(tmp_path)
    assert environments.is_whole(tmp_path)
    (tmp_path / "lib" / "__pycache__").mkdir()
    (tmp_path / "lib" / "__pycache__" / "module.pyc").touch()  # written by whoever imports it
    assert environments.is_whole(tmp_path)
    (tmp_path / "lib" / "module.py").unlink()
    assert not environments.is_whole(tmp_path)


def test_one_of_two_runs_makes_an_environment_that_both_want(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARGOSY_CI_CACHE", str(tmp_path / "cache"))
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("")
    made: list[str] = []
    another = threading.Event()
    run = subprocess.run

    def fake(command: list[str], **options: Any) -> Any:
        if command[1] == "-c":
            return run(command, **options)
        if command[2] == "venv":
            made.append(command[3])
            if len(made) == 2:
                another.set()
            another.wait(0.2)  # for one that does not wait for us
            Path(command[3]).mkdir(exist_ok=True)
        return None

    monkeypatch.setattr(subprocess, "run", fake)
    with ThreadPoolExecutor(2) as pool:
        wanted = [
            pool.submit(environments.cached_environment, sys.executable, ["a"], constraints) for _ in range(2)
        ]
        assert len({each.result() for each in wanted}) == 1
    assert len(made) == 1


def test_a_linked_environment_names_its_own_place(tmp_path: Path) -> None:
    cached, folder = tmp_path / "cached", tmp_path / "checkout" / ".venv"
    (cached / "bin").mkdir(parents=True)
    (cached / "lib").mkdir()
    (cached / "bin" / "tool").write_text(f"#!{cached}/bin/python\n")
    (cached / "bin" / "tool").chmod(0o755)
    (cached / "bin" / "python").symlink_to(sys.executable)
    (cached / "lib" / "module.py").write_text("x = 1")
    (cached / "pyvenv.cfg").write_text(f"command = python -m venv {cached}\n")
    environments.finish(cached)
    folder.parent.mkdir()
    environments.link(cached, folder)
    assert (folder / "bin" / "tool").read_text() == f"#!{folder}/bin/python\n"
    assert (folder / "bin" / "tool").stat().st_mode & 0o111
    assert (cached / "bin" / "tool").read_text() == f"#!{cached}/bin/python\n"
    assert (folder / "lib" / "module.py").samefile(cached / "lib" / "module.py")
    assert environments.is_whole(cached)


def test_a_wheel_is_known_by_its_sources(repository: Repository) -> None:
    repository.commit("router/argosy_router/server.py")
    repository.commit("docs/a.md")
    first = wheels.key(repository.folder)
    repository.commit("docs/a.md")
    assert wheels.key(repository.folder) == first
    (repository.folder / "router" / "argosy_router" / "new.py").touch()  # not yet committed
    assert wheels.key(repository.folder) != first


def test_downloads_are_tried_three_times() -> None:
    tries: list[int] = []

    def fails(until: int) -> None:
        tries.append(1)
        if len(tries) < until:
            raise subprocess.CalledProcessError(1, "pip")

    environments.try_again("pip", lambda: fails(3))
    assert len(tries) == 3
    tries.clear()
    with pytest.raises(subprocess.CalledProcessError):
        environments.try_again("pip", lambda: fails(4))
    assert len(tries) == 3


def test_groups_include_groups() -> None:
    project = {
        "project": {"dependencies": ["a"], "optional-dependencies": {"x": ["b"]}},
        "dependency-groups": {"dev": ["c", {"include-group": "more"}], "more": ["d", "a"]},
    }
    assert environments.requirements(project, ("dev",), ("x",)) == ["a", "b", "c", "d"]
    assert environments.requirements(project, ("more",), ()) == ["d", "a"]


def test_the_path_of_a_request_is_counted_in_its_table() -> None:
    page = (
        "# A\n`other.py`\n## The path of a request\nprose `no.py`\n"
        "| step | `a/one.py`, `two.py` |\n| again | `one.py` |\n"
        "\n## Next\n| `three.py` |\n"
    )
    assert weight.path_of_a_request(page) == {"one.py", "two.py"}


@pytest.mark.parametrize("command", ["slow", "record"])
def test_a_command_without_its_report_names_the_run_that_writes_it(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "report"
    monkeypatch.setattr(sys, "argv", ["gate", command, str(missing)])
    assert main() == 2
    assert f"there is no {missing}: run `bash .ci/run --lanes all` first" in capsys.readouterr().err


def test_the_tests_that_are_named_are_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever has changed."""
    told = tmp_path / "told"
    make = tmp_path / "make"
    make.write_text(f'#!/bin/sh\nfor each; do echo "$each" >> {told}; done\n')
    make.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(
        sys, "argv", ["repeated", "--times", "1", "--busy", "0", "--tests", "tests/test_a.py b"]
    )
    assert repeated.main() == 0
    assert "TESTS=tests/test_a.py b" in told.read_text().splitlines()


def test_make_hands_the_named_tests_to_the_repetition() -> None:
    for words, is_named in ((["TESTS=tests/test_gate.py"], True), ([], False)):
        command = ["make", "-n", "test-repeated", "INSTALLED_DEV=Makefile", *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert ("--tests 'tests/test_gate.py'" in done.stdout) == is_named
        assert ("--tests" in done.stdout) == is_named


def test_a_file_that_does_not_exist_is_named() -> None:
    command = [sys.executable, "-P", "-m", "pytest", "tests/no_such_test.py", "-n", "2", "--lanes", "units"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "there is no tests/no_such_test.py; TESTS= takes files and folders" in done.stderr
