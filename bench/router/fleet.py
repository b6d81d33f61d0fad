"""Routers over the same four engines, under load that shares prefixes: what comes from caches, and how soon.

    python bench/router/fleet.py [--rounds 3] [--rates 10 20 40 55] [--sglang PYTHON] [--json FILE]
    python bench/router/fleet.py --real [--rates 1 2 4 8]

Our router with its `cost` policy against its own `round-robin` and `least-load`, and against sglang-router's
`cache_aware` where `--sglang` names an interpreter that has it. Requests come as a Poisson process over ten prefixes
of 2048 tokens, each with a question of 512 tokens of its own and 32 tokens of answer, at rising rates. Each contender
gets fresh engines, one uncounted request after another for every prefix, twice, and then the same requests at the same
times as the others. One engine's cache has room for three or four prefixes beside their questions, the four together
for all of them.

Engines are clocked (`clocked_engine.py`): 8000 prompt tokens per second each. A fleet that computes nothing but
questions keeps up with 62 requests per second. `--real` takes four `argosy serve builtin://tiny --threads 1` instead;
they share the machine's cores with router and client, so their times tell less than what comes from their caches.

Times to the first token count from when a request was due. `of oracle`: of what one boundless cache for all would hold.
Figures are medians of the rounds, in which contenders take turns; errors are their sum.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import shlex
import statistics
import sys
import urllib.request
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import uvloop
from clocked_engine import KV_CACHE_TOKENS
from open_loop import Answer, OpenLoop
from overhead import HERE, command, free_ports, process, wait_until_answering
from prompts import MODEL
from shared_prefixes import Arrival, SharedPrefixes, oracle_share, text

ENGINES = 4
GROUPS = 10
PREFIX_TOKENS = 2048
QUESTION_TOKENS = 512
ANSWER_TOKENS = 32
BLOCK_TOKENS = 16
OURS = "cost"
BASELINES = ("round-robin", "least-load")
SGLANG = "sglang-router"
RATES = (10.0, 20.0, 40.0, 55.0)
REAL_RATES = (1.0, 2.0, 4.0, 8.0)


@dataclass(frozen=True, slots=True)
class Figures:
    """One contender at one rate."""

    requests: float
    cached_share: float
    of_oracle: float
    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    errors: float


Table = dict[float, dict[str, Figures]]
"""Rate -> contender -> figures."""


def quantile(values: list[float], share: float) -> float:
    """NaN of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else float("nan")


def figures(answers: Sequence[Answer], oracle: float) -> Figures:
    complete = [answer for answer in answers if not answer.error]
    cached = sum(answer.cached_tokens for answer in complete)
    share = cached / max(1, sum(answer.prompt_tokens for answer in complete))
    ttft_ms = [answer.ttft_s * 1e3 for answer in complete]
    return Figures(
        requests=len(answers),
        cached_share=share,
        of_oracle=share / oracle,
        ttft_p50_ms=quantile(ttft_ms, 0.5),
        ttft_p90_ms=quantile(ttft_ms, 0.9),
        ttft_p99_ms=quantile(ttft_ms, 0.99),
        errors=len(answers) - len(complete),
    )


