"""Request traces: arrival times, lengths and shared prefixes.

Owns: the file format and the synthetic trace. Must not know: routing.

The format is Mooncake's (one JSON object per line): `timestamp` in milliseconds, `input_length`, `output_length`, and
`hash_ids`, where equal ids mean equal blocks with equal prefixes. A block covers `block_tokens` tokens, unless the line
gives the end of each in `token_ends`, as the router's own recordings do.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta, Struct

MOONCAKE_BLOCK_TOKENS = 512
SYNTHETIC_BLOCK_TOKENS = 64
_WARMUP_THINKS = 12.0
"""Length of the warm-up, in mean pauses between turns; few synthetic conversations last longer."""
MAX_TOKENS = 1 << 24


class TraceError(Exception):
    """The file is not a trace; the message names the line."""


class TraceRequest(NamedTuple):
    """One request of a trace."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    """Ids of the prompt's blocks; each stands for the whole prompt up to its end."""
    ends: tuple[int, ...]
    """Prompt tokens up to the end of each block."""


class _Line(Struct, omit_defaults=True):
    timestamp: Annotated[float, Meta(ge=0.0)]
    input_length: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    output_length: Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
    hash_ids: Annotated[list[int], Meta(max_length=1 << 20)] = []
    token_ends: list[int] | None = None


_decoder = msgspec.json.Decoder(_Line)


def read_trace(path: Path, block_tokens: int = MOONCAKE_BLOCK_TOKENS) -> list[TraceRequest]:
    """Read a trace file; the requests are ordered by arrival, the first at time zero.

    Raises:
        TraceError: the file cannot be read, or a line is not a request.
    """
    requests = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    requests.append(_request(line, block_tokens, f"{path}:{number}"))
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from None
    if not requests:
        raise TraceError(f"{path} has no requests")
    requests.sort(key=lambda request: request.arrival_s)
    start = requests[0].arrival_s
    return [request._replace(arrival_s=request.arrival_s - start) for request in requests]


def _request(line: bytes, block_tokens: int, where: str) -> TraceRequest:
    try:
        entry = _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(f"{where}: {error}") from None
    count = len(entry.hash_ids)
    ends = entry.token_ends
    if ends is None:
        ends = [min(entry.input_length, block_tokens * (number + 1)) for number in range(count)]
    elif len(ends) != count or ends != sorted(ends) or (ends and not 0 <= ends[0] <= ends[-1] <= MAX_TOKENS):
        raise TraceError(f"{where}: token_ends must rise and have one entry per hash_id")
    return TraceRequest(
        entry.timestamp / 1000.0, entry.input_length, entry.output_length, tuple(entry.hash_ids), tuple(ends)
    )


def write_trace(path: Path, requests: Iterable[TraceRequest]) -> None:
    """Write a trace file, with `token_ends`."""
    with path.open("wb") as file:
        for request in requests:
            file.write(encode_request(request))


def encode_request(request: TraceRequest) -> bytes:
    """Encode one request as a line, with its line end."""
    line = _Line(
        request.arrival_s * 1000.0,
        request.input_tokens,
        request.output_tokens,
        list(request.blocks),
        list(request.ends),
    )
    return msgspec.json.encode(line) + b"\n"


def synthetic_trace(
    count: int,
    rate_per_s: float,
    *,
    groups: int = 40,
    prefix_tokens: int = 2048,
    turns: float = 4.0,
    turn_tokens: int = 400,
    output_tokens: int = 150,
    think_s: float = 20.0,
    seed: int = 0,
) -> list[TraceRequest]:
    """Generate conversations that share system prompts: about half of the prompt tokens can come from a cache.

    Each conversation begins with one of `groups` prefixes, the k-th with a weight of 1/k, and has `turns` turns on
    average (geometric). Each turn's prompt is the previous prompt, its answer, and `turn_tokens` more on average
    (exponential). Conversations begin as a Poisson process, so that `rate_per_s` requests arrive on average.
    """
    rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
    popularity = [1.0 / (rank + 1) for rank in range(groups)]
    requests: list[TraceRequest] = []
    fresh = iter(range(1, 1 << 62))
    prefixes = [_blocks(prefix_tokens, fresh) for _ in range(groups)]
    begin = -_WARMUP_THINKS * think_s  # so that conversations of every age are under way at zero
    horizon = count / rate_per_s
    while True:
        begin += rng.expovariate(rate_per_s / turns)
        if begin > horizon:
            seen = [request for request in requests if 0.0 <= request.arrival_s <= horizon]
            if len(seen) >= count:
                return sorted(seen, key=lambda request: request.arrival_s)[:count]
            horizon *= 1.1
        (group,) = rng.choices(range(groups), popularity)
        blocks, tokens, now = list(prefixes[group]), prefix_tokens, begin
        while True:
            tokens += 1 + int(rng.expovariate(1.0 / turn_tokens))
            output = 1 + int(rng.expovariate(1.0 / output_tokens))
            blocks += [next(fresh) for _ in range(tokens // SYNTHETIC_BLOCK_TOKENS - len(blocks))]
            ends = tuple(SYNTHETIC_BLOCK_TOKENS * (number + 1) for number in range(len(blocks)))
            requests.append(TraceRequest(now, tokens, output, tuple(blocks), ends))
            if rng.random() >= 1.0 - 1.0 / turns:
                break
            tokens += output
            now += rng.expovariate(1.0 / think_s)


def _blocks(tokens: int, fresh: Iterator[int]) -> list[int]:
    return [next(fresh) for _ in range(tokens // SYNTHETIC_BLOCK_TOKENS)]


def at_speed(requests: Iterable[TraceRequest], factor: float) -> list[TraceRequest]:
    """The same requests, arriving `factor` times as fast."""
    return [request._replace(arrival_s=request.arrival_s / factor) for request in requests]


def oracle_tokens(requests: Iterable[TraceRequest]) -> int:
    """Prompt tokens that an unbounded cache shared by all replicas would provide."""
    seen: set[int] = set()
    total = 0
    for request in requests:
        run = 0
        for block in request.blocks:
            if block not in seen:
                break
            run += 1
        total += min(request.ends[run - 1], request.input_tokens - 1) if run else 0
        seen.update(request.blocks)
    return total
