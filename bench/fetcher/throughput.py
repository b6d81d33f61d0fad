"""Compare the throughput of the fetcher with `hf download` and with plain S3 clients, from servers on loopback.

    python bench/fetcher/throughput.py [--gib 2] [--shards 4] [--runs 3] [--directory /dev/shm] [--boto3 PYTHON]
        [-o FILE]

Writes a model of random bytes, serves it from another process, and lets each client download it into an empty
directory, in alternating order. Figures are medians over the runs and include the start of the client's process.
`ratio` compares Argosy's throughput with the best other client of the same server: 1.0 is as fast. The fetcher also
checks hashes and forces its files to disk, which the others do not; in memory (the default directory, if there is one)
the latter costs nothing, so that networks are compared and not disks. The directory holds the model twice. `--boto3` is
the interpreter of an environment with boto3, which cannot share ours; without it, that client is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from loopback_servers import MODEL

HERE = Path(__file__).resolve().parent
GIB = 1 << 30
BLOCK_BYTES = 16 << 20
CLIENTS = {"hub": ["argosy-hub", "hf"], "bucket": ["argosy-bucket", "obstore"]}
"""Ours first, for each server."""
TIMEOUT_S = 1800


@dataclass
class Run:
    """One download by one client."""

    server: str
    client: str
    seconds: float
    cpu_seconds: float
    """CPU time of the client's process."""
    mb_per_s: float


def write_model(directory: Path, num_bytes: int, num_shards: int) -> int:
    """Write a model's files; returns their total size. Shards are distinct, so that no cache can share them."""
    names = [f"model-{number:05}-of-{num_shards:05}.safetensors" for number in range(1, num_shards + 1)]
    block = os.urandom(BLOCK_BYTES)
    for name in names:
        with (directory / name).open("wb") as file:
            for number in range(max(num_bytes // num_shards // BLOCK_BYTES, 1)):
                file.write(f"{name} {number:08}".encode() + block[: BLOCK_BYTES - len(name) - 9])
    index = {"weight_map": {f"layers.{number}": name for number, name in enumerate(names)}}
    small = {
        "config.json": {"architectures": ["LlamaForCausalLM"]},
        "tokenizer.json": {"version": "1.0"},
        "model.safetensors.index.json": index,
    }
    for name, content in small.items():
        (directory / name).write_text(json.dumps(content))
    return sum(path.stat().st_size for path in directory.iterdir())


@contextmanager
def serving(directory: Path) -> Iterator[dict[str, str]]:
    """Serve a model; yields the servers' addresses."""
    command = [sys.executable, str(HERE / "loopback_servers.py"), str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.stdin.close()


def command_of(client: str, endpoint: str, directory: Path, boto3: str) -> tuple[list[str], dict[str, str]]:
    """Return a client's command line, and what its environment has in addition."""
    if client != "hf":
        python = boto3 if client == "boto3" else sys.executable
        return [python, str(HERE / "downloads.py"), client, endpoint, str(directory)], {}
    environment = {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(directory),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    return [str(Path(sys.executable).with_name("hf")), "download", MODEL], environment


def download(server: str, client: str, endpoint: str, directory: Path, num_bytes: int, boto3: str) -> Run:
    directory.mkdir()
    command, environment = command_of(client, endpoint, directory, boto3)
    before, started = os.times(), time.perf_counter()
    subprocess.run(
        command,
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        check=True,
        timeout=TIMEOUT_S,
    )
    seconds, after = time.perf_counter() - started, os.times()
    stored = sum(
        path.stat().st_size for path in directory.rglob("*") if path.is_file() and not path.is_symlink()
    )
    if stored < num_bytes:
        raise SystemExit(f"{client} stored {stored} of {num_bytes} bytes")
    shutil.rmtree(directory)
    cpu_seconds = (after.children_user + after.children_system) - (
        before.children_user + before.children_system
    )
    return Run(server, client, seconds, cpu_seconds, num_bytes / seconds / 1e6)


def print_table(runs: list[Run]) -> None:
    print(f"{'server':8}{'client':16}{'MB/s':>8}{'seconds':>9}{'CPU s':>8}{'ratio':>8}")
    for server, clients in CLIENTS.items():
        speeds = {client: median(runs, client, "mb_per_s") for client in clients}
        ours, *others = speeds.values()
        for client, speed in speeds.items():
            ratio = f"{ours / max(others):8.2f}" if client == clients[0] else ""
            seconds, cpu = median(runs, client, "seconds"), median(runs, client, "cpu_seconds")
            print(f"{server:8}{client:16}{speed:8.0f}{seconds:9.2f}{cpu:8.2f}{ratio}")


def median(runs: list[Run], client: str, field: str) -> float:
    return statistics.median(getattr(run, field) for run in runs if run.client == client)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=2.0, help="size of the model")
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--runs", type=int, default=3)
    default = Path("/dev/shm")
    parser.add_argument(
        "--directory", type=Path, default=default if default.is_dir() else Path(tempfile.gettempdir())
    )
    parser.add_argument("-o", "--output", type=Path, help="also write all runs as JSON")
    parser.add_argument("--boto3", default="", metavar="PYTHON")
    arguments = parser.parse_args()
    if arguments.boto3:
        CLIENTS["bucket"].append("boto3")
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="argosy-bench-") as root:
        model = Path(root) / "model"
        model.mkdir()
        num_bytes = write_model(model, int(arguments.gib * GIB), arguments.shards)
        with serving(model) as addresses:
            for number in range(arguments.runs):
                for server, clients in CLIENTS.items():
                    for client in clients if number % 2 == 0 else reversed(clients):
                        target = Path(root) / "download"
                        runs.append(
                            download(server, client, addresses[server], target, num_bytes, arguments.boto3)
                        )
    print_table(runs)
    if arguments.output is not None:
        arguments.output.write_text(json.dumps([asdict(run) for run in runs], indent=1))


if __name__ == "__main__":
    main()
