"""`argosy bench router`: compare routing policies on a trace.

Owns: the flags and the table. Must not know: how a replay works. The policies are the router's own code, the engines
are simulated (`argosy_router.simulation`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from argosy.errors import OK, UsageError
from argosy.terminal import Parser, add_output, print_json, table
from argosy_router.observability.lines import (
    MOONCAKE_BLOCK_TOKENS,
    TraceError,
    TraceRequest,
    read_trace,
    write_trace,
)
from argosy_router.policy import POLICIES
from argosy_router.simulation import (
    HEADER,
    EngineModel,
    PolicyResult,
    Simulation,
    at_speed,
    oracle_tokens,
    result_of,
    rows,
    synthetic_trace,
)

MAX_REPLICAS: Final = 512
_MODEL: Final = EngineModel()
_REQUESTS: Final = 5000
_RATE: Final = 20.0


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    requests = _requests(options)
    if options.write_trace is not None:
        write_trace(options.write_trace, requests)
    model = EngineModel(
        prefill_tokens_per_s=options.prefill_tokens_per_s,
        decode_step_s=options.decode_step_ms / 1000.0,
        kv_cache_tokens=options.kv_cache_tokens,
        max_num_seqs=options.max_num_seqs,
    )
    oracle = oracle_tokens(requests)
    results: list[PolicyResult] = []
    for replicas in options.replicas or [4]:
        for policy in options.policy or list(POLICIES):
            simulation = Simulation(
                requests, policy, replicas, model, routers=options.routers, seed=options.seed
            )
            results.append(result_of(simulation.run(), oracle))
            if sys.stderr.isatty():
                sys.stderr.write(f"\r{len(results)} replays done")
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    if options.output == "json":
        print_json(results)
    else:
        tokens = sum(request.input_tokens for request in requests)
        print(
            f"{len(requests)} requests in {requests[-1].arrival_s:.0f}s, {tokens / len(requests):.0f} prompt tokens "
            f"each; a boundless shared cache would hold {oracle / tokens:.1%} of them"
        )
        print(table(HEADER, rows(results)))
    return OK


def _parser() -> Parser:
    parser = Parser(
        prog="argosy bench router",
        description="Replay a trace against simulated engines and compare policies: share of prompt tokens found in a "
        "cache, against a boundless cache that all replicas share; time to first token; ratios to round-robin.",
        epilog="Traces have Mooncake's format, one JSON object a line: timestamp (ms), input_length, output_length, "
        "hash_ids. Without --replay a synthetic trace is made: conversations over shared system prompts.",
    )
    parser.add_argument("--replay", type=Path, metavar="FILE", help="a trace file")
    parser.add_argument(
        "--block-tokens",
        type=_count,
        default=MOONCAKE_BLOCK_TOKENS,
        metavar="N",
        help="prompt tokens per hash id where the trace does not say (%(default)s)",
    )
    parser.add_argument("--speed", type=_positive, default=1.0, metavar="X", help="replay X times as fast")
    parser.add_argument(
        "--requests", type=_count, metavar="N", help=f"first N requests (synthetic: {_REQUESTS})"
    )
    parser.add_argument(
        "--rate",
        type=_positive,
        default=_RATE,
        metavar="R",
        help="synthetic requests per second (%(default)s)",
    )
    parser.add_argument(
        "--policy", action="append", choices=list(POLICIES), help="repeatable (all policies if left out)"
    )
    parser.add_argument(
        "--replicas",
        action="append",
        type=_replicas,
        metavar="N",
        help=f"repeatable, up to {MAX_REPLICAS} (4)",
    )
    parser.add_argument("--routers", type=_count, default=1, metavar="N", help="routers that share nothing")
    parser.add_argument(
        "--prefill-tokens-per-s", type=_positive, default=_MODEL.prefill_tokens_per_s, metavar="R"
    )
    parser.add_argument(
        "--decode-step-ms", type=_positive, default=_MODEL.decode_step_s * 1000.0, metavar="MS"
    )
    parser.add_argument("--kv-cache-tokens", type=_count, default=_MODEL.kv_cache_tokens, metavar="N")
    parser.add_argument("--max-num-seqs", type=_count, default=_MODEL.max_num_seqs, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the synthetic trace and of ties")
    parser.add_argument(
        "--write-trace", type=Path, metavar="FILE", help="also write the trace that was replayed"
    )
    add_output(parser)
    return parser


def _requests(options: argparse.Namespace) -> list[TraceRequest]:
    if options.replay is None:
        requests = synthetic_trace(options.requests or _REQUESTS, options.rate, seed=options.seed)
    else:
        try:
            requests = read_trace(options.replay, options.block_tokens)
        except TraceError as error:
            raise UsageError(str(error)) from None
        requests = requests[: options.requests]
    return at_speed(requests, options.speed)


def _positive(text: str) -> float:
    value = float(text)
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be a positive number")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _replicas(text: str) -> int:
    value = _count(text)
    if value > MAX_REPLICAS:
        raise argparse.ArgumentTypeError(f"must be at most {MAX_REPLICAS}")
    return value
