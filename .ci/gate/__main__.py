"""python3 -m gate COMMAND, with PYTHONPATH=.ci, in the root of a checkout.

prepare [--full]       install what the steps need, from the cache where it has it
run [--lanes WORDS]    the steps that the change selects, or those lanes; `all` for every lane
full [--continue] [--steps NAMES]
                       everything; or what no run has seen pass for 30 commits; or some steps of it
lanes                  which lanes a run would choose, and why; which steps of `full` are due
record [SUMMARY]       note in passed.json which lanes that run saw pass (build/gate/summary.json)
slow REPORT            fail if a test of `units` took longer than a test of every change may; record how long each file
                       took
weight                 modules, lines and files of a request's path
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from gate import bases, environments, steps, weight
from gate.lanes import ALL, UNITS, BadTable, Lanes
from gate.outcomes import Outcomes

ROOT = Path(__file__).resolve().parents[2]
SECONDS = Path(__file__).with_name("seconds.json")
"""Seconds of each file of tests that takes one or more; tests/conftest.py begins with the longest."""
SUMMARY = "build/gate/summary.json"
SLOW_S = 3.0
"""A test that every change runs takes less, recorded on two cores without other load."""
SLOW_WITH_PROCESS_S = 1.0
"""One that starts programs: small ones, no engine."""


class NoReport(Exception):
    """A command needs what a run writes, and it is not there."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="gate", description="the gate that a change passes")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("prepare").add_argument("--full", action="store_true")
    commands.add_parser("run").add_argument("--lanes", default="")
    everything = commands.add_parser("full")
    everything.add_argument("--continue", action="store_true", dest="goes_on")
    everything.add_argument("--steps", default="", help="only these, comma-separated")
    for name in ("lanes", "weight"):
        commands.add_parser(name)
    commands.add_parser("record").add_argument("summary", nargs="?", default=SUMMARY)
    commands.add_parser("slow").add_argument("report")
    arguments = parser.parse_args()
    try:
        return COMMANDS[arguments.command](arguments)
    except (BadTable, NoReport, subprocess.CalledProcessError) as error:
        print(f"gate: {error}", file=sys.stderr)
        return 2


def _selection(words: str = "") -> tuple[Lanes, bases.Selection]:
    lanes = Lanes.read()
    passed = bases.read_passed()
    if words:
        chosen = lanes.parse(words.replace(",", " ").split())
        selection = bases.Selection(dict.fromkeys(chosen | {UNITS}, "asked for"), {})
    else:
        selection = bases.select(lanes, passed, ROOT)
    if words.strip() == ALL:
        return lanes, selection
    base = passed.get(steps.SAMPLES, {}).get("commit")
    if base is None or not bases.is_ancestor(base, ROOT):
        selection.reasons.setdefault(steps.SAMPLES, "have not been run yet")
    elif (count := bases.commits_since(base, ROOT)) >= steps.SAMPLES_AFTER:
        selection.reasons.setdefault(steps.SAMPLES, f"the last ones are {count} commits old")
    else:
        selection.left_out[steps.SAMPLES] = f"the last ones are {count} commits old"
    return lanes, selection


def lanes(arguments: argparse.Namespace) -> int:
    _print_selection(_selection()[1])
    seen = steps.seen_lately(bases.read_passed(), ROOT)
    print("full:")
    for step in steps.full_steps():
        print(f"  {step.name:<18} {seen.get(step.name, 'due')}")
    return 0


def _print_selection(selection: bases.Selection) -> None:
    for lane, reason in selection.reasons.items():
        print(f"  {lane:<12} {reason}")
    for lane, reason in selection.left_out.items():
        print(f"  {lane:<12} left out: {reason}")
    sys.stdout.flush()


def prepare(arguments: argparse.Namespace) -> int:
    selection = _selection()[1]
    wanted = selection.lanes | ({"clients", steps.SAMPLES} if arguments.full else set())
    environments.install_tests(ROOT, ROOT / ".venv")
    if "clients" in wanted:
        environments.install_group(ROOT, ROOT / ".venv-clients", "clients")
        _make("prepare-clients")
    if steps.SAMPLES in wanted:
        environments.install_group(ROOT, ROOT / ".venv-fuzz", "fuzz")
    _make("prepare-tests")
    return 0


