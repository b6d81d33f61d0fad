"""Install the wheel of dist/ with the dependencies that it declares for one part, and nothing else, and use the part.

    python tests/wheel_dependencies.py [PART ...]        without a PART all of them, each in an environment of its own

A dependency that is not declared is found by no other test, because they run where everything is installed. The
environments are in build/dependencies. PIP_ARGS has arguments for pip, such as an index.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "dependencies"
START_TIMEOUT_S = 300

IMPORT_ALL = """
import importlib, json, pkgutil, sys
failed, count = {}, 0
for package in sys.argv[1:]:
    found = importlib.import_module(package)
    assert found.__file__.startswith(sys.prefix), found.__file__
    names = [module.name for module in pkgutil.walk_packages(found.__path__, package + ".")]
    for name in names:
        if name.endswith(".__main__"):
            continue
        count += 1
        try:
            importlib.import_module(name)
        except BaseException as error:
            failed[name] = f"{type(error).__name__}: {error}", getattr(error, "name", None)
print(json.dumps({"count": count, "failed": failed}))
"""


TRACES = frozenset({"opentelemetry"})
"""Packages of the extra `otlp`, for which argosy_protocol has a module that every server may import."""


@dataclass(frozen=True)
class Part:
    """What is installed and used together.

    Attributes:
        packages: every module of theirs must be importable.
        helps: the programs of the part, which must explain themselves.
        optional: packages of other extras, for which single modules of the part are only there.
        use: a program of the part at work, given its executable; None if `helps` is all.
    """

    packages: tuple[str, ...]
    helps: tuple[str, ...]
    optional: frozenset[str] = TRACES
    use: Callable[[Path], None] | None = None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextmanager
def running(argosy: Path, *arguments: str, path: str) -> Iterator[str]:
    """Run a server until the block ends, after waiting for a 200 from `path`; yield its URL."""
    port = free_port()
    process = subprocess.Popen([argosy, *arguments, "--port", str(port)], cwd=FOLDER)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_TIMEOUT_S
    try:
        while not answers(url + path):
            assert process.poll() is None, f"{arguments} exited with {process.returncode}"
            assert time.monotonic() < deadline, f"{arguments} does not answer {path}"
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def serve_router(argosy: Path) -> None:
    with running(argosy, "router", "--replica", "http://127.0.0.1:1", "--admin-port", "-1", path="/health"):
        pass


def serve_batch(argosy: Path) -> None:
    os.environ["ARGOSY_FLEET_KEY"] = "a fleet key of tests"
    with running(argosy, "batch", "--storage", str(FOLDER / "storage"), path="/ready"):
        pass


def serve_engine(argosy: Path) -> None:
    with running(argosy, "serve", "builtin://tiny", "--device", "cpu", path="/ready") as url:
        body = json.dumps({"model": "tiny", "prompt": "Hello", "max_tokens": 5}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as response:
            answer = json.load(response)
        assert answer["usage"]["completion_tokens"] > 0, answer


def list_models(argosy: Path) -> None:
    subprocess.run([argosy, "models", "list"], check=True, cwd=FOLDER)


PARTS = {
    "router": Part(
        ("argosy_protocol", "argosy_http", "argosy_router"), ("router",), TRACES | {"grpc", "google"}, serve_router,
    ),
    "batch": Part(
        ("argosy_protocol", "argosy_http", "argosy_batch"), ("batch",), TRACES | {"obstore"}, serve_batch,
    ),
    "operator": Part(("argosy_protocol", "argosy_resource", "argosy_operator"), ("operator", "crd")),
    "fetch": Part(("argosy_protocol", "argosy_fetcher"), ("models", "models pull"), use=list_models),
    "engine": Part(
        ("argosy_protocol", "argosy_http", "argosy_engine"), ("serve", "doctor"),
        TRACES | {"flash_attn", "gguf", "mistral_common", "ray", "triton"},
        serve_engine,
    ),
}  # fmt: skip


def install(name: str, wheel: Path) -> Path:
    """Make the part's environment anew; return its folder of programs."""
    folder = FOLDER / name
    venv.create(folder, clear=True, with_pip=True)
    programs = folder / "bin"
    pins = ROOT / ".ci" / "gate" / "constraints" / "tests.txt"
    command = [programs / "python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    extra = shlex.split(os.environ.get("PIP_ARGS", ""))
    subprocess.run([*command, *extra, "--constraint", pins, f"{wheel}[{name}]"], check=True)
    subprocess.run([programs / "python", "-m", "pip", "--disable-pip-version-check", "check"], check=True)
    return programs


def problems(part: Part, programs: Path) -> list[str]:
    """Use a part; return what does not work."""
    done = subprocess.run(
        [programs / "python", "-P", "-c", IMPORT_ALL, *part.packages], check=True, stdout=subprocess.PIPE, cwd=FOLDER
    )  # fmt: skip
    imported = json.loads(done.stdout.splitlines()[-1])
    print(f"  {imported['count']} modules", flush=True)
    found = [
        f"import {name}: {text}"
        for name, (text, missing) in imported["failed"].items()
        if (missing or "").partition(".")[0] not in part.optional
    ]
    for words in part.helps:
        command = [programs / "argosy", *words.split(), "--help"]
        helped = subprocess.run(command, capture_output=True, text=True, check=False, cwd=FOLDER)
        if helped.returncode or "usage" not in helped.stdout.lower():
            found.append(f"argosy {words} --help: exit code {helped.returncode}\n{helped.stderr[-2000:]}")
    if part.use is not None:
        try:
            part.use(programs / "argosy")
        except (AssertionError, OSError, subprocess.SubprocessError) as error:
            found.append(f"{part.use.__name__}: {error!r}")
    return found


def main(names: list[str]) -> int:
    if unknown := set(names) - set(PARTS):
        print(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    wheels = list((ROOT / "dist").glob("argosy-*.whl"))
    if len(wheels) != 1:
        print(f"dist has {len(wheels)} wheels; run `make wheel`", file=sys.stderr)
        return 2
    found = {}
    for name in names or PARTS:
        print(f"{name}:", flush=True)
        found[name] = problems(PARTS[name], install(name, wheels[0]))
        for line in found[name]:
            print(f"  {line}", flush=True)
    print("; ".join(f"{name}: {len(lines)} problems" for name, lines in found.items()))
    return 1 if any(found.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
