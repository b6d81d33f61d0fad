"""Send generated requests to engines and a router, and report what is wrong with the answers.

    make fuzz                     # 20000 cases; FUZZ_CASES=1000 for a sample
    PYTHONPATH=tests:tests/support python -P -m fuzz --cases 5000 --schemathesis PATH

One half of the cases is what Schemathesis generates from each server's OpenAPI document; the other half is bytes, valid
requests with changes of their JSON, bytes and framing. The exit code is 1 if there was a server error, a hang, an
answer or an error that is not as described, or a server that does not work afterwards.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from .fuzzed_document import narrowed
from .fuzzed_servers import Target, fuzzed_servers
from .raw_cases import cases
from .raw_client import RawCase, finding

IN_FLIGHT = 4
CHECKS = "not_a_server_error,content_type_conformance,response_schema_conformance,status_code_conformance"
REQUEST_TIMEOUT_S = 60
QUIET_S = 30.0
"""Time within which no request may be left at the end."""


def main() -> int:
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    parser = argparse.ArgumentParser(
        prog="fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=20_000, help="number of requests (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all that is generated (%(default)s)")
    parser.add_argument("--schemathesis", type=Path, help="the program; without it, there are bytes only")
    parser.add_argument("--folder", type=Path, help="for logs (a temporary one)")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="argosy-fuzz-"))
    folder.mkdir(parents=True, exist_ok=True)
    findings: list[str] = []
    total = 0
    with fuzzed_servers(folder) as targets:
        for target in targets:
            number = round(options.cases * target.share)
            document = httpx.get(f"{target.url}/openapi.json", timeout=60).json()
            sent = 0
            if options.schemathesis is not None:
                described = narrowed(document, target.models, _known_ids(target, document), target.only)
                sent, found = described_requests(target, described, number // 2, options, folder)
                findings += found
            left = max(0, number - sent)
            findings += asyncio.run(raw_requests(target, list(document["paths"]), left, options.seed))
            sent += left
            total += sent
            print(f"{target.name}: {sent} cases", flush=True)
        for target in targets:
            findings += left_behind(target)
    print(f"{total} cases, {len(findings)} findings; logs are in {folder}")
    for what, count in Counter(findings).most_common():
        print(f"{count:>4} x {what}")
    return 1 if findings else 0


def described_requests(
    target: Target, document: Mapping[str, Any], number: int, options: argparse.Namespace, folder: Path
) -> tuple[int, list[str]]:
    """Let Schemathesis generate about `number` requests; return how many there were, and what it found."""
    operations = sum(len(methods) for methods in document["paths"].values())
    file = folder / f"{target.name.replace(' ', '-')}.json"
    file.write_text(json.dumps(document))
    command = [
        str(options.schemathesis), "run", str(file), "--url", target.url, "--checks", CHECKS,
        "--max-examples", str(max(1, number // operations)), "--phases", "fuzzing", "--continue-on-failure",
        "--request-timeout", str(REQUEST_TIMEOUT_S), "--suppress-health-check", "all", "--warnings", "off",
        "--seed", str(options.seed), "--no-shrink",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    (folder / f"{target.name.replace(' ', '-')}-schemathesis.log").write_text(done.stdout + done.stderr)
    generated = re.search(r"(\d+) generated", done.stdout)
    if generated is None:
        raise SystemExit(f"schemathesis failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    found = [f"{target.name}: {line}" for line in _failures(done.stdout)]
    if done.returncode and not found:
        found = [f"{target.name}: schemathesis exited with {done.returncode}:\n{done.stdout[-3000:]}"]
    return int(generated[1]), found


def _failures(output: str) -> Iterator[str]:
    """Yield failures with their operations, as Schemathesis prints them."""
    operation = ""
    for line in output.splitlines():
        if title := re.fullmatch(r"_{3,} (.+) _{3,}", line):
            operation = title[1]
        elif operation and (failure := re.match(r"- (\w+\d+ .+)", line)):
            yield f"{operation}: {failure[1]}"


async def raw_requests(target: Target, paths: Sequence[str], number: int, seed: int) -> list[str]:
    """Send `number` cases of bytes; return what is wrong with the answers."""
    found: list[str] = []
    kept = [path for path in paths if re.search(target.only, path)]
    source = itertools.islice(cases(kept, target.models, seed), number)

    async def worker() -> None:
        for case in source:
            wrong = await finding(target.port, case)
            if wrong is not None:
                found.append(f"{target.name}: {case.path or 'any path'}: {case.name}: {wrong}")
                print(_shown(target, case, wrong), flush=True)

    await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))
    return found


def _shown(target: Target, case: RawCase, wrong: str) -> str:
    return f"FINDING: {target.name}: {wrong}\n  {case.name}: {b''.join(case.pieces)[:2000]!r}"


def _known_ids(target: Target, document: Mapping[str, Any]) -> dict[str, list[str]]:
    """Leave objects with the server that requests can refer to, and return their ids by path."""
    known = {"/v1/models": list(target.models)}
    with httpx.Client(base_url=target.url, timeout=60) as http:
        if "/v1/responses/{name}" in document["paths"] and not target.only:
            asked = {"model": target.models[0], "input": "Hi"}
            bodies: list[dict[str, Any]] = [asked, asked, {**asked, "background": True}]
            known["/v1/responses"] = [_id(http.post("/v1/responses", json=body)) for body in bodies]
        if "/v1/files" in document["paths"]:
            upload = {"files": {"file": ("a.jsonl", b"{}\n")}, "data": {"purpose": "batch"}}
            known["/v1/files"] = [_id(http.post("/v1/files", **upload)) for _ in range(3)]  # type: ignore[arg-type]
            batch = {"endpoint": "/v1/completions", "completion_window": "24h"}
            batch["input_file_id"] = known["/v1/files"][0]
            known["/v1/batches"] = [_id(http.post("/v1/batches", json=batch))]
    return known


def _id(response: httpx.Response) -> str:
    response.raise_for_status()
    return str(response.json()["id"])


def left_behind(target: Target) -> list[str]:
    """Return what is wrong with a server after all requests."""
    deadline = time.monotonic() + QUIET_S
    with httpx.Client(base_url=target.url, timeout=60) as http:
        if http.get("/health").status_code != 200:
            return [f"{target.name}: not healthy at the end"]
        while (load := http.get("/load").json()["server_load"]) and time.monotonic() < deadline:
            time.sleep(0.5)
    return [f"{target.name}: {load} requests are left at the end"] if load else []


if __name__ == "__main__":
    sys.exit(main())