def _make(target: str) -> None:
    command = ["make", "--no-print-directory", "-C", str(ROOT), target]
    environments.try_again(f"make {target}", lambda: subprocess.run(command, check=True))


def run(arguments: argparse.Namespace) -> int:
    table, selection = _selection(arguments.lanes)
    print("lanes:")
    _print_selection(selection)
    passed = steps.Gate(ROOT, table, selection).run(steps.gate_steps(selection.lanes))
    return 0 if passed else 1


def full(arguments: argparse.Namespace) -> int:
    table = Lanes.read()
    every = bases.Selection(dict.fromkeys([*table.purposes, steps.SAMPLES], "full"), {})
    plan = steps.full_steps()
    names = [step.name for step in plan]
    wanted = [*arguments.steps.replace(",", " ").split()] or names
    if unknown := {*wanted} - {*names}:
        raise BadTable(f"no step {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    if arguments.goes_on:
        if Path(SUMMARY).is_file():
            _record(Path(SUMMARY))
        seen = steps.seen_lately(bases.read_passed(), ROOT)
        for name, where in seen.items():
            print(f"{name}: {where}")
        wanted = [name for name in wanted if name not in seen]
    gate = steps.Gate(ROOT, table, every)
    return 0 if gate.run([step for step in plan if step.name in wanted]) else 1


def _report(name: str) -> Path:
    path = Path(name)
    if not path.is_file():
        raise NoReport(f"there is no {name}: run `bash .ci/run --lanes all` first, which writes it")
    return path


def record(arguments: argparse.Namespace) -> int:
    return 0 if _record(_report(arguments.summary)) else 1


def _record(path: Path) -> bool:
    summary = json.loads(path.read_text(encoding="utf-8"))
    commit = summary["commit"]
    if not summary["clean"]:
        print(
            f"gate: the tree of {path} was not that of a commit; nothing is recorded",
            file=sys.stderr,
        )
        return False
    if not bases.is_ancestor(commit, ROOT):
        print(f"gate: {commit[:8]} is no ancestor of HEAD; nothing is recorded", file=sys.stderr)
        return False
    passed = bases.read_passed()
    for lane in summary["lanes"]:
        passed[lane] = {"commit": commit, "date": summary["date"]}
    bases.PASSED.write_text(json.dumps(dict(sorted(passed.items())), indent=1) + "\n", encoding="utf-8")
    print(f"recorded at {commit[:8]}: {' '.join(summary['lanes'])}")
    return True


def longest(taken: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(taken.items(), key=lambda row: -row[1])


def slow(arguments: argparse.Namespace) -> int:
    """Judge a run of all lanes by what a test of every change may do, and record the seconds of the files."""
    table, outcomes = Lanes.read(), Outcomes.read(_report(arguments.report))
    units = {test for test in outcomes.seconds if table.of_test(test.partition("::")[0]) == UNITS}
    bad = False
    for test in sorted(units, key=lambda test: -outcomes.seconds[test]):
        if outcomes.seconds[test] > (SLOW_WITH_PROCESS_S if test in outcomes.started else SLOW_S):
            print(f"{outcomes.seconds[test]:7.1f} s  {outcomes.started.get(test, 0)} processes  {test}")
            bad = True
    if bad:
        print(
            f"A test of {UNITS} takes up to {SLOW_S:.0f} s, {SLOW_WITH_PROCESS_S:.0f} s if it starts a program: make"
            " these faster, or list their files in another lane (.ci/gate/lanes.toml)."
        )
    files: dict[str, float] = defaultdict(float)
    for test, seconds in outcomes.seconds.items():
        files[test.partition("::")[0]] += seconds
    SECONDS.write_text(
        json.dumps({name: round(taken, 1) for name, taken in longest(files) if taken >= 1}, indent=1) + "\n"
    )
    by_lane: dict[str, float] = defaultdict(float)
    for name, taken in files.items():
        by_lane[table.of_test(name)] += taken
    print(", ".join(f"{lane} {taken:.0f} s" for lane, taken in longest(by_lane)))
    return bool(bad)


def show_weight(arguments: argparse.Namespace) -> int:
    print(weight.report(ROOT))
    return 0


COMMANDS = {
    "prepare": prepare, "run": run, "full": full, "lanes": lanes, "record": record, "slow": slow, "weight": show_weight,
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
