"""Compare routers over four engines under conversations, while one engine dies and returns.

    python bench/router/conversations.py [--rounds 3] [--rates 6 8] [--seconds 60] [--sglang PYTHON] [--json FILE]

Conversations (`conversation_load.py`) begin as a Poisson process. Each has one of 24 system prompts of 1536 tokens, the
k-th with a popularity proportional to 1/k, and two to seven turns, whose prompts contain the history, with five seconds
on average between an answer and the next turn. Half-way through, one engine is killed, and restarted five seconds later
with an empty cache. Engines are clocked (`simulated_engine_server.py`): 8000 prompt tokens per second and 49,152 tokens
of cache each, less than the open conversations and the popular prompts need.

A router that only remembers where it sent each prompt does not learn what was evicted or lost since; our engines
announce it to our router.

The first ten seconds are not counted. Times to the first token count from when a turn was due. `of oracle` is the share
of what a single unbounded cache would hold. Contenders take turns; figures are medians of the rounds, except errors,
which are summed: requests whose stream was cut off when the engine died.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import uvloop
from contenders import OURS, RunningFleet, clocked, names, running, shown
from conversation_load import THINK_S, Conversation, conversations, mean_turns
from figures import Figures, figures, markdown, median
from open_loop import Answer, OpenLoop
from overhead import free_ports
from rounds import machine, rounds_parser, write_rounds
from shared_prefix_load import oracle_share

ENGINES = 4
KV_CACHE_TOKENS = 49_152
WARM_UP_S = 10.0
DOWN_S = 5.0
"""Time between the death of an engine and its restart."""
VICTIM = 1
RATES = (6.0, 8.0)
"""Conversations that begin per second; each has 4.5 turns on average."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One turn as it was sent."""

    due: float
    """Due time, in seconds after the load began."""
    prompt: str
    answer: Answer


async def converse(client: OpenLoop, conversation: Conversation, start: float) -> list[Asked]:
    """Run all turns of one conversation.

    After a failed turn it continues as if the turn had been answered, so that all contenders get the same prompts.
    """
    asked = []
    history = conversation.system
    due = start + conversation.at_s
    for turn in conversation.turns:
        prompt = f"{history} {turn.text}"
        answer = await client.ask(prompt, due, turn.answer_tokens)
        asked.append(Asked(due - start, prompt, answer))
        history = prompt + " hello" * turn.answer_tokens
        due = time.perf_counter() + turn.think_s
    return asked


async def fail_half_way(fleet: RunningFleet, start: float, seconds: float) -> None:
    await asyncio.sleep(start + seconds / 2 - time.perf_counter())
    fleet.kill(VICTIM)
    await asyncio.sleep(DOWN_S)
    fleet.restart(VICTIM)


async def talk(fleet: RunningFleet, load: Sequence[Conversation], seconds: float) -> list[Asked]:
    """Run all conversations; returns their turns in the order in which they were due."""
    client = OpenLoop(fleet.port, 1)
    start = time.perf_counter() + 0.5
    failing = asyncio.create_task(fail_half_way(fleet, start, seconds))
    told = await asyncio.gather(*(converse(client, each, start) for each in load))
    await failing
    return sorted((asked for each in told for asked in each), key=lambda asked: asked.due)


def measure(contender: str, rate: float, seed: str, options: argparse.Namespace) -> Figures:
    """Measure one contender over engines of its own."""
    load = conversations(seed, rate, options.seconds)
    ports = free_ports(ENGINES)
    with (
        running(contender, options.sglang, ports, clocked(ports, KV_CACHE_TOKENS)) as fleet,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        asked = runner.run(talk(fleet, load, options.seconds))
    before = [each.prompt for each in asked if each.due < WARM_UP_S]
    counted = asked[len(before) :]
    for error, count in Counter(each.answer.error for each in asked if each.answer.error).items():
        print(f"  {contender}, {rate:g}/s: {count} x {error}", file=sys.stderr)
    return figures([each.answer for each in counted], oracle_share(before, [each.prompt for each in counted]))


def conditions(options: argparse.Namespace) -> str:
    command = shlex.join(shown(sys.argv[1:], options.sglang))
    return (
        f"    python bench/router/conversations.py {command}\n\n"
        f"{ENGINES} clocked engines of {KV_CACHE_TOKENS} cached tokens; conversations of {mean_turns():g} turns, "
        f"{THINK_S:g} s of thought; {options.seconds:g} s of beginnings, an engine down for {DOWN_S:g} s half-way; "
        + machine(options.rounds)
    )


def main() -> None:
    parser = rounds_parser(__doc__)
    parser.add_argument(
        "--rates", type=float, nargs="+", default=RATES, help="conversations that begin per second"
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="in which conversations begin (%(default)s)"
    )
    parser.add_argument("--sglang", default="", metavar="PYTHON")
    parser.add_argument("--contenders", nargs="+", metavar="NAME", help="some of them only; ours always")
    options = parser.parse_args()
    contenders = [name for name in names(options.sglang) if name in (OURS, *(options.contenders or [name]))]
    head = conditions(options)
    print(head + "\n")
    rounds: list[dict[float, dict[str, Figures]]] = []
    for number in range(options.rounds):
        rounds.append(
            {
                rate: {name: measure(name, rate, f"round {number}", options) for name in contenders}
                for rate in options.rates
            }
        )
        print(f"round {number + 1} of {options.rounds} done", file=sys.stderr)
    table = {
        f"{rate:g}": {name: median([each[rate][name] for each in rounds]) for name in contenders}
        for rate in options.rates
    }
    print(markdown(table, "conversations/s"))
    plain = [{r: {c: asdict(f) for c, f in row.items()} for r, row in each.items()} for each in rounds]
    write_rounds(options.json, head, plain)


if __name__ == "__main__":
    main()
