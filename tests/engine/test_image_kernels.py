"""The `kernels` stage of the engine's image, run here: its commands on a wheel, then an engine without a compiler."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import argosy_engine
import argosy_protocol
from argosy_engine.native import build

ROOT = Path(__file__).parents[2]
PACKAGE = Path(argosy_engine.__file__).parent
PROTOCOL = Path(argosy_protocol.__file__).parent

pytestmark = [
    pytest.mark.timeout(400),  # a busy machine compiles for minutes
    pytest.mark.skipif(
        shutil.which("g++") is None
        or not any(variant.cpu_flags <= build.cpu_flags() for variant in build.VARIANTS),
        reason="no g++, or no variant of the kernels for this CPU",
    ),
]


def stage_commands() -> str:
    """The stage's RUN, as the shell gets it."""
    stage = (ROOT / "images" / "engine.Dockerfile").read_text().split("AS kernels\n")[1].split("\nFROM ")[0]
    (command,) = re.findall(r"^RUN ((?:.*\\\n)*.*)$", stage, re.MULTILINE)
    return command.replace("\\\n", "")


# Makes empty files of what is compiled for another CPU.
OWN = """#!/bin/sh
case " $* " in *" {flags} -c "* | *" --version "*) exec {compiler} "$@" -O0 ;; esac
for last in "$@"; do
  case $last in *.o) [ ! -s "$last" ] || exec {compiler} "$@" ;; esac
done
: > "$last"
"""


@pytest.mark.parametrize("compiled", ["for this CPU", pytest.param("for every CPU", marks=pytest.mark.full)])
def test_an_image_has_kernels_for_every_cpu_and_needs_no_compiler(tmp_path: Path, compiled: str) -> None:
    (tmp_path / "dist").mkdir()
    with zipfile.ZipFile(tmp_path / "dist" / "argosy-0-py3-none-any.whl", "w") as wheel:
        for file in [*PACKAGE.rglob("*.py"), *build.SOURCES.iterdir()]:
            wheel.write(file, file.relative_to(PACKAGE.parent))
        for file in PROTOCOL.rglob("*.py"):
            wheel.write(file, file.relative_to(PROTOCOL.parent))
    tools = tmp_path / "tools"
    tools.mkdir()
    # Without site-packages, as a base image's own Python; unoptimised, to be quick.
    (tools / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    compiler = shutil.which("g++")
    if compiled == "for every CPU":
        script = f'#!/bin/sh\nexec {compiler} "$@" -O0\n'
    else:
        flags = build.own_variants()[0].compile_flags
        script = OWN.format(flags=" ".join(flags), compiler=compiler)
    (tools / "g++").write_text(script)
    for tool in tools.iterdir():
        tool.chmod(0o755)
    commands = re.sub(r"(?<=\s)/(dist|src|kernels)\b", rf"{tmp_path}/\1", stage_commands())
    environment = {"PATH": f"{tools}:/usr/bin:/bin", "BUILD_KERNELS": "1", "TMPDIR": str(tmp_path)}
    subprocess.run(["sh", "-euc", commands], env=environment, check=True, timeout=300)
    kernels = tmp_path / "kernels"
    assert sorted(file.name.rpartition("-")[0] for file in kernels.iterdir()) == sorted(
        variant.name for variant in build.VARIANTS
    )

    package = tmp_path / "src" / "argosy_engine"
    shutil.copytree(kernels, package / "native" / "prebuilt")
    script = (
        "import torch, argosy_engine.native.library as library\n"
        "found = library.kernels()\n"
        "print(found.path, found.argmax(torch.tensor([[1.0, 3.0, 2.0]])).tolist())"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        env={**os.environ, "PYTHONPATH": str(package.parent), "PATH": "", "CXX": "", "XDG_CACHE_HOME": "/nonexistent"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    path, result = done.stdout.split(maxsplit=1)
    assert Path(path).parent == package / "native" / "prebuilt"
    assert result == "[1]\n"
