"""Compare routers over four engines under load with shared prefixes: cache hits and times to the first token.

    python bench/router/shared_prefixes.py [--rounds 3] [--rates 5 20 40 55] [--sglang PYTHON] [--json FILE]
    python bench/router/shared_prefixes.py --real [--rates 2 6]

Compares our router's `cost` policy with its own `round-robin` and `least-load`, and with sglang-router's `cache_aware`
if `--sglang` names an interpreter that has it (in two settings, see `contenders.py`). Requests arrive as a Poisson
process at rising rates, over ten prefixes of 2048 tokens, each with a question of its own of 512 tokens and an answer
of 32 tokens. Each contender gets fresh engines and is warmed up twice by one request for every prefix, sent
concurrently; then all contenders get the same requests at the same times. The warm-up is concurrent, as clients are,
because a router that sends unknown prompts to the least loaded engine would send prefixes that come one after another
to the same engine. One engine's cache has room for three or four prefixes besides their questions, and the four
together for all of them.

Engines are clocked (`simulated_engine_server.py`): 8000 prompt tokens per second each. A fleet that computes only the
questions keeps up with 62 requests per second. `--real` uses four `argosy serve builtin://tiny --threads 1` instead;
they share the machine's cores with router and client, so their cache hits are more meaningful than their times.

Times to the first token count from when a request was due. `of oracle` is the share of what a single unbounded cache
would hold. Contenders take turns; figures are medians of the rounds, except errors, which are summed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import sys
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

import uvloop
from contenders import OURS, clocked, names, running, shown
from figures import Figures, figures, markdown, median
from open_loop import OpenLoop
from overhead import free_ports
from prompts import MODEL
from rounds import machine, rounds_parser, write_rounds
from shared_prefix_load import Arrival, SharedPrefixes, oracle_share, text
from simulated_engine_server import KV_CACHE_TOKENS

ENGINES = 4
GROUPS = 10
PREFIX_TOKENS = 2048
QUESTION_TOKENS = 512
ANSWER_TOKENS = 32
BLOCK_TOKENS = 16
RATES = (5.0, 20.0, 40.0, 55.0)
REAL_RATES = (2.0, 6.0)


def engine_commands(ports: Sequence[int], *, real: bool) -> list[list[str]]:
    if not real:
        return clocked(ports, KV_CACHE_TOKENS)
    blocks = str(KV_CACHE_TOKENS // BLOCK_TOKENS)
    return [
        [
            *(sys.executable, "-P", "-m", "argosy", "serve", "builtin://tiny", "--port", str(port)),
            *("--threads", "1", "--served-model-name", MODEL),
            *("--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", blocks),
        ]
        for port in ports
    ]


def bytes_per_token(port: int) -> float:
    """Measure the bytes per token of this load's text with the engine's tokenizer."""
    sample = text(random.Random(0), 2048)
    body = json.dumps({"model": MODEL, "prompt": sample, "max_tokens": 1}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return len(sample) / json.load(response)["usage"]["prompt_tokens"]


async def rising_load(port: int, size: float, seed: str, options: argparse.Namespace) -> dict[float, Figures]:
    """Measure all rates, one after another, each until its last answer. `size` is in bytes per token."""
    load = SharedPrefixes(seed, GROUPS, round(PREFIX_TOKENS * size), round(QUESTION_TOKENS * size))
    client = OpenLoop(port, ANSWER_TOKENS)
    warm = load.warm_up()
    for start in range(0, len(warm), GROUPS):
        await client.send([Arrival(0.0, prompt) for prompt in warm[start : start + GROUPS]])
    measured = {}
    for rate in options.rates:
        arrivals = load.poisson(rate, options.seconds)
        answers = await client.send(arrivals)
        for error, count in Counter(answer.error for answer in answers if answer.error).items():
            print(f"  {rate:g}/s: {count} x {error}", file=sys.stderr)
        measured[rate] = figures(answers, oracle_share(warm, [arrival.prompt for arrival in arrivals]))
    return measured


def measure(contender: str, seed: str, options: argparse.Namespace) -> dict[float, Figures]:
    """Measure one contender over engines of its own."""
    ports = free_ports(ENGINES)
    with running(contender, options.sglang, ports, engine_commands(ports, real=options.real)) as fleet:
        size = bytes_per_token(ports[0])
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(rising_load(fleet.port, size, seed, options))


def conditions(options: argparse.Namespace) -> str:
    engines = "argosy serve builtin://tiny" if options.real else "clocked"
    return (
        f"    python bench/router/shared_prefixes.py {shlex.join(shown(sys.argv[1:], options.sglang))}\n\n"
        f"{ENGINES} {engines} engines of {KV_CACHE_TOKENS} cached tokens; {GROUPS} prefixes of {PREFIX_TOKENS} tokens, "
        f"{QUESTION_TOKENS} of question, {ANSWER_TOKENS} of answer; {options.seconds:g} s per rate, "
        + machine(options.rounds)
    )


def main() -> None:
    parser = rounds_parser(__doc__)
    parser.add_argument("--rates", type=float, nargs="+", help="requests per second")
    parser.add_argument("--seconds", type=float, default=15.0, help="of arrivals per rate (%(default)s)")
    parser.add_argument("--real", action="store_true", help="real engines instead of clocked ones")
    parser.add_argument("--sglang", default="", metavar="PYTHON")
    parser.add_argument("--contenders", nargs="+", metavar="NAME", help="some of them only; ours always")
    options = parser.parse_args()
    options.rates = options.rates or (REAL_RATES if options.real else RATES)
    contenders = [name for name in names(options.sglang) if name in (OURS, *(options.contenders or [name]))]
    head = conditions(options)
    print(head + "\n")
    rounds: list[dict[str, dict[float, Figures]]] = []
    for number in range(options.rounds):
        rounds.append({contender: measure(contender, f"round {number}", options) for contender in contenders})
        print(f"round {number + 1} of {options.rounds} done", file=sys.stderr)
    table = {
        f"{rate:g}": {
            contender: median([each[contender][rate] for each in rounds]) for contender in contenders
        }
        for rate in options.rates
    }
    print(markdown(table, "req/s"))
    plain = [{c: {r: asdict(f) for r, f in row.items()} for c, row in each.items()} for each in rounds]
    write_rounds(options.json, head, plain)


if __name__ == "__main__":
    main()