def engine_commands(ports: Sequence[int], *, real: bool) -> list[list[str]]:
    if not real:
        script = str(HERE / "clocked_engine.py")
        return [[sys.executable, script, ",".join(map(str, ports))]]
    blocks = str(KV_CACHE_TOKENS // BLOCK_TOKENS)
    return [
        [
            *(sys.executable, "-P", "-m", "argosy", "serve", "builtin://tiny", "--port", str(port)),
            *("--threads", "1", "--served-model-name", MODEL),
            *("--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", blocks),
        ]
        for port in ports
    ]


def router_command(contender: str, sglang: str, port: int, engines: list[int]) -> list[str]:
    if contender == SGLANG:
        return command(SGLANG, sglang, port, engines)
    return [*command("argosy", "", port, engines), "--policy", contender]


def bytes_per_token(port: int) -> float:
    """Of this load's text, as the engine counts tokens."""
    sample = text(random.Random(0), 2048)
    body = json.dumps({"model": MODEL, "prompt": sample, "max_tokens": 1}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return len(sample) / json.load(response)["usage"]["prompt_tokens"]


async def rising_load(port: int, size: float, seed: str, options: argparse.Namespace) -> dict[float, Figures]:
    """All rates, one after another, each until its last answer. `size` is in bytes per token."""
    load = SharedPrefixes(seed, GROUPS, round(PREFIX_TOKENS * size), round(QUESTION_TOKENS * size))
    client = OpenLoop(port, ANSWER_TOKENS)
    warm = load.warm_up()
    for prompt in warm:
        await client.send([Arrival(0.0, prompt)])
    measured = {}
    for rate in options.rates:
        arrivals = load.poisson(rate, options.seconds)
        answers = await client.send(arrivals)
        for error, count in Counter(answer.error for answer in answers if answer.error).items():
            print(f"  {rate:g}/s: {count} x {error}", file=sys.stderr)
        measured[rate] = figures(answers, oracle_share(warm, [arrival.prompt for arrival in arrivals]))
    return measured


def measure(contender: str, seed: str, options: argparse.Namespace) -> dict[float, Figures]:
    """One contender, over engines of its own."""
    *engines, port = free_ports(ENGINES + 1)
    with ExitStack() as running:
        for engine_command in engine_commands(engines, real=options.real):
            running.enter_context(process(*engine_command))
        for engine in engines:
            wait_until_answering(engine)
        size = bytes_per_token(engines[0])
        running.enter_context(process(*router_command(contender, options.sglang, port, engines)))
        wait_until_answering(port)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(rising_load(port, size, seed, options))


def median(rounds: Sequence[Figures]) -> Figures:
    values = {
        field.name: statistics.median(getattr(each, field.name) for each in rounds)
        for field in fields(Figures)
    }
    return Figures(**values | {"errors": sum(each.errors for each in rounds)})


def markdown(table: Table) -> str:
    """`ours is`: TTFT of our `cost` over that contender's."""
    lines = [
        "| req/s | router | cached | of oracle | TTFT p50 ms | p90 ms | p99 ms | p50, p90: ours is | errors |",
        "|" + "---|" * 9,
    ]
    for rate, row in table.items():
        ours = row[OURS]
        for contender, each in row.items():
            ratio = (
                ""
                if contender == OURS
                else f"{ours.ttft_p50_ms / each.ttft_p50_ms:.2f}x, {ours.ttft_p90_ms / each.ttft_p90_ms:.2f}x"
            )
            lines.append(
                f"| {rate:g} | {contender} | {each.cached_share:.1%} | {each.of_oracle:.3f} | {each.ttft_p50_ms:.0f} "
                f"| {each.ttft_p90_ms:.0f} | {each.ttft_p99_ms:.0f} | {ratio} | {each.errors:g} |"
            )
    return "\n".join(lines)


def conditions(options: argparse.Namespace) -> str:
    engines = "argosy serve builtin://tiny" if options.real else "clocked"
    arguments = ["SGLANG_VENV/bin/python" if word == options.sglang else word for word in sys.argv[1:]]
    return (
        f"    python bench/router/fleet.py {shlex.join(arguments)}\n\n"
        f"{ENGINES} {engines} engines of {KV_CACHE_TOKENS} cached tokens; {GROUPS} prefixes of {PREFIX_TOKENS} tokens, "
        f"{QUESTION_TOKENS} of question, {ANSWER_TOKENS} of answer; {options.seconds:g} s per rate, medians of "
        f"{options.rounds}; {os.cpu_count()} cores, Python {platform.python_version()}, load average "
        f"{os.getloadavg()[0]:.1f} at the start."
    )


def main() -> None:
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="+", help="requests per second")
    parser.add_argument("--seconds", type=float, default=15.0, help="of arrivals per rate (%(default)s)")
    parser.add_argument("--real", action="store_true", help="real engines instead of clocked ones")
    parser.add_argument("--sglang", default="", metavar="PYTHON")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all rounds' figures")
    options = parser.parse_args()
    options.rates = options.rates or (REAL_RATES if options.real else RATES)
    contenders = [OURS, *BASELINES, *([SGLANG] if options.sglang else [])]
    head = conditions(options)
    print(head + "\n")
    rounds: list[dict[str, dict[float, Figures]]] = []
    for number in range(options.rounds):
        rounds.append({contender: measure(contender, f"round {number}", options) for contender in contenders})
        print(f"round {number + 1} of {options.rounds} done", file=sys.stderr)
    table = {
        rate: {contender: median([each[contender][rate] for each in rounds]) for contender in contenders}
        for rate in options.rates
    }
    print(markdown(table))
    if options.json:
        plain = [{c: {r: asdict(f) for r, f in row.items()} for c, row in each.items()} for each in rounds]
        options.json.write_text(json.dumps({"conditions": head, "rounds": plain}, indent=1) + "\n")


if __name__ == "__main__":
    main()
