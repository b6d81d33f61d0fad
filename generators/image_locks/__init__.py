"""Which dependencies each image installs, as lock files: exact versions with the hashes of their files; and the
versions that tests run with, as constraints of pip.

Owns: what an image takes of pyproject.toml (`IMAGES`), and the text that a lock begins with. uv resolves; a lock holds
for every Python that the project supports, on Linux, x86_64 and arm64. Must not know how images are built.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path

from gate import environments


@dataclass(frozen=True)
class ImageLock:
    """The lock file images/NAME.lock."""

    name: str
    extras: tuple[str, ...]
    without: frozenset[str] = frozenset()
    """Dependencies that the image leaves out, and what only they need."""


IMAGES = (
    ImageLock("operator", ("operator",)),
    ImageLock("router", ("router", "batch", "otlp", "storage", "gateway")),
    ImageLock("engine", ("engine", "transformers", "mistral", "fetch")),
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
    oldest = _oldest_python(pyproject)
    lock = folder / f"{image.name}.lock"
    hashes = ("--generate-hashes", "--only-binary=:all:")
    _compile(uv, oldest, lock, requirements(pyproject, image), *hashes, *options)
    header = HEADER.format(image=image.name, python=f"{oldest} and newer")
    lock.write_text(header + lock.read_text().removeprefix(header))
    return lock


CONSTRAINTS_HEADER = """\
# Written by `make locks` from pyproject.toml: the versions that {what} run with, on CPython {python} on Linux.
# A new release of a dependency changes no result before somebody takes it here. Do not edit.
"""


@dataclass(frozen=True)
class Constraints:
    """The file of constraints NAME.txt."""

    name: str
    what: str
    groups: tuple[str, ...]
    extras: tuple[str, ...] = ()


CONSTRAINTS = (
    Constraints("tests", "tests and lint", ("dev",), ("engine", "fetch", "router", "batch", "operator")),
    Constraints("clients", "tests of clients", ("clients",)),
    Constraints("fuzz", "generated requests", ("fuzz",)),
)


def write_constraints(uv: Path, pyproject: Path, folder: Path, wanted: Constraints, *options: str) -> Path:
    """Resolve an environment of tests into FOLDER/NAME.txt, and return its path.

    Raises:
        subprocess.CalledProcessError: uv failed; it has said why on standard error.
    """
    oldest, path = _oldest_python(pyproject), folder / f"{wanted.name}.txt"
    tables = tomllib.loads(pyproject.read_text())
    asked = [_on_linux(each) for each in environments.requirements(tables, wanted.groups, ())]
    if wanted.extras:
        asked += requirements(pyproject, ImageLock(wanted.name, wanted.extras))
    _compile(uv, oldest, path, asked, *options)
    header = CONSTRAINTS_HEADER.format(what=wanted.what, python=f"{oldest} and newer")
    pins = path.read_text().removeprefix(header)
    path.write_text(header + re.sub(r"\[[^]]+\]", "", pins))  # pip takes no extras in constraints
    return path


def _oldest_python(pyproject: Path) -> str:
    text: str = tomllib.loads(pyproject.read_text())["project"]["requires-python"]
    return text.removeprefix(">=")


def _compile(uv: Path, python: str, output: Path, wanted: list[str], *options: str) -> None:
    words = [
        str(uv),
        "pip",
        "compile",
        "--no-config",
        "--quiet",
        "--no-header",
        "--no-annotate",
        "--universal",
    ]
    subprocess.run(  # noqa: S603
        [*words, f"--python-version={python}", *options, f"--output-file={output}", "-"],
        input="\n".join(wanted), text=True, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
