"""Resident memory of a serving engine over many requests: it must level off.

    python bench/engine/memory.py --requests 10000

Sends streamed completions of random length with 32 in flight, every fourth cut off by its client, and prints the
resident bytes of the process tree after each tenth. Exits with 1 when the second half grew by more than --tolerance.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
from pathlib import Path

from random_model import VOCAB_SIZE, write
from servers import start_argosy
from stream_client import complete

IN_FLIGHT = 32


async def send(url: str, rng: random.Random, count: int) -> None:
    """`count` completions; a quarter of the clients hang up after a moment."""
    waiting = iter(range(count))

    async def worker() -> None:
        for _ in waiting:
            prompt = [rng.randrange(300, VOCAB_SIZE) for _ in range(rng.randint(4, 200))]
            request = complete(url, "bench", prompt, rng.randint(1, 24))
            if rng.random() < 0.75:
                await request
                continue
            try:
                await asyncio.wait_for(request, rng.uniform(0.001, 0.05))
            except TimeoutError:
                continue

    await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--tolerance", type=float, default=0.02, help="share of growth that is noise")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "argosy-bench")
    options = parser.parse_args()
    model = str(write(options.models / "tiny", "tiny"))
    server = start_argosy(model, "bfloat16", options.models, len(os.sched_getaffinity(0)))
    rng = random.Random(0)
    sizes = []
    try:
        with server.awake():
            for tenth in range(1, 11):
                asyncio.run(send(server.url, rng, options.requests // 10))
                sizes.append(server.rss())
                print(
                    f"after {tenth * options.requests // 10:>6} requests: {sizes[-1] / 2**20:.1f} MiB",
                    flush=True,
                )
    finally:
        server.stop()
    growth = sizes[-1] / sizes[4] - 1
    print(f"growth of the second half: {growth:+.2%}")
    return int(growth > options.tolerance)


if __name__ == "__main__":
    raise SystemExit(main())
