"""Which dependencies each image installs, as lock files: exact versions with the hashes of their files.

Owns: what an image takes of pyproject.toml (`IMAGES`), and the text that a lock begins with. uv resolves; a lock holds
for every Python that the project supports, on Linux, x86_64 and arm64. Must not know how images are built.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ImageLock:
    """The lock file images/NAME.lock."""

    name: str
    extras: tuple[str, ...]
    without: frozenset[str] = frozenset()
    """Dependencies that the image leaves out, and what only they need."""


IMAGES = (
    ImageLock("operator", ("operator",)),
    ImageLock("router", ("router", "otlp", "storage", "gateway")),
    ImageLock("engine", ("engine", "fetch")),
    ImageLock("engine-without-torch", ("engine", "fetch"), frozenset({"torch", "xgrammar"})),
)

HEADER = """\
# Written by `make locks` from pyproject.toml: what {image} installs, for CPython {python} on Linux. Do not edit.
"""


def requirements(pyproject: Path, image: ImageLock) -> list[str]:
    """What pyproject.toml asks for in an image, one requirement (PEP 508) each, for Linux alone."""
    project = tomllib.loads(pyproject.read_text())["project"]
    wanted = [*project["dependencies"]]
    for extra in image.extras:
        wanted += project["optional-dependencies"][extra]
    kept = dict.fromkeys(each for each in wanted if requirement_name(each) not in image.without)
    return [_on_linux(each) for each in kept]


def _on_linux(requirement: str) -> str:
    name, _, marker = requirement.partition(";")
    return f"{name.strip()}; {f'({marker.strip()}) and ' if marker else ''}sys_platform == 'linux'"


def requirement_name(requirement: str) -> str:
    """The normalised name in a requirement (PEP 503)."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement.strip(), maxsplit=1)[0]).lower()


def write_lock(uv: Path, pyproject: Path, folder: Path, image: ImageLock, *options: str) -> Path:
    """Resolve an image's dependencies into FOLDER/NAME.lock, and return its path.

    Versions that the file has already stay while they satisfy pyproject.toml, unless `options` say `--upgrade`.

    Args:
        options: of `uv pip compile`.

    Raises:
        subprocess.CalledProcessError: uv failed; it has said why on standard error.
    """
    oldest = tomllib.loads(pyproject.read_text())["project"]["requires-python"].removeprefix(">=")
    lock = folder / f"{image.name}.lock"
    words = [
        str(uv),
        "pip",
        "compile",
        "--no-config",
        "--quiet",
        "--no-header",
        "--no-annotate",
        "--generate-hashes",
    ]
    words += ["--universal", f"--python-version={oldest}", "--only-binary=:all:", *options]
    subprocess.run(  # noqa: S603
        [*words, f"--output-file={lock}", "-"],
        input="\n".join(requirements(pyproject, image)), text=True, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    header = HEADER.format(image=image.name, python=f"{oldest} and newer")
    lock.write_text(header + lock.read_text().removeprefix(header))
    return lock
