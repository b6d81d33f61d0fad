"""Build the three images with everything they ship with, on a base of this machine, and try what each must do.

    PYTHONPATH=e2e python -m shipped_images

Needs root. The tests of `e2e` build lean images: without torch, compilers and compiled modules. The engine's image
takes about 8 GiB of disk while it is tried, and the whole some minutes; nothing stays but the base.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from cluster import go_binaries, images
from cluster.settings import Settings
from cluster.shell import ClusterError, say, stop_cleanly
from image_context import build_context, label_arguments

HEADERS = """
ARG BASE
FROM ${BASE}
RUN apt-get update -q && apt-get install -qy --no-install-recommends libpython3-dev && rm -rf /var/lib/apt/lists/*
"""
"""Official Python images carry Python's headers; Debian has them in a package of their own."""

ENGINE = """
import tempfile
from pathlib import Path
import triton
from triton.runtime.build import _build
from argosy_engine import LLM, SamplingParams
from argosy_engine.native.build import PREBUILT

nvidia = Path(triton.__file__).parent / "backends" / "nvidia"
with tempfile.TemporaryDirectory() as folder:
    _build("cuda_utils", str(nvidia / "driver.c"), folder, [], [str(nvidia / "include")], [], [])
print("Triton's launcher compiles")
print(f"{len(list(Path(PREBUILT).iterdir()))} files of compiled CPU kernels")
answer = LLM("builtin://tiny", device="cpu").generate(["Hello"], SamplingParams(max_tokens=4, temperature=0.0))
print(f"the tiny model says {answer[0].outputs[0].text!r}")
"""
ROUTER = """
import argosy_router.proxy as proxy
from pathlib import Path
compiled = [each.name for each in Path(proxy.__file__).parent.parent.rglob("*.so")]
assert compiled, "no module is compiled"
print(f"{len(compiled)} compiled modules")
"""
OPERATOR = """
import argosy_operator, kopf
print("the operator's packages import")
"""
TRIES = {
    "engine": [("/opt/venv/bin/python", "-c", ENGINE), ("argosy", "doctor", "builtin://tiny")],
    "router": [("/opt/venv/bin/python", "-c", ROUTER), ("argosy", "router", "--help")],
    "operator": [("/opt/venv/bin/python", "-c", OPERATOR), ("argosy", "operator", "--help")],
}


def main() -> int:
    stop_cleanly()
    settings = Settings.from_env()
    settings.state.mkdir(parents=True, exist_ok=True)
    try:
        go_binaries.ensure_packages()
        build_and_try(settings)
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def build_and_try(settings: Settings) -> None:
    """Raises ClusterError with the end of the output of what failed."""
    context = build_context(with_sources=True)
    made: list[str] = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            dockerfile = Path(folder) / "Dockerfile"
            dockerfile.write_text(HEADERS)
            base = images.build(settings, dockerfile, Path(folder), "base-with-headers")
        made.append(base)
        for name, commands in TRIES.items():
            dockerfile = context / f"{name}.Dockerfile"
            labels = label_arguments()
            tag = images.build(settings, dockerfile, context, f"shipped-{name}", {"BASE": base, **labels})
            made.insert(0, tag)
            check_description(settings, tag, labels)
            for command in commands:
                say(f"{name}: {command[-1].strip().splitlines()[0]}")
                print(images.run_inside(settings, tag, *command), end="", flush=True)
    finally:
        images.remove(settings, *made)


def check_description(settings: Settings, tag: str, labels: dict[str, str]) -> None:
    """Raises ClusterError unless the image has its labels and lists what is installed."""
    found = images.inspect(settings, tag)["OCIv1"]["config"]["Labels"]
    for name, value in labels.items():
        if found.get(f"org.opencontainers.image.{name.lower()}") != value:
            raise ClusterError(f"{tag} has no label {name.lower()} with {value}: {found}")
    listed = json.loads(images.run_inside(settings, tag, "cat", "/usr/share/sbom/argosy.cdx.json"))
    say(f"{tag} lists {len(listed['components'])} components")


if __name__ == "__main__":
    sys.exit(main())
