"""The steps of the gate, and running them: each runs though one before it failed, and one summary ends the run.

`gate` runs what a change selects; `full` runs everything, before a release and at least every 30 commits.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gate import bases
from gate.lanes import FULL, UNITS, Lanes
from gate.outcomes import Outcomes, flaky_tests, unlisted_skips, why_not_again

SAMPLES = "samples"
"""Short runs of what only `full` runs whole. The gate adds them when the last ones are `SAMPLES_AFTER` commits old."""
SAMPLES_AFTER = 30
LANES_OF_TESTS = ("units", "gpu", "executors", "processes", "fetcher")
"""Lanes whose tests are in tests/: one step runs all of them."""
FULL_LASTS = 30
"""Commits after which a step of `full` that passed is due again."""
RECORDS = (".ci/gate/passed.json", ".ci/gate/flaky.jsonl")
"""What a run is recorded in: a tree that differs from its commit only by these is that of the commit."""
COMPILED = (
    "attempts", "batches", "canary", "compiled_modules", "connections", "cross_origin", "discovery", "ext_proc",
    "framing", "hedging", "key_enforcement", "message_migration", "metrics", "migration", "native_modules", "policy",
    "proxy", "queue", "rate_limits", "response_framing", "responses", "sse", "stateful_responses", "telemetry", "tls",
    "usage",
)  # fmt: skip
"""tests/router/test_NAME.py that reach the most compiled modules. All of tests/router has run uncompiled before."""


@dataclass(frozen=True)
class Step:
    """Something that the gate runs with make.

    Attributes:
        lane: it is left out unless this lane is selected.
        tests: the make variable that names its tests, by which failed ones are run again.
        reports: it runs pytest once, with $(PYTEST_ARGS).
        stops_after: it ends after so many failures, so that not all of its tests have run then.
    """

    name: str
    target: str
    lane: str = UNITS
    variables: dict[str, str] = field(default_factory=dict)
    tests: str | None = None
    reports: bool = False
    stops_after: int | None = None
    timeout_s: float = 1800.0


@dataclass
class Result:
    """What came of a step."""

    name: str
    lane: str
    seconds: float
    result: str
    """passed, FLAKY, FAILED or left out."""
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    notes: list[str] = field(default_factory=list)
    flaky: list[dict[str, Any]] = field(default_factory=list)


def gate_steps(lanes: Collection[str]) -> list[Step]:
    """Return the steps for a change, those of lanes that are not selected included."""
    chosen = " ".join(lane for lane in LANES_OF_TESTS if lane in lanes)
    compiled = " ".join(f"tests/router/test_{name}.py" for name in COMPILED)
    return [
        Step("lint", "lint", timeout_s=900),
        Step("tests", "test", variables={"LANES": chosen}, tests="TESTS", reports=True, timeout_s=2700),
        Step("wheel", "test-wheel", "wheel", {"WHEEL_TESTS": compiled}, "WHEEL_TESTS", reports=True),
        Step("sanitizers", "test-sanitizers", "sanitizers", reports=True),
        Step("clients", "test-clients", "clients", tests="CLIENT_TESTS", reports=True),
        Step("conformance", "conformance-sample", "clients"),
        Step("e2e", "e2e-core", "e2e", tests="E2E_TESTS", reports=True, stops_after=3, timeout_s=2400),
        Step("attacks", "attack", SAMPLES, {"ATTACK_S": "100", "ATTACK_ARGS": "--patience 20"}),
        Step("requests", "fuzz", SAMPLES, {"FUZZ_CASES": "1000"}),
        # Three faults without a bound in seconds, and a fleet whose latencies are not judged: the machine may be slow.
        Step("faults", "chaos", SAMPLES, {"CHAOS_FAULTS": "R5,R10 stale lists of children,R11 CRD"}),
        Step(
            "fleet", "scale", SAMPLES,
            {"SCALE_SERVICES": "20", "SCALE_REST_S": "20", "SCALE_ARGS": "--edits 5 --any-p99"},
        ),
    ]  # fmt: skip


def full_steps() -> list[Step]:
    """Return everything."""
    hour = 3600.0
    return [
        Step("lint", "lint", timeout_s=900),
        Step("tests", "test", variables={"LANES": FULL}, tests="TESTS", reports=True, timeout_s=2 * hour),
        Step("wheel", "test-wheel", "wheel", tests="WHEEL_TESTS", reports=True, timeout_s=hour),
        Step("wheel-dependencies", "test-wheel-dependencies", "wheel", timeout_s=hour),
        Step("sanitizers", "test-sanitizers", "sanitizers", reports=True),
        Step("clients", "test-clients", "clients", tests="CLIENT_TESTS", reports=True),
        Step("conformance", "conformance-sample", "clients", {"CONFORMANCE_SAMPLE": "."}, timeout_s=hour),
        Step("attacks", "attack", SAMPLES, {"ATTACK_S": "480"}, timeout_s=hour),
        Step("requests", "fuzz", SAMPLES, {"FUZZ_CASES": "20000"}, timeout_s=hour),
        Step("faults", "chaos", SAMPLES, timeout_s=hour),
        Step("fleet", "scale", SAMPLES, timeout_s=hour),
        Step("e2e", "e2e", "e2e", tests="E2E_TESTS", reports=True, stops_after=3, timeout_s=2 * hour),
        Step("images", "images", "e2e", timeout_s=2 * hour),
        Step("pythons", "test-pythons", timeout_s=2 * hour),
        Step("repeated", "test-repeated", timeout_s=2 * hour),
    ]


def recorded_name(step: str) -> str:
    """Return what a step of `full` is called in passed.json."""
    return f"{FULL}:{step}"


def seen_lately(passed: dict[str, dict[str, Any]], root: Path) -> dict[str, str]:
    """Return the steps of `full` that are not due, each with where it passed."""
    seen = {}
    for step in full_steps():
        base = passed.get(recorded_name(step.name), {})
        if not base or not bases.is_ancestor(base["commit"], root):
            continue
        if (count := bases.commits_since(base["commit"], root)) < FULL_LASTS:
            seen[step.name] = f"passed at {base['commit'][:8]} on {base['date']}, {count} commits ago"
    return seen


class Gate:
    """One run of the gate in a checkout."""

    def __init__(self, root: Path, lanes: Lanes, selection: bases.Selection) -> None:
        self.root = root
        self.lanes = lanes
        self.selection = selection
        self.folder = root / "build" / "gate"
        self.passed = bases.read_passed()
        self.results: list[Result] = []
        self._begun: dict[str, Step] = {}

    def run(self, steps: Sequence[Step]) -> bool:
        """Run the steps, print and write the summary, and return whether all passed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs of a shell ignore it
        for step in steps:
            if step.lane not in self.selection.lanes:
                reason = self.selection.left_out.get(step.lane, "not selected")
                self.results.append(Result(step.name, step.lane, 0.0, "left out", notes=[reason]))
                continue
            self._begun[step.name] = step
            self.results.append(self._run(step))
            self._write()
        print(self.summary(), flush=True)
        return all(each.result != "FAILED" for each in self.results)

    def _run(self, step: Step) -> Result:
        print(f"\n== {step.name} ({time.strftime('%H:%M:%S')}): make {step.target}", flush=True)
        report = self.folder / f"{step.name}.xml"
        started = time.monotonic()
        code = self._make(step, step.variables, report)
        result = Result(step.name, step.lane, 0.0, "passed" if code == 0 else "FAILED")
        if code != 0:
            result.notes.append(f"exit code {code}" if code >= 0 else f"ended by signal {-code}")
        if step.reports:
            self._read(step, code, report, result)
        result.seconds = time.monotonic() - started
        return result

    def _make(self, step: Step, variables: dict[str, str], report: Path) -> int:
        report.unlink(missing_ok=True)
        if step.reports:
            variables = {**variables, "PYTEST_ARGS": f"--junitxml={report} -o junit_family=xunit1"}
        words = [f"{name}={value}" for name, value in variables.items()]
        process = subprocess.Popen(
            ["make", "--no-print-directory", "-C", str(self.root), step.target, *words],
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(step.timeout_s)
        except subprocess.TimeoutExpired:
            print(f"{step.name} took more than {step.timeout_s:.0f} s and is ended", flush=True)
            return -signal.SIGKILL
        finally:
            if process.poll() is None:
                _end(process)

    def _read(self, step: Step, code: int, report: Path, result: Result) -> None:
        """Count outcomes; run failed tests again alone if that can tell chance from a fault."""
        try:
            outcomes = Outcomes.read(report)
        except (OSError, ElementTree.ParseError) as error:
            if code == 0:
                result.result = "FAILED"
                result.notes.append(f"no report: {error}")
            return
        result.passed, result.skipped = len(outcomes.passed), len(outcomes.skipped)
        result.failed = len(outcomes.failed)
        result.notes += [f"failed: {test}" for test in list(outcomes.failed)[:20]]
        if outcomes.failed:
            self._again(step, outcomes, result)
        for test in unlisted_skips(outcomes.skipped):
            result.result = "FAILED"
            result.notes.append(f"new skip: {test}: {outcomes.skipped[test]}")

    def _again(self, step: Step, outcomes: Outcomes, result: Result) -> None:
        if step.tests is None:
            reason: str | None = "this step runs whole"
        elif step.stops_after is not None and len(outcomes.failed) >= step.stops_after:
            reason = "the step ended before all of its tests had run"
        else:
            reason = why_not_again(outcomes.failed, flaky_tests(), self._changed(step.lane), self.root)
        if step.tests is None or reason is not None:
            result.notes.append(f"not run again: {reason}")
            return
        load = os.getloadavg()[0]
        names = self.folder / f"{step.name}-failed.txt"
        names.write_text("".join(f"{test}\n" for test in outcomes.failed))
        again = self.folder / f"{step.name}-again.xml"
        print(f"\n== {step.name}: {len(outcomes.failed)} failed; run again alone", flush=True)
        variables = {**step.variables, step.tests: f"@{names}", "PARALLEL": ""}
        code = self._make(step, variables, again)
        try:
            second = Outcomes.read(again)
        except (OSError, ElementTree.ParseError):
            return
        if code == 0 and set(second.passed) >= set(outcomes.failed):
            result.result, result.failed = "FLAKY", 0
            result.passed += len(outcomes.failed)
            commit = bases.git("rev-parse", "HEAD", root=self.root).strip()
            date = time.strftime("%Y-%m-%d")
            result.flaky = [
                {"test": test, "commit": commit, "date": date, "load": load, "traceback": traceback[-4000:]}
                for test, traceback in outcomes.failed.items()
            ]

    def _changed(self, lane: str) -> list[str]:
        """Paths changed since the lane last passed; all of them if that cannot be told."""
        base = self.passed.get(lane, {}).get("commit")
        if base is None or not bases.is_ancestor(base, self.root):
            return bases.git("ls-files", root=self.root).splitlines()
        return bases.changed_since(base, self.root)

    def summary(self) -> str:
        """The last lines of the run."""
        lines = ["", f"{'step':<20} {'seconds':>8} {'passed':>8} {'failed':>7} {'skipped':>8}  result"]
        for each in self.results:
            counts = f"{each.passed or '-':>8} {each.failed or '-':>7} {each.skipped or '-':>8}"
            lines.append(f"{each.name:<20} {each.seconds:>8.0f} {counts}  {each.result}")
            lines += [f"    {note}" for note in each.notes]
        for each in self.results:
            for row in each.flaky:
                lines += ["", f"{row['test']} failed by chance (load {row['load']:.1f}):", row["traceback"]]
        for each in self.results:
            for row in each.flaky:
                short = {name: row[name] for name in ("test", "commit", "date", "load")}
                lines.append(f"FLAKY {json.dumps(short)}")
        seconds = sum(each.seconds for each in self.results)
        failed = [each.name for each in self.results if each.result == "FAILED"]
        lines.append(
            f"\n{seconds / 60:.1f} minutes; {'FAILED: ' + ', '.join(failed) if failed else 'passed'}"
        )
        totals = [
            sum(getattr(each, name) for each in self.results) for name in ("passed", "failed", "skipped")
        ]
        # A step without counts that failed is one failure, so that this line never says 0 where the run is red.
        totals[1] += sum(each.result == "FAILED" and not each.failed for each in self.results)
        lines.append("{} passed, {} failed, {} skipped".format(*totals))
        return "\n".join(lines)

    def _is_clean(self) -> bool:
        but = [f":(exclude){name}" for name in RECORDS]
        return not bases.git("status", "--porcelain", "--", ".", *but, root=self.root).strip()

    def _write(self) -> None:
        good = {each.name for each in self.results if each.result in ("passed", "FLAKY")}
        needed: dict[str, set[str]] = defaultdict(set)
        for step in gate_steps(self.selection.lanes):
            needed[step.lane].add(step.name)
        passed = {lane for lane, names in needed.items() if names <= good}
        if UNITS in passed:
            passed |= {lane for lane in LANES_OF_TESTS if lane in self.selection.lanes}
        everything = full_steps()
        passed |= {recorded_name(name) for name in good if self._begun[name] in everything}
        (self.folder / "summary.json").write_text(
            json.dumps(
                {
                    "commit": bases.git("rev-parse", "HEAD", root=self.root).strip(),
                    "clean": self._is_clean(),
                    "date": time.strftime("%Y-%m-%d"),
                    "cpu": _cpu(),
                    "python": platform.python_version(),
                    "lanes": sorted(passed),
                    "steps": [asdict(each) for each in self.results],
                },
                indent=1,
            )
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a step and what it started: politely, so that clusters and fleets are taken down, then for good."""
    for number, patience_s in ((signal.SIGTERM, 60), (signal.SIGKILL, 10)):
        try:
            os.killpg(process.pid, number)
            process.wait(patience_s)
            return
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return sys.platform
    names = [
        line.partition(":")[2].strip()
        for line in lines
        if line.startswith(("model name", "model\t", "cpu family"))
    ]
    return " ".join(dict.fromkeys(names))
