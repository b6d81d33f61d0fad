"""Warm against cold scale-up, and which replicas to give up, with real routers over clocked engines.

    python bench/router/scaling_fleet.py [--rounds 3] [--rate 7] [--engines 4] [--system-prompts 60] [--json FILE]

Two routers follow one fleet file. Conversations (`conversation_load.py`) begin as a Poisson process, with one of 60
system prompts of 2048 tokens; each is sent to one of the routers. Engines are clocked (`simulated_engine_server.py`):
8000 prompt tokens per second and 400,000 tokens of cache each, as in the replay in simulated time
(`scaling_replay.py`).

    doubling   half of the engines answer half of the load. At CHANGE_S the load doubles, REACTION_S later the other
               engines are started: warm, with the hottest prefixes of a living one, or cold. Each is added to the fleet
               file when it answers.
    halving    all engines answer the whole load. At CHANGE_S the load halves, REACTION_S later half of the engines
               leave: those that the operator marks by the routers' own reports (`/internal/load`), or those that a
               ReplicaSet chooses among pods of one age, which is any.

Figures are of the turns that were due within WATCHED_S of the moment at which engines were started, or left: the time
that warm engines take before they answer counts. Contenders take turns, figures are medians of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shlex
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec
import uvloop
from conversation_load import Conversation, conversations
from conversations import Asked, converse
from figures import Figures, figures, median
from open_loop import OpenLoop
from overhead import HERE, KEY, free_ports, process, wait_until_answering
from prompts import MODEL
from rounds import machine, rounds_parser, write_rounds
from shared_prefix_load import oracle_share

from argosy_operator.desired.scaling import cost_changes
from argosy_operator.observation import FleetLoad
from argosy_operator.pod import Pod
from argosy_protocol.fleet import Endpoint, FleetDocument, FleetService, encode_fleet
from argosy_protocol.headers import internal_key
from argosy_protocol.reports import ADMIN_KEY_UID, LOAD_PATH, LoadReport

CHANGE_S = 40.0
"""When the load changes."""
REACTION_S = {"doubling": 10.0, "halving": 30.0}
"""From there until engines are started: a decision every 5 s, and the start of a pod; or until they leave: most
conversations of the larger load have ended by then, though an autoscaler waits for minutes."""
WATCHED_S = 40.0
SYSTEM_TOKENS = 2048
KV_CACHE_TOKENS = 400_000
PREFILL_TOKENS_PER_S = 8000.0
ROUTERS = 2
CONTENDERS = {"doubling": ("cold", "warm"), "halving": ("any, as a ReplicaSet", "least valuable")}
_FLEET_KEY = "clocked-engines-of-a-benchmark"


@dataclass
class Fleet:
    """Routers over engines that come and go."""

    file: Path
    router_ports: Sequence[int]
    admin_ports: Sequence[int]
    engines: dict[int, bool] = field(default_factory=dict)
    """Port -> whether it leaves."""

    def write(self) -> None:
        """Have the routers use these engines from now on."""
        endpoints = tuple(
            Endpoint(name=f"engine-{port}", url=f"http://127.0.0.1:{port}", draining=leaves)
            for port, leaves in self.engines.items()
        )
        service = FleetService(namespace="bench", name=MODEL, uid="bench", model=MODEL, endpoints=endpoints)
        new = self.file.with_suffix(".new")
        new.write_bytes(encode_fleet(FleetDocument(services=(service,))))
        new.rename(self.file)

    def least_valuable(self, count: int) -> list[int]:
        """The engines that the operator would have a Deployment give up."""
        reports = [load_report(port) for port in self.admin_ports]
        load = FleetLoad(reports, is_complete=True)[f"bench/{MODEL}"]
        by_name = {f"engine-{port}": port for port in self.engines}
        pods = [_pod(name) for name in by_name]
        return [by_name[change.pod.name] for change in cost_changes(pods, load, count) if change.cost < 0]


def load_report(port: int) -> LoadReport:
    key = internal_key(_FLEET_KEY.encode(), ADMIN_KEY_UID)
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{LOAD_PATH}", headers={"authorization": f"Bearer {key}"}
    )
    with urllib.request.urlopen(request, timeout=10) as response:
        return msgspec.json.decode(response.read(), type=LoadReport)


def _pod(name: str) -> Pod:
    """A replica that serves, as the operator sees it. Reports name replicas of a fleet file by their names."""
    return Pod(
        name=name, uid=name, revision="one", containers_ready=True, is_ready=True, gate="True", node="node"
    )


def engine_command(port: int, warm_up_from: int | None = None) -> list[str]:
    return [
        *(sys.executable, str(HERE / "simulated_engine_server.py"), str(port)),
        *("--kv-cache-tokens", str(KV_CACHE_TOKENS), "--prefill-tokens-per-s", str(PREFILL_TOKENS_PER_S)),
        *(() if warm_up_from is None else ("--warm-up-from", str(warm_up_from))),
    ]


@contextmanager
def running(folder: Path, engines: Sequence[int]) -> Iterator[Fleet]:
    """Run engines and routers until the block ends."""
    ports = free_ports(2 * ROUTERS)
    fleet = Fleet(folder / "fleet.json", ports[:ROUTERS], ports[ROUTERS:], dict.fromkeys(engines, False))
    fleet.write()
    with ExitStack() as stack:
        for port in engines:
            stack.enter_context(process(*engine_command(port)))
        for port in engines:
            wait_until_answering(port)
        for port, admin in zip(fleet.router_ports, fleet.admin_ports, strict=True):
            command = ["--port", str(port), "--admin-port", str(admin), "--fleet-file", str(fleet.file)]
            key = ("env", f"ARGOSY_FLEET_KEY={_FLEET_KEY}")
            stack.enter_context(
                process(*key, sys.executable, "-m", "argosy_router.main", "--api-key", KEY, *command)
            )
        for port in fleet.router_ports:
            wait_until_answering(port)
        yield fleet


def halved(load: Sequence[Conversation], is_dropped: Callable[[float], bool]) -> list[Conversation]:
    """Without every other conversation of those that begin when `is_dropped` says so."""
    return [each for number, each in enumerate(load) if number % 2 or not is_dropped(each.at_s)]


async def double(fleet: Fleet, more: Sequence[int], started: ExitStack, *, is_warm: bool, seed: str) -> None:
    """Start engines, and use each once it answers."""
    rng = random.Random(seed)
    peers = list(fleet.engines)

    async def start(port: int) -> None:
        peer = rng.choice(peers) if is_warm else None  # a Service leads to any
        started.enter_context(process(*engine_command(port, peer)))
        await until_listening(port)
        fleet.engines[port] = False
        fleet.write()

    await asyncio.gather(*map(start, more))


async def until_listening(port: int) -> None:
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.05)
        else:
            writer.close()
            return


async def halve(fleet: Fleet, count: int, *, by_value: bool, seed: str) -> None:
    """Have engines finish what they compute, and get nothing more."""
    if by_value:
        leaving = await asyncio.to_thread(fleet.least_valuable, count)
    else:
        leaving = random.Random(seed).sample(sorted(fleet.engines), count)
    assert len(leaving) == count
    fleet.engines |= dict.fromkeys(leaving, True)
    fleet.write()


async def talk(
    fleet: Fleet,
    load: Sequence[Conversation],
    change_at_s: float,
    change: Callable[[], Awaitable[None]],
    seed: str,
) -> list[Asked]:
    """Run all conversations, and change the fleet at its time; returns their turns in the order of their times."""
    clients = [OpenLoop(port, 1) for port in fleet.router_ports]
    rng = random.Random(seed)
    start = time.perf_counter() + 0.5

    async def change_in_time() -> None:
        await asyncio.sleep(start + change_at_s - time.perf_counter())
        await change()

    changing = asyncio.create_task(change_in_time())
    told = await asyncio.gather(*(converse(rng.choice(clients), each, start) for each in load))
    await changing
    return sorted((asked for each in told for asked in each), key=lambda asked: asked.due)


def measure(change: str, contender: str, seed: str, options: argparse.Namespace) -> Figures:
    """Measure one contender with routers and engines of its own."""
    began = CHANGE_S + REACTION_S[change]
    load = conversations(
        seed,
        options.rate,
        began + WATCHED_S,
        system_prompts=options.system_prompts,
        system_tokens=SYSTEM_TOKENS,
    )
    ports = free_ports(options.engines)
    half = options.engines // 2
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="argosy-scaling-")))
        if change == "doubling":
            load = halved(load, lambda at_s: at_s < CHANGE_S)
            fleet = stack.enter_context(running(folder, ports[:half]))

            async def scale() -> None:
                await double(fleet, ports[half:], stack, is_warm=contender == "warm", seed=seed)

        else:
            load = halved(load, lambda at_s: at_s >= CHANGE_S)
            fleet = stack.enter_context(running(folder, ports))

            async def scale() -> None:
                await halve(fleet, half, by_value=contender == "least valuable", seed=seed)

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            asked = runner.run(talk(fleet, load, began, scale, seed))
    before = [each.prompt for each in asked if each.due < began]
    watched = [each for each in asked if began <= each.due < began + WATCHED_S]
    for error, count in Counter(each.answer.error for each in watched if each.answer.error).items():
        print(f"  {change}, {contender}: {count} x {error}", file=sys.stderr)
    oracle = oracle_share(before, [each.prompt for each in watched])
    return figures([each.answer for each in watched], oracle)


def table(rounds: Sequence[Mapping[tuple[str, str], Figures]]) -> str:
    """The medians, as Markdown."""
    lines = ["| change | engines | cached | TTFT p50 ms | p90 ms | p99 ms | errors |", "|" + "---|" * 7]
    for change, contender in rounds[0]:
        each = median([row[change, contender] for row in rounds])
        lines.append(
            f"| {change} | {contender} | {each.cached_share:.1%} | {each.ttft_p50_ms:.0f} | {each.ttft_p90_ms:.0f} "
            f"| {each.ttft_p99_ms:.0f} | {each.errors:g} |"
        )
    return "\n".join(lines)


def conditions(options: argparse.Namespace) -> str:
    return (
        f"    python bench/router/scaling_fleet.py {shlex.join(sys.argv[1:])}\n\n"
        f"{ROUTERS} routers, {options.engines} clocked engines of {PREFILL_TOKENS_PER_S:g} prompt tokens/s and "
        f"{KV_CACHE_TOKENS} cached tokens; {options.rate:g} conversations/s of the larger load, with one of "
        f"{options.system_prompts} system prompts of {SYSTEM_TOKENS} tokens; {machine(options.rounds)}"
    )


def main() -> None:
    parser = rounds_parser(__doc__)
    parser.add_argument(
        "--rate", type=float, default=7.0, help="conversations/s of the larger load (%(default)s)"
    )
    parser.add_argument("--engines", type=int, default=4, help="of the larger fleet (%(default)s)")
    parser.add_argument(
        "--system-prompts", type=int, default=60, help="that conversations begin with (%(default)s)"
    )
    parser.add_argument("--changes", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    options = parser.parse_args()
    head = conditions(options)
    print(head + "\n")
    rounds: list[dict[tuple[str, str], Figures]] = []
    for number in range(options.rounds):
        rounds.append({})
        for change in options.changes:
            for contender in CONTENDERS[change]:
                found = measure(change, contender, f"round {number}", options)
                rounds[-1][change, contender] = found
                print(f"round {number + 1}, {change}, {contender}: {found}", file=sys.stderr)
    print(table(rounds))
    plain = [{f"{change}, {name}": asdict(each) for (change, name), each in row.items()} for row in rounds]
    write_rounds(options.json, head, plain)


if __name__ == "__main__":
    main()
